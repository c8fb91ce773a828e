// One rank seen from outside, interval by interval: its ledger, its process, its control group, and
// which GPU is its own.
//
//   RankSampler sampler(started);
//   ... a second later ...
//   const monitor::Interval interval = sampler.close();
//
// Used by one thread. Reads /proc; a rank that has ended has its last interval from its ledger.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "launcher/run_observer.h"
#include "lockstep/monitor/rank_recorder.h"
#include "lockstep/monitor/run_record.h"

namespace lockstep::dashboard {

class RankSampler {
 public:
  using Clock = std::chrono::steady_clock;

  // `began`: when the rank was started, from which its first interval counts.
  explicit RankSampler(launch::RankStarted rank, Clock::time_point began = Clock::now());

  const launch::RankStarted& rank() const { return rank_; }
  // Ends the interval and begins the next one. `end`: the rank's totals when it ended, since a
  // ledger counts its last phase for ever.
  monitor::Interval close(const std::optional<ledger::Totals>& end = {});
  // The process that trains: the one that opened the ledger, or the one that was started.
  pid_t pid() const { return pid_; }
  bool stopped() const;  // by a signal, at the last look
  const std::optional<monitor::ProcessSample>& process() const { return process_.process(); }
  const monitor::CgroupSample& cgroup() const { return process_.cgroup(); }

 private:
  void find_process();
  void add_collectives(monitor::Interval& interval);

  launch::RankStarted rank_;
  pid_t pid_;
  int ledger_pid_ = 0;  // that was looked at last
  Clock::time_point began_;
  bool start_ = true;  // the interval that is open is the first
  std::optional<ledger::Totals> totals_;
  // For the collectives of all ranks: their group, which is the first that is made, the newest
  // record that was seen, and when.
  std::optional<std::string> group_;
  ledger::Ticket newest_ = 0;
  std::uint64_t looked_ns_ = 0;
  monitor::ProcessWatch process_;
};

// The GPUs that CUDA_VISIBLE_DEVICES names, as places in `gpus`, in its order: numbers, or UUIDs by
// their beginning. All of them without the variable; as in CUDA, what follows a name that fits
// nothing does not count.
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
