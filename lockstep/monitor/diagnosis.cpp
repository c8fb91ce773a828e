#include "lockstep/monitor/diagnosis.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/monitor/rules.h"

namespace lockstep::monitor {
namespace {

struct Listed {
  detail::Rule rule;
  bool compares = false;  // ranks with each other: nothing follows from a part of them
  bool by_steps = true;   // where there are enough on every rank
};
constexpr Listed kRules[] = {
    {.rule = detail::not_launched, .by_steps = false},
    {.rule = detail::never_exchanged, .by_steps = false},
    {.rule = detail::unbalanced_gpus, .by_steps = false},
    {.rule = detail::straggler, .compares = true, .by_steps = false},
    {detail::loader_bound},
    {.rule = detail::communication_bound, .compares = true},
    {detail::accumulation_synchronises},
    {.rule = detail::micro_batch_too_small, .compares = true},
    {detail::logging_too_often},
    {detail::saving_too_often},
    {.rule = detail::find_unused_parameters, .compares = true},
    {detail::page_faults},
    {detail::too_many_threads},
    {detail::cpu_starved},
};

constexpr double kFarMore = 3;

}  // namespace

std::vector<Finding> diagnose(const RunRecord& run) {
  const detail::View view = detail::make_view(run);
  std::vector<Finding> findings;
  const bool all_ranks = is_complete(run);
  for (const Listed& listed : kRules) {
    if ((listed.compares && !all_ranks) || (listed.by_steps && !view.enough)) continue;
    if (auto finding = listed.rule(view)) findings.push_back(std::move(*finding));
  }
  // Where every rank waits for a core, chance decides whose steps take longest, unless one waits
  // far more than the others.
  if (const auto starved = detail::starved_share(view))
    std::erase_if(findings, [&](const Finding& finding) {
      if (finding.rule != "straggler") return false;
      const bool waits_more = std::ranges::any_of(view.ranks, [&](const detail::RankView& rank) {
        return rank.rank == finding.rank && detail::delay_share(rank) > kFarMore * *starved;
      });
      return finding.cause == "compute" || (finding.cause == "cpu-starved" && !waits_more);
    });
  std::stable_sort(findings.begin(), findings.end(),
                   [](const Finding& a, const Finding& b) { return a.gain > b.gain; });
  return findings;
}

bool enough_to_judge(const RunRecord& run) {
  return is_complete(run) && detail::make_view(run).enough;
}

std::string missing_ranks_text(const RunRecord& run) {
  if (is_complete(run) || run.ranks.empty()) return {};
  return fmt::format(
      "{} of {} ranks are recorded here, so it is not judged whether ranks wait for each other. "
      "Copy the other hosts' {}/rank_*.jsonl to this folder, or record into a folder that all "
      "hosts share.",
      run.ranks.size(), run.facts.world_size, kRecordFolder);
}

std::optional<double> starved_share(const RunRecord& run) {
  return detail::starved_share(detail::make_view(run));
}

std::string nothing_found_text(const RunRecord& run) {
  if (!is_complete(run) && detail::make_view(run).enough)
    return "nothing found. " + missing_ranks_text(run);
  if (enough_to_judge(run)) return "healthy: no rule has found anything to change.";
  return counts_steps(run)
             ? "nothing found, and too few steps to judge the run."
             : std::string("nothing found, and no step was seen to judge the run by (") +
                   without_steps(run) + ").";
}

}  // namespace lockstep::monitor
