// Figures from the record of a run: the time of each rank by phase, as the table that doctor,
// report and page show, and the use of a host's GPUs.
//
//   const auto rows = budget_rows(run);
//   say(table_text(budget_table(rows)));
//   for (const GpuFigures& gpu : gpu_figures(run.gpus.front())) use(gpu);
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/monitor/run_record.h"

namespace lockstep::monitor {

// A table for the terminal, the report and the page.
struct Table {
  std::string title{};
  std::vector<std::string> heads{};
  std::vector<std::vector<std::string>> rows{};
  std::vector<std::string> notes{};  // sentences below the table, or in its place if it has no rows
  bool numbers = true;               // all columns but the first are right-aligned
};
// The table as text for a terminal, without a line break at the end.
std::string table_text(const Table& table);

// One rank's row. budget_rows() starts at the run's start (RunFacts::started_unix_s).
struct BudgetRow {
  int rank = 0;
  Interval budget{};
  Interval all{};  // the rank's whole time, also outside of steps
  // The phases in a step's order, "other" at last; they add up to 1 (spent_s()).
  std::vector<std::pair<const char*, double>> shares{};
  std::optional<double> collective_share{};  // for a rank that counts no steps

  // Means over the time with steps; over the whole time if no step was seen.
  const std::optional<ProcessRates>& process() const {
    return budget.steps > 0 ? budget.process : all.process;
  }
};
BudgetRow budget_row(const RankRecord& rank, double from_unix_s = 0);
std::vector<BudgetRow> budget_rows(const RunRecord& run);

// Omits columns in which every rank has 0.0 %, and all phases where no step was seen.
Table budget_table(const std::vector<BudgetRow>& rows);

// One GPU's medians over its host's samples; empty where the card has no value.
struct GpuFigures {
  int index = 0;  // NVML's
  std::optional<double> utilisation_percent{};
  std::optional<double> memory_bytes{};
  std::optional<double> memory_share{};  // of the card's memory
  std::optional<double> power_w{};
  double throttled_share = 0;  // share of samples throttled by heat, power or hardware
};
std::vector<GpuFigures> gpu_figures(const HostGpus& host);
// The host reduced to the GPUs that a process uses. A process with a CUDA context holds memory; an
// intermittent one may be idle in every sample.
HostGpus gpus_in_use(const HostGpus& host);
// The share of samples in which every GPU was busy for 85 % of the time or more: near 1 where ranks
// work together, 0 where GPUs take turns.
double busy_together_share(const HostGpus& host);

}  // namespace lockstep::monitor
