// Where the time of each rank went, as figures and as the table that doctor, report and page show.
//
//   const auto rows = budget_rows(run);
//   say(table_text(budget_table(rows)));
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/monitor/run_record.h"

namespace lockstep::monitor {

// What a run has left, for whoever shows it: a terminal, the report, the page.
struct Table {
  std::string title{};
  std::vector<std::string> heads{};
  std::vector<std::vector<std::string>> rows{};
  std::vector<std::string> notes{};  // sentences below; alone where there is nothing to list
  bool numbers = true;               // all columns but the first are right-aligned
};
// Heads and rows for a terminal, without a line break at the end.
std::string table_text(const Table& table);

// budget_rows() has them since the run's start (RunFacts::started_unix_s).
struct BudgetRow {
  int rank = 0;
  Interval budget{};
  Interval all{};  // of all of its time, not of its steps alone
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

// Parts that no rank spends time in are left away, and so are all of them where no step was seen.
Table budget_table(const std::vector<BudgetRow>& rows);

}  // namespace lockstep::monitor
