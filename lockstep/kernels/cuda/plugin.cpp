// The kernels' part of the CUDA plug-in: the table that library.cpp looks for, and CUDA graphs.
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>

#include "lockstep/kernels/cuda/launch.h"
#include "lockstep/kernels/cuda/table.h"

namespace lockstep::kernels::cuda {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

// A graph through LibTorch's own class, which knows its allocator and its random generators.
class TorchGraph final : public Graph {
 public:
  explicit TorchGraph(const Graph* other) {
    if (other != nullptr) pool_ = dynamic_cast<const TorchGraph&>(*other).pool_;
  }

  void begin() override {
    device_ = c10::cuda::current_device();
    const at::Generator& random = at::cuda::detail::getDefaultCUDAGenerator(device_);
    seed_ = random.current_seed();
    offset_ = random.get_offset();
    // Other threads still do what a capture must not do: a loader allocates pinned memory,
    // NCCL's watchdog asks for events.
    graph_.capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
  }

  void end() override {
    try {
      graph_.capture_end();
    } catch (...) {
      abandon();
      throw;
    }
  }

  void replay() override { graph_.replay(); }

 private:
  // A capture that has become invalid: LibTorch leaves its allocator and its generator in capture
  // mode, and every random number after it would be refused.
  void abandon() {
    allocator::endAllocateToPool(device_, pool_);
    allocator::releasePool(device_, pool_);
    const auto state = c10::make_intrusive<at::CUDAGeneratorState>(seed_, offset_);
    at::Generator random = at::cuda::detail::getDefaultCUDAGenerator(device_);
    random.graphsafe_set_state(at::make_generator<at::CUDAGeneratorImpl>(device_, state));
  }

  at::cuda::MempoolId_t pool_ = at::cuda::graph_pool_handle();
  at::cuda::CUDAGraph graph_;
  c10::DeviceIndex device_ = 0;
  std::uint64_t seed_ = 0, offset_ = 0;
};

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
    .nf4_decode = call<Nf4Decode, nf4_decode>,
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
    .make_graph = [](const Graph* other) -> Graph* { return new TorchGraph(other); },
};

}  // namespace
}  // namespace lockstep::kernels::cuda

extern "C" const lockstep::kernels::cuda::Table* lockstep_cuda_kernels() {
  return &lockstep::kernels::cuda::kTable;
}
