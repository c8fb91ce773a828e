#include "lockstep/monitor/budget_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace lockstep::monitor {
namespace {

using ledger::Phase;

constexpr double kGiB = 1u << 30;
// Shown as 0.0 %.
constexpr double kNothing = 0.0005;

// All of them, in a step's order: the shares add up to 1.
constexpr Phase kParts[] = {Phase::kData,          Phase::kForward,    Phase::kBackward,
                            Phase::kCommunication, Phase::kOptimizer,  Phase::kEvaluation,
                            Phase::kLogging,       Phase::kSaving,     Phase::kStartup,
                            Phase::kEnded,         Phase::kDeviceWait, Phase::kNone};
static_assert(std::size(kParts) == ledger::kPhases);

// One column of the table, with the text of each rank below its title.
struct Column {
  std::string title;
  std::vector<std::string> cells;
};

std::string table_text(const std::vector<Column>& columns, std::size_t rows) {
  std::string text;
  for (std::size_t row = 0; row <= rows; ++row) {
    if (row > 0) text += '\n';
    for (const Column& column : columns) {
      std::size_t width = column.title.size();
      for (const std::string& cell : column.cells) width = std::max(width, cell.size());
      text += fmt::format("  {:>{}}", row == 0 ? column.title : column.cells[row - 1], width);
    }
  }
  return text;
}

}  // namespace

BudgetRow budget_row(const RankRecord& rank, double from_unix_s) {
  BudgetRow row{.rank = rank.rank, .budget = budget_of(rank, 0, from_unix_s)};
  row.collective_share = mean_collective_share(rank, from_unix_s);
  for (const Phase phase : kParts)
    row.shares.emplace_back(phase_key(phase), row.budget.share(phase));
  Interval all;
  for (const Interval& interval : rank.intervals)
    if (interval.unix_time_s >= from_unix_s) join(all, interval);
  row.resident_bytes = all.resident_bytes;
  row.threads = all.threads;
  if (const auto& process = row.budget.steps > 0 ? row.budget.process : all.process) {
    row.cores = process->cores;
    row.minor_faults_per_s = process->minor_faults_per_s;
  }
  return row;
}

std::vector<BudgetRow> budget_rows(const RunRecord& run) {
  std::vector<BudgetRow> rows;
  for (const RankRecord& rank : run.ranks)
    rows.push_back(budget_row(rank, run.facts.started_unix_s));
  return rows;
}

std::string budget_table(const std::vector<BudgetRow>& rows) {
  std::vector<Column> columns;
  const auto add = [&](const char* title, auto text) {
    Column& column = columns.emplace_back(Column{title, {}});
    for (const BudgetRow& row : rows) column.cells.push_back(text(row));
  };
  add("rank", [](const BudgetRow& row) { return std::to_string(row.rank); });
  add("steps", [](const BudgetRow& row) { return std::to_string(row.budget.steps); });
  if (std::ranges::any_of(rows, [](const BudgetRow& row) { return row.budget.steps > 0; })) {
    add("ms/step",
        [](const BudgetRow& row) { return fmt::format("{:.2f}", 1e3 * row.budget.step_s()); });
    for (std::size_t part = 0; part < rows.front().shares.size(); ++part) {
      const auto share = [part](const BudgetRow& row) { return row.shares[part].second; };
      if (std::ranges::any_of(rows, [&](const BudgetRow& row) { return share(row) >= kNothing; }))
        add(rows.front().shares[part].first,
            [&](const BudgetRow& row) { return fmt::format("{:.1f} %", 100 * share(row)); });
    }
  }
  if (std::ranges::any_of(rows,
                          [](const BudgetRow& row) { return row.collective_share.has_value(); }))
    add("in collectives", [](const BudgetRow& row) {
      return row.collective_share ? fmt::format("{:.1f} %", 100 * *row.collective_share)
                                  : std::string("-");
    });
  add("cores", [](const BudgetRow& row) { return fmt::format("{:.2f}", row.cores.value_or(0)); });
  add("memory", [](const BudgetRow& row) {
    return fmt::format("{:.2f} GiB", static_cast<double>(row.resident_bytes) / kGiB);
  });
  add("threads", [](const BudgetRow& row) { return std::to_string(row.threads); });
  add("page faults/s",
      [](const BudgetRow& row) { return fmt::format("{:.0f}", row.minor_faults_per_s); });
  return table_text(columns, rows.size());
}

}  // namespace lockstep::monitor
