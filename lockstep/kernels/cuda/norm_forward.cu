// Residual addition with LayerNorm or RMSNorm.
#include "lockstep/kernels/cuda/launch.h"
#include "lockstep/kernels/cuda/norm.cuh"

namespace lockstep::kernels::cuda {
namespace {

// R is the residual's type, T that of delta and of the norm.
template <typename R, typename T, int kVectors>
struct ForwardRow {
  Vector8<R> residual[kVectors];
  Vector8<T> delta[kVectors];
};

template <typename R, typename T, typename Shape>
__device__ __forceinline__ void load_row(const NormForward& args, std::int64_t row, int thread,
                                         ForwardRow<R, T, Shape::kVectors>& to) {
  if (row >= args.rows) return;
  const int vectors = args.columns / 8;
#pragma unroll
  for (int j = 0; j < Shape::kVectors; ++j) {
    const int i = j * Shape::kThreads + thread;
    if (i >= vectors) continue;
    to.residual[j] = load8(static_cast<const R*>(args.residual), row * vectors + i);
    if (args.delta != nullptr) {
      to.delta[j] = load8(static_cast<const T*>(args.delta), row * vectors + i);
    }
  }
}

template <int kVectors>
struct Parameters {
  float weight[kVectors][8], bias[kVectors][8] = {}, delta_bias[kVectors][8] = {};
};

template <typename T, typename Shape>
__device__ __forceinline__ void load_parameters(const NormForward& args, int thread,
                                                Parameters<Shape::kVectors>& to) {
  const bool is_float = args.weight_type == Type::kFloat;
#pragma unroll
  for (int j = 0; j < Shape::kVectors; ++j) {
    const int i = j * Shape::kThreads + thread;
    if (i >= args.columns / 8) continue;
    load8_as_float<T>(args.weight, is_float, i, to.weight[j]);
    if (args.bias != nullptr) load8_as_float<T>(args.bias, is_float, i, to.bias[j]);
    if (args.delta_bias != nullptr) {
      load8_as_float<T>(args.delta_bias, is_float, i, to.delta_bias[j]);
    }
  }
}

template <typename R, typename T, typename Shape, bool kRms>
__global__ void __launch_bounds__(Shape::kThreads* Shape::kGroups, Shape::kBlocks)
    norm_forward_kernel(NormForward args) {
  constexpr int kVectors = Shape::kVectors, kWarps = Shape::kWarps, kThreads = Shape::kThreads;
  __shared__ float exchange[2][Shape::kGroups][kWarps];
  const auto [group, thread] = RowGroup<kWarps>{};
  const int vectors = args.columns / 8;
  const float scale = 1.0f / args.columns;
  const std::int64_t step = std::int64_t{gridDim.x} * Shape::kGroups;
  Parameters<kVectors> parameters;
  load_parameters<T, Shape>(args, thread, parameters);
  const auto& [weight, bias, delta_bias] = parameters;
  std::uint32_t most = 0;  // of the norm, as it is stored
  std::int64_t first = std::int64_t{blockIdx.x} * Shape::kGroups;
  ForwardRow<R, T, kVectors> next;
  load_row<R, T, Shape>(args, first + group, thread, next);
  for (int turn = 0; first < args.rows; first += step, turn ^= 1) {
    const std::int64_t row = first + group;
    float x[kVectors][8];
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = j * kThreads + thread;
      if (i >= vectors) continue;
      unpack8(next.residual[j], x[j]);
      if (args.delta != nullptr) {
        float delta[8];
        unpack8(next.delta[j], delta);
#pragma unroll
        for (int k = 0; k < 8; ++k) x[j][k] += delta[k] + delta_bias[j][k];
        const Vector8<R> rounded = pack8<R>(x[j]);
        unpack8(rounded, x[j]);
        if (row < args.rows) store8(static_cast<R*>(args.x), row * vectors + i, rounded);
      }
#pragma unroll
      for (int k = 0; k < 8; ++k) sum += kRms ? x[j][k] * x[j][k] : x[j][k];
    }
    load_row<R, T, Shape>(args, row + step, thread, next);
    float mean = 0;
    if constexpr (!kRms) {
      mean = group_sum<kWarps>(sum, exchange[0][group]) * scale;
      sum = 0;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (j * kThreads + thread >= vectors) continue;
#pragma unroll
        for (int k = 0; k < 8; ++k) sum += (x[j][k] - mean) * (x[j][k] - mean);
      }
    }
    sum = group_sum<kWarps>(sum, exchange[kRms ? turn : 1][group]);
    if (row >= args.rows) continue;
    const float rstd = rsqrtf(sum * scale + args.eps);
    if (thread == 0) {
      if constexpr (!kRms) args.mean[row] = mean;
      args.rstd[row] = rstd;
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = j * kThreads + thread;
      if (i >= vectors) continue;
#pragma unroll
      for (int k = 0; k < 8; ++k) x[j][k] = (x[j][k] - mean) * rstd * weight[j][k] + bias[j][k];
      const Vector8<T> normed = pack8<T>(x[j]);
      store8(static_cast<T*>(args.normed), row * vectors + i, normed);
      if (args.amax != nullptr) most = larger_of(most, normed);
    }
  }
  if (args.amax != nullptr) raise_amax<kThreads * Shape::kGroups>(most, args.amax);
}

template <typename R, typename T, typename Shape>
cudaError_t run(const NormForward& args, cudaStream_t stream) {
  const int blocks = norm_blocks<Shape>(args.rows);
  constexpr int kThreads = Shape::kThreads * Shape::kGroups;
  if (args.rms) {
    norm_forward_kernel<R, T, Shape, true><<<blocks, kThreads, 0, stream>>>(args);
  } else {
    norm_forward_kernel<R, T, Shape, false><<<blocks, kThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace

bool norm_covers(int columns) {
  return columns > 0 && columns % 8 == 0 && columns <= kMaxNormColumns;
}

// One vector per thread where possible: measured on H200 for 768, 1600 and 2048 columns.
cudaError_t norm_forward(const NormForward& args, cudaStream_t stream) {
  if (!norm_covers(args.columns)) return cudaErrorInvalidValue;
  return with_norm_types(args.residual_type, args.type, [&](auto residual, auto type) {
    using R = decltype(residual);
    using T = decltype(type);
    if (args.columns <= 768) return run<R, T, NormShape<1, 3, 2, 5>>(args, stream);
    if (args.columns <= 1792) return run<R, T, NormShape<1, 7, 1, 4>>(args, stream);
    if (args.columns <= 2048) return run<R, T, NormShape<1, 8, 1, 4>>(args, stream);
    if (args.columns <= 4096) return run<R, T, NormShape<2, 8, 1, 2>>(args, stream);
    return run<R, T, NormShape<4, 8, 1, 1>>(args, stream);
  });
}

}  // namespace lockstep::kernels::cuda
