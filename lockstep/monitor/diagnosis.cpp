#include "lockstep/monitor/diagnosis.h"

#include <algorithm>
#include <utility>

#include "lockstep/monitor/rules.h"

namespace lockstep::monitor {
namespace {

constexpr detail::Rule kRules[] = {
    detail::not_launched,
    detail::unbalanced_gpus,
    detail::straggler,
    detail::loader_bound,
    detail::communication_bound,
    detail::accumulation_synchronises,
    detail::micro_batch_too_small,
    detail::logging_too_often,
    detail::saving_too_often,
    detail::find_unused_parameters,
    detail::float32,
    detail::unfused_optimizer,
    detail::replicated_optimizer,
    detail::page_faults,
    detail::too_many_threads,
    detail::cpu_starved,
};

}  // namespace

std::vector<Finding> diagnose(const RunRecord& run) {
  const detail::View view = detail::make_view(run);
  std::vector<Finding> findings;
  for (const detail::Rule rule : kRules)
    if (auto finding = rule(view)) findings.push_back(std::move(*finding));
  std::stable_sort(findings.begin(), findings.end(),
                   [](const Finding& a, const Finding& b) { return a.gain > b.gain; });
  return findings;
}

bool enough_to_judge(const RunRecord& run) {
  return detail::make_view(run).enough;
}

std::optional<double> starved_share(const RunRecord& run) {
  return detail::starved_share(detail::make_view(run));
}

std::string nothing_found_text(const RunRecord& run) {
  if (enough_to_judge(run)) return "healthy: no rule has found anything to change.";
  return counts_steps(run)
             ? "nothing found, and too few steps to judge the run."
             : std::string("nothing found, and no step was seen to judge the run by (") +
                   without_steps(run) + ").";
}

}  // namespace lockstep::monitor
