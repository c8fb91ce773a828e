#include "lockstep/kernels/norm.h"

#include <algorithm>
#include <cmath>

#include "lockstep/kernels/machine.h"
#include "lockstep/kernels/mean.h"

namespace lockstep::kernels {
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

// The same for a block that was not stored.
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
  auto mean = detail::mean_of(gradient);
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

}  // namespace lockstep::kernels
