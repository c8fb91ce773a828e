// One element of an AdamW step with parameters and state in float or bfloat16, for the CUDA kernel
// (cuda/adamw.cu) and for the CPU (adamw() in step.h), with the same bits: every rounding is
// written here and none is left to a compiler.
//
//   const AdamFactors factors = adam_factors(group, /*step=*/1, /*parameter=*/7);
//   adam_element({group, factors, /*clip=*/1}, param, grad, exp_avg, exp_avg_sq, element);
//
// What is stored in bfloat16 is rounded stochastically: up or down, with the probabilities that
// make its expectation the exact value, so that changes far below an element's last digit add up
// over steps. The random bits are a function of the parameter, the step and the element's place in
// the parameter, and so the same for any number of ranks that divide the state, and after a resume.
// Slices of tensor parallelism count as parameters: their ranks draw the same bits.
//
// The including file must be compiled without contraction of products and sums on a CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "lockstep/kernels/cuda/arguments.h"

#ifdef __CUDACC__
#define LOCKSTEP_ON_BOTH __host__ __device__ __forceinline__
#else
#define LOCKSTEP_ON_BOTH inline
#endif

namespace lockstep::kernels {

using Bf16 = std::uint16_t;  // the upper half of a float's bits

namespace detail {

LOCKSTEP_ON_BOTH float product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
LOCKSTEP_ON_BOTH double product(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

LOCKSTEP_ON_BOTH double power(double base, std::uint32_t exponent) {
  double result = 1;
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result = product(result, base);
    base = product(base, base);
  }
  return result;
}

// Every bit of the result depends on every bit of x (the last step of SplitMix64).
LOCKSTEP_ON_BOTH std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

template <typename To, typename From>
LOCKSTEP_ON_BOTH To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

LOCKSTEP_ON_BOTH float widened(float value) {
  return value;
}
LOCKSTEP_ON_BOTH float widened(Bf16 value) {
  return same_bits<float>(std::uint32_t{value} << 16);
}

// The magnitude is rounded up with the probability of the fraction that is cut off.
template <typename T>
LOCKSTEP_ON_BOTH T narrowed(float value, std::uint64_t random) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    const auto bits = same_bits<std::uint32_t>(value);
    const bool finite = (bits & 0x7F800000u) != 0x7F800000u;
    const std::uint32_t quiet = (bits & 0x007FFFFFu) != 0 ? 0x40u : 0u;  // nan stays nan
    return static_cast<Bf16>(finite ? (bits + (random & 0xFFFFu)) >> 16 : bits >> 16 | quiet);
  }
}

}  // namespace detail

LOCKSTEP_ON_BOTH cuda::AdamFactors adam_factors(const cuda::AdamGroup& group, float step,
                                                std::uint32_t parameter) {
  const auto steps = static_cast<std::uint32_t>(step);
  const double correction1 = 1 - detail::power(group.beta1, steps);
  const double correction2 = 1 - detail::power(group.beta2, steps);
  return {static_cast<float>(group.lr / correction1),
          static_cast<float>(1 / std::sqrt(correction2)),
          1 - detail::product(group.lr, group.weight_decay),
          detail::mixed(detail::mixed(parameter) + steps)};
}

struct AdamElement {
  cuda::AdamGroup group;
  cuda::AdamFactors factors;
  float clip;
};

// P: the type of the parameter and of its gradient; S: that of both averages.
template <typename P, typename S>
LOCKSTEP_ON_BOTH void adam_element(const AdamElement& how, P& param, P grad, S& exp_avg,
                                   S& exp_avg_sq, std::int64_t element) {
  const cuda::AdamGroup& c = how.group;
  const float g = detail::product(detail::widened(grad), how.clip);
  float m = detail::widened(exp_avg), v = detail::widened(exp_avg_sq);
  m = std::fma(1 - c.beta1, g - m, m);
  v = std::fma(c.beta2, v, detail::product(detail::product(1 - c.beta2, g), g));
  const float denominator = detail::product(std::sqrt(v), how.factors.root_correction2) + c.eps;
  const float x = detail::product(detail::widened(param), how.factors.decay) -
                  detail::product(how.factors.step_size, m) / denominator;
  std::uint64_t random = 0;
  if constexpr (!std::is_same_v<P, float> || !std::is_same_v<S, float>)
    random =
        detail::mixed(how.factors.key + static_cast<std::uint64_t>(element) * 0x9E3779B97F4A7C15u);
  param = detail::narrowed<P>(x, random);
  exp_avg = detail::narrowed<S>(m, random >> 16);
  exp_avg_sq = detail::narrowed<S>(v, random >> 32);
}

}  // namespace lockstep::kernels
