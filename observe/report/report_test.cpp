// What is read from a run's folder, what is concluded from it, and the rows of a scaling report.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <numeric>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "observe/report/run_report.h"
#include "observe/report/run_summary.h"
#include "observe/report/scale_report.h"

namespace lockstep::report {
namespace {

namespace fs = std::filesystem;
using ledger::Phase;
using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pointwise;

class Folder : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) { folder.write(name, text); }

  TemporaryDirectory folder;
  fs::path path = folder.path();
};

monitor::Interval interval(double end, double seconds, std::int64_t steps, double cores = 1) {
  monitor::Interval one{.unix_time_s = end, .seconds = seconds, .steps = steps};
  one.host_s[ledger::index(Phase::kForward)] = seconds / 2;
  one.host_s[ledger::index(Phase::kCommunication)] = seconds / 4;
  one.host_s[ledger::index(Phase::kSaving)] = seconds / 8;
  one.host_s[ledger::index(Phase::kLogging)] = seconds / 8;
  one.process.emplace();
  one.process->cores = cores;
  return one;
}

TEST_F(Folder, WhatIsNotThereIsSaid) {
  write("metrics.jsonl",
        "{\"step\": 10, \"epoch\": 0.5, \"loss\": 2.5, \"run\": \"a\"}\nnot JSON\n"
        "{\"step\": 20, \"epoch\": 1, \"loss\": null}\n{\"step\": 30, \"epo");
  const RunView run = read_run_view(path.string(), monitor::Detail::kAll);
  ASSERT_EQ(run.metrics.size(), 2u);
  EXPECT_EQ(run.metrics[0].step, 10);
  EXPECT_EQ(*run.metrics[0].find("loss"), 2.5);
  EXPECT_TRUE(std::isnan(*run.metrics[1].find("loss")));
  EXPECT_EQ(run.metrics[0].find("run"), nullptr);
  EXPECT_THAT(run.missing,
              ElementsAre(HasSubstr("1 of 4 lines of metrics.jsonl cannot be read (the first is "
                                    "line 2)"),
                          HasSubstr("no folder monitor/"), HasSubstr("configuration is not")));
  const std::string page = run_report(run);
  EXPECT_THAT(page, HasSubstr("no folder monitor/"));
  EXPECT_THAT(page, HasSubstr("1 logged losses from step 20 to 20 were not finite."));
  EXPECT_THAT(page, HasSubstr("The step budget was not recorded."));
}

TEST_F(Folder, AFolderWithoutARunIsRefused) {
  EXPECT_THROW(read_run_view(path.string(), monitor::Detail::kAll), UsageError);
  EXPECT_THROW(read_run_view((path / "nowhere").string(), monitor::Detail::kAll), UsageError);
}

TEST_F(Folder, ADamagedRecordLeavesTheRest) {
  write("metrics.jsonl", "{\"step\": 1, \"epoch\": 0.5, \"loss\": 2.5}\n");
  write("monitor/run.json", "{");
  const RunView run = read_run_view(path.string(), monitor::Detail::kAll);
  EXPECT_FALSE(run.record.has_value());
  ASSERT_FALSE(run.missing.empty());
  EXPECT_THAT(run.missing[0], HasSubstr("monitor/run.json"));
}

TEST_F(Folder, ConfigurationHasItsOrigins) {
  write("metrics.jsonl", "{\"step\": 1, \"epoch\": 0.5, \"loss\": 2.5}\n");
  write("effective_config.json",
        R"j({"settings": {"seed": {"value": 7, "from": "--seed", "beats": ["a.yaml:3:1 (42)"]},)j"
        R"j( "optim": {"value": "adamw", "from": "default"}}, "notes": []})j");
  const RunView run = read_run_view(path.string(), monitor::Detail::kAll);
  ASSERT_EQ(run.config.size(), 2u);
  EXPECT_EQ(run.config[0].from, "--seed");
  const std::string page = run_report(run);
  EXPECT_THAT(page, HasSubstr("<td>seed</td><td>7</td><td>--seed</td><td>a.yaml:3:1 (42)</td>"));
  EXPECT_THAT(page, HasSubstr("1 defaults"));
}

TEST(Summary, ResumesAreFoundInWhatWasSuperseded) {
  RunView run{.id = "out"};
  for (const int step : {41, 50, 60, 31, 40}) run.superseded.push_back({.step = step});
  run.checkpoints.push_back({.step = 30});
  const auto parts = superseded_of(run);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].first, 41);
  EXPECT_EQ(parts[0].last, 60);
  EXPECT_EQ(parts[1].first, 31);
  EXPECT_THAT(events_of(run)[1].text, HasSubstr("from step 30: steps 31 to 40"));
}

TEST(Summary, StartsAreMarkedHoweverSoonTheyFollow) {
  RunView run{.id = "out"};
  run.record.emplace();
  run.record->ranks.push_back({.rank = 0});
  auto& intervals = run.record->ranks[0].intervals;
  intervals = {interval(101, 1, 5), interval(102, 1, 5), interval(112, 1, 5),
               interval(113.25, 1, 5)};
  intervals[1].step = 10;
  intervals[3].start = true;  // the one before came late, as where the clock was set
  auto events = events_of(run);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[1].step, 10);
  EXPECT_THAT(events[1].text, HasSubstr("started again after 0.25 s; it had reached step 10"));
  intervals[2].start = true;
  events = events_of(run);
  ASSERT_EQ(events.size(), 3u);
  EXPECT_THAT(events[1].text, HasSubstr("started again after 9 s; it had reached step 10"));
}

TEST(Summary, TheEndOfAProgramWithoutMetricsIsKnownFromItsRecord) {
  RunView run{.id = "out"};
  run.record.emplace();
  run.record->facts.started_unix_s = 100;
  run.record->ranks.push_back({.rank = 0, .intervals = {interval(101, 1, 0)}});
  EXPECT_EQ(events_of(run).size(), 1u) << "it may still run";
  run.record->facts.ended_unix_s = 103;
  EXPECT_THAT(events_of(run).back().text, HasSubstr("The run ended, 3 s after its start."));
  run.record->facts.failure = "rank 1 failed";
  EXPECT_THAT(events_of(run).back().text, HasSubstr("The run failed: rank 1 failed."));
  run.metrics.push_back({.step = 7});
  EXPECT_THAT(events_of(run).back().text, HasSubstr("The run failed at step 7: rank 1 failed."));
}

TEST(Summary, ARunThatDidNotComeToItsEndSaysSoAtTheTop) {
  RunView run{.id = "out"};
  run.record.emplace();
  run.record->facts.program = "trainer";
  run.record->facts.total_steps = 400;
  run.record->facts.started_unix_s = 100;
  run.record->facts.ended_unix_s = 103;
  run.record->ranks.push_back({.rank = 0, .intervals = {interval(101, 1, 0)}});
  run.metrics.push_back({.step = 120});
  EXPECT_FALSE(end_of(run).well);
  EXPECT_EQ(end_of(run).event.text, "The run was stopped at step 120 of 400, 3 s after its start.");
  EXPECT_THAT(run_report(run), HasSubstr("There is no checkpoint to continue from."));
  run.checkpoints.push_back({.step = 100, .name = "checkpoint-100"});
  run.checkpoints.push_back({.step = 120, .name = "checkpoint-120", .problem = "no size"});
  run.record->facts.failure = "rank 1 failed: killed by SIGKILL. It comes from outside.";
  const std::string failed = run_report(run);
  const std::string note =
      "<p class=\"note\">The run failed at step 120 of 400: rank 1 failed: killed by SIGKILL. It "
      "comes from outside. lockstep train --resume auto continues from checkpoint-100.</p>";
  EXPECT_THAT(failed, HasSubstr(note));
  EXPECT_LT(failed.find(note), failed.find("Figures"));
  // Its last line is there: whatever its record says of steps, it has ended.
  run.record->facts.failure.clear();
  run.metrics.push_back({.step = 120, .values = {{"train_runtime", 3}}});
  EXPECT_TRUE(end_of(run).well);
}

TEST(Summary, FiguresComeFromMetricsAndRecord) {
  RunView run{.id = "out"};
  for (std::int64_t step = 0; const double rate : {1.0, 10.0, 30.0, 20.0})
    run.metrics.push_back(
        {.step = ++step, .values = {{"samples_per_second", rate}, {"loss", rate}}});
  run.record.emplace();
  run.record->facts = {.world_size = 2, .device = "cpu", .cores = 2};
  for (const int rank : {0, 1})
    run.record->ranks.push_back(
        {.rank = rank, .intervals = {interval(101, 1, 10, 0.5), interval(102, 1, 10, 0.5)}});
  const auto figures = figures_of(run);
  const auto value = [&](const char* name) {
    for (const Figure& figure : figures)
      if (figure.name == name) return figure.value.value_or(NAN);
    return -1.0;
  };
  EXPECT_EQ(value("samples per second (median)"), 20);
  EXPECT_EQ(value("last loss"), 20);
  EXPECT_DOUBLE_EQ(value("time per step"), 0.1);
  EXPECT_DOUBLE_EQ(value("share in exposed communication"), 0.25);
  EXPECT_DOUBLE_EQ(value("utilisation of GPUs or cores"), 0.5);
}

TEST(Budget, PartsAddUpToThePhases) {
  const auto parts = by_part(interval(1, 1, 1).host_s);
  ASSERT_EQ(parts.size(), budget_parts().size());
  EXPECT_THAT(parts, ElementsAre(0, 0.5, 0, 0.25, 0, 0, 0.25, 0));
}

// A device that was busy for 9 of 10 s while the host waited in it and logged.
TEST(Budget, OfADeviceIsNoLongerThanTheStep) {
  monitor::RankRecord rank;
  for (int i = 0; i < 4; ++i) {
    monitor::Interval one = interval(110 + 10 * i, 10, 100);
    one.device_s[ledger::index(Phase::kForward)] = 9;
    one.device_s[ledger::index(Phase::kNone)] = 1;
    rank.intervals.push_back(one);
  }
  const auto bars = budget_bars("Step budget", {{"rank 0", settled_budget(rank)}}).bars;
  ASSERT_EQ(bars.size(), 1u);
  // Saving and logging took 1.25 s each by the host's clock, and the device was idle for 1 s.
  EXPECT_THAT(bars[0].values, Pointwise(DoubleNear(1e-9), {0, 90, 0, 0, 0, 0, 10, 0}));
  for (const Column& column : budget_over_time(rank, 100).columns)
    EXPECT_NEAR(std::accumulate(column.values.begin(), column.values.end(), 0.0),
                column.to - column.from, 1e-9);
}

TEST(Budget, ColumnsKeepGapsAndStayFew) {
  monitor::RankRecord rank;
  for (int i = 0; i < 1000; ++i) rank.intervals.push_back(interval(100 + i, 1, 1));
  for (int i = 0; i < 1000; ++i) rank.intervals.push_back(interval(3000 + i, 1, 1));
  rank.intervals[1000].start = true;
  const auto chart = budget_over_time(rank, 99);
  EXPECT_LE(chart.columns.size(), 140u);
  double covered = 0, seconds = 0;
  for (const Column& column : chart.columns) {
    covered += column.to - column.from;
    for (const double value : column.values) seconds += value;
    EXPECT_FALSE(column.from < 1900 && column.to > 2000) << "the gap is covered";
  }
  EXPECT_NEAR(covered, 2000, 1e-6);
  EXPECT_NEAR(seconds, 2000, 1e-6);
}

TEST(Scale, SpeedUpIsOfTheSameRound) {
  ScalePoint one{.ranks = 1, .batch = 8, .accumulation = 2, .samples_per_s = {100, 50, 100}};
  ScalePoint two{.ranks = 2, .batch = 8, .accumulation = 2, .samples_per_s = {180, 100, 190}};
  const auto rows = scale_rows({two, one});
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].point.ranks, 1);
  EXPECT_EQ(rows[0].speedup, 1);
  EXPECT_DOUBLE_EQ(rows[1].speedup, 1.9);
  EXPECT_DOUBLE_EQ(rows[1].efficiency, 0.95);
  EXPECT_DOUBLE_EQ(rows[1].step_s, 32 / 180.0);
  EXPECT_FALSE(rows[1].utilisation.has_value());
  // Without one rank the fewest are taken for linear.
  ScalePoint four{.ranks = 4, .samples_per_s = {360, 200, 380}};
  const auto later = scale_rows({two, four});
  EXPECT_EQ(later[0].speedup, 2);
  EXPECT_EQ(later[1].speedup, 4);
}

TEST(Scale, UtilisationIsOfTheCoresThatRanksWereGiven) {
  RunView run{.id = "out"};
  run.record.emplace();
  run.record->facts = {.world_size = 2, .device = "cpu", .cores = 64};
  for (const int rank : {0, 1})
    run.record->ranks.push_back({.rank = rank,
                                 .intervals = {interval(100.5 + rank / 4.0, 1, 10, 1.5),
                                               interval(101.5 + rank / 4.0, 1, 10, 1.5)}});
  const auto rows =
      scale_rows({{.ranks = 2, .samples_per_s = {10}, .cores_per_rank = 2, .run = run}});
  EXPECT_DOUBLE_EQ(*rows[0].utilisation, 0.75);
  const LineChart chart = scale_utilisation_chart(rows);
  ASSERT_EQ(chart.lines.size(), 1u);
  for (const auto& [second, percent] : chart.lines[0].points) EXPECT_NEAR(percent, 75, 1e-9);
  const auto cells = scale_csv_rows(rows);
  EXPECT_EQ(cells[0].size(), cells[1].size());
  EXPECT_EQ(cells[1][9], "0.7500");
}

TEST(Report, GpusAreShownOverTimeAndAsFigures) {
  RunView run{.id = "out"};
  run.record.emplace();
  run.record->facts = {.world_size = 1, .device = "cuda", .ranks_on_host = 1};
  run.record->ranks.push_back({.rank = 0, .intervals = {interval(110, 10, 10)}});
  run.record->ranks[0].intervals[0].device_s[ledger::index(Phase::kBackward)] = 5;
  monitor::HostGpus host{.gpus = {{.index = 0}, {.index = 1}}};
  for (int i = 0; i < 10; ++i) {
    monitor::GpuSample sample{.unix_time_s = 100.5 + i, .gpus = {{}, {}}};
    sample.gpus[0].utilisation_percent = 5;
    sample.gpus[1].utilisation_percent = 90;
    sample.gpus[1].power_w = 321;
    if (i == 7) sample.gpus[0] = {.problem = "GPU is lost"};
    host.samples.push_back(sample);
  }
  run.record->gpus.push_back(host);
  // The busiest GPU is the one of the only rank.
  EXPECT_DOUBLE_EQ(*mean_gpu_percent(*run.record), 90);
  EXPECT_DOUBLE_EQ(*utilisation(*run.record), 0.9);
  const LineChart chart = gpus_over_time(*run.record);
  ASSERT_EQ(chart.lines.size(), 2u);
  EXPECT_DOUBLE_EQ(chart.lines[1].points[3].first, 3.5);
  EXPECT_TRUE(std::isnan(chart.lines[0].points[7].second));
  std::vector<std::string> titles;
  for (const monitor::Table& table : run_tables(run)) titles.push_back(table.title);
  EXPECT_THAT(titles, ElementsAre("Figures", "GPUs", "Where the time went", "Checkpoints", "Events",
                                  "Configuration"));
  const std::string page = run_report(run);
  EXPECT_THAT(page, HasSubstr("GPU: time with a kernel running"));
  EXPECT_THAT(page, HasSubstr("<td>1 of host 0</td><td>90 %</td>"));
  EXPECT_THAT(page, HasSubstr("321 W"));
  EXPECT_THAT(page, HasSubstr("Host 0, GPU 0: GPU is lost."));
  EXPECT_THAT(page, HasSubstr("by its device&#39;s clock"));
}

TEST(Report, FindingsAreShownAndHostileNamesStayText) {
  RunView run{.id = "<script>alert(1)</script>"};
  run.metrics.push_back({.step = 1, .values = {{"<img src=x onerror=alert(1)>", 1}}});
  run.record.emplace();
  run.record->ranks.push_back({.rank = 0, .intervals = {interval(101, 1, 1)}});
  run.findings = {{.rule = "loader-bound",
                   .rank = 1,
                   .what = "<b>waits</b>",
                   .evidence = "52 % of a step",
                   .remedy = "dataloader_num_workers: 4",
                   .gain = 0.15}};
  for (const std::string& page : {run_report(run), comparison_report(run, run)}) {
    EXPECT_THAT(page, HasSubstr("loader-bound (rank 1)"));
    EXPECT_THAT(page, HasSubstr("dataloader_num_workers: 4"));
    EXPECT_THAT(page, HasSubstr("15.0 % of the step time"));
    EXPECT_THAT(page, HasSubstr("&lt;b&gt;waits"));
    for (const char* markup : {"<script", "<img", "<b>"}) EXPECT_THAT(page, Not(HasSubstr(markup)));
  }
  run.findings.clear();
  EXPECT_THAT(run_report(run), HasSubstr("too few recorded steps to judge"));
  for (int i = 0; i < 100; ++i) run.record->ranks[0].intervals.push_back(interval(102 + i, 1, 10));
  EXPECT_THAT(run_report(run), HasSubstr("No rule found anything to change."));
}

}  // namespace
}  // namespace lockstep::report
