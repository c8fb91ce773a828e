// The rounding of ATen's fused optimizers on this machine, and loops with the same rounding.
//
// Multiply, add, divide and square root are rounded correctly everywhere; the difference is which
// product is added without being rounded first. ATen's sources leave that to the compiler, so the
// rules below are those of LibTorch 2.11's wheels, found by comparing bits with every alternative.
// A column names the product that is added unrounded; - means that all are rounded before they are
// added.
//                          lerp  l2:  Adam  SGD  v*b2 + (c*g)*g  m*mu + (1-d)*g  nesterov  x - lr*g
//   x86, no AVX2 and FMA   -          -     -    -               -               -         -
//   x86, AVX2 or AVX-512   w*(g-m)    w*x   w*x  (c*g)*g         (1-d)*g         mu*m      lr*g
//   arm, SVE of 256 bits   w*(g-m)    -     w*x  -               (1-d)*g         mu*m      -
//   arm, otherwise (NEON)  w*(g-m)    w*x   w*x  v*b2            (1-d)*g         mu*m      lr*g
//   the last elements      w*(g-m)    w*x   w*x  v*b2            m*mu            mu*m      lr*g
//
// The last elements are those after the last whole vector of a tensor, on every machine but that of
// the first line. kernels_test compares each rule with the LibTorch that it runs on.
//
// For this folder's sources and its test; others use step.h.
#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep::kernels::detail {

// Which product in a*b + c*d is added without being rounded first.
enum class Unrounded { kNone, kFirst, kSecond };

struct Rounding {
  bool lerp = true;
  bool adam_l2 = true;
  Unrounded variance = Unrounded::kFirst;
  bool sgd_l2 = true;
  Unrounded momentum = Unrounded::kFirst;
  bool nesterov = true;
  bool sgd_update = true;
};

inline constexpr Rounding kRoundAll{.lerp = false,
                                    .adam_l2 = false,
                                    .variance = Unrounded::kNone,
                                    .sgd_l2 = false,
                                    .momentum = Unrounded::kNone,
                                    .nesterov = false,
                                    .sgd_update = false};
inline constexpr Rounding kLastElements{};
inline constexpr Rounding kAvx2{.variance = Unrounded::kSecond, .momentum = Unrounded::kSecond};
inline constexpr Rounding kSve256{.adam_l2 = false,
                                  .variance = Unrounded::kNone,
                                  .momentum = Unrounded::kSecond,
                                  .sgd_update = false};
inline constexpr Rounding kNeon{.momentum = Unrounded::kSecond};

// The constants of a step with ATen's rounding: computed in double, then rounded to T.
template <typename T>
struct AdamConstants {
  bool l2 = false;  // weight decay into the gradient; otherwise `decay` times the parameter
  T decay = 1;      // 1 - lr * weight_decay, or the l2 factor
  T lerp = 0;       // 1 - beta1
  T beta2 = 0;
  T fresh = 0;       // 1 - beta2
  T correction = 1;  // sqrt(1 - beta2^step)
  T eps = 0;
  T minus_step = 0;  // -lr / (1 - beta1^step)
};

template <typename T>
struct SgdConstants {
  bool l2 = false;
  bool momentum = false;
  bool first = false;
  bool nesterov = false;
  T decay = 0;
  T mu = 0;
  T fresh = 1;  // 1 - dampening
  T minus_lr = 0;
};

// The mean of several sources from `offset` on (Gradient in step.h).
template <typename T>
struct Mean {
  const T* const* sources = nullptr;
  int count = 1;
  std::int64_t offset = 0;
  bool divides = false;
  T divisor = 1;
  T factor = 1;  // the exact 1 / divisor when it does not divide
  T scale = 1;
};

template <typename T>
struct AdamSpan {
  T* param;
  T* exp_avg;
  T* exp_avg_sq;
  Mean<T> grad;
  std::int64_t count;
};

template <typename T>
struct SgdSpan {
  T* param;
  T* momentum;
  Mean<T> grad;
  std::int64_t count;
};

// Lanes of a block's square sum: element i of a block is added to lane i modulo this.
inline constexpr std::int64_t kNormLanes = 64;

template <typename T>
struct Loops {
  void (*adam)(const AdamSpan<T>&, const AdamConstants<T>&);
  void (*adam_last)(const AdamSpan<T>&, const AdamConstants<T>&);
  void (*sgd)(const SgdSpan<T>&, const SgdConstants<T>&);
  void (*sgd_last)(const SgdSpan<T>&, const SgdConstants<T>&);
  // out[i] = the mean of element i unless out is null, and lanes[i % kNormLanes] += its square
  void (*mean_squares)(const Mean<T>&, T* out, std::int64_t count, double* lanes);
  // lanes[i % kNormLanes] += values[i]^2
  void (*squares)(const T* values, std::int64_t count, double* lanes);
};

struct Machine {
  std::string_view name;
  std::int64_t vector_bytes;  // size of ATen's vectors: where the last elements begin
  bool fuses_decay;           // 1 - lr * weight_decay, in double, without rounding the product
  Loops<float> singles;
  Loops<double> doubles;
};

// This machine's rules, chosen as ATen chooses: by the processor, and by
// ATEN_CPU_CAPABILITY=default. Computed once; never throws.
const Machine& machine() noexcept;

template <typename T>
const Loops<T>& loops();
template <>
inline const Loops<float>& loops<float>() {
  return machine().singles;
}
template <>
inline const Loops<double>& loops<double>() {
  return machine().doubles;
}

}  // namespace lockstep::kernels::detail
