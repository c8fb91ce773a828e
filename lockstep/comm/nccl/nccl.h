// The nccl backend: CUDA tensors between GPUs. Compiled when the build has CUDA; otherwise
// unavailable.cpp stands in. Neither links CUDA; only the plug-in (nccl/plugin.h) does.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/comm/backend.h"

namespace lockstep::detail::nccl {

struct Options {
  c10::intrusive_ptr<c10d::Store> store = {};
  int rank = 0;
  int size = 1;
  c10::Device device{c10::kCUDA, 0};
  // Set only where ranks share GPUs: the host id to report to NCCL for this rank.
  std::string shared_host_id = {};
};

// Whether this build has the plug-in.
bool built();
// Opens the plug-in once; throws UsageError naming the file and what the loader said.
void load();
// Makes `device` the calling thread's current one.
void set_device(c10::Device device);
// Creates the communicator at once, so that the store is not needed afterwards.
std::unique_ptr<Backend> make(const Options& options);

}  // namespace lockstep::detail::nccl
