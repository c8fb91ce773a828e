// Cross entropy for GPUs with asynchronous bulk copies: one block per multiprocessor; while one row
// is in registers, the next two are on their way into shared memory. A row of 50304 logits is 98 KB
// and fits into the registers of one multiprocessor, so each logit is read once.
#include "lockstep/kernels/cuda/cross_entropy.cuh"
#include "lockstep/kernels/cuda/launch.h"

namespace lockstep::kernels::cuda {
namespace {

using Bf16x8 = Vector8<__nv_bfloat16>;

__device__ __forceinline__ Bf16x8 all_padding() {
  Bf16x8 v;
#pragma unroll
  for (int i = 0; i < 4; ++i) v.pair[i] = __float2bfloat162_rn(-INFINITY);
  return v;
}

// -inf where the column is padding: its exponential is then 0 in the sum and in the gradient.
__device__ __forceinline__ Bf16x8 mask_padding(Bf16x8 v, int vector, int classes) {
  const int valid = classes - 8 * vector;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (valid < 2 * i + 2) v.pair[i].y = __float2bfloat16_rn(-INFINITY);
    if (valid < 2 * i + 1) v.pair[i].x = __float2bfloat16_rn(-INFINITY);
  }
  return v;
}

template <int kVectors>
__device__ __forceinline__ SoftmaxPart softmax_part(const Bf16x8 (&held)[kVectors]) {
  __nv_bfloat162 max2 = held[0].pair[0];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) max2 = __hmax2(max2, held[j].pair[i]);
  }
  const float max = warp_max(fmaxf(__low2float(max2), __high2float(max2)));
  const float shift = shift_of(max);
  float2 sum = {0, 0};
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = __bfloat1622float2(held[j].pair[i]);
      sum.x += fast_exp2(fmaf(x.x, kLog2E, -shift));
      sum.y += fast_exp2(fmaf(x.y, kLog2E, -shift));
    }
  }
  return {max, warp_sum(sum.x + sum.y)};
}

__device__ __forceinline__ Bf16x8 gradient(Bf16x8 v, float log2_sum, float scale) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = __bfloat1622float2(v.pair[i]);
    v.pair[i] = __floats2bfloat162_rn(scale * fast_exp2(fmaf(x.x, kLog2E, -log2_sum)),
                                      scale * fast_exp2(fmaf(x.y, kLog2E, -log2_sum)));
  }
  return v;
}

// Copies that complete on a barrier in shared memory.

__device__ __forceinline__ std::uint32_t shared_address(const void* at) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(at));
}

__device__ __forceinline__ void init_barrier(std::uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void start_copy(void* to, const void* from, std::uint32_t bytes,
                                           std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void wait_copy(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p;\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// A warp's slice of a row from shared memory, with its padding masked there.
template <int kVectors>
__device__ __forceinline__ void take_slice(Bf16x8* slice, int first, int count, int classes,
                                           Bf16x8 (&held)[kVectors]) {
  const int lane = threadIdx.x % kWarpSize;
  for (int i = max(0, classes / 8 - first) + lane; i < count; i += kWarpSize) {
    slice[i] = mask_padding(slice[i], first + i, classes);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before the next copy
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int i = j * kWarpSize + lane;
    held[j] = i < count ? slice[i] : all_padding();
  }
}

// Each warp owns one slice of every row and copies it for itself: it waits for its own slice only,
// and the slice's memory is free for the row after next as soon as the warp has it in registers.
// The one barrier per row is in row_log2_sum. A block's first three rows are fixed; later ones go
// to whichever block is free, because not all multiprocessors get the same share of the memory: 9 %
// faster. columns <= 256 * kWarps * kVectors. Dynamic shared memory: two rows.
template <int kWarps, int kVectors>
__global__ void __launch_bounds__(kWarps* kWarpSize, 1) pipelined_kernel(CrossEntropy args) {
  constexpr int kSlice = kVectors * kWarpSize;
  extern __shared__ Bf16x8 rows_in_flight[];  // [2][vectors]
  __shared__ alignas(8) std::uint64_t arrived[2][kWarps];
  __shared__ SoftmaxPart parts[2][kWarps];
  __shared__ std::int64_t row_of[4];  // for turns t to t + 3; t + 3 is written in turn t
  auto* const all_logits = static_cast<__nv_bfloat16*>(args.logits);
  const int vectors = args.columns / 8;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int first = warp * kSlice;
  const int count = max(0, min(kSlice, vectors - first));
  const auto copy_slice = [&](std::int64_t row, int stage) {
    if (lane == 0 && count > 0 && row < args.rows) {
      start_copy(rows_in_flight + stage * vectors + first,
                 all_logits + row * args.columns + 8 * first, count * 16, &arrived[stage][warp]);
    }
  };
  for (int stage = 0; stage < 2; ++stage) {
    if (lane == 0) init_barrier(&arrived[stage][warp]);
    __syncwarp();
    copy_slice(blockIdx.x + stage * gridDim.x, stage);
  }
  if (threadIdx.x < 3) row_of[threadIdx.x] = blockIdx.x + threadIdx.x * gridDim.x;
  const float mean_scale = *args.scale;
  __syncthreads();

  std::int64_t row = blockIdx.x;
  for (unsigned turn = 0; row < args.rows; row = row_of[++turn % 4]) {
    const int stage = turn % 2;
    std::int64_t row_after = 0;
    if (threadIdx.x == 0) {
      row_after = 3 * gridDim.x + std::int64_t{atomicAdd(args.next_row, 1u)};
    }
    const std::int64_t target = args.targets[row];
    if (count > 0) wait_copy(&arrived[stage][warp], turn / 2 % 2);
    Bf16x8* const slice = rows_in_flight + stage * vectors + first;
    Bf16x8 held[kVectors];
    take_slice(slice, first, count, args.classes, held);
    const int target_vector = static_cast<int>(target / 8) - first;
    const bool owner = has_target(args, target) && target_vector >= 0 && target_vector < count &&
                       target_vector % kWarpSize == lane;
    float logit = 0;
    if (owner) {
      logit = __bfloat162float(
          reinterpret_cast<const __nv_bfloat16*>(slice + target_vector)[target % 8]);
    }
    __syncwarp();
    copy_slice(row_of[(turn + 2) % 4], stage);

    const SoftmaxPart part = softmax_part(held);
    if (threadIdx.x == 0) row_of[(turn + 3) % 4] = row_after;
    const float log2_sum = row_log2_sum(part, parts[stage]);
    const float scale = has_target(args, target) ? mean_scale : 0.0f;
    __nv_bfloat16* const out = all_logits + row * args.columns + 8 * first;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = j * kWarpSize + lane;
      if (i < count) store8(out, i, gradient(held[j], log2_sum, scale));
    }
    if (owner) finish_target<__nv_bfloat16>(args, row, target, logit, log2_sum, scale);
    if (threadIdx.x == 0 && !has_target(args, target)) {
      args.losses[row] = loss_without_target(args, target);
    }
  }
}

template <int kVectors>
cudaError_t launch(const CrossEntropy& args, cudaStream_t stream) {
  constexpr int kWarps = 8;
  const auto kernel = pipelined_kernel<kWarps, kVectors>;
  const int bytes = 2 * args.columns * static_cast<int>(sizeof(__nv_bfloat16));
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  status = cudaMemsetAsync(args.next_row, 0, sizeof *args.next_row, stream);
  if (status != cudaSuccess) return status;
  int blocks = multiprocessors();
  if (args.rows < blocks) blocks = static_cast<int>(args.rows);
  kernel<<<blocks, kWarps * kWarpSize, bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t cross_entropy_pipelined(const CrossEntropy& args, cudaStream_t stream) {
  if (args.columns <= 8192) return launch<4>(args, stream);
  if (args.columns <= 32768) return launch<16>(args, stream);
  return launch<25>(args, stream);
}

}  // namespace lockstep::kernels::cuda
