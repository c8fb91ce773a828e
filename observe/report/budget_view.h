// Where the time of ranks went and how busy they were, as charts and figures of a run's record.
//
//   figures({draw(budget_bars("Step budget", {{"rank 0", settled_budget(rank)}}))});
//
// Free functions without state; call them from any thread.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/monitor/run_figures.h"
#include "observe/report/chart.h"

namespace lockstep::report {

// The parts of a step, as they are drawn: data, forward, backward, communication, optimizer,
// evaluation, logging and saving, other.
const std::vector<Part>& budget_parts();
// Sums by part.
std::vector<double> by_part(const monitor::PhaseSeconds& seconds);

// Without the start: a quarter of the recorded time, at most five seconds.
monitor::Interval settled_budget(const monitor::RankRecord& rank);
// The mean of the ranks: what one of them spent.
monitor::Interval mean_budget(const monitor::RunRecord& run);

using NamedBudget = std::pair<std::string, monitor::Interval>;
// Milliseconds of a step.
BarChart budget_bars(const std::string& title, const std::vector<NamedBudget>& budgets);

// Shares over the seconds since `start_unix_s`.
ColumnChart budget_over_time(const monitor::RankRecord& rank, double start_unix_s);
double start_of(const monitor::RunRecord& run);

// Cores that each rank used, and what each GPU's driver says, over seconds.
LineChart cores_over_time(const monitor::RunRecord& run);
LineChart gpus_over_time(const monitor::RunRecord& run);
inline constexpr std::size_t kMostLines = 16;  // ranks or GPUs in one of these charts

// The cores that a rank used, as the mean over ranks; empty where nothing was sampled of one.
std::optional<double> mean_cores(const monitor::RunRecord& run);
// The mean over as many GPUs as there are ranks, while steps ran, 0 to 100.
std::optional<double> mean_gpu_percent(const monitor::RunRecord& run);
// 0 to 1: of the GPUs where there are some, else of the cores that the ranks of a host may use.
std::optional<double> utilisation(const monitor::RunRecord& run);

}  // namespace lockstep::report
