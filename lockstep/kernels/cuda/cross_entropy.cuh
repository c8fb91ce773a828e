// Cross entropy over a row of logits, in pieces that both kernels use.
//
// Columns from `classes` on are padding: they take no part in the softmax and their gradient is
// zero. Every sum has a fixed order: the same bits in every run.
#pragma once

#include "lockstep/kernels/cuda/vector.cuh"

namespace lockstep::kernels::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A maximum and the sum of exp(x - maximum), so that parts of a row can be put together.
struct SoftmaxPart {
  float max;
  float sum;
};

__device__ __forceinline__ float shift_of(float max) {
  return max == -INFINITY ? 0.0f : max * kLog2E;  // a part that is all padding
}

__device__ __forceinline__ SoftmaxPart combine_in_warp(SoftmaxPart part) {
  const float max = warp_max(part.max);
  const float sum = part.sum * fast_exp2(part.max * kLog2E - shift_of(max));
  return {max, warp_sum(sum)};
}

// One barrier per row: `parts` alternates between two arrays, so a warp that is a row ahead writes
// into the other one. Returns log2 of the sum of exp over the row.
template <int kWarps>
__device__ __forceinline__ float row_log2_sum(SoftmaxPart part, SoftmaxPart (&parts)[kWarps]) {
  const int lane = threadIdx.x % kWarpSize;
  if (lane == 0) parts[threadIdx.x / kWarpSize] = part;
  __syncthreads();
  const SoftmaxPart row = combine_in_warp(lane < kWarps ? parts[lane] : SoftmaxPart{-INFINITY, 0});
  return shift_of(row.max) + __log2f(row.sum);
}

// The thread that stored the target's vector writes the target's element and the loss.
template <typename T>
__device__ __forceinline__ void finish_target(const CrossEntropy& args, std::int64_t row,
                                              std::int64_t target, float logit, float log2_sum,
                                              float scale) {
  const float p = fast_exp2(fmaf(logit, kLog2E, -log2_sum));
  static_cast<T*>(args.logits)[row * args.columns + target] = static_cast<T>(scale * (p - 1));
  args.losses[row] = kLn2 * log2_sum - logit;
}

// Rows whose target names no column: 0 where it is ignored, NaN where it is out of range.
__device__ __forceinline__ bool has_target(const CrossEntropy& args, std::int64_t target) {
  return target != args.ignore_index && target >= 0 && target < args.classes;
}

__device__ __forceinline__ float loss_without_target(const CrossEntropy& args,
                                                     std::int64_t target) {
  return target == args.ignore_index ? 0.0f : NAN;
}

}  // namespace lockstep::kernels::cuda
