// What the two norm kernels share. Each tensor crosses the memory bus once. The statistics are
// those of x as it is stored, so forward and backward see the same values.
//
// A block is kGroups groups of kWarps warps that take a row each, the next rows on their way while
// these are computed; thread t of a group has the vectors t, t + kThreads, ... of its row, so
// parameters and column sums stay in registers over all rows. The groups of a block advance
// together.
#pragma once

#include "lockstep/kernels/cuda/vector.cuh"

namespace lockstep::kernels::cuda {

// A block's shape: columns <= 256 * kWarps * kVectors. kBlocks of them run on a multiprocessor.
template <int kVectors_, int kWarps_, int kGroups_, int kBlocks_>
struct NormShape {
  static constexpr int kVectors = kVectors_, kWarps = kWarps_, kGroups = kGroups_;
  static constexpr int kBlocks = kBlocks_, kThreads = kWarps_ * kWarpSize;
  static constexpr int kColumns = 256 * kWarps * kVectors;
};

constexpr int kMaxNormColumns = 8192;

template <int kWarps>
struct RowGroup {
  static constexpr int kThreads = kWarps * kWarpSize;
  int group = threadIdx.x / kThreads;
  int thread = threadIdx.x % kThreads;
};

// The sum over a group. There must be a barrier between two uses of the same `exchange`: the
// callers alternate between two arrays.
template <int kWarps>
__device__ __forceinline__ float2 group_sum(float2 value, float2 (&exchange)[kWarps]) {
  value = {warp_sum(value.x), warp_sum(value.y)};
  if constexpr (kWarps == 1) return value;
  if (threadIdx.x % kWarpSize == 0) exchange[threadIdx.x / kWarpSize % kWarps] = value;
  __syncthreads();
  value = exchange[0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) {
    value.x += exchange[i].x;
    value.y += exchange[i].y;
  }
  return value;
}

template <int kWarps>
__device__ __forceinline__ float group_sum(float value, float (&exchange)[kWarps]) {
  value = warp_sum(value);
  if constexpr (kWarps == 1) return value;
  if (threadIdx.x % kWarpSize == 0) exchange[threadIdx.x / kWarpSize % kWarps] = value;
  __syncthreads();
  value = exchange[0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) value += exchange[i];
  return value;
}

// Calls body(R{}, T{}) with the type of the residual and that of the rest, which are the same, or
// float beside another type.
template <typename Body>
cudaError_t with_norm_types(Type residual, Type type, Body&& body) {
  if (residual == type) return with_type(type, [&](auto one) { return body(one, one); });
  if (residual != Type::kFloat) return cudaErrorInvalidValue;
  return type == Type::kHalf ? body(float{}, __half{}) : body(float{}, __nv_bfloat16{});
}

// As many blocks as fit on the GPU at once, and no more than there are rows for.
template <typename Shape>
int norm_blocks(std::int64_t rows) {
  const std::int64_t wanted = (rows + Shape::kGroups - 1) / Shape::kGroups;
  const std::int64_t fit = std::int64_t{multiprocessors()} * Shape::kBlocks;
  return static_cast<int>(wanted < fit ? wanted : fit);
}

}  // namespace lockstep::kernels::cuda
