// The figures of a run that people compare, and what happened in it.
//
//   for (const Figure& figure : figures_of(run)) row(figure.name, figure.text());
//
// Pure functions of what was read; call them from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/monitor/run_view.h"

namespace lockstep::report {

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

// How the run ended, or that nothing of that is recorded; without a text where nothing is there.
struct RunEnd {
  RunEvent event{};
  bool well = false;  // it has done what it was to do
};
RunEnd end_of(const RunView& run);

// Losses and gradients that were not finite.
std::vector<RunEvent> bad_steps_of(const RunView& run);

// Starts, resumes, skipped steps, GPUs that failed, the end.
std::vector<RunEvent> events_of(const RunView& run);

// A stretch of steps that were measured and measured again, because the run was resumed.
struct Superseded {
  std::int64_t first = 0, last = 0;
};
std::vector<Superseded> superseded_of(const RunView& run);

}  // namespace lockstep::report
