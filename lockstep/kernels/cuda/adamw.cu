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
#include "lockstep/kernels/cuda/launch.h"
#include "lockstep/kernels/cuda/vector.cuh"

namespace lockstep::kernels::cuda {
namespace {

constexpr int kThreads = 512;

__global__ void __launch_bounds__(kThreads)
    grad_norm_kernel(const AdamTensor* tensors, const AdamChunk* chunks, float* partials) {
  __shared__ float sums[kThreads / kWarpSize];
  const AdamChunk chunk = chunks[blockIdx.x];
  const AdamTensor tensor = tensors[chunk.tensor];
  const std::int64_t first = chunk.first * kAdamChunk;
  const std::int64_t end = min(tensor.size, first + kAdamChunk);
  const std::int64_t vectors_end = tensor.aligned ? end / 4 : first / 4;
  const auto* const vectors = reinterpret_cast<const float4*>(tensor.grad);
  float sum = 0;
#pragma unroll 8
  for (std::int64_t i = first / 4 + threadIdx.x; i < vectors_end; i += kThreads) {
    const float4 g = vectors[i];
    sum += g.x * g.x + g.y * g.y + g.z * g.z + g.w * g.w;
  }
  for (std::int64_t i = 4 * vectors_end + threadIdx.x; i < end; i += kThreads) {
    sum += tensor.grad[i] * tensor.grad[i];
  }
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
    const AdamGroup group = args.groups[args.tensors[i].group];
    const float step = *args.tensors[i].step += 1;
    args.factors[i] = {
        static_cast<float>(group.lr / (1 - pow(static_cast<double>(group.beta1), step))),
        static_cast<float>(1 / sqrt(1 - pow(static_cast<double>(group.beta2), step))),
        1 - group.lr * group.weight_decay};
  }
}

struct Element {
  AdamGroup group;
  AdamFactors factors;
  float clip;

  __device__ __forceinline__ void operator()(float& param, float grad, float& m, float& v) const {
    grad *= clip;
    m = fmaf(1 - group.beta1, grad - m, m);
    v = fmaf(group.beta2, v, (1 - group.beta2) * grad * grad);
    const float denominator = sqrtf(v) * factors.root_correction2 + group.eps;
    param = param * factors.decay - factors.step_size * m / denominator;
  }
};

__global__ void __launch_bounds__(kThreads) adamw_kernel(AdamStep args) {
  if (skips(args)) return;
  const AdamChunk chunk = args.chunks[blockIdx.x];
  const AdamTensor tensor = args.tensors[chunk.tensor];
  const Element update{args.groups[tensor.group], args.factors[chunk.tensor], *args.clip};
  const std::int64_t first = chunk.first * kAdamChunk;
  const std::int64_t end = min(tensor.size, first + kAdamChunk);
  const std::int64_t vectors_end = tensor.aligned ? end / 4 : first / 4;
  auto* const params = reinterpret_cast<float4*>(tensor.param);
  auto* const averages = reinterpret_cast<float4*>(tensor.exp_avg);
  auto* const squares = reinterpret_cast<float4*>(tensor.exp_avg_sq);
  const auto* const grads = reinterpret_cast<const float4*>(tensor.grad);
#pragma unroll 2
  for (std::int64_t i = first / 4 + threadIdx.x; i < vectors_end; i += kThreads) {
    float4 p = params[i], m = averages[i], v = squares[i];
    const float4 g = grads[i];
    update(p.x, g.x, m.x, v.x);
    update(p.y, g.y, m.y, v.y);
    update(p.z, g.z, m.z, v.z);
    update(p.w, g.w, m.w, v.w);
    params[i] = p;
    averages[i] = m;
    squares[i] = v;
  }
  for (std::int64_t i = 4 * vectors_end + threadIdx.x; i < end; i += kThreads) {
    update(tensor.param[i], tensor.grad[i], tensor.exp_avg[i], tensor.exp_avg_sq[i]);
  }
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
