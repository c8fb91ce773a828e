// The plug-in's whole content: NCCL process groups of LibTorch, made without their watchdog.
#include "lockstep/comm/nccl/plugin.h"

#include <c10/cuda/CUDAFunctions.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>
#include <vector>

namespace lockstep::detail::nccl {

namespace {

// LibTorch reads these when a group is made. They are put back afterwards, so that other groups of
// the process, and its children, keep what the user or torchrun has set.
class ScopedEnvironment {
 public:
  explicit ScopedEnvironment(const std::vector<std::pair<const char*, const char*>>& settings) {
    for (const auto& [name, value] : settings) {
      const char* old = std::getenv(name);
      saved_.emplace_back(name, old ? std::optional<std::string>(old) : std::nullopt);
      ::setenv(name, value, 1);
    }
  }
  ~ScopedEnvironment() {
    for (const auto& [name, value] : saved_) {
      if (value) {
        ::setenv(name.c_str(), value->c_str(), 1);
      } else {
        ::unsetenv(name.c_str());
      }
    }
  }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

 private:
  std::vector<std::pair<std::string, std::optional<std::string>>> saved_;
};

void set_device(int index) {
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(index));
}

c10::intrusive_ptr<c10d::Backend> make_group(const GroupOptions& options) {
  // Nobody but us ends an operation or the process: no error handling that tears down, no monitor
  // thread that aborts, no waits that block inside the library.
  const ScopedEnvironment environment({{"TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"},
                                       {"TORCH_NCCL_BLOCKING_WAIT", "0"},
                                       {"TORCH_NCCL_ENABLE_MONITORING", "0"},
                                       {"TORCH_NCCL_DUMP_ON_TIMEOUT", "0"},
                                       {"TORCH_NCCL_PROPAGATE_ERROR", "0"},
                                       {"TORCH_NCCL_RETHROW_CUDA_ERRORS", "0"},
                                       {"TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN", "0"}});
  auto group_options = c10d::ProcessGroupNCCL::Options::create();
  group_options->timeout = options.timeout;
  auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(options.store, options.rank,
                                                           options.size, group_options);
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(options.device));
  group->setBoundDeviceId(device);
  group->eagerConnectSingleDevice(device);
  return group;
}

const PluginTable table{kPluginVersion, set_device, make_group};

}  // namespace
}  // namespace lockstep::detail::nccl

extern "C" const lockstep::detail::nccl::PluginTable* lockstep_cuda_plugin() {
  return &lockstep::detail::nccl::table;
}
