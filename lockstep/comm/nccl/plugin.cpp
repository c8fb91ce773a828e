// The plug-in's part for communication: NCCL process groups of LibTorch. What keeps their watchdog
// from ending the process is set in the environment by the opener of the plug-in (nccl.cpp).
#include "lockstep/comm/nccl/plugin.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace lockstep::detail::nccl {

namespace {

void set_device(int index) {
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(index));
}

c10::intrusive_ptr<c10d::Backend> make_group(const GroupOptions& options) {
  auto group_options = c10d::ProcessGroupNCCL::Options::create();
  group_options->timeout = options.timeout;
  auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(options.store, options.rank,
                                                           options.size, group_options);
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(options.device));
  group->setBoundDeviceId(device);
  group->eagerConnectSingleDevice(device);
  return group;
}

bool capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

const PluginTable table{kPluginVersion, set_device, make_group, capturing};

}  // namespace
}  // namespace lockstep::detail::nccl

extern "C" const lockstep::detail::nccl::PluginTable* lockstep_cuda_plugin() {
  return &lockstep::detail::nccl::table;
}
