// What matrix products take, as in arguments.h.
//
//   table->gemm({.a = {x, columns, false}, .b = {w, columns, true}, .d = y, ...}, stream, &status);
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

// What the elements of an 8-bit matrix are.
enum class Fp8 : int { kNone, kE4m3, kE5m2 };

// A row-major matrix; `transposed` when the memory holds the transpose.
struct GemmMatrix {
  const void* data;
  std::int64_t stride;  // from one row in memory to the next
  bool transposed;
  Fp8 fp8 = Fp8::kNone;  // a is as it is and b transposed: tensor cores have no other layout
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
  bool fast_accumulation = false;  // for fp8: sums are held in fewer bits
};

}  // namespace lockstep::kernels::cuda
