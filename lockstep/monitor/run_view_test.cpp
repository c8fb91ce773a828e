// What is shown of a run: its step time, and when it may be called healthy.
#include "lockstep/monitor/run_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace lockstep::monitor {
namespace {

using testing::HasSubstr;

TEST(StepTime, IsSteadyWhereIntervalsEndBetweenSteps) {
  std::vector<Interval> intervals = {{.seconds = 3, .steps = 1}};  // with the start
  EXPECT_EQ(recent_step_ms(intervals), 3000);
  // Steps of 104 ms: two or three of them end within 250 ms, nine or ten within a second.
  double time = 0;
  double counted = 0;
  for (int i = 0; i < 60; ++i) {
    const double seconds = i < 20 ? 0.25 : 1;
    time += seconds;
    const auto steps = static_cast<std::int64_t>(time / 0.104 - counted);
    counted += static_cast<double>(steps);
    intervals.push_back({.seconds = seconds, .steps = steps});
    if (time < 3) continue;
    EXPECT_NEAR(recent_step_ms(intervals), 104, 5) << time;
  }
  const double before = recent_step_ms(intervals);
  intervals.push_back({.seconds = 1});
  EXPECT_EQ(recent_step_ms(intervals), before) << "no step ended";
  EXPECT_EQ(recent_step_ms({}), 0);
  intervals.assign({{.seconds = 1, .steps = 1}});
  for (int i = 1; i < 60; ++i)
    intervals.push_back(
        {.seconds = 1,
         .steps = static_cast<std::int64_t>((i + 1) / 1.7) - static_cast<std::int64_t>(i / 1.7)});
  EXPECT_NEAR(recent_step_ms(intervals), 1700, 100);
}

TEST(Budget, OfADeviceIsTheDevicesAndAddsUp) {
  RunView view;
  RankState rank{.rank = 0, .step = 7};
  Interval newest{.seconds = 1, .steps = 10};
  newest.host_s[ledger::index(ledger::Phase::kForward)] = 0.25;
  newest.host_s[ledger::index(ledger::Phase::kLogging)] = 0.125;
  newest.host_s[ledger::index(ledger::Phase::kDeviceWait)] = 0.625;
  newest.device_s[ledger::index(ledger::Phase::kForward)] = 0.75;
  rank.newest = newest;
  view.ranks.push_back(rank);
  const Node read = parse_json(snapshot_json(view), "snapshot");
  const Node& budget = read.at("ranks").items.at(0).at("budget");
  EXPECT_EQ(budget.at("forward").real, 0.75);
  EXPECT_EQ(budget.at("logging").real, 0.125);
  EXPECT_EQ(budget.at("other").real, 0.125);
  EXPECT_EQ(budget.entries.size(), 3u);
}

// As the table of `lockstep doctor --run` has it: without what another start has recorded.
TEST(Budget, OfARunThatHasEndedIsThatOfItsLastStart) {
  RunView view;
  RunRecord& record = view.record.emplace();
  record.facts.started_unix_s = 1000;
  record.facts.ended_unix_s = 1010;
  RankRecord& rank = record.ranks.emplace_back();
  const auto add = [&](double unix_time_s, std::int64_t steps, ledger::Phase phase) {
    Interval& interval = rank.intervals.emplace_back();
    interval.unix_time_s = unix_time_s;
    interval.seconds = 5;
    interval.step = interval.steps = steps;
    interval.host_s[ledger::index(phase)] = 4;
  };
  add(500, 10, ledger::Phase::kData);
  add(505, 10, ledger::Phase::kData);
  add(1005, 20, ledger::Phase::kBackward);
  add(1010, 20, ledger::Phase::kBackward);
  conclude(view);
  ASSERT_EQ(view.state, "ended");
  const Node read = parse_json(snapshot_json(view), "snapshot");
  const Node& shown = read.at("ranks").items.at(0);
  const BudgetRow row = budget_rows(record).front();
  std::size_t parts = 0;
  for (const auto& [part, share] : row.shares) {
    if (share == 0) continue;
    ++parts;
    EXPECT_NEAR(shown.at("budget").at(part).real, share, 1e-9) << part;
  }
  EXPECT_EQ(shown.at("budget").entries.size(), parts);
  EXPECT_NEAR(shown.at("step_ms").real, 1e3 * row.budget.step_s(), 1e-9);
}

TEST(Verdict, OnlyARunWithStepsEnoughThatMovesIsHealthy) {
  RunView view;
  view.state = "running";
  view.ranks = {{.rank = 0}};
  EXPECT_THAT(verdict_of(view, false).text, HasSubstr("No step has been seen"));
  view.ranks[0].step = 3;
  EXPECT_THAT(verdict_of(view, false).text, HasSubstr("too few steps"));
  EXPECT_TRUE(verdict_of(view, true).healthy);
  EXPECT_THAT(verdict_of(view, true).text, HasSubstr("Nothing found that slows"));
  view.stall = Stall{7, "No step has ended for 7 s."};
  EXPECT_FALSE(verdict_of(view, true).healthy);
  EXPECT_THAT(verdict_of(view, true).text, HasSubstr("while no step ends"));
  view.stall.reset();
  view.state = "failed";
  EXPECT_FALSE(verdict_of(view, true).healthy);
  EXPECT_THAT(verdict_of(view, true).text, HasSubstr("the run itself failed"));
}

TEST(TimeLeft, IsThatOfTheStepsLeftWhileTheRunMoves) {
  RunView view{.state = "running", .mean_step_s = 0.25};
  view.record.emplace().facts.total_steps = 100;
  EXPECT_FALSE(seconds_left(view)) << "no step is known";
  view.ranks = {{.rank = 0, .step = 39}, {.rank = 1, .step = 40}};
  EXPECT_EQ(seconds_left(view), 15);
  view.stall = Stall{.seconds = 12};
  EXPECT_FALSE(seconds_left(view));
  view.stall.reset();
  view.ranks[0].step = 101;
  EXPECT_FALSE(seconds_left(view)) << "more than were planned";
  view.ranks[0].step = 100;
  EXPECT_EQ(seconds_left(view), 0);
  view.state = "ended";
  EXPECT_FALSE(seconds_left(view));
}

}  // namespace
}  // namespace lockstep::monitor
