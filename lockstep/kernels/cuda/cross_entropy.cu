// Cross entropy of any width and type: one block per row reads the row twice, the second time
// partly from the L2 cache; and the choice between that and the pipelined kernel.
#include "lockstep/kernels/cuda/cross_entropy.cuh"
#include "lockstep/kernels/cuda/launch.h"

namespace lockstep::kernels::cuda {
namespace {

// One block: integers add up to the same number in any order.
__global__ void count_targets_kernel(const std::int64_t* targets, std::int64_t rows,
                                     std::int64_t ignore_index, float* to) {
  __shared__ int valid;
  if (threadIdx.x == 0) valid = 0;
  __syncthreads();
  int mine = 0;
#pragma unroll 16
  for (std::int64_t row = threadIdx.x; row < rows; row += blockDim.x) {
    mine += targets[row] != ignore_index;
  }
  mine = __reduce_add_sync(0xffffffffu, mine);
  if (threadIdx.x % kWarpSize == 0) atomicAdd(&valid, mine);
  __syncthreads();
  if (threadIdx.x == 0) {
    to[0] = static_cast<float>(valid);
    to[1] = 1.0f / static_cast<float>(max(valid, 1));
  }
}

// Eight logits of a row as floats; padding is -inf, whose exponential is 0.
template <typename T>
__device__ __forceinline__ void load_logits(const T* logits, int vector, int classes,
                                            float (&to)[8]) {
  unpack8(load8(logits, vector), to);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (8 * vector + k >= classes) to[k] = -INFINITY;
  }
}

template <typename T, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarpSize) two_reads_kernel(CrossEntropy args) {
  __shared__ SoftmaxPart parts[kWarps];
  const int vectors = args.columns / 8;
  const std::int64_t row = blockIdx.x;
  T* const logits = static_cast<T*>(args.logits) + row * args.columns;
  const std::int64_t target = args.targets[row];
  const float logit = has_target(args, target) ? static_cast<float>(logits[target]) : 0.0f;

  SoftmaxPart part = {-INFINITY, 0};
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    float x[8];
    load_logits(logits, i, args.classes, x);
    float max = part.max;
#pragma unroll
    for (int k = 0; k < 8; ++k) max = fmaxf(max, x[k]);
    const float shift = shift_of(max);
    part.sum *= fast_exp2(part.max * kLog2E - shift);
#pragma unroll
    for (int k = 0; k < 8; ++k) part.sum += fast_exp2(fmaf(x[k], kLog2E, -shift));
    part.max = max;
  }
  const float log2_sum = row_log2_sum(combine_in_warp(part), parts);
  const float scale = has_target(args, target) ? *args.scale : 0.0f;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    float x[8];
    load_logits(logits, i, args.classes, x);
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = scale * fast_exp2(fmaf(x[k], kLog2E, -log2_sum));
    store8(logits, i, pack8<T>(x));
  }
  if (!has_target(args, target)) {
    if (threadIdx.x == 0) args.losses[row] = loss_without_target(args, target);
  } else if (threadIdx.x == target / 8 % blockDim.x) {
    finish_target<T>(args, row, target, logit, log2_sum, scale);
  }
}

// Compute capability 9 has bulk copies; two rows must fit a block's shared memory.
constexpr int kPipelinedColumns = 51200;

bool can_pipeline(int columns) {
  int device = 0, major = 0, shared = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  constexpr int kOwn = 2048;  // barriers and partial sums
  return major >= 9 && columns <= kPipelinedColumns && 4 * columns + kOwn <= shared;
}

}  // namespace

cudaError_t count_targets(const std::int64_t* targets, std::int64_t rows, std::int64_t ignore_index,
                          float* to, cudaStream_t stream) {
  count_targets_kernel<<<1, 1024, 0, stream>>>(targets, rows, ignore_index, to);
  return cudaGetLastError();
}

cudaError_t cross_entropy(const CrossEntropy& args, cudaStream_t stream) {
  if (args.columns % 8 != 0 || args.classes < 1 || args.classes > args.columns) {
    return cudaErrorInvalidValue;
  }
  if (args.rows == 0) return cudaSuccess;
  if (args.type == Type::kBfloat16 && can_pipeline(args.columns)) {
    return cross_entropy_pipelined(args, stream);
  }
  return with_type(args.type, [&](auto type) {
    constexpr int kWarps = 32;
    two_reads_kernel<decltype(type), kWarps>
        <<<static_cast<unsigned>(args.rows), kWarps * kWarpSize, 0, stream>>>(args);
    return cudaGetLastError();
  });
}

}  // namespace lockstep::kernels::cuda
