// The snapshot of docs/dashboard.md.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "lockstep/core/document.h"
#include "lockstep/monitor/run_view.h"

namespace lockstep::monitor {
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

Node curve_node(const Curve& curve) {
  std::vector<Node> points;
  for (const auto& [step, value] : thinned(curve, MetricsFile::kPoints))
    points.push_back(list_node({integer_node(static_cast<std::int64_t>(step)), number(value)}));
  return list_node(std::move(points));
}

// Where the time of the interval went (monitor/budget.h). A rank that counts no steps has told of
// no phases, so nothing is known of what is outside of them.
Node budget_node(const Interval& interval, bool counts_steps) {
  NodeMembers shares;
  const PhaseSeconds spent = spent_s(interval);
  for (std::size_t phase = 0; phase < ledger::kPhases; ++phase) {
    if (spent[phase] <= 0 || interval.seconds <= 0) continue;
    if (static_cast<ledger::Phase>(phase) == ledger::Phase::kNone && !counts_steps) continue;
    shares.emplace_back(phase_key(static_cast<ledger::Phase>(phase)),
                        number(spent[phase] / interval.seconds));
  }
  return map_node(std::move(shares));
}

Node gpu_node(const RunView& run, int index) {
  const auto& known = run.gpus.gpus;
  for (std::size_t i = 0; index >= 0 && run.gpus.newest && i < known.size(); ++i) {
    if (known[i].index != index || i >= run.gpus.newest->gpus.size()) continue;
    const GpuReading& reading = run.gpus.newest->gpus[i];
    return map_node({{"index", integer_node(index)},
                     {"utilisation_percent", optional_number(reading.utilisation_percent)},
                     {"memory_used_bytes", optional_number(reading.memory_used_bytes)},
                     {"memory_total_bytes", optional_number(reading.memory_total_bytes)},
                     {"power_w", optional_number(reading.power_w)},
                     {"problem", text_node(reading.problem)}});
  }
  return Node{};
}

Node position_node(const std::optional<Position>& position) {
  if (!position) return Node{};
  return map_node({{"operation", text_node(position->operation)},
                   {"sequence", count(position->sequence)},
                   {"state", text_node(position->state)},
                   {"age_s", number(position->age_s)}});
}

Node known(std::int64_t value, std::int64_t least) {
  return value >= least ? integer_node(value) : Node{};
}

Node rank_node(const RunView& run, const RankState& rank) {
  const Interval newest = rank.newest.value_or(Interval{});
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
       {"gpu", gpu_node(run, rank.gpu)},
       {"position", position_node(rank.position)}});
}

Node stall_node(const std::optional<Stall>& stall) {
  if (!stall) return Node{};
  return map_node({{"seconds", number(stall->seconds)}, {"what", text_node(stall->what)}});
}

Node table_node(const std::optional<StallTable>& table) {
  if (!table) return Node{};
  return map_node({{"time", number(table->time_s)}, {"text", text_node(table->text)}});
}

// A run that learns nothing runs on: its numbers say so, and nothing else does.
std::string trouble_of(const RunView& run) {
  const Curve loss = curve_of(run.metrics, "loss");
  const Curve skipped = curve_of(run.metrics, "skipped_steps");
  if (!skipped.empty() && (loss.empty() || skipped.back().first >= loss.back().first))
    return fmt::format(
        "At step {:.0f} the gradient was not finite: {:.0f} of the steps logged there were "
        "skipped. Try a smaller learning rate.",
        skipped.back().first, skipped.back().second);
  if (loss.empty() || std::isfinite(loss.back().second)) return "";
  double since = loss.back().first;
  for (auto at = loss.rbegin(); at != loss.rend() && !std::isfinite(at->second); ++at)
    since = at->first;
  return fmt::format(
      "The loss is not finite since step {:.0f}. Try a smaller learning rate, or max_grad_norm.",
      since);
}

Node run_node(const RunView& run) {
  const std::optional<double> left = seconds_left(run);
  return map_node({{"id", text_node(run.id)},
                   {"world_size", integer_node(run.facts().world_size)},
                   {"started", number(run.started_s)},
                   {"attempt", integer_node(run.attempt)},
                   {"state", text_node(run.state)},
                   {"message", text_node(run.message.empty() ? trouble_of(run) : run.message)},
                   {"recorded", bool_node(run.recorded)},
                   {"total_steps", known(run.facts().total_steps, 1)},
                   {"left_s", optional_number(left)}});
}

}  // namespace

Node snapshot_node(const RunView& run) {
  std::vector<Node> ranks;
  NodeMembers logs;
  for (const RankState& rank : run.ranks) {
    ranks.push_back(rank_node(run, rank));
    logs.emplace_back(std::to_string(rank.rank), texts_node({rank.log.begin(), rank.log.end()}));
  }
  NodeMembers series;
  for (const std::string& name : metric_names(run.metrics))
    if (name != "step_ms" && series.size() < MetricsFile::kNames)
      series.emplace_back(name, curve_node(curve_of(run.metrics, name)));
  series.emplace_back("step_ms", curve_node(run.step_ms));
  return map_node({{"time", number(run.time_s)},
                   {"run", run_node(run)},
                   {"ranks", list_node(std::move(ranks))},
                   {"series", map_node(std::move(series))},
                   {"log", map_node(std::move(logs))},
                   {"findings", findings_node(run.findings)},
                   {"verdict", map_node({{"healthy", bool_node(run.verdict.healthy)},
                                         {"text", text_node(run.verdict.text)}})},
                   {"stall", stall_node(run.stall)},
                   {"stall_table", table_node(run.stall_table)}});
}

std::string snapshot_json(const RunView& run) {
  return to_json(snapshot_node(run));
}

}  // namespace lockstep::monitor
