// The arguments of matrix products and of casts to fp8, with the rules of arguments.h.
//
//   table->gemm({.a = {x, columns, false}, .b = {w, columns, true}, .d = y, ...}, stream, &status);
//   table->fp8_amax({.from = x, .amax = bits, ...}, stream);   // bits were zero
//   table->fp8_cast({.from = x, .amax = bits, .to = bytes, .scale = scale, ...}, stream);
#pragma once

#include <cstddef>
#include <cstdint>

#include "lockstep/kernels/cuda/arguments.h"

namespace lockstep::kernels::cuda {

enum class Epilogue : int {
  kNone,
  kBias,         // . + bias
  kGeluAuxBias,  // gelu(. + bias), and . + bias to aux
  kDGelu,        // . * gelu'(aux)
};

// The format of an 8-bit matrix's elements.
enum class Fp8 : int { kNone, kE4m3, kE5m2 };

// A row-major matrix; `transposed` when the memory holds the transpose.
struct GemmMatrix {
  const void* data;
  std::int64_t stride;  // from one row in memory to the next
  bool transposed;
  Fp8 fp8 = Fp8::kNone;          // tensor cores require a untransposed and b transposed
  const float* scale = nullptr;  // on the device, for fp8: what elements are multiplied by
};
// d [m, n] = a [m, k] b [k, n] + beta d, summed in float.
struct Gemm {
  GemmMatrix a, b;
  void* d;
  const void* bias;  // [n]
  void* aux;         // [m, n]
  void* workspace;
  std::size_t workspace_bytes;
  std::int64_t m, n, k;
  float beta;
  Epilogue epilogue;
  Type type;                       // for a, b, bias and aux; with fp8 for bias alone
  Type d_type;                     // the same or float
  bool fast_accumulation = false;  // for fp8: accumulates in fewer bits
};

// The largest magnitudes of a matrix, as the bits of floats: NaN is above infinity.
struct Fp8Amax {
  const void* from;          // [rows, columns]
  std::uint32_t* amax;       // [1], or by row [rows]; raised to at least what is found
  std::uint32_t* by_column;  // by row: [columns]; else null
  std::int64_t rows;
  int columns;  // a multiple of 8
  Type type;
};

// to = from * (largest fp8 / amax), rounded to nearest even; scale = its inverse.
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
