// One rank seen from outside, interval by interval: its ledger, its process and its control group.
//
//   RankSampler sampler(started);
//   ... a second later ...
//   const monitor::Interval interval = sampler.close();
//
// Used by one thread. Reads /proc; a rank that has ended has its last interval from its ledger.
#pragma once

#include <chrono>
#include <optional>

#include "launcher/run_observer.h"
#include "lockstep/monitor/rank_recorder.h"

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

}  // namespace lockstep::dashboard
