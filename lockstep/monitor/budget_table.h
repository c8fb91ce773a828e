// Where the time of each rank went, as figures and as the table that the doctor prints.
//
//   const auto rows = budget_rows(run);
//   say(budget_table(rows));
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/monitor/run_record.h"

namespace lockstep::monitor {

// budget_rows() has them since the run's start (RunFacts::started_unix_s).
struct BudgetRow {
  int rank = 0;
  Interval budget{};
  // The phases in a step's order, "other" at last; they add up to 1 (budget.h).
  std::vector<std::pair<const char*, double>> shares{};
  std::optional<double>
      cores{};  // mean while it made steps; over all of its time where no step was seen
  double minor_faults_per_s = 0;
  std::uint64_t resident_bytes = 0;          // most
  int threads = 0;                           // most
  std::optional<double> collective_share{};  // of a rank that counts no steps
};
BudgetRow budget_row(const RankRecord& rank, double from_unix_s = 0);
std::vector<BudgetRow> budget_rows(const RunRecord& run);

// A line of titles and one of each rank, without a line break at the end. Parts that no rank spends
// time in are left away, and so are all of them where no step was seen.
std::string budget_table(const std::vector<BudgetRow>& rows);

}  // namespace lockstep::monitor
