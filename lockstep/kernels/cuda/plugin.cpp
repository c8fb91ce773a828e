// The kernels' part of the CUDA plug-in: the table that library.cpp looks for.
#include <c10/cuda/CUDAStream.h>

#include "lockstep/kernels/cuda/launch.h"
#include "lockstep/kernels/cuda/table.h"

namespace lockstep::kernels::cuda {
namespace {

// launch.h has CUDA's types, table.h has none.
cudaStream_t stream_of(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

template <typename Args, cudaError_t (*kFunction)(const Args&, cudaStream_t)>
int call(const Args& args, void* stream) {
  return kFunction(args, stream_of(stream));
}

const Table kTable{
    .version = kTableVersion,
    .error_text = [](int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); },
    .current_stream =
        [](int device) {
          const auto index = static_cast<c10::DeviceIndex>(device);
          return static_cast<void*>(c10::cuda::getCurrentCUDAStream(index).stream());
        },
    .norm_covers = norm_covers,
    .norm_partials = norm_partials,
    .norm_forward = call<NormForward, norm_forward>,
    .norm_backward = call<NormBackward, norm_backward>,
    .count_targets = [](const std::int64_t* targets, std::int64_t rows, std::int64_t ignore_index,
                        float* to, void* stream) -> int {
      return count_targets(targets, rows, ignore_index, to, stream_of(stream));
    },
    .cross_entropy = call<CrossEntropy, cross_entropy>,
    .column_sum_partials = column_sum_partials,
    .column_sum = call<ColumnSum, column_sum>,
    .swiglu_forward = call<Swiglu, swiglu_forward>,
    .swiglu_backward = call<Swiglu, swiglu_backward>,
    .rope = call<Rope, rope>,
    .scale = [](void* data, std::int64_t size, Type type, const float* factor,
                void* stream) -> int { return scale(data, size, type, factor, stream_of(stream)); },
    .lora_covers = lora_covers,
    .dropped_input = call<DroppedInput, dropped_input>,
    .dropped_product = call<DroppedProduct, dropped_product>,
    .dropped_gradient_partials = dropped_gradient_partials,
    .dropped_gradient = call<DroppedGradient, dropped_gradient>,
    .gemm =
        [](const Gemm& args, void* stream, int* status) {
          cudaError_t result = cudaSuccess;
          const bool covered = gemm(args, stream_of(stream), &result);
          *status = result;
          return covered;
        },
    .adamw_norm = call<AdamStep, adamw_norm>,
    .adamw_update = call<AdamStep, adamw_update>,
    .fp8_amax = call<Fp8Amax, fp8_amax>,
    .fp8_cast = call<Fp8Cast, fp8_cast>,
    .compute_capability =
        [](int device) {
          int major = 0, minor = 0;
          cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
          cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
          return 10 * major + minor;
        },
    .make_graph = make_torch_graph,
};

}  // namespace
}  // namespace lockstep::kernels::cuda

extern "C" const lockstep::kernels::cuda::Table* lockstep_cuda_kernels() {
  return &lockstep::kernels::cuda::kTable;
}
