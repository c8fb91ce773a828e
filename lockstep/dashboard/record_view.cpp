#include "lockstep/dashboard/record_view.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>

#include "lockstep/dashboard/metrics_tail.h"
#include "lockstep/launch/output.h"

namespace lockstep::dashboard {
namespace {

constexpr std::size_t kLineBytes = 16u << 10;

double unix_time_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Of a run that is over the budget is that of all its steps: its last second may have had none.
LiveRank rank_of(const monitor::RankRecord& record, bool over) {
  LiveRank rank;
  rank.rank = record.rank;
  rank.status = over ? RankStatus::kEnded : RankStatus::kRunning;
  if (record.intervals.empty()) return rank;
  rank.newest = monitor::newest_sample(record);
  rank.step = record.intervals.back().step;
  const monitor::Interval all = budget_of(record);
  rank.step_ms = over ? 1e3 * all.step_s() : recent_step_ms(record.intervals);
  if (over && all.steps > 0) {
    rank.newest->seconds = all.seconds;
    rank.newest->host_s = all.host_s;
    rank.newest->device_s = all.device_s;
  }
  return rank;
}

// Also those that failed before they had recorded anything.
void mark_failed(LiveView& view, const Node& failed) {
  for (const Entry& entry : failed.entries) {
    int number = -1;
    std::from_chars(entry.key.data(), entry.key.data() + entry.key.size(), number);
    if (number < 0 || number >= view.world_size) continue;
    auto rank = std::ranges::find(view.ranks, number, &LiveRank::rank);
    if (rank == view.ranks.end()) rank = view.ranks.insert(rank, LiveRank{.rank = number});
    rank->status = RankStatus::kFailed;
    rank->exit = entry.value.text;
  }
  std::ranges::sort(view.ranks, {}, &LiveRank::rank);
}

// A Trainer's last line, where it was written since its last start.
bool trainer_has_ended(const std::string& directory, double started_unix_s) {
  const std::string path = directory + "/metrics.jsonl";
  std::error_code error;
  const auto written = std::filesystem::last_write_time(path, error);
  if (error) return false;
  const auto time = std::chrono::file_clock::to_sys(written).time_since_epoch();
  if (std::chrono::duration<double>(time).count() < started_unix_s) return false;
  std::string text = launch::end_of_file(path, kLineBytes);
  if (text.empty() || text.back() != '\n') return false;
  text.pop_back();
  const std::size_t line = text.rfind('\n') + 1;  // npos + 1 is the beginning
  return text.find("\"train_runtime\"", line) != text.npos;
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
  const bool through = trainer_has_ended(directory, run.facts.started_unix_s);
  const bool complete = run.facts.ended_unix_s > 0 || through;
  const bool gone = !complete && monitor::is_over(run.facts);
  const bool over = complete || gone || unix_time_s() - view.time_s > kRecordIdle_s;
  const bool failed = over && !run.facts.failure.empty();
  view.state = failed ? "failed" : gone ? "killed" : over ? "ended" : "running";
  std::int64_t step = -1;
  for (const monitor::RankRecord& record : run.ranks)
    if (!record.intervals.empty()) step = std::max(step, record.intervals.back().step);
  monitor::RunFacts facts = run.facts;
  if (gone && !failed)
    facts.failure =
        "Its process is gone and has not written an end: it was killed, by a signal or for the "
        "memory that it used";
  // A Trainer that is through has written a line.
  const bool early = facts.program == "trainer" && complete && !through && step < facts.total_steps;
  if (over) view.message = end_message(facts, step, early);
  view.recorded = true;
  view.total_steps = run.facts.total_steps;
  for (const monitor::RankRecord& record : run.ranks) view.ranks.push_back(rank_of(record, over));
  mark_failed(view, run.facts.failed_ranks);
  if (!run.ranks.empty()) {
    view.mean_step_s = budget_of(run.ranks.front(), 0, run.facts.started_unix_s).step_s();
    const std::span<const monitor::Interval> all = run.ranks.front().intervals;
    for (std::size_t i = 0; i < all.size(); ++i)
      if (all[i].steps > 0) add_point(view.step_ms, all[i].step, recent_step_ms(all.first(i + 1)));
  }
  MetricsTail metrics;
  metrics.follow(directory);
  metrics.read();
  view.logged = metrics.series();
  view.findings = monitor::diagnose(run);
  view.verdict = verdict_of(view, monitor::enough_to_judge(run));
  return view;
}

}  // namespace lockstep::dashboard
