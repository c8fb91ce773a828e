// RankRecorder: writes down where a rank's time goes while it trains (run_record.h has the format).
//
// A thread of its own reads the ledger's sums, /proc and the control group once a second and
// appends a line to DIR/monitor/rank_<r>.jsonl; the first rank of a host also samples its GPUs. The
// training thread is never involved.
//
//   RankRecorder recorder({.directory = "out", .rank = world.rank()});
//   ... train ...                        // the destructor writes the last, shorter interval
//
// A file that cannot be written (a full disk, a folder that is gone) is reported once, and the run
// continues. What could not be written is part of the next interval.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "lockstep/core/host.h"
#include "lockstep/monitor/line_file.h"

namespace lockstep::monitor {

struct RankRecorderOptions {
  std::string directory{};  // of the run
  int rank = 0;
  int host = 0;
  bool gpus = false;  // this rank samples those of its host
  std::chrono::milliseconds interval{1000};
  // After that many lines intervals are ten times as long.
  int fine_lines = kFineLines;
  std::chrono::milliseconds end_limit{2000};
  HostFiles files{};
  std::string nvml{};  // empty: nvml_library()
};

// The destructor waits for the thread for `end_limit` at most and leaves one behind whose disk does
// not answer.
class RankRecorder {
 public:
  explicit RankRecorder(const RankRecorderOptions& options);
  ~RankRecorder();
  RankRecorder(const RankRecorder&) = delete;
  RankRecorder& operator=(const RankRecorder&) = delete;

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::thread thread_;
};

// Writes DIR/monitor/run.json, in place of an earlier one. Throws SystemError.
void write_facts(const std::string& directory, const RunFacts& facts);

// An interval of the ledger's sums: the time that no phase has is Phase::kNone's.
Interval interval_of(const ledger::Totals& spent);
// The share of a control group's periods between two readings in which it was throttled; nothing
// without a limit.
std::optional<double> throttled_share(const CgroupSample& before, const CgroupSample& after);

// The process of a rank and its control group, from one look to the next. Used by one thread.
class ProcessWatch {
 public:
  explicit ProcessWatch(pid_t pid, const HostFiles& files = {});

  // What both did since the last look is the interval's. Another pid is another process.
  void look(pid_t pid, Interval& interval);
  const std::optional<ProcessSample>& process() const { return process_; }
  const CgroupSample& cgroup() const { return cgroup_; }

 private:
  HostFiles files_;
  std::optional<ProcessSample> process_;
  CgroupSample cgroup_;
};

}  // namespace lockstep::monitor
