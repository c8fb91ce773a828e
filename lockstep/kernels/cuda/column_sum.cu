// The sum of a matrix over its rows: the bias gradient of a linear layer. One read of the matrix.
#include <algorithm>

#include "lockstep/kernels/cuda/launch.h"
#include "lockstep/kernels/cuda/vector.cuh"

namespace lockstep::kernels::cuda {
namespace {

constexpr int kThreads = 128, kUnroll = 8;

// A thread keeps the sums of its eight columns over a block's rows.
template <typename T>
__global__ void __launch_bounds__(kThreads) column_sum_kernel(ColumnSum args, int rows_per_block) {
  const int vector = blockIdx.x * kThreads + threadIdx.x;
  const int vectors = args.columns / 8;
  if (vector >= vectors) return;
  const T* const from = static_cast<const T*>(args.from);
  const std::int64_t begin = std::int64_t{blockIdx.y} * rows_per_block;
  const std::int64_t end = min(args.rows, begin + rows_per_block);
  float sums[8] = {};
  for (std::int64_t row = begin; row < end; row += kUnroll) {
    Vector8<T> held[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (row + j < end) held[j] = load8(from, (row + j) * vectors + vector);
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
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
  const dim3 grid((args.columns / 8 + kThreads - 1) / kThreads, parts);
  const cudaError_t status = with_type(args.type, [&](auto type) {
    column_sum_kernel<decltype(type)>
        <<<grid, kThreads, 0, stream>>>(args, rows_per_block(args.rows));
    return cudaGetLastError();
  });
  if (status != cudaSuccess) return status;
  return add_parts(args.partials, parts, args.columns, 1, {{args.to, nullptr, nullptr}}, stream);
}

}  // namespace lockstep::kernels::cuda
