// What is read from a run's folder and concluded from it for the page, the rows of a scaling
// report, the page as a file, and what Prometheus reads.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "lockstep/core/document.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/monitor/run_record.h"
#include "lockstep/monitor/run_view.h"
#include "observe/dashboard/page.h"
#include "observe/dashboard/rank_sampler.h"
#include "observe/dashboard/run_summary.h"

namespace lockstep::dashboard {
namespace {

namespace fs = std::filesystem;
using ledger::Phase;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

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

// The cells of the table of that title, "a b; c d; ".
std::string rows_of(const Node& state, const std::string& title) {
  std::string text;
  for (const Node& table : state.at("tables").items) {
    if (table.at("title").text != title) continue;
    for (const Node& row : table.at("rows").items) {
      for (std::size_t i = 0; i < row.items.size(); ++i)
        text += (i > 0 ? " " : "") + row.items[i].text;
      text += "; ";
    }
  }
  return text;
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
  const std::string state = to_json(report_state(run));
  EXPECT_THAT(state, HasSubstr("no folder monitor/"));
  EXPECT_THAT(state, HasSubstr("1 logged losses from step 20 to 20 were not finite."));
  EXPECT_THAT(to_json(comparison_state(run, run)), HasSubstr("has no record of its step budget."));
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
  const auto tables = run_tables(run);
  EXPECT_THAT(tables[tables.size() - 2].rows,
              ElementsAre(ElementsAre("seed", "7", "--seed", "a.yaml:3:1 (42)")));
  EXPECT_EQ(tables.back().title, "1 defaults");
  RunView other = run;
  other.id = "other";
  other.config[0].value = "8";
  other.config[1].key = "lr";
  EXPECT_EQ(
      rows_of(comparison_state(run, other), "Configuration: what differs"),
      "seed 7 --seed 8 --seed; optim adamw default not there ; lr not there  adamw default; ");
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
  EXPECT_THAT(to_json(report_state(run)), HasSubstr("There is no checkpoint."));
  run.checkpoints.push_back({.step = 100, .name = "checkpoint-100"});
  run.checkpoints.push_back({.step = 120, .name = "checkpoint-120", .problem = "no size"});
  run.record->facts.failure = "rank 1 failed: killed by SIGKILL. It comes from outside.";
  const std::string failed = to_json(report_state(run));
  EXPECT_THAT(failed, HasSubstr("The run failed at step 120 of 400: rank 1 failed: killed by "
                                "SIGKILL. It comes from outside."));
  EXPECT_THAT(failed, HasSubstr("lockstep train --resume auto continues from checkpoint-100."));
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

// A device that was busy for 9 of 10 s while the host waited in it and logged.
TEST(Budget, OfADeviceIsNoLongerThanTheStep) {
  monitor::RankRecord rank;
  for (int i = 0; i < 4; ++i) {
    monitor::Interval one = interval(110 + 10 * i, 10, 100);
    one.device_s[ledger::index(Phase::kForward)] = 9;
    one.device_s[ledger::index(Phase::kNone)] = 1;
    rank.intervals.push_back(one);
  }
  const Node entry = budget_entry("rank 0", settled_budget(rank));
  EXPECT_DOUBLE_EQ(entry.at("step_ms").real, 100);
  // Saving and logging took 1.25 s each by the host's clock, and the device was idle for 1 s.
  const Node& shares = entry.at("budget");
  EXPECT_NEAR(shares.at("forward").real, 0.9, 1e-9);
  double rest = 0;
  for (const Entry& share : shares.entries)
    if (share.key == "logging" || share.key == "saving") rest += share.value.real;
  EXPECT_NEAR(rest, 0.1, 1e-9);
  EXPECT_EQ(shares.find("communication"), nullptr);
  const auto columns = charts_of({.ranks = {rank}}).back().columns;
  for (const ChartColumn& column : columns)
    EXPECT_NEAR(std::accumulate(column.shares.begin(), column.shares.end(), 0.0), 1, 1e-9);
}

TEST(Budget, ColumnsKeepGapsAndStayFew) {
  monitor::RankRecord rank;
  for (int i = 0; i < 1000; ++i) rank.intervals.push_back(interval(100 + i, 1, 1));
  for (int i = 0; i < 1000; ++i) rank.intervals.push_back(interval(3000 + i, 1, 1));
  rank.intervals[1000].start = true;
  const auto columns = charts_of({.ranks = {rank}}).back().columns;
  EXPECT_LE(columns.size(), 140u);
  double covered = 0;
  for (const ChartColumn& column : columns) {
    covered += column.to - column.from;
    EXPECT_FALSE(column.from < 1900 && column.to > 2000) << "the gap is covered";
  }
  EXPECT_NEAR(covered, 2000, 1e-6);
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
  const Node state = scale_state(rows, {.file = "a.yaml", .notes = {"<note>"}});
  const Node& chart = state.at("charts").items.back();
  EXPECT_EQ(chart.at("title").text, "Utilisation of the cores given to the ranks");
  for (const Node& point : chart.at("lines").items.at(0).at("points").items)
    EXPECT_NEAR(point.items[1].real, 75, 1e-6);
  const Node& budget = state.at("budgets").items.at(0);
  EXPECT_EQ(budget.at("name").text, "2 ranks");
  EXPECT_EQ(budget.at("budget").at("communication").real, 0.25);
  EXPECT_EQ(state.at("run").at("message").text, "<note>");
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
  const Chart chart = charts_of(*run.record).front();
  EXPECT_EQ(chart.title, "GPU: time with a kernel running");
  ASSERT_EQ(chart.lines.size(), 2u);
  EXPECT_DOUBLE_EQ(chart.lines[1].points[3].first, 3.5);
  EXPECT_TRUE(std::isnan(chart.lines[0].points[7].second));
  std::vector<std::string> titles;
  for (const monitor::Table& table : run_tables(run)) titles.push_back(table.title);
  EXPECT_THAT(titles, ElementsAre("Figures", "GPUs", "Where the time went", "Checkpoints", "Events",
                                  "Configuration"));
  const Node state = report_state(run);
  EXPECT_THAT(rows_of(state, "GPUs"), HasSubstr("1 of host 0 90 %"));
  for (const char* part : {"321 W", "Host 0, GPU 0: GPU is lost.", "by its device's clock"})
    EXPECT_THAT(to_json(state), HasSubstr(part));
}

TEST(Page, AFileLoadsNothingAndHostileNamesStayText) {
  RunView run{.id = "</script><script>alert(1)</script>"};
  run.metrics.push_back({.step = 1, .values = {{"<img src=x onerror=alert(1)>", 1}}});
  run.record.emplace();
  run.record->ranks.push_back({.rank = 0, .intervals = {interval(101, 1, 1)}});
  run.findings = {{.rule = "loader-bound", .rank = 1, .what = "<b>waits</b>"}};
  for (const Node& state : {report_state(run), comparison_state(run, run)}) {
    const std::string page = page_file(state);
    EXPECT_THAT(page, HasSubstr("\\u003cb>waits"));
    for (const char* markup : {"<script>alert", "<img src=x", "<b>", "=\"/"})
      EXPECT_THAT(page, Not(HasSubstr(markup)));
    EXPECT_THAT(page, HasSubstr("default-src 'none'; script-src 'sha256-"));
    const std::string begin = "<script type=\"application/json\" id=\"data\">";
    const std::size_t at = page.find(begin) + begin.size();
    const std::string data = page.substr(at, page.find("</script>", at) - at);
    EXPECT_TRUE(same_value(parse_json(data, "page"), parse_json(to_json(state), "state")));
  }
}

TEST(Page, NumbersAreForPeople) {
  EXPECT_EQ(number_text(0.03125), "0.03125");
  EXPECT_EQ(number_text(-1234567.2), "-1,234,567");
  EXPECT_EQ(number_text(999.96), "1,000");
  EXPECT_EQ(number_text(NAN), "not a number");
  EXPECT_EQ(time_text(0), "");
  EXPECT_EQ(time_text(1e9), "2001-09-09 01:46:40 UTC");
  EXPECT_EQ(percent_text(0.153), "15.3 %");
  for (const auto& [seconds, text] :
       {std::pair{1.25, "1.25 s"}, {200.0, "3 min 20 s"}, {18720.0, "5 h 12 min"}})
    EXPECT_EQ((Figure{"", seconds, Unit::kSeconds}).text(), text);
}

// ---------------------------------------------------------------- what Prometheus reads

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

// ---------------------------------------------------------------- a record: whether it is over

using monitor::Interval;

class RecordView : public testing::Test {
 protected:
  // Five seconds until now of a program without steps, and the rest after its last sample.
  void write(const monitor::RunFacts& facts) {
    RecordWriter writer(folder_, 0);
    writer.write(facts);
    const double now = static_cast<double>(std::time(nullptr));
    for (int i = 1; i <= 5; ++i) {
      Interval interval{.unix_time_s = now - 6 + i, .seconds = 1};
      interval.host_s[ledger::index(ledger::Phase::kNone)] = 1;
      interval.process = monitor::ProcessRates{.seconds = 1, .cores = 1.5};
      interval.resident_bytes = 3u << 30;
      interval.threads = 7;
      writer.add(0, interval);
    }
    writer.add(0, {.unix_time_s = now - 0.8, .seconds = 0.2});
  }
  std::string state() { return monitor::read_run_view(folder_).state; }
  void log(const std::string& line) {
    std::ofstream(folder_ + "/metrics.jsonl", std::ios::app) << line << "\n";
  }

  TemporaryDirectory directory_;
  std::string folder_ = directory_.path();
};

TEST_F(RecordView, OfAProgramWithoutStepsShowsWhatIsKnown) {
  write({.started_unix_s = 100});
  const monitor::RunView view = monitor::read_run_view(folder_);
  ASSERT_EQ(view.ranks.size(), 1u);
  const Node snapshot = parse_json(monitor::snapshot_json(view), "snapshot");
  const Node& rank = snapshot.at("ranks").items.at(0);
  for (const char* key : {"step", "step_ms", "pid"})
    EXPECT_TRUE(rank.at(key).is(NodeKind::kNull)) << key;
  EXPECT_TRUE(rank.at("budget").entries.empty());
  EXPECT_EQ(rank.at("cores").real, 1.5);
  EXPECT_EQ(rank.at("resident_bytes").integer, 3LL << 30);
  EXPECT_EQ(rank.at("threads").integer, 7);
}

TEST_F(RecordView, ARunEndsWithTheProcessThatRecordsIt) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(60);
    while (true) ::pause();
  }
  const monitor::RunFacts facts{.started_unix_s = 100, .writer = monitor::process_identity(child)};
  write(facts);
  EXPECT_FALSE(facts.writer.empty());
  EXPECT_EQ(state(), "running");
  ::kill(child, SIGKILL);
  siginfo_t ended{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(state(), "killed") << "nobody has waited for it";
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_EQ(state(), "killed");
  EXPECT_THAT(monitor::read_run_view(folder_).message, testing::HasSubstr("it was killed"));
  // What it could still write down counts.
  monitor::RunFacts failed = facts;
  failed.failure = "an error";
  write(failed);
  EXPECT_EQ(state(), "failed");
  write(facts);
  log("{\"step\": 5, \"train_runtime\": 1.5}");
  EXPECT_EQ(state(), "ended");
  EXPECT_FALSE(monitor::has_ended("")) << "not known";
  EXPECT_FALSE(monitor::has_ended("another-boot " + facts.writer));
  EXPECT_FALSE(monitor::has_ended(monitor::process_identity(::getpid())));
  EXPECT_TRUE(monitor::has_ended(monitor::process_identity(::getpid()) + "1")) << "a later process";
}

TEST_F(RecordView, TheRecordAndTheMetricsSayThatItEnded) {
  write({.started_unix_s = 100, .ended_unix_s = 200});
  EXPECT_EQ(state(), "ended");
  write({.started_unix_s = 100, .ended_unix_s = 200, .failure = "rank 0 failed"});
  EXPECT_EQ(state(), "failed");
  EXPECT_EQ(monitor::read_run_view(folder_).message, "Rank 0 failed.");
  write({.world_size = 3,
         .started_unix_s = 100,
         .total_steps = 40,
         .ended_unix_s = 200,
         .failure = "rank 0 failed",
         .failed_ranks = map_node({{"2", text_node("exited with code 3")},
                                   {"0", text_node("killed by SIGKILL")},
                                   {"7", text_node("there is no such rank")}})});
  const monitor::RunView view = monitor::read_run_view(folder_);
  EXPECT_EQ(view.ranks.at(0).status, monitor::RankStatus::kFailed);
  EXPECT_EQ(view.ranks.at(0).exit, "killed by SIGKILL");
  ASSERT_EQ(view.ranks.size(), 2u) << "one has left nothing, and one is known by its failure";
  EXPECT_EQ(view.ranks.at(1).exit, "exited with code 3");
  EXPECT_EQ(view.facts().total_steps, 40);
  EXPECT_TRUE(view.recorded);
  write({.program = "trainer", .started_unix_s = 100, .total_steps = 40, .ended_unix_s = 200});
  EXPECT_THAT(monitor::read_run_view(folder_).message, testing::StartsWith("Stopped on request"));
  write({.started_unix_s = 100});
  EXPECT_EQ(state(), "running") << "of another host, say";
  log("{\"step\": 5, \"loss\": 1}");
  EXPECT_EQ(state(), "running");
  log("{\"step\": 5, \"train_runtime\": 1.5}");
  EXPECT_EQ(state(), "ended");
  write({.started_unix_s = static_cast<double>(std::time(nullptr)) + 5});
  EXPECT_EQ(state(), "running") << "these are of an earlier start";
}

// A launcher makes one before it knows whether the ranks record themselves.
TEST_F(RecordView, AWriterThatWritesNothingLeavesTheEarlierRecord) {
  write({.started_unix_s = 100, .ended_unix_s = 200});
  { const RecordWriter unused(folder_, 0); }
  EXPECT_EQ(state(), "ended");
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/monitor.1"));
}

}  // namespace
}  // namespace lockstep::dashboard
