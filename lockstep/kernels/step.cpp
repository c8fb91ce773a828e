#include "lockstep/kernels/step.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "lockstep/kernels/adamw_element.h"
#include "lockstep/kernels/machine.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace lockstep::kernels {
namespace {

using detail::AdamConstants;
using detail::Mean;
using detail::SgdConstants;

// Converts a caller's Gradient for the loops. Division by a power of two and multiplication by its
// reciprocal round alike, so the cheaper one is used; other divisors divide.
template <typename T>
Mean<T> mean_of(const Gradient<T>& gradient) {
  Mean<T> mean{.sources = gradient.sources,
               .count = gradient.count,
               .divisor = gradient.divisor,
               .scale = gradient.scale};
  int exponent = 0;
  const T fraction = std::frexp(gradient.divisor, &exponent);
  const bool power_of_two = fraction == T(0.5) && exponent > -64 && exponent < 64;
  mean.divides = !power_of_two;
  if (power_of_two) mean.factor = T(1) / gradient.divisor;
  return mean;
}

// ---------------------------------------------------------------- the step

// 1 - lr * weight_decay as ATen's compiler made it; the difference shows only in double.
double one_minus(double lr, double weight_decay) {
  return detail::machine().fuses_decay ? std::fma(-lr, weight_decay, 1.0) : 1 - lr * weight_decay;
}

template <typename T>
AdamConstants<T> constants_of(const AdamStep& step) {
  const double correction1 = 1 - std::pow(step.beta1, step.step);
  const double correction2 = 1 - std::pow(step.beta2, step.step);
  AdamConstants<T> c;
  c.l2 = !step.decoupled && step.weight_decay != 0;
  if (c.l2) {
    c.decay = static_cast<T>(step.weight_decay);
  } else if (step.weight_decay != 0) {
    c.decay = static_cast<T>(one_minus(step.lr, step.weight_decay));
  }
  c.lerp = static_cast<T>(1 - step.beta1);
  c.beta2 = static_cast<T>(step.beta2);
  c.fresh = static_cast<T>(1 - step.beta2);
  c.correction = static_cast<T>(std::sqrt(correction2));
  c.eps = static_cast<T>(step.eps);
  c.minus_step = static_cast<T>(-(step.lr / correction1));
  return c;
}

template <typename T>
SgdConstants<T> constants_of(const SgdStep& step) {
  return {.l2 = step.weight_decay != 0,
          .momentum = step.momentum != 0,
          .first = step.first,
          .nesterov = step.nesterov,
          .decay = static_cast<T>(step.weight_decay),
          .mu = static_cast<T>(step.momentum),
          .fresh = static_cast<T>(1 - step.dampening),
          .minus_lr = static_cast<T>(-step.lr)};
}

// The number of the slice's elements before the last, partial vector of their tensor.
template <typename T>
std::int64_t whole_vectors(const Slice& slice) {
  const std::int64_t lanes = detail::machine().vector_bytes / std::int64_t{sizeof(T)};
  const std::int64_t end = slice.tensor_size - slice.tensor_size % lanes;
  return std::clamp<std::int64_t>(end - slice.begin, 0, slice.count);
}

// Calls body(mean, begin, count, last) for the part of a slice in whole vectors and for the rest.
template <typename T, typename Body>
void in_two_parts(const Gradient<T>& gradient, const Slice& slice, const Body& body) {
  auto mean = mean_of(gradient);
  const std::int64_t whole = whole_vectors<T>(slice);
  if (whole > 0) body(mean, 0, whole, /*last=*/false);
  mean.offset = whole;
  if (whole < slice.count) body(mean, whole, slice.count - whole, /*last=*/true);
}

}  // namespace

template <typename T>
void adam(const Gradient<T>& gradient, const AdamTensors<T>& tensors, const Slice& slice,
          const AdamStep& step) {
  const AdamConstants<T> c = constants_of<T>(step);
  in_two_parts(gradient, slice,
               [&](const Mean<T>& mean, std::int64_t begin, std::int64_t count, bool last) {
                 const auto loop = last ? detail::loops<T>().adam_last : detail::loops<T>().adam;
                 loop({tensors.param + begin, tensors.exp_avg + begin, tensors.exp_avg_sq + begin,
                       mean, count},
                      c);
               });
}

template <typename T>
void sgd(const Gradient<T>& gradient, const SgdTensors<T>& tensors, const Slice& slice,
         const SgdStep& step) {
  const SgdConstants<T> c = constants_of<T>(step);
  in_two_parts(gradient, slice,
               [&](const Mean<T>& mean, std::int64_t begin, std::int64_t count, bool last) {
                 const auto loop = last ? detail::loops<T>().sgd_last : detail::loops<T>().sgd;
                 T* momentum = c.momentum ? tensors.momentum + begin : nullptr;
                 loop({tensors.param + begin, momentum, mean, count}, c);
               });
}

template void adam(const Gradient<float>&, const AdamTensors<float>&, const Slice&,
                   const AdamStep&);
template void adam(const Gradient<double>&, const AdamTensors<double>&, const Slice&,
                   const AdamStep&);
template void sgd(const Gradient<float>&, const SgdTensors<float>&, const Slice&, const SgdStep&);
template void sgd(const Gradient<double>&, const SgdTensors<double>&, const Slice&, const SgdStep&);

// ---------------------------------------------------------------- AdamW as on a GPU

cuda::AdamFactors adamw_factors(const cuda::AdamGroup& group, float step, std::uint32_t parameter) {
  return adam_factors(group, step, parameter);
}

void adamw(const cuda::AdamTensor& tensor, const cuda::AdamGroup& group, float clip,
           std::int64_t from, std::int64_t to) {
  const AdamElement how{group, adam_factors(group, *tensor.step, tensor.parameter), clip};
  const auto run = [&]<typename P, typename S>(P*, S*) {
    auto* const params = static_cast<P*>(tensor.param);
    const auto* const grads = static_cast<const P*>(tensor.grad);
    auto* const averages = static_cast<S*>(tensor.exp_avg);
    auto* const squares = static_cast<S*>(tensor.exp_avg_sq);
    for (std::int64_t i = from; i < to; ++i)
      adam_element(how, params[i], grads[i], averages[i], squares[i], tensor.begin + i);
  };
  float* const single = nullptr;
  Bf16* const half = nullptr;
  if (tensor.bf16_param != 0) {
    tensor.bf16_state != 0 ? run(half, half) : run(half, single);
  } else {
    tensor.bf16_state != 0 ? run(single, half) : run(single, single);
  }
}

// ---------------------------------------------------------------- norms

namespace {

struct Lanes {
  alignas(64) double values[detail::kNormLanes] = {};

  // Halves are added until one is left: a fixed order.
  double sum() {
    for (std::int64_t half = detail::kNormLanes / 2; half > 0; half /= 2) {
      for (std::int64_t i = 0; i < half; ++i) values[i] += values[i + half];
    }
    return values[0];
  }
};

// A finite sum had finite terms; only other sums are looked at again.
template <typename T>
bool all_finite(double sum, const T* values, std::int64_t count) {
  if (std::isfinite(sum)) return true;
  return std::all_of(values, values + count, [](T value) { return std::isfinite(value); });
}

// The same for a block of the mean that is not stored.
template <typename T>
bool mean_is_finite(const detail::Mean<T>& mean, std::int64_t count) {
  T values[kNormBlock];
  Lanes ignored;
  detail::loops<T>().mean_squares(mean, values, count, ignored.values);
  return all_finite(ignored.sum(), values, count);
}

}  // namespace

template <typename T>
bool block_norms(const T* values, std::int64_t count, double* sums) {
  bool finite = true;
  for (std::int64_t at = 0; at < count; at += kNormBlock) {
    const std::int64_t size = std::min(kNormBlock, count - at);
    Lanes lanes;
    detail::loops<T>().squares(values + at, size, lanes.values);
    sums[at / kNormBlock] = lanes.sum();
    finite &= all_finite(sums[at / kNormBlock], values + at, size);
  }
  return finite;
}

template <typename T>
bool reduce_with_norms(const Gradient<T>& gradient, T* out, std::int64_t count, double* sums) {
  static_assert(kNormBlock % detail::kNormLanes == 0);
  auto mean = mean_of(gradient);
  bool finite = true;
  for (std::int64_t at = 0; at < count; at += kNormBlock) {
    const std::int64_t size = std::min(kNormBlock, count - at);
    mean.offset = at;
    Lanes lanes;
    detail::loops<T>().mean_squares(mean, out == nullptr ? nullptr : out + at, size, lanes.values);
    const double sum = sums[at / kNormBlock] = lanes.sum();
    if (std::isfinite(sum)) continue;
    finite &= out == nullptr ? mean_is_finite(mean, size) : all_finite(sum, out + at, size);
  }
  return finite;
}

double add_blocks(const double* sums, std::int64_t blocks) {
  double total = 0;
  for (std::int64_t b = 0; b < blocks; ++b) total += sums[b];
  return total;
}

template bool block_norms(const float*, std::int64_t, double*);
template bool block_norms(const double*, std::int64_t, double*);
template bool reduce_with_norms(const Gradient<float>&, float*, std::int64_t, double*);
template bool reduce_with_norms(const Gradient<double>&, double*, std::int64_t, double*);

// ---------------------------------------------------------------- copies

void stream_copy(void* to, const void* from, std::size_t bytes) {
#if defined(__SSE2__)
  constexpr std::size_t kLine = 64;
  auto* out = static_cast<std::byte*>(to);
  const auto* in = static_cast<const std::byte*>(from);
  // Up to the first whole line of the target; only whole lines are written past the cache.
  const std::size_t past = reinterpret_cast<std::uintptr_t>(out) % kLine;
  const std::size_t head = std::min(bytes, past == 0 ? 0 : kLine - past);
  std::memcpy(out, in, head);
  const std::size_t end = head + (bytes - head) / kLine * kLine;
  for (std::size_t at = head; at < end; at += kLine) {
    __m128i line[4];
    for (int i = 0; i < 4; ++i)
      line[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + at) + i);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(out + at) + i, line[i]);
  }
  // Such stores are not ordered with later ones, by which other ranks learn of them.
  _mm_sfence();
  std::memcpy(out + end, in + end, bytes - end);
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace lockstep::kernels
