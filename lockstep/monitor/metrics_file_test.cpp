// metrics.jsonl, read while a run writes it, the text for Prometheus, and the view of a run.
#include "lockstep/monitor/metrics_file.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/core/helpers_for_test.h"
#include "lockstep/monitor/prometheus.h"
#include "lockstep/monitor/run_view.h"

namespace lockstep::monitor {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;

void append(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::app) << text << std::flush;
}

Curve loss_of(const MetricsFile& file) {
  return curve_of(file.lines(), "loss");
}

MetricsFile newest_in(const io::TemporaryDirectory& folder) {
  return MetricsFile(folder / "metrics.jsonl", MetricsFile::Part::kNewest);
}

TEST(MetricsFile, FollowsAFileThatGrowsIsTornAndIsReplaced) {
  const io::TemporaryDirectory folder;
  MetricsFile tail = newest_in(folder);
  tail.read();  // there is none
  append(folder / "metrics.jsonl",
         "{\"step\": 1, \"loss\": 2.5, \"tokens_per_second\": 10, "
         "\"samples_per_second\": 3}\n"
         "{\"step\": 2, \"eval_loss\": 9}\nnot json\n[1]\n{\"step\": \"x\", \"loss\": 1}\n"
         "{\"step\": 2, \"loss\": \"NaN\"}\n{\"step\": 2, \"lo");
  tail.read();
  EXPECT_THAT(loss_of(tail), ElementsAre(Pair(1, 2.5)));
  EXPECT_THAT(metric_names(tail.lines()),
              ElementsAre("loss", "tokens_per_second", "samples_per_second", "eval_loss"));
  EXPECT_THAT(curve_of(tail.lines(), "eval_loss"), ElementsAre(Pair(2, 9.0)));
  EXPECT_EQ(tail.problem(), "3 of 7 lines of metrics.jsonl cannot be read (the first is line 3).");
  append(folder / "metrics.jsonl", "ss\": 1.5}\n{\"step\": 3, \"loss\": 1}\n");
  tail.read();
  EXPECT_THAT(loss_of(tail), ElementsAre(Pair(1, 2.5), Pair(2, 1.5), Pair(3, 1.0)));
  // Resumed at step 1: the later lines are taken back, then written again.
  append(folder / "new", "{\"step\": 1, \"loss\": 2.5}\n{\"step\": 2, \"loss\": 0.5}\n");
  std::filesystem::rename(folder / "new", folder / "metrics.jsonl");
  tail.read();
  EXPECT_THAT(loss_of(tail), ElementsAre(Pair(1, 2.5), Pair(2, 0.5)));
}

TEST(MetricsFile, WhatIsNotFiniteIsAPointToo) {
  const io::TemporaryDirectory folder;
  MetricsFile tail = newest_in(folder);
  append(folder / "metrics.jsonl", "{\"step\": 1, \"loss\": 2.5}\n{\"step\": 2, \"loss\": null}\n");
  tail.read();
  EXPECT_THAT(loss_of(tail), ElementsAre(Pair(1, 2.5), Pair(2, testing::IsNan())));
}

TEST(MetricsFile, IsBoundedAndTakesOnlyFiles) {
  const io::TemporaryDirectory folder;
  for (int step = 1; step <= 2000; ++step)
    append(folder / "metrics.jsonl", fmt::format("{{\"step\": {}, \"loss\": 1}}\n", step));
  append(folder / "metrics.jsonl", std::string(3u << 20, 'x'));
  MetricsFile tail = newest_in(folder);
  for (int i = 0; i < 8; ++i) tail.read();
  append(folder / "metrics.jsonl", "\n{\"step\": 2001, \"loss\": 7}\n");
  tail.read();
  ASSERT_FALSE(loss_of(tail).empty());
  EXPECT_LE(loss_of(tail).size(), 5 * MetricsFile::kPoints);
  EXPECT_THAT(loss_of(tail).back(), Pair(2001, 7.0));
  const io::TemporaryDirectory other;
  ASSERT_EQ(::mkfifo((other / "metrics.jsonl").c_str(), 0600), 0);
  MetricsFile pipe = newest_in(other);
  pipe.read();  // does not wait for a writer
  EXPECT_THAT(pipe.lines(), IsEmpty());
  EXPECT_FALSE(pipe.there());
}

TEST(MetricsFile, HasWhateverIsLoggedButTheSumOfTheRun) {
  const io::TemporaryDirectory folder;
  append(folder / "metrics.jsonl",
         "{\"step\": 2, \"epoch\": 0.5, \"accuracy\": 0.25, \"run_name\": \"a\"}\n"
         "{\"step\": 2, \"train_runtime\": 3, \"train_loss\": 1}\n");
  for (int i = 0; i < 40; ++i)
    append(folder / "metrics.jsonl", fmt::format("{{\"step\": 3, \"name_{}\": 1}}\n", i));
  MetricsFile tail = newest_in(folder);
  tail.read();
  const auto names = metric_names(tail.lines());
  EXPECT_EQ(names.size() + 2, MetricsFile::kNames) << "the last line's two are known, not drawn";
  EXPECT_EQ(names[0], "accuracy");
  EXPECT_THAT(curve_of(tail.lines(), "accuracy"), ElementsAre(Pair(2, 0.25)));
  EXPECT_EQ(names[1], "name_0");
  MetricsFile all(folder / "metrics.jsonl");
  all.read();
  EXPECT_EQ(metric_names(all.lines()).size(), 41u);
}

// Steps are logged one by one, evaluations are rare.
TEST(MetricsFile, RareNamesKeepTheirPointsAmongManyLines) {
  const io::TemporaryDirectory folder;
  MetricsFile tail = newest_in(folder);
  for (int part = 0; part < 10; ++part) {
    std::string lines = fmt::format("{{\"step\": {}, \"eval_loss\": 1}}\n", 1000 * part);
    for (int step = 1; step < 1000; ++step)
      lines += fmt::format("{{\"step\": {}, \"loss\": 1}}\n", 1000 * part + step);
    append(folder / "metrics.jsonl", lines);
    tail.read();
  }
  EXPECT_LE(tail.lines().size(), 5 * MetricsFile::kPoints);
  EXPECT_EQ(curve_of(tail.lines(), "eval_loss").size(), 10u);
  EXPECT_GE(loss_of(tail).size(), MetricsFile::kPoints);
  EXPECT_THAT(loss_of(tail).back(), Pair(9999, 1.0));
}

TEST(MetricsFile, ALastLineWithoutItsEndCountsOnce) {
  const io::TemporaryDirectory folder;
  append(folder / "metrics.jsonl", "{\"step\": 1, \"loss\": 2}\n{\"step\": 2, \"loss\": 1}");
  MetricsFile file(folder / "metrics.jsonl");
  file.read();
  EXPECT_EQ(file.lines().size(), 2u);
  append(folder / "metrics.jsonl", "\n{\"step\": 3, \"loss\": 0.5}\n");
  file.read();
  EXPECT_THAT(loss_of(file), ElementsAre(Pair(1, 2.0), Pair(2, 1.0), Pair(3, 0.5)));
  EXPECT_EQ(file.problem(), "");
}

TEST(Thinned, ExtremesGapsAndTheLastPointStay) {
  Curve curve;
  for (int step = 0; step < 10'000; ++step) curve.emplace_back(step, 1);
  curve[4321].second = 9;
  curve[7000].second = -9;
  curve[8000].second = std::nan("");
  EXPECT_EQ(thinned(curve, 10'000).size(), 10'000u);
  const Curve few = thinned(curve, 500);
  EXPECT_LE(few.size(), 500u);
  EXPECT_THAT(few, testing::Contains(Pair(4321, 9)));
  EXPECT_THAT(few, testing::Contains(Pair(7000, -9)));
  EXPECT_THAT(few, testing::Contains(Pair(8000, testing::IsNan())));
  EXPECT_EQ(few.back().first, 9999);
  EXPECT_TRUE(std::ranges::is_sorted(few, {}, &Curve::value_type::first));
}

TEST(PrometheusPage, HasHelpTypeAndEscapedLabels) {
  Prometheus page;
  const Metric loss{"lockstep_loss", "Loss of\nthe \"last\" \\ step."};
  page.set(loss, {{"rank", "0"}, {"host", "a\"b\\c\nd\xff"}}, 1.25);
  page.set(loss, {{"host", "a\"b\\c\nd\xff"}, {"rank", "0"}}, 0.5);  // the same series
  page.set({"lockstep_steps_total", "Steps.", MetricType::kCounter}, {}, 12345678901234);
  page.set(loss, {{"rank", "1"}}, std::numeric_limits<double>::infinity());
  page.set(loss, {{"rank", "2"}}, std::nan(""));
  EXPECT_EQ(page.text(),
            "# HELP lockstep_loss Loss of\\nthe \"last\" \\\\ step.\n"
            "# TYPE lockstep_loss gauge\n"
            "lockstep_loss{host=\"a\\\"b\\\\c\\nd\xEF\xBF\xBD\",rank=\"0\"} 0.5\n"
            "lockstep_loss{rank=\"1\"} +Inf\n"
            "lockstep_loss{rank=\"2\"} NaN\n"
            "# HELP lockstep_steps_total Steps.\n"
            "# TYPE lockstep_steps_total counter\n"
            "lockstep_steps_total 12345678901234\n");
}

TEST(PrometheusPage, RefusesNamesThatPrometheusDoesNotTake) {
  Prometheus page;
  const auto error = [&](const Metric& metric, const Labels& labels = {}) {
    return message_of([&] { page.set(metric, labels, 0); });
  };
  EXPECT_THAT(error({"1st", ""}), HasSubstr("[prometheus] '1st' cannot be the name of a metric."));
  EXPECT_THAT(error({"a-b", ""}), HasSubstr("'a-b' cannot"));
  EXPECT_THAT(error({"", ""}), HasSubstr("'' cannot"));
  page.set({"a", "A."}, {}, 1);
  EXPECT_THAT(error({"a", "A.", MetricType::kCounter}),
              HasSubstr("a is on the page already, as a gauge with the help 'A.'."));
  EXPECT_THAT(error({"a", "A."}, {{"__x", ""}}), HasSubstr("'__x' cannot be the name of a label."));
  EXPECT_THAT(error({"a", "A."}, {{"x:y", ""}}), HasSubstr("'x:y' cannot"));
}

TEST(PrometheusPage, ShowsWhatTheSamplersRead) {
  Prometheus page;
  GpuReading gpu{.utilisation_percent = 97, .memory_used_bytes = 1024};
  gpu.clock_reasons = 0x40;
  const auto sample =
      std::make_shared<GpuSample>(GpuSample{.gpus = {gpu, GpuReading{.problem = "GPU is lost"}}});
  publish(page, GpuSnapshot{.gpus = {{.index = 0, .uuid = "GPU-a"}, {.index = 1, .uuid = "GPU-b"}},
                            .newest = sample,
                            .xid_counts = {{{1, 79}, 2}}});
  publish(page, 2, read_process(::getpid()).value());
  publish(page, 2, CgroupSample{.cpu_limit_cores = 1.5, .throttled_s = 2.5});
  const std::string text = page.text();
  for (const char* line : {
           "lockstep_gpu_driver_up 1\n",
           "lockstep_gpu_up{gpu=\"0\",uuid=\"GPU-a\"} 1\n",
           "lockstep_gpu_up{gpu=\"1\",uuid=\"GPU-b\"} 0\n",
           "lockstep_gpu_utilization_ratio{gpu=\"0\",uuid=\"GPU-a\"} 0.97\n",
           "lockstep_gpu_memory_used_bytes{gpu=\"0\",uuid=\"GPU-a\"} 1024\n",
           "{gpu=\"0\",reason=\"hardware thermal slowdown\",uuid=\"GPU-a\"} 1\n",
           "{gpu=\"0\",reason=\"idle\",uuid=\"GPU-a\"} 0\n",
           "lockstep_gpu_xid_events_total{gpu=\"1\",xid=\"79\"} 2\n",
           "lockstep_process_threads{rank=\"2\"} ",
           "lockstep_process_cpu_seconds_total{mode=\"user\",rank=\"2\"} ",
           "lockstep_cgroup_cpu_limit_cores{rank=\"2\"} 1.5\n",
           "lockstep_cgroup_throttled_seconds_total{rank=\"2\"} 2.5\n",
       })
    EXPECT_THAT(text, HasSubstr(line));
}

// ---------------------------------------------------------------- the view of a run

// What is shown of a run: its step time, and when it may be called healthy.

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
