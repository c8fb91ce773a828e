// What Prometheus reads of a run.
#include "observe/dashboard/run_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::dashboard {
namespace {

using testing::HasSubstr;
using testing::Not;

monitor::RunView a_run() {
  monitor::RunView view;
  view.record.emplace().facts = {.world_size = 2, .total_steps = 200};
  view.started_s = 1700000000;
  view.state = "running";
  for (int r = 0; r < 2; ++r) {
    monitor::RankState rank;
    rank.rank = r;
    rank.step = 120;
    rank.step_ms = 20;
    monitor::Interval interval{.seconds = 2, .steps = 100};
    interval.host_s[ledger::index(ledger::Phase::kData)] = 0.5;
    rank.newest = interval;
    rank.process = monitor::ProcessSample{.pid = 7, .user_s = 3.5, .resident_bytes = 4096};
    view.ranks.push_back(rank);
  }
  view.metrics = {{.step = 100, .values = {{"eval_loss", 2.5}}},
                  {.step = 119, .values = {{"loss", 2.5}}},
                  {.step = 120, .values = {{"loss", 2.25}}}};
  view.mean_step_s = 0.5;
  return view;
}

TEST(RunMetrics, HasStepsPhasesLossAndResources) {
  RunMetrics metrics;
  const std::string text = metrics.text(a_run());
  for (const char* line :
       {"lockstep_run_state{state=\"running\"} 1\n", "lockstep_run_state{state=\"failed\"} 0\n",
        "lockstep_world_size 2\n", "lockstep_step{rank=\"1\"} 120\n",
        "lockstep_step_seconds{rank=\"0\"} 0.02\n", "lockstep_loss 2.25\n",
        "lockstep_logged{name=\"eval_loss\"} 2.5\n", "lockstep_total_steps 200\n",
        "lockstep_left_seconds 40\n", "lockstep_rank_up{rank=\"1\"} 1\n",
        "lockstep_process_cpu_seconds_total{mode=\"user\",rank=\"0\"} 3.5\n",
        "lockstep_process_resident_memory_bytes{rank=\"0\"} 4096\n"})
    EXPECT_THAT(text, HasSubstr(line));
  EXPECT_THAT(text, HasSubstr("lockstep_phase_ratio{phase=\"data\",rank=\"0\"} 0.25\n"));
  EXPECT_THAT(text, HasSubstr("# TYPE lockstep_step gauge\n"));
}

TEST(RunMetrics, PhasesOfADeviceAreNoMoreThanTheInterval) {
  monitor::RunView view = a_run();
  monitor::Interval& newest = *view.ranks[0].newest;
  newest.host_s[ledger::index(ledger::Phase::kLogging)] = 1.5;
  newest.device_s[ledger::index(ledger::Phase::kForward)] = 1.75;
  RunMetrics metrics;
  const std::string text = metrics.text(view);
  for (const char* line :
       {"{phase=\"forward\",rank=\"0\"} 0.875\n", "{phase=\"data\",rank=\"0\"} 0.125\n",
        "{phase=\"logging\",rank=\"0\"} 0\n", "{phase=\"device_wait\",rank=\"0\"} 0\n",
        "{phase=\"other\",rank=\"0\"} 0\n"})
    EXPECT_THAT(text, HasSubstr(std::string("lockstep_phase_ratio") + line));
}

TEST(RunMetrics, FollowsFailuresFindingsAndRanksThatGo) {
  RunMetrics metrics;
  monitor::RunView view = a_run();
  view.findings = {{.rule = "loader-bound", .what = "", .evidence = "", .remedy = ""}};
  EXPECT_THAT(metrics.text(view), HasSubstr("lockstep_findings{rule=\"loader-bound\"} 1\n"));
  view.findings.clear();
  view.state = "failed";
  view.ranks[1].status = monitor::RankStatus::kFailed;
  const std::string failed = metrics.text(view);
  EXPECT_THAT(failed, HasSubstr("lockstep_findings{rule=\"loader-bound\"} 0\n"));
  EXPECT_THAT(failed, HasSubstr("lockstep_rank_failed{rank=\"1\"} 1\n"));
  EXPECT_THAT(failed, HasSubstr("lockstep_run_state{state=\"failed\"} 1\n"));
  view.ranks.pop_back();
  EXPECT_THAT(metrics.text(view), Not(HasSubstr("rank=\"1\"")));
}

}  // namespace
}  // namespace lockstep::dashboard
