// A run's key figures for comparison, its events, the division of its time, and its Prometheus
// metrics; and a run as text for a terminal (terminal_view.cpp).
//
//   for (const Figure& figure : figures_of(run)) row(figure.name, figure.text());
//   respond(Prometheus::kContentType, metrics.text(run));  // a RunMetrics
//
// Pure functions of the data that were read; call them from any thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/core/document.h"
#include "lockstep/monitor/run_view.h"

namespace lockstep::dashboard {

using monitor::RunView;

enum class Unit { kNumber, kPercent, kSeconds, kBytes };

struct Figure {
  std::string name{};
  std::optional<double> value{};  // a share for kPercent
  Unit unit = Unit::kNumber;

  std::string text() const;  // "not recorded" without a value
};
// The same names in the same order for every run.
std::vector<Figure> figures_of(const RunView& run);

struct RunEvent {
  std::optional<std::int64_t> step{};
  double unix_time_s = 0;  // 0: not known
  std::string text{};
};
// How the run ended, or that its end is not recorded; no text if there is no record.
struct RunEnd {
  RunEvent event{};
  bool well = false;  // it has done what it was to do
};
RunEnd end_of(const RunView& run);
// Losses and gradients that were not finite.
std::vector<RunEvent> bad_steps_of(const RunView& run);
// Starts, resumes, steps that were not finite, GPUs that failed, the end.
std::vector<RunEvent> events_of(const RunView& run);

// Steps that were measured again, because the run was resumed before them.
struct Superseded {
  std::int64_t first = 0, last = 0;
};
std::vector<Superseded> superseded_of(const RunView& run);

// A rank's budget without its start: a quarter of the recorded time, at most five seconds.
monitor::Interval settled_budget(const monitor::RankRecord& rank);
// The mean budget over all ranks.
monitor::Interval mean_budget(const monitor::RunRecord& run);
double begin_of(const monitor::Interval& interval);
// The time at which the run's first interval began.
double start_of(const monitor::RunRecord& run);
// The cores that a rank used, as the mean over ranks; empty if a rank has no samples.
std::optional<double> mean_cores(const monitor::RunRecord& run);
// The mean over as many GPUs as there are ranks, while steps ran, 0 to 100.
std::optional<double> mean_gpu_percent(const monitor::RunRecord& run);
// 0 to 1: of the GPUs if there are any, else of the cores available to the ranks of a host.
std::optional<double> utilisation(const monitor::RunRecord& run);

// Four significant digits: "0.0312", "48,210", "not a number".
std::string number_text(double value);
std::string percent_text(double share);     // 0.153 -> "15.3 %"
std::string time_text(double unix_time_s);  // "2026-11-16 18:00:05 UTC"; "" for 0

// A run's metrics for Prometheus: state, steps, time per phase, loss, and the samples of the ranks'
// processes, control groups and GPUs. Used by one thread at a time.
class RunMetrics {
 public:
  std::string text(const monitor::RunView& view);

 private:
  std::set<std::string> rules_;  // rules with findings so far: they stay on the page with 0
};

// ---------------------------------------------------------------- text for a terminal
//
// A run's state (the snapshot of docs/dashboard.md) on one screen, for `lockstep monitor`, and the
// lines of `lockstep run --doctor`.
//
//   fmt::print("\033[H{}", terminal_view(snapshot, {.columns = 120, .rows = 40, .colour = true}));
//
// Control characters that ranks wrote are removed from the output.

struct TerminalOptions {
  int columns = 100;
  int rows = 0;  // 0: unlimited
  bool colour = false;
};

// Parses a snapshot's JSON; CommError if it is invalid.
Node parse_snapshot(const std::string& json);
// Lines, each at most `columns` wide.
std::string terminal_view(const Node& snapshot, const TerminalOptions& options = {});
// One line, for a log or a terminal without cursor control.
std::string status_line(const Node& snapshot);
// "starting", "running", "ended" or "failed".
std::string run_state(const Node& snapshot);

// Filters findings for display: each is reported once, after several looks. Used by one thread.
class StandingFindings {
 public:
  static constexpr int kStands = 2;  // consecutive looks before a finding is reported
  static constexpr int kGone = 5;    // looks without it, after which it is reported again

  // The lines to print now. `step` is the ranks' current step; -1: not known.
  std::vector<std::string> look(const std::vector<monitor::Finding>& findings, std::int64_t step);

 private:
  struct Seen {
    int present = 0;
    int absent = 0;
    bool said = false;
  };
  std::map<std::string, Seen> seen_;  // by rule, rank and cause
};

// A table of each rank's time, and the findings or that there are none. Only a run that did not
// fail and had enough steps is called healthy.
std::vector<std::string> doctor_summary(const monitor::RunRecord& run,
                                        const std::vector<monitor::Finding>& findings,
                                        bool failed = false);

}  // namespace lockstep::dashboard
