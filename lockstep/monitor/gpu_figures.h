// What the GPUs of a host did in a run, as figures over its samples.
#pragma once

#include <optional>
#include <vector>

#include "lockstep/monitor/run_record.h"

namespace lockstep::monitor {

// What a GPU did in a run: medians over the samples of a host, empty where a card has no value.
struct GpuFigures {
  int index = 0;  // NVML's
  std::optional<double> utilisation_percent{};
  std::optional<double> memory_bytes{};
  std::optional<double> memory_share{};  // of what the card has
  std::optional<double> power_w{};
  double throttled_share = 0;  // of the samples, by heat, power or hardware
};
std::vector<GpuFigures> gpu_figures(const HostGpus& host);
// The host with those alone that some process uses: one that has a CUDA context holds memory, and
// one that works at times is not always seen at work.
HostGpus gpus_in_use(const HostGpus& host);
// The share of samples in which every GPU worked for 85 % of the time or more. Ranks that work
// together have nearly all; GPUs that take turns have none.
double busy_together_share(const HostGpus& host);

}  // namespace lockstep::monitor
