#include "lockstep/dashboard/doctor_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

namespace lockstep::dashboard {
namespace {

using ledger::Phase;

// One column of the table, with the text of each rank below its title.
struct Column {
  std::string title;
  std::vector<std::string> cells;
};

std::string table_text(const std::vector<Column>& columns, std::size_t rows) {
  std::string text;
  for (std::size_t row = 0; row <= rows; ++row) {
    text += row == 0 ? " " : "\n ";
    for (const Column& column : columns) {
      std::size_t width = column.title.size();
      for (const std::string& cell : column.cells) width = std::max(width, cell.size());
      text += fmt::format(" {:>{}}", row == 0 ? column.title : column.cells[row - 1], width + 1);
    }
  }
  return text;
}

// The mean of a rate over the rank's intervals, by their time.
double mean_rate(const monitor::RankRecord& rank, double monitor::ProcessRates::*rate) {
  double sum = 0;
  double seconds = 0;
  for (const monitor::Interval& interval : rank.intervals) {
    if (!interval.process) continue;
    sum += (*interval.process).*rate * interval.process->seconds;
    seconds += interval.process->seconds;
  }
  return seconds > 0 ? sum / seconds : 0;
}

template <typename Value>
Value most(const monitor::RankRecord& rank, Value monitor::Interval::*value) {
  Value result{};
  for (const monitor::Interval& interval : rank.intervals)
    result = std::max(result, interval.*value);
  return result;
}

template <typename Text>
Column column_of(const monitor::RunRecord& run, std::string title, Text text) {
  Column column{std::move(title), {}};
  for (const monitor::RankRecord& rank : run.ranks) column.cells.push_back(text(rank));
  return column;
}

// By the device's clock where it is there: a host that only enqueues is fast in every phase.
double share_of(const monitor::Budget& budget, Phase phase) {
  if (budget.seconds <= 0) return 0;
  const bool on_device = std::ranges::any_of(budget.device_s, [](double s) { return s > 0; });
  const bool of_device = phase == Phase::kForward || phase == Phase::kBackward ||
                         phase == Phase::kCommunication || phase == Phase::kOptimizer;
  return on_device && of_device ? budget.device_s[ledger::index(phase)] / budget.seconds
                                : budget.share(phase);
}

void add_budget(std::vector<Column>& columns, const monitor::RunRecord& run) {
  std::vector<monitor::Budget> budgets;
  for (const monitor::RankRecord& rank : run.ranks)
    budgets.push_back(budget_of(rank, 0, run.facts.started_unix_s));
  const auto add = [&](std::string title, auto text) {
    Column column{std::move(title), {}};
    for (const monitor::Budget& budget : budgets) column.cells.push_back(text(budget));
    columns.push_back(std::move(column));
  };
  if (std::ranges::none_of(budgets, [](const monitor::Budget& b) { return b.steps > 0; })) return;
  add("steps", [](const monitor::Budget& budget) { return fmt::format("{}", budget.steps); });
  add("ms/step",
      [](const monitor::Budget& budget) { return fmt::format("{:.1f}", budget.step_s() * 1e3); });
  constexpr Phase kParts[] = {Phase::kData,          Phase::kForward,   Phase::kBackward,
                              Phase::kCommunication, Phase::kOptimizer, Phase::kEvaluation,
                              Phase::kLogging,       Phase::kSaving};
  const auto add_share = [&](const char* title, auto share) {
    if (std::ranges::any_of(budgets, [&](const monitor::Budget& b) { return share(b) >= 0.0005; }))
      add(title, [&](const monitor::Budget& b) { return fmt::format("{:.1f} %", 100 * share(b)); });
  };
  for (const Phase phase : kParts)
    add_share(ledger::name(phase),
              [phase](const monitor::Budget& budget) { return share_of(budget, phase); });
  add_share("other", [&](const monitor::Budget& budget) {
    double rest = 1;
    for (const Phase phase : kParts) rest -= share_of(budget, phase);
    return std::max(rest, 0.0);
  });
}

const char* nothing_found(const monitor::RunRecord& run, bool failed) {
  if (failed) return "nothing found to change; the run itself failed.";
  if (enough_to_judge(run)) return "healthy: no rule has found anything to change.";
  const bool stepped = std::ranges::any_of(
      run.ranks, [](const monitor::RankRecord& rank) { return budget_of(rank).steps > 0; });
  return stepped ? "nothing found, and too few steps to judge the run."
                 : "nothing found, and no step was seen to judge the run by.";
}

std::string key_of(const monitor::Finding& finding) {
  return fmt::format("{} {} {}", finding.rule, finding.rank, finding.cause);
}

}  // namespace

std::vector<std::string> StandingFindings::look(const std::vector<monitor::Finding>& findings,
                                                std::int64_t step) {
  std::vector<std::string> lines;
  std::set<std::string> present;
  for (const monitor::Finding& finding : findings) {
    const std::string key = key_of(finding);
    if (!present.insert(key).second) continue;
    Seen& seen = seen_[key];
    seen.absent = 0;
    if (++seen.present < kStands || seen.said) continue;
    seen.said = true;
    lines.push_back(fmt::format("[doctor]{} {}", step >= 0 ? fmt::format(" step {}:", step) : "",
                                finding_text(finding)));
  }
  for (auto item = seen_.begin(); item != seen_.end();) {
    Seen& seen = item->second;
    const bool absent = !present.contains(item->first);
    if (absent) seen.present = 0;
    const bool forgotten = absent && (!seen.said || ++seen.absent >= kGone);
    item = forgotten ? seen_.erase(item) : std::next(item);
  }
  return lines;
}

std::vector<std::string> doctor_summary(const monitor::RunRecord& run,
                                        const std::vector<monitor::Finding>& findings,
                                        bool failed) {
  if (run.ranks.empty()) return {"[doctor] no rank lived long enough to be looked at."};
  double seconds = 0;
  for (const monitor::RankRecord& rank : run.ranks) {
    double of_rank = 0;
    for (const monitor::Interval& interval : rank.intervals) of_rank += interval.seconds;
    seconds = std::max(seconds, of_rank);
  }
  std::vector<Column> columns;
  columns.push_back(column_of(
      run, "rank", [](const monitor::RankRecord& rank) { return std::to_string(rank.rank); }));
  add_budget(columns, run);
  const bool budget = columns.size() > 1;
  columns.push_back(column_of(run, "cores", [](const monitor::RankRecord& rank) {
    return fmt::format("{:.2f}", mean_rate(rank, &monitor::ProcessRates::cores));
  }));
  columns.push_back(column_of(run, "memory", [](const monitor::RankRecord& rank) {
    return fmt::format(
        "{:.2f} GiB",
        static_cast<double>(most(rank, &monitor::Interval::resident_bytes)) / (1u << 30));
  }));
  columns.push_back(column_of(run, "threads", [](const monitor::RankRecord& rank) {
    return std::to_string(most(rank, &monitor::Interval::threads));
  }));
  columns.push_back(column_of(run, "page faults/s", [](const monitor::RankRecord& rank) {
    return fmt::format("{:.0f}", mean_rate(rank, &monitor::ProcessRates::minor_faults_per_s));
  }));
  std::vector<std::string> lines = {fmt::format(
      "[doctor] {} of {} ranks, {:.1f} s{}:\n{}", run.ranks.size(), run.facts.world_size, seconds,
      budget ? "; where the time between the first and the last step went"
             : "; no step was seen, as in a program without Lockstep's backend",
      table_text(columns, run.ranks.size()))};
  if (findings.empty()) lines.push_back(fmt::format("[doctor] {}", nothing_found(run, failed)));
  for (const monitor::Finding& finding : findings)
    lines.push_back("[doctor] " + finding_text(finding));
  return lines;
}

}  // namespace lockstep::dashboard
