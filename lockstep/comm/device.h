// Which device a rank works on, and CUDA without linking it.
//
// The driver is asked directly (dlopen of libcuda), so a machine without a GPU never loads the
// gigabytes of LibTorch's CUDA part; load_cuda() opens them when a CUDA device is really wanted.
//
//   lockstep::load_cuda();                 // torch::cuda works from here on
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "lockstep/comm/types.h"

namespace lockstep {

// Devices the CUDA driver shows to this process (CUDA_VISIBLE_DEVICES counts); 0 without a driver.
int cuda_device_count();

// Makes torch's CUDA side part of this process: opens our plug-in, which brings libtorch_cuda.
// Cheap when it is there already. Throws UsageError when this build has no plug-in.
void load_cuda();

namespace detail {

struct DeviceChoice {
  c10::Device device;
  std::string backend;     // "shm", "gloo" or "nccl"
  std::string reason;      // for one line of log
  bool automatic = false;  // nobody asked for shm by name: gloo where it is unavailable
};

// Options first, then LOCKSTEP_DEVICE and LOCKSTEP_BACKEND, then what the machine has.
DeviceChoice choose_device(const Identity& identity, const WorldOptions& options);

// A name for the physical GPU (its UUID), equal in every process of the host; empty when unknown.
std::string cuda_device_id(int index);

}  // namespace detail
}  // namespace lockstep
