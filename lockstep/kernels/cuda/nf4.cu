// Weights in 4 bits to 16 or 32: one read of the bytes and one write of the weight.
#include "lockstep/kernels/cuda/launch.h"
#include "lockstep/kernels/cuda/vector.cuh"
#include "lockstep/kernels/nf4.h"

namespace lockstep::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 4;  // of eight values, for a thread

__device__ const Nf4Numbers kNumbers = nf4_numbers();

// Neighbouring threads have neighbouring vectors, of which eight are a block of NF4. Product and
// sum are rounded one after the other, as on the CPU.
template <typename T>
__global__ void __launch_bounds__(kThreads) nf4_decode_kernel(Nf4Decode args, Nf4Layout layout) {
  __shared__ float numbers[16];  // one in each of 16 banks: no two lanes wait for each other
  if (threadIdx.x < 16) numbers[threadIdx.x] = kNumbers.of_values[threadIdx.x];
  __syncthreads();
  const auto* const scales = reinterpret_cast<const float*>(args.from + layout.scales);
  const float mean = *reinterpret_cast<const float*>(args.from + layout.mean);
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads * kVectors + threadIdx.x;
  std::uint32_t codes[kVectors];
  float magnitudes[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const std::int64_t vector = first + i * kThreads, block = vector / 8;
    if (8 * vector >= args.count) break;
    codes[i] = reinterpret_cast<const std::uint32_t*>(args.from)[vector];
    magnitudes[i] =
        __fadd_rn(__fmul_rn(kNumbers.of_magnitudes[args.from[layout.magnitudes + block]],
                            scales[block / kNf4Group]),
                  mean);
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const std::int64_t vector = first + i * kThreads;
    if (8 * vector >= args.count) return;
    float out[8];
#pragma unroll
    for (int k = 0; k < 8; ++k)
      out[k] = numbers[codes[i] >> (8 * (k / 2) + (k % 2 == 0 ? 4 : 0)) & 15] * magnitudes[i];
    const std::int64_t rest = args.count - 8 * vector;
    if (rest >= 8)
      store8(static_cast<T*>(args.to), vector, pack8<T>(out));
    else
      for (int k = 0; k < rest; ++k) static_cast<T*>(args.to)[8 * vector + k] = T(out[k]);
  }
}

}  // namespace

cudaError_t nf4_decode(const Nf4Decode& args, cudaStream_t stream) {
  constexpr std::int64_t kValues = 8 * kThreads * kVectors;
  const auto blocks = static_cast<unsigned>((args.count + kValues - 1) / kValues);
  return with_type(args.type, [&](auto type) {
    nf4_decode_kernel<decltype(type)><<<blocks, kThreads, 0, stream>>>(args, Nf4Layout(args.count));
    return cudaGetLastError();
  });
}

}  // namespace lockstep::kernels::cuda
