// Graphs through LibTorch's own class, which knows its allocator and its random generators.
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <cstdint>

#include "lockstep/kernels/cuda/graph.h"
#include "lockstep/kernels/cuda/launch.h"

namespace lockstep::kernels::cuda {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

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

}  // namespace

Graph* make_torch_graph(const Graph* other) {
  return new TorchGraph(other);
}

}  // namespace lockstep::kernels::cuda
