#include "lockstep/dashboard/record_view.h"

#include <algorithm>
#include <chrono>

#include "lockstep/dashboard/metrics_tail.h"

namespace lockstep::dashboard {
namespace {

double unix_time_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

double step_ms_of(const monitor::Interval& interval) {
  return interval.steps > 0 ? 1e3 * interval.seconds / static_cast<double>(interval.steps) : 0;
}

LiveRank rank_of(const monitor::RankRecord& record) {
  LiveRank rank;
  rank.rank = record.rank;
  if (record.intervals.empty()) return rank;
  rank.newest = record.intervals.back();
  rank.step = rank.newest->step;
  // The last stretch in which steps ended: a run's last one often has none.
  for (const monitor::Interval& interval : record.intervals)
    if (interval.steps > 0) rank.step_ms = step_ms_of(interval);
  return rank;
}

}  // namespace

LiveView view_of_record(const std::string& directory) {
  const monitor::RunRecord run = monitor::read_run(directory);
  LiveView view;
  view.run_id = directory;
  view.world_size = run.facts.world_size;
  view.started_s = run.facts.started_unix_s;
  view.time_s = view.started_s;
  for (const monitor::RankRecord& record : run.ranks) {
    view.ranks.push_back(rank_of(record));
    if (record.intervals.empty()) continue;
    view.time_s = std::max(view.time_s, record.intervals.back().unix_time_s);
    if (&record != &run.ranks.front()) continue;
    for (const monitor::Interval& interval : record.intervals)
      if (interval.steps > 0) add_point(view.step_ms, interval.step, step_ms_of(interval));
  }
  const bool over = unix_time_s() - view.time_s > kRecordIdle_s;
  view.state = over ? "ended" : "running";
  for (LiveRank& rank : view.ranks) rank.status = over ? RankStatus::kEnded : RankStatus::kRunning;
  MetricsTail metrics;
  metrics.follow(directory);
  metrics.read();
  view.loss = metrics.loss();
  view.tokens_per_second = metrics.tokens_per_second();
  view.samples_per_second = metrics.samples_per_second();
  view.findings = monitor::diagnose(run);
  return view;
}

}  // namespace lockstep::dashboard
