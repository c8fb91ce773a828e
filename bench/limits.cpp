#include "bench/limits.h"

#include <algorithm>
#include <cmath>
#include <cstring>

// Each function for the vector widths of x86 processors, chosen at run time; NEON is everywhere.
#if defined(__x86_64__)
#define WIDEST_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST_VECTORS
#endif

namespace lockstep::bench {
namespace {

constexpr std::int64_t kBlock = 1024;  // floats: stays in the first cache

WIDEST_VECTORS void sum_two(float* __restrict a, float* __restrict b, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) a[i] = b[i] = a[i] + b[i];
}

WIDEST_VECTORS void add(float* __restrict sum, const float* __restrict values, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) sum[i] += values[i];
}

WIDEST_VECTORS void move_two(const float* __restrict first, const float* __restrict second,
                             float* __restrict param, float* __restrict exp_avg,
                             float* __restrict exp_avg_sq, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float sum = first[i] + second[i];
    param[i] += sum;
    exp_avg[i] += sum;
    exp_avg_sq[i] += sum;
  }
}

WIDEST_VECTORS void adamw_block(float* __restrict param, float* __restrict exp_avg,
                                float* __restrict exp_avg_sq, const float* __restrict gradient) {
  for (std::int64_t i = 0; i < kBlock; ++i) {
    const float g = gradient[i];
    const float m = exp_avg[i] + 0.1F * (g - exp_avg[i]);
    const float v = 0.999F * exp_avg_sq[i] + 0.001F * g * g;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    param[i] = 0.99999F * param[i] - 1e-3F * m / (std::sqrt(v) / 0.6321F + 1e-8F);
  }
}

}  // namespace

void sum_slices(const Slices& s) {
  if (s.count == 2) {
    sum_two(s.arrays[0] + s.begin, s.arrays[1] + s.begin, s.end - s.begin);
    return;
  }
  alignas(64) float sum[kBlock];
  for (std::int64_t at = s.begin; at < s.end; at += kBlock) {
    const std::int64_t count = std::min(kBlock, s.end - at);
    const auto bytes = static_cast<std::size_t>(count) * sizeof(float);
    std::memcpy(sum, s.arrays[0] + at, bytes);
    for (int i = 1; i < s.count; ++i) add(sum, s.arrays[i] + at, count);
    for (int i = 0; i < s.count; ++i) std::memcpy(s.arrays[i] + at, sum, bytes);
  }
}

void copy_slices(const Slices& s) {
  const auto bytes = static_cast<std::size_t>(s.end - s.begin) * sizeof(float);
  for (int i = 0; i < s.count; ++i)
    std::memcpy(s.arrays[i] + s.begin, s.arrays[(i + 1) % s.count] + s.begin, bytes);
}

void move_step_bytes(const StepArrays& a, std::int64_t begin, std::int64_t end) {
  alignas(64) float sum[kBlock];
  for (std::int64_t at = begin; at < end; at += kBlock) {
    const std::int64_t count = std::min(kBlock, end - at);
    const float* second = a.gradients[1] + at;
    if (a.ranks > 2) {
      std::memcpy(sum, second, static_cast<std::size_t>(count) * sizeof(float));
      for (int r = 2; r < a.ranks; ++r) add(sum, a.gradients[r] + at, count);
      second = sum;
    }
    move_two(a.gradients[0] + at, second, a.param + at, a.exp_avg + at, a.exp_avg_sq + at, count);
  }
}

float adamw_arithmetic(std::int64_t count) {
  alignas(64) static float param[kBlock], exp_avg[kBlock], exp_avg_sq[kBlock], gradient[kBlock];
  for (std::int64_t i = 0; i < kBlock; ++i) gradient[i] = static_cast<float>(i % 7) - 3.5F;
  for (std::int64_t done = 0; done < count; done += kBlock)
    adamw_block(param, exp_avg, exp_avg_sq, gradient);
  return param[0];
}

}  // namespace lockstep::bench
