#include "lockstep/dashboard/live_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "lockstep/core/document.h"

namespace lockstep::dashboard {
namespace {

Node number(double value) {
  return std::isfinite(value) ? real_node(value) : Node{};
}

Node count(std::uint64_t value) {
  return integer_node(static_cast<std::int64_t>(std::min<std::uint64_t>(value, INT64_MAX)));
}

template <typename T>
Node optional_number(const std::optional<T>& value) {
  return value ? number(static_cast<double>(*value)) : Node{};
}

Node series_node(const LiveSeries& series) {
  std::vector<Node> points;
  for (const auto& [step, value] : series)
    points.push_back(list_node({integer_node(step), number(value)}));
  return list_node(std::move(points));
}

// Where the time of the interval went (monitor/budget.h). A rank that counts no steps has told of
// no phases, so nothing is known of what is outside of them.
Node budget_node(const monitor::Interval& interval, bool counts_steps) {
  NodeMembers shares;
  const monitor::PhaseSeconds spent = monitor::spent_s(interval);
  for (std::size_t phase = 0; phase < ledger::kPhases; ++phase) {
    if (spent[phase] <= 0 || interval.seconds <= 0) continue;
    if (static_cast<ledger::Phase>(phase) == ledger::Phase::kNone && !counts_steps) continue;
    shares.emplace_back(monitor::phase_key(static_cast<ledger::Phase>(phase)),
                        number(spent[phase] / interval.seconds));
  }
  return map_node(std::move(shares));
}

Node gpu_node(const LiveView& view, int index) {
  const auto& known = view.gpus.gpus;
  for (std::size_t i = 0; index >= 0 && view.gpus.newest && i < known.size(); ++i) {
    if (known[i].index != index || i >= view.gpus.newest->gpus.size()) continue;
    const monitor::GpuReading& reading = view.gpus.newest->gpus[i];
    return map_node({{"index", integer_node(index)},
                     {"utilisation_percent", optional_number(reading.utilisation_percent)},
                     {"memory_used_bytes", optional_number(reading.memory_used_bytes)},
                     {"memory_total_bytes", optional_number(reading.memory_total_bytes)},
                     {"power_w", optional_number(reading.power_w)},
                     {"problem", text_node(reading.problem)}});
  }
  return Node{};
}

Node position_node(const std::optional<LivePosition>& position) {
  if (!position) return Node{};
  return map_node({{"operation", text_node(position->operation)},
                   {"sequence", count(position->sequence)},
                   {"state", text_node(position->state)},
                   {"age_s", number(position->age_s)}});
}

Node known(std::int64_t value, std::int64_t least) {
  return value >= least ? integer_node(value) : Node{};
}

Node rank_node(const LiveView& view, const LiveRank& rank) {
  const monitor::Interval newest = rank.newest.value_or(monitor::Interval{});
  return map_node(
      {{"rank", integer_node(rank.rank)},
       {"host", integer_node(rank.host)},
       {"pid", known(rank.pid, 1)},
       {"state", text_node(name(rank.status))},
       {"exit", text_node(rank.exit)},
       {"step", known(rank.step, 0)},
       {"step_ms", rank.step_ms > 0 ? number(rank.step_ms) : Node{}},
       {"phase", text_node(rank.phase)},
       {"budget", budget_node(newest, rank.step >= 0)},
       {"cores", newest.process ? number(newest.process->cores) : Node{}},
       {"resident_bytes", newest.resident_bytes > 0 ? count(newest.resident_bytes) : Node{}},
       {"threads", known(newest.threads, 1)},
       {"gpu", gpu_node(view, rank.gpu)},
       {"position", position_node(rank.position)}});
}

Node stall_node(const std::optional<LiveStall>& stall) {
  if (!stall) return Node{};
  return map_node({{"seconds", number(stall->seconds)}, {"what", text_node(stall->what)}});
}

Node table_node(const std::optional<StallTable>& table) {
  if (!table) return Node{};
  return map_node({{"time", number(table->time_s)}, {"text", text_node(table->text)}});
}

// A run that learns nothing runs on: its numbers say so, and nothing else does.
std::string trouble_of(const LiveView& view) {
  const auto series = [&view](std::string_view name) -> const LiveSeries* {
    const auto found = std::ranges::find(view.logged, name, &LoggedSeries::value_type::first);
    return found != view.logged.end() && !found->second.empty() ? &found->second : nullptr;
  };
  const LiveSeries* const loss = series("loss");
  const LiveSeries* const skipped = series("skipped_steps");
  if (skipped != nullptr && (loss == nullptr || skipped->back().first >= loss->back().first))
    return fmt::format(
        "At step {} the gradient was not finite: {:.0f} of the steps logged there were skipped. "
        "Try a smaller learning rate.",
        skipped->back().first, skipped->back().second);
  if (loss == nullptr || std::isfinite(loss->back().second)) return "";
  std::int64_t since = loss->back().first;
  for (auto at = loss->rbegin(); at != loss->rend() && !std::isfinite(at->second); ++at)
    since = at->first;
  return fmt::format(
      "The loss is not finite since step {}. Try a smaller learning rate, or max_grad_norm.",
      since);
}

Node run_node(const LiveView& view) {
  const std::optional<double> left = seconds_left(view);
  return map_node({{"id", text_node(view.run_id)},
                   {"world_size", integer_node(view.world_size)},
                   {"started", number(view.started_s)},
                   {"attempt", integer_node(view.attempt)},
                   {"state", text_node(view.state)},
                   {"message", text_node(view.message.empty() ? trouble_of(view) : view.message)},
                   {"recorded", bool_node(view.recorded)},
                   {"total_steps", known(view.total_steps, 1)},
                   {"left_s", optional_number(left)}});
}

constexpr double kRecent_s = 5;
constexpr std::int64_t kRecentSteps = 10;

}  // namespace

const char* name(RankStatus status) {
  constexpr const char* kNames[] = {"running", "stopped", "ended", "failed"};
  return kNames[static_cast<std::size_t>(status)];
}

Verdict verdict_of(const LiveView& view, bool enough) {
  if (!view.findings.empty()) return {};
  if (view.state == "starting") return {false, "Waiting for the first steps."};
  if (view.stall) return {false, "Nothing can be judged while no step ends."};
  if (view.state == "failed") return {false, "Nothing found to change; the run itself failed."};
  if (view.state == "killed") return {false, "Nothing found to change; the run was killed."};
  if (enough) return {view.state == "running", "Nothing found that slows this run down."};
  if (!view.ranks.empty() && static_cast<int>(view.ranks.size()) < view.world_size)
    return {false, fmt::format("Nothing found. {} of {} ranks are seen here; whether they wait for "
                               "the others is not judged.",
                               view.ranks.size(), view.world_size)};
  const bool stepped =
      std::ranges::any_of(view.ranks, [](const LiveRank& rank) { return rank.step > 0; });
  return {false, stepped ? "Nothing found, and too few steps to judge the run."
                         : "No step has been seen, and without steps nothing can be judged."};
}

std::string end_message(const monitor::RunFacts& facts, std::int64_t step, bool early) {
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

double recent_step_ms(std::span<const monitor::Interval> intervals) {
  const auto stepped = [](const monitor::Interval& interval) { return interval.steps > 0; };
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

std::optional<double> newest_logged(const LiveView& view, std::string_view name) {
  for (const auto& [key, points] : view.logged)
    if (key == name && !points.empty()) return points.back().second;
  return std::nullopt;
}

std::int64_t step_of(const LiveView& view) {
  std::int64_t step = -1;
  for (const LiveRank& rank : view.ranks) step = std::max(step, rank.step);
  return step;
}

std::optional<double> seconds_left(const LiveView& view) {
  const std::int64_t step = step_of(view);
  if (view.state != "running" || view.stall || view.mean_step_s <= 0 || step < 0 ||
      step > view.total_steps || view.total_steps == 0)
    return std::nullopt;
  return static_cast<double>(view.total_steps - step) * view.mean_step_s;
}

std::string live_snapshot_json(const LiveView& view) {
  std::vector<Node> ranks;
  NodeMembers logs;
  for (const LiveRank& rank : view.ranks) {
    ranks.push_back(rank_node(view, rank));
    logs.emplace_back(std::to_string(rank.rank), texts_node({rank.log.begin(), rank.log.end()}));
  }
  NodeMembers series;
  for (const auto& [name, points] : view.logged)
    if (name != "step_ms") series.emplace_back(name, series_node(points));
  series.emplace_back("step_ms", series_node(view.step_ms));
  return to_json(map_node({{"time", number(view.time_s)},
                           {"run", run_node(view)},
                           {"ranks", list_node(std::move(ranks))},
                           {"series", map_node(std::move(series))},
                           {"log", map_node(std::move(logs))},
                           {"findings", monitor::findings_node(view.findings)},
                           {"verdict", map_node({{"healthy", bool_node(view.verdict.healthy)},
                                                 {"text", text_node(view.verdict.text)}})},
                           {"stall", stall_node(view.stall)},
                           {"stall_table", table_node(view.stall_table)}}));
}

}  // namespace lockstep::dashboard
