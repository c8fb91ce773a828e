// Figures over the record of a run: where the time of each rank went, with the table that doctor,
// report and page show, and what the GPUs of a host did.
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

// A table of a run for a terminal, the report or the page.
struct Table {
  std::string title{};
  std::vector<std::string> heads{};
  std::vector<std::vector<std::string>> rows{};
  std::vector<std::string> notes{};  // sentences below; alone where there is nothing to list
  bool numbers = true;               // all columns but the first are right-aligned
};
// Heads and rows for a terminal, without a line break at the end.
std::string table_text(const Table& table);

// One rank. budget_rows() counts from the run's start (RunFacts::started_unix_s).
struct BudgetRow {
  int rank = 0;
  Interval budget{};
  Interval all{};  // all of its time, also outside of steps
  // The phases in a step's order, "other" at last; they add up to 1 (budget.h).
  std::vector<std::pair<const char*, double>> shares{};
  std::optional<double> collective_share{};  // of a rank that counts no steps

  // Means while it made steps; over all of its time where no step was seen.
  const std::optional<ProcessRates>& process() const {
    return budget.steps > 0 ? budget.process : all.process;
  }
};
BudgetRow budget_row(const RankRecord& rank, double from_unix_s = 0);
std::vector<BudgetRow> budget_rows(const RunRecord& run);

// Without the columns in which every rank has 0.0 %, and without any phase where no step was seen.
Table budget_table(const std::vector<BudgetRow>& rows);

// One GPU: medians over the samples of its host, empty where the card has no value.
struct GpuFigures {
  int index = 0;  // NVML's
  std::optional<double> utilisation_percent{};
  std::optional<double> memory_bytes{};
  std::optional<double> memory_share{};  // of what the card has
  std::optional<double> power_w{};
  double throttled_share = 0;  // of the samples, by heat, power or hardware
};
std::vector<GpuFigures> gpu_figures(const HostGpus& host);
// The host with only the GPUs that some process uses. A process with a CUDA context holds memory;
// one that works now and then may be idle in every sample.
HostGpus gpus_in_use(const HostGpus& host);
// The share of samples in which every GPU was busy for 85 % of the time or more: near 1 where ranks
// work together, 0 where GPUs take turns.
double busy_together_share(const HostGpus& host);

}  // namespace lockstep::monitor
