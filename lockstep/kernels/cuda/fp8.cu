// Matrices as 8-bit floating point: their largest magnitude, and the cast with the scale that
// follows from it, of a matrix and of its transpose in one read. Scales stay on the device.
#include <cuda_fp8.h>

#include <algorithm>

#include "lockstep/kernels/cuda/launch.h"
#include "lockstep/kernels/cuda/vector.cuh"

namespace lockstep::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;

template <typename T>
__device__ __forceinline__ void raise(std::uint32_t (&most)[8], Vector8<T> vector) {
  float x[8];
  unpack8(vector, x);
#pragma unroll
  for (int k = 0; k < 8; ++k) most[k] = max(most[k], magnitude(x[k]));
}

__device__ __forceinline__ std::uint32_t most_of(const std::uint32_t (&each)[8]) {
  std::uint32_t most = each[0];
#pragma unroll
  for (int k = 1; k < 8; ++k) most = max(most, each[k]);
  return most;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) amax_kernel(Fp8Amax args, std::int64_t vectors) {
  const T* const from = static_cast<const T*>(args.from);
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  std::uint32_t each[8] = {};
  constexpr int kUnroll = 4;
  std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; at + (kUnroll - 1) * step < vectors; at += kUnroll * step) {
    Vector8<T> held[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) held[j] = load8(from, at + j * step);
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) raise(each, held[j]);
  }
  for (; at < vectors; at += step) raise(each, load8(from, at));
  raise_amax<kThreads>(most_of(each), args.amax);
}

// A block reads 64 rows of 256 columns; a warp takes every eighth row.
constexpr int kAmaxRows = 64, kAmaxColumns = 8 * kWarpSize;

template <typename T>
__global__ void __launch_bounds__(kThreads) amax_by_row_kernel(Fp8Amax args) {
  __shared__ std::uint32_t of_warp[kWarps][kAmaxColumns];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int column = blockIdx.x * kAmaxColumns + 8 * lane, vectors = args.columns / 8;
  const std::int64_t first = std::int64_t{blockIdx.y} * kAmaxRows;
  const std::int64_t end = min(args.rows, first + kAmaxRows);
  std::uint32_t each[8] = {};
  for (std::int64_t row = first + warp; row < end; row += kWarps) {
    std::uint32_t own[8] = {};
    if (column < args.columns)
      raise(own, load8(static_cast<const T*>(args.from), row * vectors + column / 8));
#pragma unroll
    for (int k = 0; k < 8; ++k) each[k] = max(each[k], own[k]);
    const std::uint32_t most = __reduce_max_sync(0xffffffffu, most_of(own));
    if (lane == 0) atomicMax(args.amax + row, most);
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) of_warp[warp][8 * lane + k] = each[k];
  __syncthreads();
  const int mine = blockIdx.x * kAmaxColumns + threadIdx.x;
  if (mine >= args.columns) return;
  std::uint32_t all = of_warp[0][threadIdx.x];
  for (int i = 1; i < kWarps; ++i) all = max(all, of_warp[i][threadIdx.x]);
  atomicMax(args.by_column + mine, all);
}

// ---------------------------------------------------------------- the cast

template <Fp8 kFp8>
constexpr float kLargest = kFp8 == Fp8::kE4m3 ? 448.0f : 57344.0f;

// Not fmaxf, which would lose a NaN.
template <Fp8 kFp8>
__device__ __forceinline__ float scale_for(std::uint32_t amax) {
  constexpr float kSmallest = 1e-30f;
  const float most = __uint_as_float(amax);
  return __fdiv_rn(kLargest<kFp8>, most < kSmallest ? kSmallest : most);
}

template <Fp8 kFp8>
__device__ __forceinline__ std::uint32_t two_of(float x, float y) {
  return __nv_cvt_float2_to_fp8x2({x, y}, __NV_SATFINITE,
                                  kFp8 == Fp8::kE4m3 ? __NV_E4M3 : __NV_E5M2);
}

template <Fp8 kFp8>
__device__ __forceinline__ uint2 eight_of(const float (&x)[8], const float (&scale)[8]) {
  float y[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) y[k] = __fmul_rn(x[k], scale[k]);
  return {two_of<kFp8>(y[0], y[1]) | two_of<kFp8>(y[2], y[3]) << 16,
          two_of<kFp8>(y[4], y[5]) | two_of<kFp8>(y[6], y[7]) << 16};
}

// Bytes of four rows become the words of four columns.
__device__ __forceinline__ void transpose4(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                           std::uint32_t d, std::uint32_t (&to)[4]) {
  const std::uint32_t ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
  const std::uint32_t ab2 = __byte_perm(a, b, 0x7362), cd2 = __byte_perm(c, d, 0x7362);
  to[0] = __byte_perm(ab, cd, 0x5410);
  to[1] = __byte_perm(ab, cd, 0x7632);
  to[2] = __byte_perm(ab2, cd2, 0x5410);
  to[3] = __byte_perm(ab2, cd2, 0x7632);
}

constexpr int kTile = 128, kSub = 32;

// The factor that a product multiplies by; one block of each row or column of blocks writes it.
template <Fp8 kFp8, bool kByRow>
__device__ __forceinline__ void write_scales(const Fp8Cast& args, std::int64_t first_row,
                                             int first_column) {
  if (!kByRow && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    *args.scale = __fdiv_rn(1.0f, scale_for<kFp8>(*args.amax));
  }
  if (kByRow && threadIdx.x < kTile) {
    const std::int64_t row = first_row + threadIdx.x;
    const int column = first_column + threadIdx.x;
    if (blockIdx.x == 0 && row < args.rows && args.scale != nullptr)
      args.scale[row] = __fdiv_rn(1.0f, scale_for<kFp8>(args.amax[row]));
    if (blockIdx.y == 0 && column < args.columns && args.transposed_scale != nullptr)
      args.transposed_scale[column] = __fdiv_rn(1.0f, scale_for<kFp8>(args.by_column[column]));
  }
}

// A warp casts 32 x 32 elements at a time, a thread four rows of eight columns: in shared memory no
// two threads of a warp then meet in a bank.
template <typename T, Fp8 kFp8, bool kByRow>
__global__ void __launch_bounds__(kThreads) cast_kernel(Fp8Cast args) {
  __shared__ std::uint32_t words[kTile][kTile / 4 + 1];  // [column][row / 4]
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const std::int64_t first_row = std::int64_t{blockIdx.y} * kTile;
  const int first_column = blockIdx.x * kTile;
  const float whole = kByRow ? 0 : scale_for<kFp8>(*args.amax);
#pragma unroll
  for (int item = 0; item < 2; ++item) {
    const int sub = 2 * warp + item;
    const int row_in = sub / 4 * kSub + lane / 4 * 4, column_in = sub % 4 * kSub + lane % 4 * 8;
    const std::int64_t row = first_row + row_in;
    const int column = first_column + column_in;
    if (column >= args.columns) continue;
    Vector8<T> held[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (row + j < args.rows)
        held[j] = load8(static_cast<const T*>(args.from), ((row + j) * args.columns + column) / 8);
    }
    float down[8];  // the scales of the columns
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      down[k] = whole;
      if (kByRow && args.transposed != nullptr) {
        down[k] = scale_for<kFp8>(args.by_column[column + k]);
      }
    }
    uint2 bytes[4], turned[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float x[8], across[8];
      unpack8(held[j], x);
      turned[j] = eight_of<kFp8>(x, down);
      bytes[j] = turned[j];
      if (row + j >= args.rows) continue;
      if (kByRow) {
        const float own = scale_for<kFp8>(args.amax[row + j]);
#pragma unroll
        for (int k = 0; k < 8; ++k) across[k] = own;
        bytes[j] = eight_of<kFp8>(x, across);
      }
      if (args.to != nullptr) {
        *reinterpret_cast<uint2*>(static_cast<char*>(args.to) + (row + j) * args.columns + column) =
            bytes[j];
      }
    }
    if (args.transposed == nullptr) continue;
    std::uint32_t low[4], high[4];
    transpose4(turned[0].x, turned[1].x, turned[2].x, turned[3].x, low);
    transpose4(turned[0].y, turned[1].y, turned[2].y, turned[3].y, high);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      words[column_in + k][row_in / 4] = low[k];
      words[column_in + 4 + k][row_in / 4] = high[k];
    }
  }
  write_scales<kFp8, kByRow>(args, first_row, first_column);
  if (args.transposed == nullptr) return;
  __syncthreads();
  const std::int64_t row = first_row + 4 * lane;
  if (row >= args.padded_rows) return;
  char* const to = static_cast<char*>(args.transposed);
  for (int i = warp; i < kTile && first_column + i < args.columns; i += kWarps) {
    *reinterpret_cast<std::uint32_t*>(to + (first_column + i) * args.stride + row) = words[i][lane];
  }
}

unsigned parts(std::int64_t size, int part) {
  return static_cast<unsigned>((size + part - 1) / part);
}

template <typename T, Fp8 kFp8>
cudaError_t cast(const Fp8Cast& args, cudaStream_t stream) {
  const dim3 grid(parts(args.columns, kTile), parts(args.padded_rows, kTile));
  if (args.by_column != nullptr) {
    cast_kernel<T, kFp8, true><<<grid, kThreads, 0, stream>>>(args);
  } else {
    cast_kernel<T, kFp8, false><<<grid, kThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

// The grid's second dimension is limited to 65535 blocks.
constexpr std::int64_t kMaxRows = std::int64_t{65535} * kAmaxRows;

}  // namespace

cudaError_t fp8_amax(const Fp8Amax& args, cudaStream_t stream) {
  if (args.columns % 8 != 0 || args.rows > kMaxRows) return cudaErrorInvalidValue;
  const std::int64_t vectors = args.rows * (args.columns / 8);
  const unsigned most = static_cast<unsigned>(multiprocessors()) * 8;
  const unsigned blocks = std::min(most, parts(vectors, kThreads));
  return with_type(args.type, [&](auto type) {
    using T = decltype(type);
    if (args.by_column != nullptr) {
      const dim3 grid(parts(args.columns, kAmaxColumns), parts(args.rows, kAmaxRows));
      amax_by_row_kernel<T><<<grid, kThreads, 0, stream>>>(args);
    } else {
      amax_kernel<T><<<blocks, kThreads, 0, stream>>>(args, vectors);
    }
    return cudaGetLastError();
  });
}

cudaError_t fp8_cast(const Fp8Cast& args, cudaStream_t stream) {
  if (args.columns % 8 != 0 || args.padded_rows % 16 != 0 || args.stride % 16 != 0 ||
      args.rows > kMaxRows)
    return cudaErrorInvalidValue;
  return with_type(args.type, [&](auto type) {
    using T = decltype(type);
    return args.fp8 == Fp8::kE4m3 ? cast<T, Fp8::kE4m3>(args, stream)
                                  : cast<T, Fp8::kE5m2>(args, stream);
  });
}

}  // namespace lockstep::kernels::cuda
