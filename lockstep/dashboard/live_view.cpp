#include "lockstep/dashboard/live_view.h"

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

// Where the time of the interval went; what is outside of all phases is "other".
Node budget_node(const monitor::Interval& interval) {
  NodeMembers shares;
  for (std::size_t phase = 0; phase < ledger::kPhases; ++phase) {
    if (interval.host_s[phase] <= 0 || interval.seconds <= 0) continue;
    shares.emplace_back(monitor::phase_key(static_cast<ledger::Phase>(phase)),
                        number(interval.host_s[phase] / interval.seconds));
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

Node rank_node(const LiveView& view, const LiveRank& rank) {
  const monitor::Interval newest = rank.newest.value_or(monitor::Interval{});
  return map_node({{"rank", integer_node(rank.rank)},
                   {"host", integer_node(rank.host)},
                   {"pid", integer_node(rank.pid)},
                   {"state", text_node(name(rank.status))},
                   {"exit", text_node(rank.exit)},
                   {"step", integer_node(rank.step)},
                   {"step_ms", number(rank.step_ms)},
                   {"phase", text_node(rank.phase)},
                   {"budget", budget_node(newest)},
                   {"cores", newest.process ? number(newest.process->cores) : Node{}},
                   {"resident_bytes", count(newest.resident_bytes)},
                   {"threads", integer_node(newest.threads)},
                   {"gpu", gpu_node(view, rank.gpu)},
                   {"position", position_node(rank.position)}});
}

}  // namespace

const char* name(RankStatus status) {
  constexpr const char* kNames[] = {"running", "stopped", "ended", "failed"};
  return kNames[static_cast<std::size_t>(status)];
}

std::string live_snapshot_json(const LiveView& view) {
  std::vector<Node> ranks;
  NodeMembers logs;
  for (const LiveRank& rank : view.ranks) {
    ranks.push_back(rank_node(view, rank));
    logs.emplace_back(std::to_string(rank.rank), texts_node({rank.log.begin(), rank.log.end()}));
  }
  return to_json(
      map_node({{"time", number(view.time_s)},
                {"run", map_node({{"id", text_node(view.run_id)},
                                  {"world_size", integer_node(view.world_size)},
                                  {"started", number(view.started_s)},
                                  {"attempt", integer_node(view.attempt)},
                                  {"state", text_node(view.state)},
                                  {"message", text_node(view.message)}})},
                {"ranks", list_node(std::move(ranks))},
                {"series", map_node({{"loss", series_node(view.loss)},
                                     {"tokens_per_second", series_node(view.tokens_per_second)},
                                     {"samples_per_second", series_node(view.samples_per_second)},
                                     {"step_ms", series_node(view.step_ms)}})},
                {"log", map_node(std::move(logs))},
                {"findings", monitor::findings_node(view.findings)}}));
}

}  // namespace lockstep::dashboard
