// Eight values of bf16, half or float as pairs: one 16-byte access, or two for float, the widest a
// thread can make.
//
//   const Vector8<T> v = load8(logits, index);          // index counts vectors, not elements
//   float x[8];
//   unpack8(v, x);
//   store8(logits, index, pack8<T>(x));
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "lockstep/kernels/cuda/arguments.h"

namespace lockstep::kernels::cuda {

constexpr int kWarpSize = 32;

__device__ __forceinline__ float2 to_floats(__nv_bfloat162 pair) {
  return __bfloat1622float2(pair);
}
__device__ __forceinline__ float2 to_floats(__half2 pair) {
  return __half22float2(pair);
}
__device__ __forceinline__ float2 to_floats(float2 pair) {
  return pair;
}

template <typename T>
struct PairOf;
template <>
struct PairOf<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  static __device__ __forceinline__ Pair make(float x, float y) {
    return __floats2bfloat162_rn(x, y);
  }
};
template <>
struct PairOf<__half> {
  using Pair = __half2;
  static __device__ __forceinline__ Pair make(float x, float y) { return __floats2half2_rn(x, y); }
};
template <>
struct PairOf<float> {
  using Pair = float2;
  static __device__ __forceinline__ Pair make(float x, float y) { return {x, y}; }
};

template <typename T>
struct alignas(16) Vector8 {
  typename PairOf<T>::Pair pair[4];
};

template <typename T>
__device__ __forceinline__ Vector8<T> load8(const T* from, std::int64_t vector) {
  return reinterpret_cast<const Vector8<T>*>(from)[vector];
}

template <typename T>
__device__ __forceinline__ void store8(T* to, std::int64_t vector, Vector8<T> value) {
  reinterpret_cast<Vector8<T>*>(to)[vector] = value;
}

template <typename T>
__device__ __forceinline__ void unpack8(Vector8<T> from, float (&to)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = to_floats(from.pair[i]);
    to[2 * i] = two.x;
    to[2 * i + 1] = two.y;
  }
}

template <typename T>
__device__ __forceinline__ Vector8<T> pack8(const float (&from)[8]) {
  Vector8<T> to;
#pragma unroll
  for (int i = 0; i < 4; ++i) to.pair[i] = PairOf<T>::make(from[2 * i], from[2 * i + 1]);
  return to;
}

// Eight parameters, which are float or of the tensors' own type.
template <typename T>
__device__ __forceinline__ void load8_as_float(const void* from, bool is_float, int vector,
                                               float (&to)[8]) {
  if (is_float) {
    unpack8(load8(static_cast<const float*>(from), vector), to);
  } else {
    unpack8(load8(static_cast<const T*>(from), vector), to);
  }
}

// The butterfly gives every lane the same bits, because addition and max commute.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, lanes);
  }
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  }
  return value;
}

// As integers magnitudes are ordered as the floats are, and NaN is the largest.
__device__ __forceinline__ std::uint32_t magnitude(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
}

// The largest of `most` and the eight magnitudes.
template <typename T>
__device__ __forceinline__ std::uint32_t larger_of(std::uint32_t most, Vector8<T> vector) {
  float x[8];
  unpack8(vector, x);
#pragma unroll
  for (int k = 0; k < 8; ++k) most = max(most, magnitude(x[k]));
  return most;
}

// Raises *amax to the largest `most` of a block, by all of whose threads it is called. A word that
// many blocks write is slow, so one that is below what is there already only reads it.
template <int kThreads>
__device__ __forceinline__ void raise_amax(std::uint32_t most, std::uint32_t* amax) {
  __shared__ std::uint32_t of_warp[kThreads / kWarpSize];
  most = __reduce_max_sync(0xffffffffu, most);
  if (threadIdx.x % kWarpSize == 0) of_warp[threadIdx.x / kWarpSize] = most;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kThreads / kWarpSize; ++i) most = max(most, of_warp[i]);
  if (most > __ldcg(amax)) atomicMax(amax, most);
}

// Calls body(T{}) with the element type.
template <typename Body>
cudaError_t with_type(Type type, Body&& body) {
  switch (type) {
    case Type::kBfloat16:
      return body(__nv_bfloat16{});
    case Type::kHalf:
      return body(__half{});
    case Type::kFloat:
      return body(float{});
  }
  return cudaErrorInvalidValue;
}

// Outputs are overwritten, not added to: to[y][column] = the sum over the parts of
// [parts][sums][...]. Blocks of 32 columns x 32 parts, gridDim.y = the number of sums; an output
// may be null.
struct SumOutputs {
  float* to[3];
};

static __global__ void add_parts_kernel(const float* parts, int count, int columns,
                                        SumOutputs outputs) {
  __shared__ float sums[32][33];
  const int column = blockIdx.x * 32 + threadIdx.x;
  float sum = 0;
  if (column < columns) {
    for (int i = threadIdx.y; i < count; i += 32) {
      sum += parts[(std::int64_t{i} * gridDim.y + blockIdx.y) * columns + column];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  sum = warp_sum(sums[threadIdx.x][threadIdx.y]);
  float* const to = outputs.to[blockIdx.y];
  const int mine = blockIdx.x * 32 + threadIdx.y;
  if (threadIdx.x == 0 && mine < columns && to != nullptr) to[mine] = sum;
}

static inline cudaError_t add_parts(const float* parts, int count, int columns, int sums,
                                    const SumOutputs& outputs, cudaStream_t stream) {
  const dim3 grid((columns + 31) / 32, sums);
  add_parts_kernel<<<grid, dim3(32, 32), 0, stream>>>(parts, count, columns, outputs);
  return cudaGetLastError();
}

static inline int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

}  // namespace lockstep::kernels::cuda
