// Samples one rank from outside, interval by interval: its ledger, its process, its control group,
// and the GPU that it uses. Writes the record of ranks that are seen from outside.
//
//   RankSampler sampler(started);
//   RecordWriter writer(dir, node_rank);
//   ... a second later ...
//   writer.add(rank, sampler.close());
//
// Used by one thread. Reads /proc; a rank that has ended has its last interval from its ledger.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
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
  // Ends the interval and begins the next one. `end`: the rank's totals at its end, since a ledger
  // continues to count its last phase.
  monitor::Interval close(const std::optional<ledger::Totals>& end = {});
  // The training process: the one that opened the ledger, or the one that was started.
  pid_t pid() const { return pid_; }
  bool stopped() const;  // by a signal, at the last look
  const std::optional<monitor::ProcessSample>& process() const { return process_.process(); }
  const monitor::CgroupSample& cgroup() const { return process_.cgroup(); }

 private:
  void find_process();
  void add_collectives(monitor::Interval& interval);

  launch::RankStarted rank_;
  pid_t pid_;
  int ledger_pid_ = 0;  // the process that was sampled last
  Clock::time_point began_;
  bool start_ = true;  // the current interval is the first
  std::optional<ledger::Totals> totals_;
  // For the collectives of all ranks: the group of all ranks, which is the first one created, its
  // newest record that was seen, and the time.
  std::optional<std::string> group_;
  ledger::Ticket newest_ = 0;
  std::uint64_t looked_ns_ = 0;
  monitor::ProcessWatch process_;
};

// The GPUs named by CUDA_VISIBLE_DEVICES, as indices into `gpus`, in its order: numbers, or
// prefixes of UUIDs. All of them without the variable; as in CUDA, entries after an invalid one do
// not count.
std::vector<std::size_t> visible_gpus(const std::vector<monitor::GpuIdentity>& gpus,
                                      const std::optional<std::string>& variable);

struct GpuUser {
  pid_t pid = -1;
  int local_rank = 0;
};
// NVML's index of the GPU that the process uses; if the driver does not report it, the visible one
// with the rank's number. -1: none.
int gpu_of_rank(const monitor::GpuSnapshot& snapshot, const std::vector<std::size_t>& visible,
                const GpuUser& user);

// The visible GPUs only, with their part of these samples.
monitor::HostGpus host_gpus(int host, const std::vector<monitor::GpuIdentity>& gpus,
                            const std::vector<std::size_t>& visible,
                            const std::vector<monitor::GpuSamplePtr>& samples);

// ---------------------------------------------------------------- the record

// `lockstep run --record DIR`: the files of monitor/run_record.h. Moves an earlier run's files to
// monitor.<n> before the first line. After monitor::kFineLines lines of a file one covers ten
// seconds. A file that cannot be written is reported once by problem(), and the run continues
// without it.
class RecordWriter {
 public:
  // Makes the folder. Throws SystemError.
  RecordWriter(const std::string& directory, int host);
  ~RecordWriter();  // writes what is left
  RecordWriter(const RecordWriter&) = delete;
  RecordWriter& operator=(const RecordWriter&) = delete;

  // Whether the rank has added to its own file, while this writer has written nothing.
  bool rank_records(int rank) const;

  void write(const monitor::RunFacts& facts);  // where they have changed
  // Writes the facts before anything is recorded, and only into an empty folder.
  void write_first(const monitor::RunFacts& facts);
  void add(int rank, const monitor::Interval& interval);
  void add(const monitor::GpuSample& sample, const std::vector<monitor::GpuIdentity>& gpus);

  // Since the last call: where an earlier run's record is now, and what failed; empty: nothing.
  std::string moved_to();
  std::string problem();

 private:
  using Listing = std::map<std::string, std::pair<std::uintmax_t, std::filesystem::file_time_type>>;
  Listing listing() const;
  void begin();
  template <typename Body>
  void attempt(const Body& body);

  std::string folder_;
  int host_;
  Listing before_;  // what an earlier run left
  bool began_ = false;
  std::string facts_;  // as written
  monitor::RecordFiles files_;
  std::string moved_to_;
  std::string problem_;
  bool failed_ = false;
};

}  // namespace lockstep::dashboard
