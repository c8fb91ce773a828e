#include "lockstep/monitor/run_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "lockstep/core/deadline.h"
#include "lockstep/core/document.h"

namespace lockstep::monitor {
namespace {

constexpr double kRecent_s = 5;
constexpr std::int64_t kRecentSteps = 10;

// Taken from the record, or else from what was logged.
std::int64_t last_step(const RunView& run) {
  std::int64_t step = run.metrics.empty() ? -1 : run.metrics.back().step;
  if (run.record)
    for (const RankRecord& rank : run.record->ranks)
      if (!rank.intervals.empty()) step = std::max(step, rank.intervals.back().step);
  return step;
}

// Also those that failed before they had recorded anything.
void mark_failed(RunView& run) {
  for (const Entry& entry : run.facts().failed_ranks.entries) {
    int number = -1;
    std::from_chars(entry.key.data(), entry.key.data() + entry.key.size(), number);
    if (number < 0 || number >= run.facts().world_size) continue;
    auto rank = std::ranges::find(run.ranks, number, &RankState::rank);
    if (rank == run.ranks.end()) rank = run.ranks.insert(rank, RankState{.rank = number});
    rank->status = RankStatus::kFailed;
    rank->exit = entry.value.text;
  }
  std::ranges::sort(run.ranks, {}, &RankState::rank);
}

}  // namespace

const RunFacts& RunView::facts() const {
  static const RunFacts none;
  return record ? record->facts : none;
}

const char* name(RankStatus status) {
  constexpr const char* kNames[] = {"running", "stopped", "ended", "failed"};
  return kNames[static_cast<std::size_t>(status)];
}

void conclude(RunView& run) {
  run.recorded = true;
  if (!run.record) return;
  const RunFacts& facts = run.facts();
  run.started_s = run.time_s = facts.started_unix_s;
  for (const RankRecord& rank : run.record->ranks)
    run.time_s = std::max(run.time_s, rank.intervals.back().unix_time_s);
  const Ending ending = ending_of(run);
  const bool failed = ending.over && !facts.failure.empty();
  run.state = failed ? "failed" : ending.killed ? "killed" : ending.over ? "ended" : "running";
  RunFacts said = facts;
  if (ending.killed && !failed)
    said.failure =
        "Its process is gone and has not written an end: it was killed, by a signal or for the "
        "memory that it used";
  if (ending.over) run.message = end_message(said, last_step(run), ending.early);
  for (const RankRecord& rank : run.record->ranks)
    run.ranks.push_back(
        {.rank = rank.rank, .status = ending.over ? RankStatus::kEnded : RankStatus::kRunning});
  mark_failed(run);
  describe_ranks(run);
  if (!run.record->ranks.empty()) {
    const std::span<const Interval> all = run.record->ranks.front().intervals;
    for (std::size_t i = 0; i < all.size(); ++i)
      if (all[i].steps > 0) add_point(run.step_ms, all[i].step, recent_step_ms(all.first(i + 1)));
  }
  run.findings = diagnose(*run.record);
  run.verdict = verdict_of(run, enough_to_judge(*run.record));
}

Verdict verdict_of(const RunView& run, bool enough) {
  if (!run.findings.empty()) return {};
  if (run.state == "starting") return {false, "Waiting for the first steps."};
  if (run.stall) return {false, "Nothing can be judged while no step ends."};
  if (run.state == "failed") return {false, "Nothing found to change; the run itself failed."};
  if (run.state == "killed") return {false, "Nothing found to change; the run was killed."};
  if (enough) return {run.state == "running", "Nothing found that slows this run down."};
  if (!run.ranks.empty() && static_cast<int>(run.ranks.size()) < run.facts().world_size)
    return {false, fmt::format("Nothing found. {} of {} ranks are seen here; whether they wait for "
                               "the others is not judged.",
                               run.ranks.size(), run.facts().world_size)};
  const bool stepped =
      std::ranges::any_of(run.ranks, [](const RankState& rank) { return rank.step > 0; });
  return {false, stepped ? "Nothing found, and too few steps to judge the run."
                         : "No step has been seen, and without steps nothing can be judged."};
}

Ending ending_of(const RunView& run) {
  const RunFacts& facts = run.facts();
  const bool current = run.metrics_unix_s == 0 || run.metrics_unix_s >= facts.started_unix_s;
  Ending ending{.through = current && !run.metrics.empty() &&
                           run.metrics.back().find("train_runtime") != nullptr};
  const bool written = facts.ended_unix_s > 0 || ending.through;
  ending.killed = !written && is_over(facts);
  ending.known = written || ending.killed;
  ending.over = ending.known || unix_time_s() - run.time_s > kRecordIdle_s;
  ending.early = written && !ending.through && facts.program == "trainer" &&
                 last_step(run) < facts.total_steps;
  return ending;
}

std::string end_message(const RunFacts& facts, std::int64_t step, bool early) {
  std::string text = facts.failure;
  const bool stepped = facts.total_steps > 0 && step > 0;
  if (text.empty() && early) {
    text = stepped ? fmt::format("Stopped on request at step {} of {}", step, facts.total_steps)
                   : "Stopped on request";
  }
  if (text.empty()) return text;
  if (!text.ends_with('.')) text += '.';
  if (text[0] >= 'a' && text[0] <= 'z') text[0] = static_cast<char>(text[0] - 'a' + 'A');
  if (facts.program == "trainer" && stepped)
    text +=
        " lockstep train --resume auto continues from its newest checkpoint, if it has saved "
        "one.";
  return text;
}

double recent_step_ms(std::span<const Interval> intervals) {
  const auto stepped = [](const Interval& interval) { return interval.steps > 0; };
  const auto first = std::ranges::find_if(intervals, stepped);
  if (first == intervals.end()) return 0;
  double seconds = 0;
  std::int64_t steps = 0;
  for (auto at = intervals.end(); at != first;) {
    --at;
    // An interval without a step belongs to the next one with steps; the first of those holds what
    // came before training.
    const bool enough = seconds >= kRecent_s && steps >= kRecentSteps;
    if (stepped(*at) && (enough || (at == first && steps > 0))) break;
    steps += at->steps;
    if (steps > 0) seconds += at->seconds;
  }
  return 1e3 * seconds / static_cast<double>(steps);
}

void describe_ranks(RunView& run) {
  if (!run.record) return;
  // What a launcher watches is of one start, and the facts may be by another host's clock.
  const double from_unix_s = run.recorded ? run.facts().started_unix_s : 0;
  for (const RankRecord& record : run.record->ranks) {
    if (record.intervals.empty()) continue;
    auto rank = std::ranges::lower_bound(run.ranks, record.rank, {}, &RankState::rank);
    if (rank == run.ranks.end() || rank->rank != record.rank)
      rank = run.ranks.insert(rank, RankState{.rank = record.rank});
    rank->step = record.intervals.back().step;
    rank->newest = newest_sample(record);
    rank->step_ms = recent_step_ms(record.intervals);
    if (rank->status != RankStatus::kEnded && rank->status != RankStatus::kFailed) continue;
    // Its last second may have had no step.
    const Interval all = budget_of(record, 0, from_unix_s);
    rank->step_ms = 1e3 * all.step_s();
    if (all.steps == 0) continue;
    rank->newest->seconds = all.seconds;
    rank->newest->host_s = all.host_s;
    rank->newest->device_s = all.device_s;
  }
  if (!run.record->ranks.empty())
    run.mean_step_s = budget_of(run.record->ranks.front(), 0, from_unix_s).step_s();
}

std::optional<double> newest_logged(const RunView& run, std::string_view name) {
  for (auto line = run.metrics.rbegin(); line != run.metrics.rend(); ++line)
    if (const double* value = line->find(name)) return *value;
  return std::nullopt;
}

std::int64_t step_of(const RunView& run) {
  std::int64_t step = -1;
  for (const RankState& rank : run.ranks) step = std::max(step, rank.step);
  return step;
}

std::optional<double> seconds_left(const RunView& run) {
  const std::int64_t step = step_of(run);
  if (run.state != "running" || run.stall || run.mean_step_s <= 0 || step < 0 ||
      step > run.facts().total_steps || run.facts().total_steps == 0)
    return std::nullopt;
  return static_cast<double>(run.facts().total_steps - step) * run.mean_step_s;
}

}  // namespace lockstep::monitor
