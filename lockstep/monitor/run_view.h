// RunView: the state of a run at one moment, while it runs and after its end. The page, terminal,
// report, doctor and Prometheus show this and nothing else.
//
//   const RunView run = read_run_view("out");             // from its folder
//   send(snapshot_json(run));
//
// A launcher makes the same view of the run that it watches (dashboard/live_run.h). Plain values
// without references.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/monitor/diagnosis.h"
#include "lockstep/monitor/metrics_file.h"
#include "lockstep/monitor/run_figures.h"

namespace lockstep::monitor {

enum class RankStatus { kRunning, kStopped, kEnded, kFailed };  // stopped: by SIGSTOP and the like
const char* name(RankStatus status);                            // "running", ...

// The rank's oldest collective that is under way, otherwise its newest.
struct Position {
  std::string operation{};
  std::uint64_t sequence = 0;
  std::string state{};  // "started", "finished", ...
  double age_s = 0;     // since it began
};

struct RankState {
  int rank = 0;
  int host = 0;
  pid_t pid = -1;  // of the process that trains
  RankStatus status = RankStatus::kRunning;
  std::string exit{};  // "killed by SIGKILL"; empty while it runs
  std::int64_t step = -1;
  double step_ms = 0;   // of about the last 5 s, of the run once it has ended; 0: not known
  std::string phase{};  // "backward"; empty: none, or not known
  // The newest interval with figures of the process. Once the rank has ended: all its steps.
  std::optional<Interval> newest{};
  std::optional<ProcessSample> process{};
  CgroupSample cgroup{};
  int gpu = -1;  // NVML's index; -1: none is known to be its own
  std::optional<Position> position{};
  std::deque<std::string> log{};  // newest lines of stdout and stderr, oldest first
};

// Ranks that make no progress, or that were stopped by a signal.
struct Stall {
  double seconds = 0;
  std::string what{};  // "No step has ended for 12 s: rank 1 is stopped (...)."
};

// The launcher's text about the run's newest stall; it stays after the ranks move again.
struct StallTable {
  double time_s = 0;
  std::string cause{};
  std::string text{};
};

// The text that takes the place of findings where there are none.
struct Verdict {
  bool healthy = false;
  std::string text{};
};

struct CheckpointInfo {
  std::int64_t step = 0;
  std::string name{};  // of its folder
  double unix_time_s = 0;
  std::uint64_t bytes = 0;
  std::string problem{};  // a file is missing or has the wrong size; empty: complete
};

struct ConfigValue {
  std::string key{};
  std::string value{};
  std::string from{};                // "default", "train.yaml:3:1", "--seed"; empty: not recorded
  std::vector<std::string> beats{};  // what it overrides
};

struct RunView {
  std::string id{};      // the launcher's, or the folder that it was read from
  double time_s = 0;     // of the newest figures; all times are since the epoch
  double started_s = 0;  // of the oldest
  int attempt = 0;
  // Later "running", finally "ended" or "failed"; a folder's run can also be "killed".
  std::string state = "starting";
  std::string message{};                 // of a failure, or of a stop before the last step
  bool recorded = false;                 // read from a folder: the present state is unknown
  std::optional<RunRecord> record{};     // where time went; a folder of an older run has none
  std::vector<RankState> ranks{};        // by rank; of a launcher those of its host
  std::vector<MetricLine> metrics{};     // what the program has logged
  std::vector<MetricLine> superseded{};  // measured, and measured again after a resume
  double metrics_unix_s = 0;             // when the last line was written; 0: not known
  Curve step_ms{};
  double mean_step_s = 0;  // evaluations and saves in it; 0: not known
  std::vector<Finding> findings{};
  Verdict verdict{};
  // While a launcher watches.
  std::optional<Stall> stall{};
  std::optional<StallTable> stall_table{};
  GpuSnapshot gpus{};
  // Filled when a folder is read with Detail::kAll.
  std::vector<CheckpointInfo> checkpoints{};  // by step
  std::optional<std::int64_t> best_step{};
  std::optional<double> best_metric{};
  std::vector<ConfigValue> config{};
  std::vector<std::string> missing{};  // sentences about what is missing or cannot be read

  const RunFacts& facts() const;  // the record's facts; empty facts without a record
};

// kShown: the record and the newest logged values, for readers that refresh each second. kAll:
// everything that the run left; `missing` has a sentence for each missing part.
enum class Detail { kShown, kAll };
// UsageError if there is no record or, with kAll, no file of a run.
RunView read_run_view(const std::string& directory, Detail detail = Detail::kShown);

// A run counts as over when nothing was added to its record for this long. After an hour a line
// comes only every ten seconds, and a shared file system may delay it.
inline constexpr double kRecordIdle_s = 60;

struct Ending {
  bool over = false;     // no more records are expected
  bool known = false;    // the end is recorded, or its process is gone; not only silence
  bool through = false;  // a Trainer has written its last line
  bool killed = false;   // it has not written an end
  bool early = false;    // a Trainer was stopped before its last step
};
Ending ending_of(const RunView& run);
// Derives the run's state, its ranks' and the findings from what was read from a folder.
void conclude(RunView& run);

// Fills each rank's step, step time and budget from the record, and the run's mean.
void describe_ranks(RunView& run);
// `enough`: there are steps enough to judge (enough_to_judge).
Verdict verdict_of(const RunView& run, bool enough);

// Milliseconds of a step over about the last 5 s and at least ten steps, so that a step that ends
// just outside of an interval does not count much. 0: no step has ended.
double recent_step_ms(std::span<const Interval> intervals);
// The message about a run that is over: its failure, or that it stopped early at that step, and how
// to resume a Trainer's run. Empty: it ended normally.
std::string end_message(const RunFacts& facts, std::int64_t step, bool early);
// The newest value that was logged under that name. It need not be finite.
std::optional<double> newest_logged(const RunView& run, std::string_view name);
// The last step of the most advanced rank; -1: not known.
std::int64_t step_of(const RunView& run);
// Seconds until the last step at the current pace; nothing where that is not known.
std::optional<double> seconds_left(const RunView& run);

// The state that docs/dashboard.md describes, as a document and as one line of JSON. Invalid UTF-8
// and numbers that JSON lacks are replaced.
Node snapshot_node(const RunView& run);
// The interval's time by phase (spent_s()) as shares of it; phases without time are omitted. A rank
// that counts no steps has reported no phases, so the time outside of them is unknown.
Node shares_node(const Interval& interval, bool counts_steps = true);
std::string snapshot_json(const RunView& run);

}  // namespace lockstep::monitor
