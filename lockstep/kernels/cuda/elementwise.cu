// SwiGLU, rotary embeddings and scaling by a number on the device: one read and one write of each
// element, in vectors of eight.
#include "lockstep/kernels/cuda/launch.h"
#include "lockstep/kernels/cuda/vector.cuh"

namespace lockstep::kernels::cuda {
namespace {

constexpr int kThreads = 256;

unsigned blocks_for(std::int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

__device__ __forceinline__ std::int64_t global_thread() {
  return std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
}

__device__ __forceinline__ float sigmoid(float x) {
  return 1.0f / (1.0f + __expf(-x));
}

// The vector of a thread. One past the end computes the last again, so that blocks stay whole.
__device__ __forceinline__ std::int64_t vector_of(const Swiglu& args) {
  return min(global_thread(), args.rows * (args.width / 8) - 1);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) swiglu_forward_kernel(Swiglu args) {
  const std::int64_t vectors = args.width / 8, at = vector_of(args);
  const std::int64_t from = at / vectors * (args.pitch / 8) + at % vectors;
  float gate[8], up[8];
  unpack8(load8(static_cast<const T*>(args.gate), from), gate);
  unpack8(load8(static_cast<const T*>(args.up), from), up);
#pragma unroll
  for (int k = 0; k < 8; ++k) up[k] *= gate[k] * sigmoid(gate[k]);
  const Vector8<T> out = pack8<T>(up);
  store8(static_cast<T*>(args.out), at, out);
  if (args.amax != nullptr) raise_amax<kThreads>(larger_of(0, out), args.amax);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) swiglu_backward_kernel(Swiglu args) {
  const std::int64_t vectors = args.width / 8, at = vector_of(args);
  const std::int64_t from = at / vectors * (args.pitch / 8) + at % vectors;
  float gate[8], up[8], dout[8];
  unpack8(load8(static_cast<const T*>(args.gate), from), gate);
  unpack8(load8(static_cast<const T*>(args.up), from), up);
  unpack8(load8(static_cast<const T*>(args.dout), at), dout);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const float s = sigmoid(gate[k]);
    const float silu = gate[k] * s;
    const float dgate = dout[k] * up[k] * (s + silu * (1 - s));
    up[k] = dout[k] * silu;
    gate[k] = dgate;
  }
  const Vector8<T> dgate = pack8<T>(gate), dup = pack8<T>(up);
  store8(static_cast<T*>(args.dgate), from, dgate);
  store8(static_cast<T*>(args.dup), from, dup);
  if (args.amax != nullptr) raise_amax<kThreads>(larger_of(larger_of(0, dgate), dup), args.amax);
}

// A thread rotates eight pairs, or copies eight elements that are not rotated.
template <typename T>
__global__ void __launch_bounds__(kThreads) rope_kernel(Rope args) {
  const int pairs = args.half / 8, rest = (args.width - 2 * args.half) / 8;
  const std::int64_t heads = args.query.heads + args.key.heads;
  std::int64_t at = global_thread();
  const int i = static_cast<int>(at % (pairs + rest));
  at /= pairs + rest;
  std::int64_t head = at % heads;
  at /= heads;
  const std::int64_t time = at % args.time, batch = at / args.time;
  if (batch >= args.batch) return;
  const bool is_key = head >= args.query.heads;
  const RopePart& part = is_key ? args.key : args.query;
  if (is_key) head -= args.query.heads;
  const T* const from = static_cast<const T*>(part.from) + batch * part.from_batch +
                        head * part.from_head + time * part.from_time;
  T* const to =
      static_cast<T*>(part.to) + batch * part.to_batch + head * part.to_head + time * part.to_time;
  if (i >= pairs) {
    store8(to, pairs + i, load8(from, pairs + i));
    return;
  }
  const std::int64_t angle = (batch * args.angles_batch + time * args.half) / 8 + i;
  float low[8], high[8], cosines[8], sines[8];
  unpack8(load8(from, i), low);
  unpack8(load8(from, pairs + i), high);
  unpack8(load8(args.cos, angle), cosines);
  unpack8(load8(args.sin, angle), sines);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const float sine = args.inverse ? -sines[k] : sines[k];
    const float first = low[k] * cosines[k] - high[k] * sine;
    high[k] = high[k] * cosines[k] + low[k] * sine;
    low[k] = first;
  }
  store8(to, i, pack8<T>(low));
  store8(to, pairs + i, pack8<T>(high));
}

// Ends at once where the factor is 1, so that the host need not ask.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(T* data, std::int64_t size, const float* factor) {
  const float by = *factor;
  if (by == 1.0f) return;
  const std::int64_t vectors = size / 8, step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = global_thread(); i < vectors; i += step) {
    float x[8];
    unpack8(load8(data, i), x);
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] *= by;
    store8(data, i, pack8<T>(x));
  }
  for (std::int64_t i = 8 * vectors + global_thread(); i < size; i += step) {
    data[i] = static_cast<T>(static_cast<float>(data[i]) * by);
  }
}

}  // namespace

cudaError_t swiglu_forward(const Swiglu& args, cudaStream_t stream) {
  if (args.width % 8 != 0 || args.pitch % 8 != 0) return cudaErrorInvalidValue;
  return with_type(args.type, [&](auto type) {
    swiglu_forward_kernel<decltype(type)>
        <<<blocks_for(args.rows * (args.width / 8)), kThreads, 0, stream>>>(args);
    return cudaGetLastError();
  });
}

cudaError_t swiglu_backward(const Swiglu& args, cudaStream_t stream) {
  if (args.width % 8 != 0 || args.pitch % 8 != 0) return cudaErrorInvalidValue;
  return with_type(args.type, [&](auto type) {
    swiglu_backward_kernel<decltype(type)>
        <<<blocks_for(args.rows * (args.width / 8)), kThreads, 0, stream>>>(args);
    return cudaGetLastError();
  });
}

cudaError_t rope(const Rope& args, cudaStream_t stream) {
  if (args.half % 8 != 0 || args.width % 8 != 0 || 2 * args.half > args.width) {
    return cudaErrorInvalidValue;
  }
  const std::int64_t vectors = args.half / 8 + (args.width - 2 * args.half) / 8;
  const std::int64_t threads =
      args.batch * args.time * (args.query.heads + args.key.heads) * vectors;
  return with_type(args.type, [&](auto type) {
    rope_kernel<decltype(type)><<<blocks_for(threads), kThreads, 0, stream>>>(args);
    return cudaGetLastError();
  });
}

cudaError_t scale(void* data, std::int64_t size, Type type, const float* factor,
                  cudaStream_t stream) {
  const unsigned most = static_cast<unsigned>(multiprocessors()) * 8;
  const unsigned wanted = blocks_for((size + 7) / 8);
  const unsigned blocks = wanted < most ? wanted : most;
  return with_type(type, [&](auto zero) {
    using T = decltype(zero);
    scale_kernel<T><<<blocks, kThreads, 0, stream>>>(static_cast<T*>(data), size, factor);
    return cudaGetLastError();
  });
}

}  // namespace lockstep::kernels::cuda
