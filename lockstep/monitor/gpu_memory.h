// log_gpu_memory(): logs the GPUs' memory use from within a training loop.
//
//   for (auto& batch : loader.epoch(epoch)) {
//     ...
//     lockstep::log_gpu_memory();    // every step: a line comes every 5 s at most
//   }
//
// [gpu] memory: GPU 0 31.2 of 79.6 GiB, GPU 1 30.9 of 79.6 GiB; cuda:0 of this process: allocated
// 24.1, reserved 28.0, peak 27.5 GiB
#pragma once

#include <chrono>
#include <string>

namespace lockstep {

// At INFO, so on rank 0 unless set_level() or LOCKSTEP_LOG changes that. Lists all GPUs that the
// host's driver shows; the last part is from LibTorch's allocator. Any thread may call. A separate
// thread asks the driver (monitor/gpu_sampler.h): the first call waits at most a second for it,
// later calls never. Without a GPU one line says so, once.
void log_gpu_memory(std::chrono::milliseconds interval = std::chrono::seconds(5));

}  // namespace lockstep
