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

}  // namespace

BudgetRow budget_row(const RankRecord& rank, double from_unix_s) {
  BudgetRow row{.rank = rank.rank, .budget = budget_of(rank, 0, from_unix_s)};
  row.collective_share = mean_collective_share(rank, from_unix_s);
  for (const Phase phase : kParts)
    row.shares.emplace_back(phase_key(phase), row.budget.share(phase));
  for (const Interval& interval : rank.intervals)
    if (interval.unix_time_s >= from_unix_s) join(row.all, interval);
  return row;
}

std::vector<BudgetRow> budget_rows(const RunRecord& run) {
  std::vector<BudgetRow> rows;
  for (const RankRecord& rank : run.ranks)
    rows.push_back(budget_row(rank, run.facts.started_unix_s));
  return rows;
}

std::string table_text(const Table& table) {
  std::vector<std::size_t> widths;
  for (const std::string& head : table.heads) widths.push_back(head.size());
  for (const auto& row : table.rows)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string text;
  const auto add = [&](const std::vector<std::string>& cells) {
    for (std::size_t i = 0; i < cells.size(); ++i)
      text += fmt::format("  {:>{}}", cells[i], widths[i]);
  };
  add(table.heads);
  for (const auto& row : table.rows) {
    text += '\n';
    add(row);
  }
  return text;
}

Table budget_table(const std::vector<BudgetRow>& rows) {
  Table table{.title = "Where the time went", .rows = {rows.size(), std::vector<std::string>{}}};
  const auto any = [&](auto is) { return std::ranges::any_of(rows, is); };
  const auto add = [&](const char* head, auto text) {
    table.heads.emplace_back(head);
    for (std::size_t i = 0; i < rows.size(); ++i) table.rows[i].push_back(text(rows[i]));
  };
  const auto percent = [](const std::optional<double>& share) {
    return share ? fmt::format("{:.1f} %", 100 * *share) : std::string("-");
  };
  add("rank", [](const BudgetRow& row) { return std::to_string(row.rank); });
  add("steps", [](const BudgetRow& row) { return std::to_string(row.budget.steps); });
  if (any([](const BudgetRow& row) { return row.budget.steps > 0; })) {
    add("ms/step",
        [](const BudgetRow& row) { return fmt::format("{:.2f}", 1e3 * row.budget.step_s()); });
    for (std::size_t part = 0; part < std::size(kParts); ++part) {
      const auto share = [part](const BudgetRow& row) { return row.shares[part].second; };
      if (any([&](const BudgetRow& row) { return share(row) >= kNothing; }))
        add(phase_key(kParts[part]), [&](const BudgetRow& row) { return percent(share(row)); });
    }
  }
  if (any([](const BudgetRow& row) { return row.collective_share.has_value(); }))
    add("in collectives", [&](const BudgetRow& row) { return percent(row.collective_share); });
  const auto rate = [](const BudgetRow& row, double ProcessRates::*of) {
    return row.process() ? (*row.process()).*of : 0;
  };
  add("cores",
      [&](const BudgetRow& row) { return fmt::format("{:.2f}", rate(row, &ProcessRates::cores)); });
  add("memory", [](const BudgetRow& row) {
    return fmt::format("{:.2f} GiB", static_cast<double>(row.all.resident_bytes) / kGiB);
  });
  add("threads", [](const BudgetRow& row) { return std::to_string(row.all.threads); });
  add("page faults/s", [&](const BudgetRow& row) {
    return fmt::format("{:.0f}", rate(row, &ProcessRates::minor_faults_per_s));
  });
  if (any([](const BudgetRow& row) { return row.all.cpu_limit_cores.has_value(); })) {
    add("CPU limit", [](const BudgetRow& row) {
      const auto& limit = row.all.cpu_limit_cores;
      return limit ? fmt::format("{:.2f}", *limit) : std::string("-");
    });
    add("stopped by it", [&](const BudgetRow& row) { return percent(row.all.throttled_share); });
  }
  return table;
}

}  // namespace lockstep::monitor
