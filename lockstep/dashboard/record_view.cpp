#include "lockstep/dashboard/record_view.h"

#include <algorithm>
#include <chrono>

#include "lockstep/dashboard/metrics_tail.h"

namespace lockstep::dashboard {
namespace {

double unix_time_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

LiveRank rank_of(const monitor::RankRecord& record, bool over) {
  LiveRank rank;
  rank.rank = record.rank;
  rank.status = over ? RankStatus::kEnded : RankStatus::kRunning;
  if (record.intervals.empty()) return rank;
  rank.newest = record.intervals.back();
  rank.step = rank.newest->step;
  rank.step_ms = over ? 1e3 * budget_of(record).step_s() : recent_step_ms(record.intervals);
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
  for (const monitor::RankRecord& record : run.ranks)
    if (!record.intervals.empty())
      view.time_s = std::max(view.time_s, record.intervals.back().unix_time_s);
  const bool over = unix_time_s() - view.time_s > kRecordIdle_s;
  view.state = over ? "ended" : "running";
  for (const monitor::RankRecord& record : run.ranks) view.ranks.push_back(rank_of(record, over));
  if (!run.ranks.empty()) {
    const std::span<const monitor::Interval> all = run.ranks.front().intervals;
    for (std::size_t i = 0; i < all.size(); ++i)
      if (all[i].steps > 0) add_point(view.step_ms, all[i].step, recent_step_ms(all.first(i + 1)));
  }
  MetricsTail metrics;
  metrics.follow(directory);
  metrics.read();
  view.loss = metrics.loss();
  view.tokens_per_second = metrics.tokens_per_second();
  view.samples_per_second = metrics.samples_per_second();
  view.findings = monitor::diagnose(run);
  view.verdict = verdict_of(view, monitor::enough_to_judge(run));
  return view;
}

}  // namespace lockstep::dashboard
