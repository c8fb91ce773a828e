#include "observe/dashboard/doctor_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>

#include "lockstep/monitor/run_figures.h"

namespace lockstep::dashboard {
namespace {

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
  const auto rows = monitor::budget_rows(run);
  const bool budget =
      std::ranges::any_of(rows, [](const auto& row) { return row.budget.steps > 0; });
  std::vector<std::string> lines = {fmt::format(
      "[doctor] {} of {} ranks, {:.1f} s{}:\n{}", run.ranks.size(), run.facts.world_size, seconds,
      budget ? "; where the time between the first and the last step went"
             : fmt::format("; {}", monitor::without_steps(run)),
      table_text(monitor::budget_table(rows)))};
  if (findings.empty())
    lines.push_back("[doctor] " + (failed ? "nothing found to change; the run itself failed."
                                          : monitor::nothing_found_text(run)));
  for (const monitor::Finding& finding : findings)
    lines.push_back("[doctor] " + finding_text(finding));
  return lines;
}

}  // namespace lockstep::dashboard
