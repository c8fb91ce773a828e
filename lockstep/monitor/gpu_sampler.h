// The GPUs of this host, sampled by a thread of their own once a second into a bounded history.
//
// Readers get a copy of the latest sample and never wait for the driver. While the driver does not
// answer, the snapshot says for how long and in which call. A lost GPU has its own `problem`, and
// the others are still sampled.
//
//   GpuSampler sampler;
//   const GpuSnapshot now = sampler.snapshot();
//   if (now.newest) use(now.newest->gpus[0].utilisation_percent);
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/monitor/nvml.h"

namespace lockstep {
struct Node;
}

namespace lockstep::monitor {

struct GpuSample {
  double unix_time_s = 0;
  std::vector<GpuReading> gpus{};  // by index
};
using GpuSamplePtr = std::shared_ptr<const GpuSample>;

struct GpuSnapshot {
  std::string problem{};  // why there are no values, or old ones; empty when all is well
  std::string driver_version{};
  std::vector<GpuIdentity> gpus{};
  GpuSamplePtr newest{};  // null before the first
  std::uint64_t samples = 0;
  std::vector<XidEvent> xids{};  // the newest 64, oldest first
  std::map<std::pair<int, std::uint64_t>, std::uint64_t> xid_counts{};  // by GPU and Xid, of all
};

struct GpuSamplerOptions {
  std::string library{};  // empty: nvml_library()
  std::chrono::milliseconds interval{1000};
  std::chrono::milliseconds call_deadline{2000};  // a call that takes longer is a problem
  std::size_t history = 600;
};

// Any thread may call. Logs a warning when a GPU fails, and for an Xid. The destructor waits at
// most call_deadline for a call in progress, and abandons a thread that is stuck in the driver.
class GpuSampler {
 public:
  explicit GpuSampler(const GpuSamplerOptions& options = {});
  ~GpuSampler();
  GpuSampler(const GpuSampler&) = delete;
  GpuSampler& operator=(const GpuSampler&) = delete;

  GpuSnapshot snapshot() const;
  // The newest samples, oldest first.
  std::vector<GpuSamplePtr> history(std::size_t most = SIZE_MAX) const;
  // Waits until there are that many samples or a problem; false when the time is over first. The
  // driver starts in seconds where its daemon does not run.
  bool wait_for_samples(std::uint64_t count,
                        std::chrono::milliseconds limit = std::chrono::seconds(10)) const;

 private:
  struct State;
  static void work(const std::shared_ptr<State>& state);
  std::shared_ptr<State> state_;
  std::thread thread_;
};

// "0: 97 %, 31.2 of 79.6 GiB, 412 of 700 W, 61 C, 1980 MHz; 1: GPU is lost ...": one line.
std::string gpu_line(const GpuSnapshot& snapshot);
// The same of one GPU, and of its memory alone ("31.2 of 79.6 GiB").
std::string reading_text(const GpuReading& reading);
std::string memory_text(const GpuReading& reading);
// Everything, for JSON (core/document.h). What a card does not have is null.
Node gpu_node(const GpuSnapshot& snapshot);

}  // namespace lockstep::monitor
