// Which of a host's GPUs are the run's, and which is a rank's own.
//
//   const auto visible = visible_gpus(snapshot.gpus, env::get("CUDA_VISIBLE_DEVICES"));
//   const int gpu = gpu_of_rank(snapshot, visible, {.pid = pid, .local_rank = 1});
//
// Free functions without state.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/monitor/run_record.h"

namespace lockstep::dashboard {

// Places in `gpus`, in the order of the variable: numbers, or UUIDs by their beginning. All of them
// without the variable; as in CUDA, what follows a name that fits nothing does not count.
std::vector<std::size_t> visible_gpus(const std::vector<monitor::GpuIdentity>& gpus,
                                      const std::optional<std::string>& variable);

struct GpuUser {
  pid_t pid = -1;
  int local_rank = 0;
};
// NVML's index of the GPU that the process uses; where the driver does not say, the visible one
// with the rank's number. -1: none.
int gpu_of_rank(const monitor::GpuSnapshot& snapshot, const std::vector<std::size_t>& visible,
                const GpuUser& user);

// The visible ones alone, with these samples of all.
monitor::HostGpus host_gpus(int host, const std::vector<monitor::GpuIdentity>& gpus,
                            const std::vector<std::size_t>& visible,
                            const std::vector<monitor::GpuSamplePtr>& samples);

}  // namespace lockstep::dashboard
