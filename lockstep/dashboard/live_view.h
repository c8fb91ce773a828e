// A run as it stands at one moment, for whoever shows it: a page, a terminal, a test.
//
//   const LiveView view = run.view();            // live_run.h
//   send(live_snapshot_json(view));
//
// Plain values, copied out of the run; nothing refers back to it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/monitor/diagnosis.h"

namespace lockstep::dashboard {

enum class RankStatus { kRunning, kStopped, kEnded, kFailed };  // stopped: by SIGSTOP and the like
const char* name(RankStatus status);                            // "running", ...

// The rank's oldest collective that is under way, otherwise its newest.
struct LivePosition {
  std::string operation{};
  std::uint64_t sequence = 0;
  std::string state{};  // "started", "finished", ...
  double age_s = 0;     // since it began
};

struct LiveRank {
  int rank = 0;
  int host = 0;
  pid_t pid = -1;  // of the process that trains
  RankStatus status = RankStatus::kRunning;
  std::string exit{};  // "killed by SIGKILL"; empty while it runs
  std::int64_t step = -1;
  double step_ms = 0;   // of about the last 5 s, of the run once it has ended; 0: not known
  std::string phase{};  // "backward"; empty: none, or not known
  std::optional<monitor::Interval> newest{};
  std::optional<monitor::ProcessSample> process{};
  monitor::CgroupSample cgroup{};
  int gpu = -1;  // NVML's index; -1: none is known to be its own
  std::optional<LivePosition> position{};
  std::deque<std::string> log{};  // newest lines of stdout and stderr, oldest first
};

// Ranks that do not move, or that somebody has stopped.
struct LiveStall {
  double seconds = 0;
  std::string what{};  // "No step has ended for 12 s: rank 1 is stopped (...)."
};

// What the launcher printed of a stall: the newest of the run, also after ranks moved again.
struct StallTable {
  double time_s = 0;
  std::string cause{};
  std::string text{};
};

// What stands where there are no findings.
struct Verdict {
  bool healthy = false;
  std::string text{};
};

using LiveSeries = std::deque<std::pair<std::int64_t, double>>;  // (step, value), oldest first
// By name, in the order in which they came first.
using LoggedSeries = std::vector<std::pair<std::string, LiveSeries>>;

struct LiveView {
  double time_s = 0;  // since the epoch, as all times
  std::string run_id{};
  int world_size = 0;
  double started_s = 0;
  int attempt = 0;
  // Then "running", at last "ended" or "failed"; of a record also "killed".
  std::string state = "starting";
  std::string message{};          // of a failure, or of a stop before the last step
  bool recorded = false;          // read from a record: nothing is known of now
  std::vector<LiveRank> ranks{};  // of this host, by rank
  std::int64_t total_steps = 0;   // 0: not known
  double mean_step_s = 0;         // evaluations and saves in it; 0: not known
  LoggedSeries logged{};          // what the program writes into metrics.jsonl
  LiveSeries step_ms{};
  std::vector<monitor::Finding> findings{};
  Verdict verdict{};
  std::optional<LiveStall> stall{};  // now
  std::optional<StallTable> stall_table{};
  monitor::GpuSnapshot gpus{};
};

// `enough`: there are steps enough to judge (monitor::enough_to_judge).
Verdict verdict_of(const LiveView& view, bool enough);

// Milliseconds of a step over about the last 5 s and ten steps in which steps ended: the steps that
// end within one interval are one too many or too few. 0: none has.
double recent_step_ms(std::span<const monitor::Interval> intervals);

// What is to be said of a run that is over and at that step: its failure, or that it stopped early,
// and how a Trainer's run goes on. Empty: it ended well.
std::string end_message(const monitor::RunFacts& facts, std::int64_t step, bool early);

// The newest value of what was logged under that name, which need not be finite.
std::optional<double> newest_logged(const LiveView& view, std::string_view name);
// The step that the rank which is farthest has ended; -1: not known.
std::int64_t step_of(const LiveView& view);
// Until the last step, as the run went so far; nothing where that is not known.
std::optional<double> seconds_left(const LiveView& view);

// One object on one line. Text that is not UTF-8 and numbers that JSON does not have are replaced.
std::string live_snapshot_json(const LiveView& view);

}  // namespace lockstep::dashboard
