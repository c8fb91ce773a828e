// One AdamW step over many tensors: the norm of all gradients, then parameters and both averages in
// one pass. Learning rate and step number are on the device, so a CUDA graph can hold it.
//
//   grad_norm_kernel   the sum of squares of each chunk of gradients
//   total_kernel       the norm, and whether it is finite
//   factors_kernel     step numbers and what follows from them
//   adamw_kernel       the update
//
// Between the second and the third, ranks may agree to leave the step out.
//
// The tensors are cut into chunks; a block takes one chunk. Every sum has a fixed order.
#include "lockstep/kernels/adamw_element.h"
#include "lockstep/kernels/cuda/launch.h"
#include "lockstep/kernels/cuda/vector.cuh"

namespace lockstep::kernels::cuda {
namespace {

constexpr int kThreads = 512;

// Four elements in one access.
template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T of[4];
};

// Calls body(P{}, S{}) with the types of a tensor's parameter and state.
template <typename Body>
__device__ __forceinline__ void with_types(const AdamTensor& tensor, const Body& body) {
  if (tensor.bf16_param != 0) {
    tensor.bf16_state != 0 ? body(Bf16{}, Bf16{}) : body(Bf16{}, float{});
  } else {
    tensor.bf16_state != 0 ? body(float{}, Bf16{}) : body(float{}, float{});
  }
}

__device__ __forceinline__ float square(float x) {
  return x * x;
}

template <typename P>
__device__ __forceinline__ float squares_of(const AdamTensor& tensor, std::int64_t first,
                                            std::int64_t end) {
  const std::int64_t vectors_end = tensor.aligned ? end / 4 : first / 4;
  const auto* const grads = static_cast<const P*>(tensor.grad);
  const auto* const vectors = static_cast<const Four<P>*>(tensor.grad);
  float sum = 0;
#pragma unroll 8
  for (std::int64_t i = first / 4 + threadIdx.x; i < vectors_end; i += kThreads) {
    const Four<P> g = vectors[i];
    sum += square(detail::widened(g.of[0])) + square(detail::widened(g.of[1])) +
           square(detail::widened(g.of[2])) + square(detail::widened(g.of[3]));
  }
  for (std::int64_t i = 4 * vectors_end + threadIdx.x; i < end; i += kThreads) {
    sum += square(detail::widened(grads[i]));
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    grad_norm_kernel(const AdamTensor* tensors, const AdamChunk* chunks, float* partials) {
  __shared__ float sums[kThreads / kWarpSize];
  const AdamChunk chunk = chunks[blockIdx.x];
  const AdamTensor tensor = tensors[chunk.tensor];
  const std::int64_t first = chunk.first * kAdamChunk;
  const std::int64_t end = min(tensor.size, first + kAdamChunk);
  float sum = tensor.bf16_param != 0 ? squares_of<Bf16>(tensor, first, end)
                                     : squares_of<float>(tensor, first, end);
  sum = warp_sum(sum);
  if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    sum = warp_sum(threadIdx.x < kThreads / kWarpSize ? sums[threadIdx.x] : 0.0f);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
  }
}

// One block of 1024 threads.
__global__ void total_kernel(AdamStep args) {
  __shared__ double sums[1024];
  double sum = 0;
  for (int i = threadIdx.x; i < args.chunk_count; i += 1024) sum += args.partials[i];
  sums[threadIdx.x] = sum;
  for (int half = 512; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x != 0) return;
  const float norm = static_cast<float>(sqrt(sums[0]));
  const float max_norm = args.max_norm != nullptr ? *args.max_norm : 0.0f;
  // A norm that is not a number must reach every parameter, so no fminf(), which drops it.
  const float ratio = max_norm / (norm + 1e-6f);
  *args.norm = norm;
  *args.found_inf = isfinite(norm) ? 0.0f : 1.0f;
  *args.clip = max_norm > 0 && !(ratio > 1) ? ratio : 1.0f;
}

__device__ __forceinline__ bool skips(const AdamStep& args) {
  return args.skip != nullptr && *args.skip != 0;
}

// One block of 1024 threads.
__global__ void factors_kernel(AdamStep args) {
  if (skips(args)) return;
  for (int i = threadIdx.x; i < args.tensor_count; i += 1024) {
    const AdamTensor& tensor = args.tensors[i];
    args.factors[i] = adam_factors(args.groups[tensor.group], *tensor.step += 1, tensor.parameter);
  }
}

template <typename P, typename S>
__device__ __forceinline__ void update_chunk(const AdamTensor& tensor, const AdamElement& how,
                                             std::int64_t first, std::int64_t end) {
  const std::int64_t vectors_end = tensor.aligned ? end / 4 : first / 4;
  auto* const params = static_cast<P*>(tensor.param);
  const auto* const grads = static_cast<const P*>(tensor.grad);
  auto* const averages = static_cast<S*>(tensor.exp_avg);
  auto* const squares = static_cast<S*>(tensor.exp_avg_sq);
#pragma unroll 2
  for (std::int64_t i = first / 4 + threadIdx.x; i < vectors_end; i += kThreads) {
    Four<P> p = reinterpret_cast<Four<P>*>(params)[i];
    Four<S> m = reinterpret_cast<Four<S>*>(averages)[i];
    Four<S> v = reinterpret_cast<Four<S>*>(squares)[i];
    const Four<P> g = reinterpret_cast<const Four<P>*>(grads)[i];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      adam_element(how, p.of[k], g.of[k], m.of[k], v.of[k], tensor.begin + 4 * i + k);
    reinterpret_cast<Four<P>*>(params)[i] = p;
    reinterpret_cast<Four<S>*>(averages)[i] = m;
    reinterpret_cast<Four<S>*>(squares)[i] = v;
  }
  for (std::int64_t i = 4 * vectors_end + threadIdx.x; i < end; i += kThreads) {
    adam_element(how, params[i], grads[i], averages[i], squares[i], tensor.begin + i);
  }
}

__global__ void __launch_bounds__(kThreads) adamw_kernel(AdamStep args) {
  if (skips(args)) return;
  const AdamChunk chunk = args.chunks[blockIdx.x];
  const AdamTensor tensor = args.tensors[chunk.tensor];
  const AdamElement how{args.groups[tensor.group], args.factors[chunk.tensor], *args.clip};
  const std::int64_t first = chunk.first * kAdamChunk;
  const std::int64_t end = min(tensor.size, first + kAdamChunk);
  with_types(tensor, [&](auto p, auto s) {
    update_chunk<decltype(p), decltype(s)>(tensor, how, first, end);
  });
}

}  // namespace

cudaError_t adamw_norm(const AdamStep& args, cudaStream_t stream) {
  if (args.chunk_count == 0) return cudaSuccess;
  grad_norm_kernel<<<args.chunk_count, kThreads, 0, stream>>>(args.tensors, args.chunks,
                                                              args.partials);
  total_kernel<<<1, 1024, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t adamw_update(const AdamStep& args, cudaStream_t stream) {
  if (args.chunk_count == 0) return cudaSuccess;
  factors_kernel<<<1, 1024, 0, stream>>>(args);
  adamw_kernel<<<args.chunk_count, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace lockstep::kernels::cuda
