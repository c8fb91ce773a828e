// Residual addition with LayerNorm or RMSNorm, and its gradient: dx, and the sums over the rows
// that are the gradients of weight, bias and delta_bias.
//
// Each tensor crosses the memory bus once. The statistics are those of x as it is stored, so
// forward and backward see the same values. A block is kGroups groups of kWarps warps that take a
// row each, the next rows on their way while these are computed; thread t of a group has the
// vectors t, t + kThreads, ... of its row, so parameters and column sums stay in registers over all
// rows. The groups of a block advance together.
#include <algorithm>

#include "lockstep/kernels/cuda/launch.h"
#include "lockstep/kernels/cuda/vector.cuh"

namespace lockstep::kernels::cuda {
namespace {

// A block's shape: columns <= 256 * kWarps * kVectors. kBlocks of them run on a multiprocessor.
template <int kVectors_, int kWarps_, int kGroups_, int kBlocks_>
struct NormShape {
  static constexpr int kVectors = kVectors_, kWarps = kWarps_, kGroups = kGroups_;
  static constexpr int kBlocks = kBlocks_, kThreads = kWarps_ * kWarpSize;
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

// ---------------------------------------------------------------- forward

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

// ---------------------------------------------------------------- backward

namespace {

// dweight; dbias unless RMSNorm; the sum of dx, the bias gradient of the layer that made delta.
template <bool kRms, bool kSumDx>
constexpr int kNormSums = 1 + !kRms + kSumDx;

// R is the residual's type, T that of delta and of the norm.
template <typename R, typename T, int kVectors>
struct BackwardRow {
  Vector8<T> dnormed[kVectors];
  Vector8<R> x[kVectors], dresidual[kVectors];
  float mean, rstd;
};

template <typename R, typename T, typename Shape, bool kRms>
__device__ __forceinline__ void load_row(const NormBackward& args, std::int64_t row, int thread,
                                         BackwardRow<R, T, Shape::kVectors>& to) {
  if (row >= args.rows) return;
  const int vectors = args.columns / 8;
#pragma unroll
  for (int j = 0; j < Shape::kVectors; ++j) {
    const int i = j * Shape::kThreads + thread;
    if (i >= vectors) continue;
    to.dnormed[j] = load8(static_cast<const T*>(args.dnormed), row * vectors + i);
    to.x[j] = load8(static_cast<const R*>(args.x), row * vectors + i);
    if (args.dresidual != nullptr) {
      to.dresidual[j] = load8(static_cast<const R*>(args.dresidual), row * vectors + i);
    }
  }
  to.mean = kRms ? 0.0f : args.mean[row];
  to.rstd = args.rstd[row];
}

// The groups of a block add their shares one after the other, then the block writes the sums.
template <typename Shape, int kSums>
__device__ __forceinline__ void write_partials(const float (&shares)[kSums][Shape::kVectors][8],
                                               float* sums, int columns, float* partials) {
  const int group = threadIdx.x / Shape::kThreads;
  const int thread = threadIdx.x % Shape::kThreads;
  for (int turn = 0; turn < Shape::kGroups; ++turn) {
#pragma unroll
    for (int j = 0; j < Shape::kVectors; ++j) {
      const int i = j * Shape::kThreads + thread;
      if (group != turn || i >= columns / 8) continue;
#pragma unroll
      for (int k = 0; k < 8 * kSums; ++k) {
        float* const at = sums + k / 8 * columns + 8 * i + k % 8;
        *at = (turn == 0 ? 0.0f : *at) + shares[k / 8][j][k % 8];
      }
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < kSums * columns; i += blockDim.x) {
    partials[std::int64_t{blockIdx.x} * kSums * columns + i] = sums[i];
  }
}

// Dynamic shared memory: kNormSums * columns floats.
template <typename R, typename T, typename Shape, bool kRms, bool kSumDx>
__global__ void __launch_bounds__(Shape::kThreads* Shape::kGroups, Shape::kBlocks)
    norm_backward_kernel(NormBackward args) {
  constexpr int kVectors = Shape::kVectors, kWarps = Shape::kWarps, kThreads = Shape::kThreads;
  constexpr int kSums = kNormSums<kRms, kSumDx>;
  __shared__ float2 exchange[2][Shape::kGroups][kWarps];
  extern __shared__ float sums[];
  const auto [group, thread] = RowGroup<kWarps>{};
  const int vectors = args.columns / 8;
  const float scale = 1.0f / args.columns;
  const bool float_weight = args.weight_type == Type::kFloat;
  const std::int64_t step = std::int64_t{gridDim.x} * Shape::kGroups;
  float shares[kSums][kVectors][8] = {};
  float weight[kVectors][8];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int i = j * kThreads + thread;
    if (i < vectors) load8_as_float<T>(args.weight, float_weight, i, weight[j]);
  }
  std::int64_t first = std::int64_t{blockIdx.x} * Shape::kGroups;
  BackwardRow<R, T, kVectors> next;
  load_row<R, T, Shape, kRms>(args, first + group, thread, next);
  for (int turn = 0; first < args.rows; first += step, turn ^= 1) {
    const std::int64_t row = first + group;
    const bool valid = row < args.rows;
    const BackwardRow<R, T, kVectors> at = next;
    load_row<R, T, Shape, kRms>(args, row + step, thread, next);
    const float shift = -at.mean * at.rstd;  // xhat = x * rstd + shift
    float2 sum = {0, 0};                     // sums of g and g * xhat, where g = dnormed * weight
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (!valid || j * kThreads + thread >= vectors) continue;
      float dy[8], x[8];
      unpack8(at.dnormed[j], dy);
      unpack8(at.x[j], x);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float xhat = fmaf(x[k], at.rstd, shift);
        const float g = dy[k] * weight[j][k];
        if constexpr (!kRms) sum.x += g;
        sum.y += g * xhat;
        shares[0][j][k] += dy[k] * xhat;
        if constexpr (!kRms) shares[1][j][k] += dy[k];
      }
    }
    sum = group_sum<kWarps>(sum, exchange[turn][group]);
    const float mean_g = scale * at.rstd * sum.x, mean_gx = scale * at.rstd * sum.y;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = j * kThreads + thread;
      if (!valid || i >= vectors) continue;
      float dy[8], x[8], dx[8] = {};
      unpack8(at.dnormed[j], dy);
      unpack8(at.x[j], x);
      if (args.dresidual != nullptr) unpack8(at.dresidual[j], dx);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float xhat = fmaf(x[k], at.rstd, shift);
        dx[k] += fmaf(-xhat, mean_gx, fmaf(at.rstd * weight[j][k], dy[k], -mean_g));
        if constexpr (kSumDx) shares[kSums - 1][j][k] += dx[k];
      }
      store8(static_cast<R*>(args.dx), row * vectors + i, pack8<R>(dx));
      if (args.ddelta != nullptr) {
        store8(static_cast<T*>(args.ddelta), row * vectors + i, pack8<T>(dx));
      }
    }
  }
  write_partials<Shape>(shares, sums, args.columns, args.partials);
}

template <typename R, typename T, typename Shape, bool kRms, bool kSumDx>
cudaError_t run(const NormBackward& args, cudaStream_t stream) {
  constexpr int kSums = kNormSums<kRms, kSumDx>;
  const auto kernel = norm_backward_kernel<R, T, Shape, kRms, kSumDx>;
  const int blocks = norm_blocks<Shape>(args.rows);
  const int bytes = kSums * args.columns * static_cast<int>(sizeof(float));
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  kernel<<<blocks, Shape::kThreads * Shape::kGroups, bytes, stream>>>(args);
  SumOutputs outputs{{args.dweight, kRms ? args.ddelta_bias : args.dbias, args.ddelta_bias}};
  return add_parts(args.partials, blocks, args.columns, kSums, outputs, stream);
}

template <typename R, typename T, typename Shape, typename SumShape>
cudaError_t choose(const NormBackward& args, cudaStream_t stream) {
  const bool sums = args.ddelta_bias != nullptr;
  if (args.rms) {
    return sums ? run<R, T, SumShape, true, true>(args, stream)
                : run<R, T, Shape, true, false>(args, stream);
  }
  return sums ? run<R, T, SumShape, false, true>(args, stream)
              : run<R, T, Shape, false, false>(args, stream);
}

// The maximum number of blocks, over the shapes below, on one multiprocessor.
constexpr int kMostBlocks = 4;

}  // namespace

std::int64_t norm_partials(std::int64_t rows, int columns) {
  const std::int64_t blocks = std::int64_t{multiprocessors()} * kMostBlocks;
  return 3 * columns * (rows < blocks ? rows : blocks);
}

cudaError_t norm_backward(const NormBackward& args, cudaStream_t stream) {
  if (!norm_covers(args.columns)) return cudaErrorInvalidValue;
  // Measured on H200 with bf16 at 768, 1600 and 2048 columns; a float row takes twice the
  // registers.
  return with_norm_types(args.residual_type, args.type, [&](auto residual, auto type) {
    using R = decltype(residual);
    using T = decltype(type);
    if constexpr (sizeof(R) == sizeof(float)) {
      using Narrow = NormShape<1, 4, 1, 2>;
      if (args.columns <= 1024) return choose<R, T, Narrow, Narrow>(args, stream);
    } else {
      if (args.columns <= 768) {
        return choose<R, T, NormShape<1, 3, 2, 4>, NormShape<3, 1, 4, 2>>(args, stream);
      }
      if (args.columns <= 2048) {
        return choose<R, T, NormShape<2, 4, 1, 4>, NormShape<2, 4, 1, 3>>(args, stream);
      }
    }
    using Middle = NormShape<2, 8, 1, 1>;
    using Wide = NormShape<2, 16, 1, 1>;
    if (args.columns <= 4096) return choose<R, T, Middle, Middle>(args, stream);
    return choose<R, T, Wide, Wide>(args, stream);
  });
}

// ---------------------------------------------------------------- the sum over rows
//
// The sum of a matrix over its rows: the bias gradient of a linear layer. One read of the matrix.

namespace {

constexpr int kSumThreads = 128, kSumUnroll = 8;

// A thread keeps the sums of its eight columns over a block's rows.
template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    column_sum_kernel(ColumnSum args, int rows_per_block) {
  const int vector = blockIdx.x * kSumThreads + threadIdx.x;
  const int vectors = args.columns / 8;
  if (vector >= vectors) return;
  const T* const from = static_cast<const T*>(args.from);
  const std::int64_t begin = std::int64_t{blockIdx.y} * rows_per_block;
  const std::int64_t end = min(args.rows, begin + rows_per_block);
  float sums[8] = {};
  for (std::int64_t row = begin; row < end; row += kSumUnroll) {
    Vector8<T> held[kSumUnroll];
#pragma unroll
    for (int j = 0; j < kSumUnroll; ++j) {
      if (row + j < end) held[j] = load8(from, (row + j) * vectors + vector);
    }
#pragma unroll
    for (int j = 0; j < kSumUnroll; ++j) {
      if (row + j >= end) continue;
      float values[8];
      unpack8(held[j], values);
#pragma unroll
      for (int k = 0; k < 8; ++k) sums[k] += values[k];
    }
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    args.partials[std::int64_t{blockIdx.y} * args.columns + 8 * vector + k] = sums[k];
  }
}

// Few rows are divided more finely, so that the whole GPU reads them. The grid's second dimension
// is limited to 65535 blocks.
int rows_per_block(std::int64_t rows) {
  constexpr std::int64_t kMin = 16, kUsual = 256, kParts = 64;
  const std::int64_t fine = std::clamp(rows / kParts, kMin, kUsual);
  return static_cast<int>(std::max(fine, (rows + 32767) / 32768));
}

int blocks_of(std::int64_t rows) {
  return static_cast<int>((rows + rows_per_block(rows) - 1) / rows_per_block(rows));
}

}  // namespace

std::int64_t column_sum_partials(std::int64_t rows, int columns) {
  return std::int64_t{blocks_of(rows)} * columns;
}

cudaError_t column_sum(const ColumnSum& args, cudaStream_t stream) {
  if (args.columns % 8 != 0) return cudaErrorInvalidValue;
  const int parts = blocks_of(args.rows);
  const dim3 grid((args.columns / 8 + kSumThreads - 1) / kSumThreads, parts);
  const cudaError_t status = with_type(args.type, [&](auto type) {
    column_sum_kernel<decltype(type)>
        <<<grid, kSumThreads, 0, stream>>>(args, rows_per_block(args.rows));
    return cudaGetLastError();
  });
  if (status != cudaSuccess) return status;
  return add_parts(args.partials, parts, args.columns, 1, {{args.to, nullptr, nullptr}}, stream);
}

}  // namespace lockstep::kernels::cuda
