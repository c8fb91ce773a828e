#include "lockstep/monitor/diagnosis.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

#include "lockstep/core/text.h"
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
  // If every rank waits for a core, chance decides whose steps take longest, unless one waits far
  // more than the others.
  if (const auto starved = detail::starved_share(view))
    std::erase_if(findings, [&](const Finding& finding) {
      if (finding.rule != "straggler") return false;
      const bool waits_more = std::ranges::any_of(view.ranks, [&](const detail::RankWindows& rank) {
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

std::string finding_text(const Finding& finding) {
  std::string about = finding.rank >= 0 ? fmt::format("rank {}", finding.rank) : "";
  if (!finding.cause.empty()) about += (about.empty() ? "" : ", ") + finding.cause;
  return printable(fmt::format(
      "{}{}: {} Evidence: {} Change: {} Expected gain: {}.", finding.rule,
      about.empty() ? "" : " (" + about + ")", finding.what, finding.evidence, finding.remedy,
      finding.gain > 0 ? fmt::format("about {:.0f} %", 100 * finding.gain) : "not known"));
}

Node findings_node(const std::vector<Finding>& findings) {
  std::vector<Node> items;
  for (const Finding& finding : findings)
    items.push_back(map_node({{"rule", text_node(finding.rule)},
                              {"rank", integer_node(finding.rank)},
                              {"cause", text_node(finding.cause)},
                              {"what", text_node(finding.what)},
                              {"evidence", text_node(finding.evidence)},
                              {"remedy", text_node(finding.remedy)},
                              {"gain", real_node(finding.gain)}}));
  return list_node(std::move(items));
}

}  // namespace lockstep::monitor

namespace lockstep::monitor::detail {

using ledger::Counter;
using ledger::index;
using ledger::Phase;

namespace {

// Below this many windows the first one stays: a short record has nothing to spare.
constexpr std::size_t kWindowsToSpare = 4;

// Removes the time outside of steps: in the first window of a start also the program's time before
// its loop, if its phases are known.
void keep_steps(Interval& window, bool first) {
  const PhaseSeconds spent = spent_s(window);
  const auto take = [&](Phase phase) {
    double& host = window.host_s[index(phase)];
    window.seconds -=
        phase == Phase::kNone ? std::min(spent[index(phase)], host) : spent[index(phase)];
    host = window.device_s[index(phase)] = 0;
  };
  if (first && window.host_s[index(Phase::kForward)] > 0) take(Phase::kNone);
  for (const Phase phase : {Phase::kStartup, Phase::kEvaluation, Phase::kEnded}) take(phase);
}

bool is_timed(const Interval& window) {
  return has_device_times(window.device_s);
}

RankWindows rank_view(const RankRecord& record, double from_unix_s) {
  RankWindows rank{.rank = record.rank};
  Interval open;
  bool stepping = false;
  for (const Interval& interval : record.intervals) {
    if (interval.unix_time_s < from_unix_s) continue;
    if (interval.start) stepping = false;  // a run that is started again begins with loading
    if (!stepping) open = {};
    join(open, interval);
    if (open.steps == 0) continue;
    keep_steps(open, !std::exchange(stepping, true));
    if (open.seconds > 0) rank.windows.push_back(std::move(open));
    open = {};
  }
  rank.on_device = std::ranges::any_of(rank.windows, is_timed);
  if (rank.on_device) std::erase_if(rank.windows, std::not_fn(is_timed));
  if (rank.windows.size() >= kWindowsToSpare) rank.windows.erase(rank.windows.begin());
  for (const Interval& window : rank.windows) join(rank.sum, window);
  return rank;
}

}  // namespace

View make_view(const RunRecord& run) {
  View view{.run = run};
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (const RankRecord& record : run.ranks) {
    view.ranks.push_back(rank_view(record, run.facts.started_unix_s));
    least = std::min(least, view.ranks.back().sum.steps);
  }
  for (const HostGpus& host : run.gpus) {
    HostGpus& since = view.gpus.emplace_back(HostGpus{.host = host.host, .gpus = host.gpus});
    for (const GpuSample& sample : host.samples)
      if (sample.unix_time_s >= run.facts.started_unix_s) since.samples.push_back(sample);
    if (since.samples.empty()) view.gpus.pop_back();
  }
  view.enough = !view.ranks.empty() && least >= kMinSteps;
  return view;
}

// ------------------------------------------------------------------ figures

double lower_median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[(values.size() - 1) / 2];
}

std::uint64_t count(const RankWindows& rank, Counter counter) {
  return rank.sum.counts[index(counter)];
}

double spent_s(const Interval& window, Phase phase) {
  return monitor::spent_s(window)[index(phase)];
}

double step_s(const RankWindows& rank) {
  return median_of(rank,
                   [](const Interval& w) { return w.seconds / static_cast<double>(w.steps); });
}

double share(const RankWindows& rank, Phase phase) {
  return median_of(rank, [&](const Interval& w) { return spent_s(w, phase) / w.seconds; });
}

double bounded_gain(const RankWindows& rank, double gain) {
  const double idle =
      median_of(rank, [](const Interval& w) { return idle_s(w.seconds, w.device_s) / w.seconds; });
  return rank.on_device ? std::min(gain, idle) : gain;
}

double delay_share(const RankWindows& rank) {
  return median_of(rank, [](const Interval& window) {
    return window.process ? window.process->run_delay_share.value_or(0) : 0;
  });
}

double throttled_share(const RankWindows& rank) {
  return median_of(rank, [](const Interval& window) { return window.throttled_share.value_or(0); });
}

double rate(const RankWindows& rank, double ProcessRates::*which) {
  return median_of(
      rank, [&](const Interval& window) { return window.process ? (*window.process).*which : 0; });
}

double least_share(const View& view, Phase phase) {
  const auto shares = of_ranks(view, [&](const RankWindows& rank) { return share(rank, phase); });
  return shares.empty() ? 0 : *std::min_element(shares.begin(), shares.end());
}

double usual_share(const View& view, Phase phase) {
  return lower_median(of_ranks(view, [&](const RankWindows& rank) { return share(rank, phase); }));
}

double passes_per_update(const View& view) {
  return lower_median(of_ranks(view, [](const RankWindows& rank) {
    const auto updates = std::max<std::uint64_t>(count(rank, Counter::kUpdates) > 0
                                                     ? count(rank, Counter::kUpdates)
                                                     : static_cast<std::uint64_t>(rank.sum.steps),
                                                 1);
    return static_cast<double>(count(rank, Counter::kMicroBatches)) / static_cast<double>(updates);
  }));
}

// ------------------------------------------------------------------ facts and GPUs

std::optional<std::int64_t> integer_argument(const View& view, std::string_view key) {
  const Entry* entry = view.run.facts.arguments.find(key);
  if (entry == nullptr || !entry->value.is(NodeKind::kInteger)) return std::nullopt;
  return entry->value.integer;
}

bool on_cuda(const View& view) {
  return view.run.facts.device == "cuda";
}

std::int64_t round_up(double value) {
  for (std::int64_t ten = 1; ten < 1'000'000'000'000; ten *= 10)
    for (const std::int64_t digit : {1, 2, 5})
      if (static_cast<double>(digit * ten) >= value * (1 - 1e-6)) return digit * ten;
  return 1'000'000'000'000;
}

std::vector<GpuFigures> gpus_of_ranks(const View& view, const HostGpus& host) {
  const auto ranks = static_cast<std::size_t>(std::max(view.run.facts.ranks_on_host, 1));
  if (!on_cuda(view)) return {};
  auto all = gpu_figures(host);
  if (all.size() > ranks) all = gpu_figures(gpus_in_use(host));
  if (all.size() > ranks) all.clear();
  return all;
}

std::optional<GpuFigures> gpu_of_rank(const View& view, int rank) {
  const int on_host = std::max(view.run.facts.ranks_on_host, 1);
  for (const HostGpus& host : view.gpus) {
    if (host.host != rank / on_host) continue;
    const auto all = gpus_of_ranks(view, host);
    const auto local = static_cast<std::size_t>(rank % on_host);
    if (local < all.size()) return all[local];
  }
  return std::nullopt;
}

std::optional<double> idle_share(const View& view, const RankWindows& rank) {
  const auto gpu = gpu_of_rank(view, rank.rank);
  if (!gpu || !gpu->utilisation_percent) return std::nullopt;
  double idle = 1 - *gpu->utilisation_percent / 100;
  for (const Phase phase : {Phase::kData, Phase::kSaving, Phase::kLogging})
    idle -= share(rank, phase);
  return std::max(0.0, idle);
}

std::optional<double> memory_share(const View& view) {
  std::optional<double> most;
  for (const RankWindows& rank : view.ranks) {
    const auto gpu = gpu_of_rank(view, rank.rank);
    if (gpu && gpu->memory_share) most = std::max(most.value_or(0), *gpu->memory_share);
  }
  return most;
}

}  // namespace lockstep::monitor::detail
