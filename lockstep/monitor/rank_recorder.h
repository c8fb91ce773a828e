// RankRecorder: records where a rank's time goes while it trains (run_record.h has the format).
//
// A thread of its own reads the ledger's sums, /proc and the control group once a second and
// appends a line to DIR/monitor/rank_<r>.jsonl; the first rank of a host also samples its GPUs. The
// training thread is never involved.
//
//   RankRecorder recorder({.directory = "out", .rank = world.rank()});
//   ... train ...                        // the destructor writes the last, shorter interval
//
// A file that cannot be written (a full disk, a removed folder) is reported once, and the run
// continues. The next interval includes what could not be written.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/core/fd.h"
#include "lockstep/core/host.h"
#include "lockstep/monitor/run_record.h"

namespace lockstep::monitor {

// After an hour of one line a second, a line covers kCoarser seconds, so that the file of a run
// that takes days stays small.
inline constexpr int kFineLines = 3600;
inline constexpr int kCoarser = 10;

struct LineLimits {
  int fine_lines = kFineLines;
  double coarse_s = kCoarser - 0.5;  // looks come a little early or late
};

// Creates the file with the first line; truncates half a line that a killed run left.
class LineFile {
 public:
  explicit LineFile(std::string path) : path_(std::move(path)) {}

  // Without the line's end. Throws SystemError, and leaves the file without this line.
  void append(const std::string& line);

 private:
  void open();

  std::string path_;
  Fd fd_;
};

// Appends whole lines to one folder's rank_<r>.jsonl and gpus_<host>.jsonl: for a rank that records
// itself, and for a launcher outside (dashboard/rank_sampler.h).
//
//   RecordFiles files("out/monitor");
//   files.add(rank, interval);
//
// Used by one thread. A reader, concurrent or after a kill, finds every line except one being
// written. Throws SystemError; an interval that could not be written is added to the next
// line.
class RecordFiles {
 public:
  explicit RecordFiles(std::string folder, const LineLimits& limits = {})
      : folder_(std::move(folder)), limits_(limits) {}

  void add(int rank, const Interval& interval);
  void add(int host, const GpuSample& sample, const std::vector<GpuIdentity>& gpus);
  void end();  // writes what is left

 private:
  struct File {
    LineFile file;
    int lines = 0;
    Interval pending{};  // of a rank
    double time_s = 0;   // of the newest sample that was written
  };
  File& file(const char* kind, int number);
  void write(File& file);

  std::string folder_;
  LineLimits limits_;
  std::map<std::string, File> files_;
};

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

// The destructor waits for the thread at most `end_limit`, and abandons one whose disk does not
// answer.
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

// Writes DIR/monitor/run.json, replacing an earlier one. Throws SystemError.
void write_facts(const std::string& directory, const RunFacts& facts);

// Converts the ledger's sums: time outside of all phases is Phase::kNone's.
Interval interval_of(const ledger::Totals& spent);
// The share of a control group's periods between two samples in which it was throttled; nothing
// without a limit.
std::optional<double> throttled_share(const CgroupSample& before, const CgroupSample& after);

// Samples a rank's process and its control group at intervals. Used by one thread.
class ProcessWatch {
 public:
  explicit ProcessWatch(pid_t pid, const HostFiles& files = {});

  // Adds the resources used since the last call to the interval. A new pid starts afresh.
  void look(pid_t pid, Interval& interval);
  const std::optional<ProcessSample>& process() const { return process_; }
  const CgroupSample& cgroup() const { return cgroup_; }

 private:
  HostFiles files_;
  std::optional<ProcessSample> process_;
  CgroupSample cgroup_;
};

}  // namespace lockstep::monitor
