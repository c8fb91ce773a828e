// The record of a run, which doctor, report, dashboard and bench scale read.
//
//   DIR/monitor/run.json           facts that do not change (RunFacts)
//   DIR/monitor/rank_<r>.jsonl     one line per interval of about a second (Interval)
//   DIR/monitor/gpus_<host>.jsonl  one line per sample of a host's GPUs
//
// The Trainer records into its output_dir; `lockstep run --record DIR` records any program from
// outside, with what the ranks' ledgers have. A run that is resumed appends; any other one that is
// recorded into the same folder moves the earlier record away.
//
//   const RunRecord run = read_run("out");
//   for (const RankRecord& rank : run.ranks) use(spent_s(budget_of(rank)));
//
// A torn last line is skipped; any other fault of the files is a UsageError that names file and
// line.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/document.h"
#include "lockstep/core/ledger.h"
#include "lockstep/monitor/cpu_sampler.h"
#include "lockstep/monitor/gpu_sampler.h"

namespace lockstep::monitor {

inline constexpr const char* kRecordFolder = "monitor";

// The budget of a rank's time by phase: the one definition, for page, terminal, report, doctor and
// Prometheus.
//
// Without device times, the budget is the training thread's. With them it is the device's: its
// phases count as measured, and host work that overlaps them costs nothing. The device's idle time
// is attributed to what the host did meanwhile: data, saving, evaluation, logging and startup, in
// this order, each at most with its own time. The remainder is other (Phase::kNone). The parts
// always add up to the whole.
//
//   const PhaseSeconds spent = spent_s(interval);
//   spent[ledger::index(ledger::Phase::kData)] / interval.seconds;
//
// Free functions without state; call them from any thread.
using PhaseSeconds = std::array<double, ledger::kPhases>;  // by ledger::Phase

// Whether a phase of the device was measured; time between its phases alone does not count.
bool has_device_times(const PhaseSeconds& device_s);

PhaseSeconds spent_s(double seconds, const PhaseSeconds& host_s, const PhaseSeconds& device_s);

// The budget of an Interval.
template <typename Part>
PhaseSeconds spent_s(const Part& part) {
  return spent_s(part.seconds, part.host_s, part.device_s);
}

// The device's time outside of all phases: all of `seconds` without device times.
double idle_s(double seconds, const PhaseSeconds& device_s);

using Counts = std::array<std::uint64_t, ledger::kCounters>;  // by ledger::Counter

// An interval of one rank's time. Sums and counts are those of the interval alone.
struct Interval {
  double unix_time_s = 0;  // its end
  double seconds = 0;
  bool start = false;       // the first since the rank was started
  std::int64_t step = -1;   // at its end; -1: not known
  std::int64_t steps = 0;   // that ended in it
  PhaseSeconds host_s{};    // what the training thread did; they add up to `seconds`
  PhaseSeconds device_s{};  // recorded when it is complete, so that it may exceed `seconds`
  Counts counts{};
  std::optional<ProcessRates> process{};
  std::uint64_t resident_bytes = 0;
  int threads = 0;
  std::optional<double> cpu_limit_cores{};  // of its control group
  std::optional<double> throttled_share{};  // of the group's periods, in which it was stopped
  // For a rank that counts no steps: the share of its time in which a collective of all ranks was
  // under way, and how many were seen. Nothing where it is not known.
  std::optional<double> collective_share{};
  std::uint64_t collectives = 0;

  double step_s() const { return steps > 0 ? seconds / static_cast<double>(steps) : 0; }
  double share(ledger::Phase phase) const {  // by the one definition
    return seconds > 0 ? spent_s(*this)[ledger::index(phase)] / seconds : 0;
  }
};
// Extends `to` by the interval that follows it: sums and counts are added, rates and shares are
// averaged by time, memory and threads are maxima.
void join(Interval& to, const Interval& next);

struct RunFacts {
  int world_size = 1;
  int hosts = 1;
  std::string device{};   // "cpu", "cuda"; empty: not known (a program that is not ours)
  std::string backend{};  // "shm", "gloo", "nccl"; empty: not known
  std::string program{};  // "trainer", or the command line that was launched
  double started_unix_s = 0;
  int cores = 0;  // that this host's ranks may use
  int ranks_on_host = 1;
  int gpus_visible = 0;
  std::int64_t parameters = 0;  // 0: not known, as everything below
  std::int64_t per_device_batch = 0;
  std::int64_t accumulation = 0;
  std::string optimizer{};  // "replicated" or "sharded", and "fused" or not: "sharded fused adamw"
  Node arguments{};         // training_args, as in a checkpoint
  std::int64_t total_steps = 0;
  int threads_per_rank = 0;  // that compute (OpenMP's), not those that only wait
  std::string writer{};      // the process whose end is the run's (process_identity())
  double ended_unix_s = 0;   // 0: the run continues, or its end could not be recorded
  std::string failure{};     // of a run that has ended; empty: none, or not known
  Node failed_ranks{};       // {"1": "killed by SIGKILL"}, where their launcher saw it
};

struct RankRecord {
  int rank = 0;
  std::vector<Interval> intervals{};  // oldest first
};

struct HostGpus {
  int host = 0;
  std::vector<GpuIdentity> gpus{};
  std::vector<GpuSample> samples{};  // oldest first
};

struct RunRecord {
  RunFacts facts{};
  std::vector<RankRecord> ranks{};  // by rank; a rank that left nothing is not there
  std::vector<HostGpus> gpus{};
};

// Reads the ranks that the facts count: a run continued with fewer ranks leaves old files. Times
// are by rank 0's clock (align_clocks). UsageError, with a remedy, when DIR has no record.
RunRecord read_run(const std::string& directory);
// Corrects clocks that differ between hosts, possibly by hours. Ranks end a step together, so their
// times at common steps are compared; ranks without known steps are assumed to have begun together
// at the last start. Does nothing without rank 0, whose host wrote the facts.
void align_clocks(RunRecord& run);
// Whether every rank of the run has a record. One host of several has only its own ranks'.
bool is_complete(const RunRecord& run);

// The sum of the intervals from the first to the last in which a step ended, without the first
// `skip_s` seconds, since loading, warm-up and first allocations are not typical. With
// facts.started_unix_s as `from_unix_s`, intervals of earlier starts are excluded.
Interval budget_of(const RankRecord& rank, double skip_s = 0, double from_unix_s = 0);

// The mean over the whole record, weighted by time; nothing where no collective was seen.
std::optional<double> mean_collective_share(const RankRecord& rank, double from_unix_s = 0);
// The newest interval with figures of the process; an ended rank's last interval has none.
const Interval& newest_sample(const RankRecord& rank);
// Whether the record is complete: the run has recorded its end, or its writer has ended.
bool is_over(const RunFacts& facts);
// Whether the program counts its steps. A Trainer does, also before its first one; for any other
// program the record must contain steps.
bool counts_steps(const RunRecord& run);
// Text for runs without step counts: which other figures are known.
const char* without_steps(const RunRecord& run);

// Converts an interval to a line of a rank's file, and back. The document has the fields' names,
// and phases and counters that are not zero. UsageError for any other text.
std::string interval_json(const Interval& interval);
Interval parse_interval(const std::string& line, const std::string& file);
std::string facts_json(const RunFacts& facts);
RunFacts parse_facts(const std::string& text, const std::string& file);
std::string gpu_sample_json(const GpuSample& sample, const std::vector<GpuIdentity>& gpus);
// A phase as documents name it: "other" for Phase::kNone, whose own name is empty.
const char* phase_key(ledger::Phase phase);

// RunFacts::writer names the process whose end is the end of the run, so that a reader on the same
// host knows at once whether the record is complete.
//
//   facts.writer = process_identity(::getpid());
//   if (has_ended(facts.writer)) ...
//
// Boot, PID namespace, PID and start time, which no other process has; empty: not known.
std::string process_identity(pid_t pid);
// True only where it is certain; false for a process of another host or PID namespace.
bool has_ended(const std::string& identity);

}  // namespace lockstep::monitor

namespace lockstep::monitor::detail {

// The median of a few figures; 0 of none.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace lockstep::monitor::detail
