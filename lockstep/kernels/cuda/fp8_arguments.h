// What the kernels that cast to fp8 take, as in arguments.h.
//
//   table->fp8_amax({.from = x, .amax = bits, ...}, stream);   // bits were zero
//   table->fp8_cast({.from = x, .amax = bits, .to = bytes, .scale = scale, ...}, stream);
#pragma once

#include <cstdint>

#include "lockstep/kernels/cuda/gemm_arguments.h"

namespace lockstep::kernels::cuda {

// The largest magnitudes of a matrix, as the bits of floats: NaN is above infinity.
struct Fp8Amax {
  const void* from;          // [rows, columns]
  std::uint32_t* amax;       // [1], or by row [rows]; raised to at least what is found
  std::uint32_t* by_column;  // by row: [columns]; else null
  std::int64_t rows;
  int columns;  // a multiple of 8
  Type type;
};

// to = from * (largest fp8 / amax), rounded to the nearest and even; scale = its inverse.
struct Fp8Cast {
  const void* from;                // [rows, columns]
  const std::uint32_t* amax;       // of Fp8Amax
  const std::uint32_t* by_column;  // by row: the scales of the transpose; else null
  void* to;                        // [rows, columns]; or null
  void* transposed;                // [columns, stride], of which padded_rows are written; or null
  float* scale;                    // [1], or by row [rows]
  float* transposed_scale;         // by row: [columns]; else null
  std::int64_t rows;
  std::int64_t padded_rows;  // rows, rounded up to a multiple of 16: the rest is zeros
  std::int64_t stride;       // a multiple of 16
  int columns;               // a multiple of 8
  Type type;
  Fp8 fp8;
};

}  // namespace lockstep::kernels::cuda
