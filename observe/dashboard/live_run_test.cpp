// The live run over real processes, ledgers, files and a made-up driver.
#include "observe/dashboard/live_run.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <thread>

#include "launcher/plan.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/monitor/rank_recorder.h"
#include "lockstep/monitor/run_figures.h"
#include "observe/dashboard/rank_sampler.h"
#include "observe/dashboard/run_summary.h"

namespace lockstep::dashboard {
namespace {

namespace fs = std::filesystem;
using child_for_test::Child;
using ledger::Counter;
using ledger::Phase;
using monitor::Finding;
using monitor::Interval;
using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;

// Steps of 10 ms, of which 5 are for data (25 on rank 1), until it is killed.
CHILD(trains) {
  if (!ledger::open()) return 3;
  if (const char* folder = std::getenv("OUTPUT_DIR")) ledger::set_output_dir(folder);
  const char* const rank = std::getenv("RANK");
  const bool slow = rank != nullptr && std::string(rank) == "1";
  for (int step = 1;; ++step) {
    {
      const ledger::PhaseScope data(Phase::kData);
      std::this_thread::sleep_for(milliseconds(slow ? 25 : 5));
    }
    {
      const ledger::PhaseScope forward(Phase::kForward);
      std::this_thread::sleep_for(milliseconds(5));
    }
    ledger::add(Counter::kBatches);
    ledger::ended(ledger::post({.name = "all_reduce", .sequence = static_cast<unsigned>(step)}),
                  ledger::End::kFinished);
    ledger::set_step(step);
  }
}

// Collectives without steps, as of a Python script; rank 1 comes late to each.
CHILD(reduces) {
  if (!ledger::open()) return 3;
  ledger::ended(ledger::post({.name = "connect", .group = "0"}), ledger::End::kFinished);
  const bool slow = std::string(std::getenv("RANK")) == "1";
  for (unsigned i = 1;; ++i) {
    std::this_thread::sleep_for(milliseconds(slow ? 36 : 4));
    const auto reduction = ledger::post({.name = "all_reduce", .group = "0", .sequence = i});
    std::this_thread::sleep_for(milliseconds(slow ? 4 : 36));
    ledger::ended(reduction, ledger::End::kFinished);
    // A root, a part of the world, a message: others need not wait for this rank.
    for (const ledger::Operation& other :
         {ledger::Operation{.name = "gather", .group = "0", .sequence = i, .peer = 0},
          ledger::Operation{.name = "all_reduce", .group = "1", .sequence = i},
          ledger::Operation{.name = "send", .group = "0", .peer = 1, .message = true}}) {
      const auto posted = ledger::post(other);
      std::this_thread::sleep_for(milliseconds(2));
      ledger::ended(posted, ledger::End::kFinished);
    }
  }
}

// What a Trainer does that loads for a long time.
CHILD(starts_up) {
  if (!ledger::open()) return 3;
  std::this_thread::sleep_for(milliseconds(600'000));
  return 0;
}

CHILD(knows_nothing) {
  for (std::atomic<unsigned> i{0};;) i.fetch_add(1);
}

template <typename Condition>
bool soon(Condition condition, milliseconds limit = milliseconds(30'000)) {
  const Deadline deadline = Deadline::after(limit);
  while (!condition()) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(milliseconds(10));
  }
  return true;
}

void append(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::app) << text << std::flush;
}

// A process that is a rank with a ledger, as the launcher would have started it.
struct Rank {
  Rank(const std::string& body, int number, std::map<std::string, std::string> variables = {})
      : ledger(std::make_shared<ledger::File>(ledger::File::create({number, 2, 0}))) {
    variables.insert({{"RANK", std::to_string(number)},
                      {"WORLD_SIZE", "2"},
                      {ledger::kVariable, ledger->variable()}});
    process.emplace(body, variables, std::vector<int>{ledger->fd()});
    started = {.rank = number, .local_rank = number, .pid = process->pid(), .ledger = ledger};
  }
  std::shared_ptr<ledger::File> ledger;
  std::optional<Child> process;
  launch::RankStarted started;
};

// ---------------------------------------------------------------- findings

Finding finding(const std::string& rule, int rank = -1, const std::string& cause = "") {
  Finding result;
  result.rule = rule;
  result.rank = rank;
  result.cause = cause;
  result.what = "it is slow";
  return result;
}

TEST(StandingFindings, AFindingIsSaidOnceAfterItHasStood) {
  StandingFindings standing;
  const std::vector<Finding> found = {finding("straggler", 1, "data")};
  EXPECT_THAT(standing.look(found, 5), IsEmpty());
  EXPECT_THAT(standing.look({}, 6), IsEmpty());
  EXPECT_THAT(standing.look(found, 7), IsEmpty()) << "it was gone in between";
  const auto said = standing.look(found, 8);
  ASSERT_EQ(said.size(), 1u);
  EXPECT_THAT(said[0], testing::StartsWith("[doctor] step 8: straggler"));
  for (int i = 0; i < 20; ++i) EXPECT_THAT(standing.look(found, 9), IsEmpty());
}

TEST(StandingFindings, AnotherRankOrCauseIsAnotherFinding) {
  StandingFindings standing;
  standing.look({finding("straggler", 1, "data")}, -1);
  EXPECT_EQ(standing.look({finding("straggler", 1, "data"), finding("straggler", 0)}, -1).size(),
            1u);
  EXPECT_EQ(standing.look({finding("straggler", 1, "data"), finding("straggler", 0)}, -1).size(),
            1u);
}

TEST(StandingFindings, OneThatIsGoneForAWhileIsNewsWhenItReturns) {
  StandingFindings standing;
  const std::vector<Finding> found = {finding("loader-bound")};
  standing.look(found, -1);
  EXPECT_EQ(standing.look(found, -1).size(), 1u);
  for (int i = 0; i < StandingFindings::kGone - 1; ++i) standing.look({}, -1);
  for (int i = 0; i < 5; ++i) EXPECT_THAT(standing.look(found, -1), IsEmpty());
  for (int i = 0; i < StandingFindings::kGone; ++i) standing.look({}, -1);
  EXPECT_THAT(standing.look(found, -1), IsEmpty());
  EXPECT_EQ(standing.look(found, -1).size(), 1u);
}

monitor::RankRecord steady_rank(int rank, double data_share) {
  monitor::RankRecord record{.rank = rank};
  for (int i = 1; i <= 5; ++i) {
    Interval interval{.unix_time_s = 100.0 + i, .seconds = 1, .step = 10 * i, .steps = 10};
    interval.host_s[ledger::index(Phase::kData)] = data_share;
    interval.host_s[ledger::index(Phase::kForward)] = 1 - data_share;
    interval.process = monitor::ProcessRates{.seconds = 1, .cores = 1.5};
    interval.resident_bytes = 3u << 30;
    interval.threads = 7;
    record.intervals.push_back(interval);
  }
  return record;
}

TEST(Summary, HasARowForEachRankAndSaysHealthy) {
  monitor::RunRecord run;
  run.facts.world_size = 2;
  run.ranks = {steady_rank(0, 0.25), steady_rank(1, 0.5)};
  const auto lines = doctor_summary(run, {});
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines[0], HasSubstr("[doctor] 2 of 2 ranks, 5.0 s"));
  EXPECT_THAT(lines[0], testing::ContainsRegex("rank +steps +ms/step +data +forward +cores"));
  EXPECT_THAT(lines[0],
              testing::ContainsRegex("\n +0 +50 +100.00 +25.0 % +75.0 % +1.50 +3.00 GiB +7 +0\n"));
  EXPECT_THAT(lines[0], testing::ContainsRegex("\n +1 +50 +100.00 +50.0 % +50.0 %"));
  EXPECT_THAT(lines[0], testing::EndsWith("\n" + table_text(budget_table(budget_rows(run)))));
  EXPECT_THAT(lines[1], HasSubstr("healthy"));
  EXPECT_THAT(doctor_summary(run, {}, true)[1], HasSubstr("the run itself failed"));
  EXPECT_THAT(doctor_summary(run, {finding("straggler", 1)})[1], HasSubstr("straggler (rank 1"));
  for (monitor::RankRecord& rank : run.ranks)
    for (Interval& interval : rank.intervals) interval.steps = 0;
  EXPECT_THAT(doctor_summary(run, {})[0], HasSubstr("no step was seen"));
  EXPECT_THAT(doctor_summary(run, {})[1], HasSubstr("nothing found, and no step was seen"));
  for (monitor::RankRecord& rank : run.ranks) rank.intervals[1].steps = 1;
  EXPECT_THAT(doctor_summary(run, {})[1], HasSubstr("nothing found, and too few steps"));
  EXPECT_THAT(doctor_summary({}, {})[0], HasSubstr("no rank lived long enough"));
}

// ---------------------------------------------------------------- GPUs

std::vector<monitor::GpuIdentity> three_gpus() {
  return {{.index = 0, .uuid = "GPU-aa"}, {.index = 1, .uuid = "GPU-ab"}, {.index = 2}};
}

TEST(RankGpus, TheVariableChoosesAsInCuda) {
  const auto gpus = three_gpus();
  EXPECT_THAT(visible_gpus(gpus, {}), ElementsAre(0, 1, 2));
  EXPECT_THAT(visible_gpus(gpus, ""), IsEmpty());
  EXPECT_THAT(visible_gpus(gpus, "2, 0"), ElementsAre(2, 0));
  EXPECT_THAT(visible_gpus(gpus, "GPU-ab"), ElementsAre(1));
  EXPECT_THAT(visible_gpus(gpus, "1,-1,0"), ElementsAre(1));
  EXPECT_THAT(visible_gpus(gpus, "7"), IsEmpty());
}

TEST(RankGpus, TheDriverKnowsWhoUsesAGpuOtherwiseTheLocalRankSays) {
  monitor::GpuSnapshot snapshot{.gpus = three_gpus()};
  EXPECT_EQ(gpu_of_rank(snapshot, {0, 1, 2}, {10, 0}), -1) << "before the first sample";
  auto sample = std::make_shared<monitor::GpuSample>();
  sample->gpus.resize(3);
  sample->gpus[2].processes = {{.pid = 10}};
  snapshot.newest = sample;
  EXPECT_EQ(gpu_of_rank(snapshot, {0, 1, 2}, {10, 0}), 2);
  EXPECT_EQ(gpu_of_rank(snapshot, {1, 0}, {11, 0}), 1);
  EXPECT_EQ(gpu_of_rank(snapshot, {1, 0}, {11, 2}), -1);
  const monitor::HostGpus chosen = host_gpus(3, snapshot.gpus, {2}, {sample});
  EXPECT_EQ(chosen.gpus.at(0).index, 2);
  EXPECT_EQ(chosen.samples.at(0).gpus.at(0).processes.size(), 1u);
}

// ---------------------------------------------------------------- record

TEST(RecordWriter, WhatItWritesIsReadBackAndMovedAwayByTheNextRun) {
  const TemporaryDirectory folder;
  monitor::RunFacts facts;
  facts.world_size = 2;
  facts.program = "./train";
  {
    RecordWriter writer(folder.path(), 0);
    writer.write(facts);
    for (const Interval& interval : steady_rank(1, 0.5).intervals) writer.add(1, interval);
    monitor::GpuSample sample{.unix_time_s = 5};
    sample.gpus.resize(1);
    sample.gpus[0].utilisation_percent = 97;
    writer.add(sample, {{.index = 0, .name = "Fake"}});
    EXPECT_EQ(writer.problem(), "");
  }
  append(folder / "monitor/rank_1.jsonl", "{\"unix_time_s\": 3, \"sec");  // killed here
  const monitor::RunRecord run = monitor::read_run(folder.path());
  EXPECT_EQ(run.facts.world_size, 2);
  ASSERT_EQ(run.ranks.size(), 1u);
  EXPECT_EQ(run.ranks[0].rank, 1);
  EXPECT_EQ(run.ranks[0].intervals.size(), 5u);
  EXPECT_EQ(run.gpus.at(0).samples.at(0).gpus.at(0).utilisation_percent, 97u);
  for (const int host : {1, 0}) {
    RecordWriter writer(folder.path(), host);
    RecordWriter shared(folder.path(), 2);
    facts.world_size = 5 + host;
    writer.write(facts);
    writer.add(0, steady_rank(0, 0.5).intervals.back());
    shared.add(2, steady_rank(2, 0.5).intervals.back());
    EXPECT_EQ(writer.moved_to(), folder / (host == 1 ? "monitor.1" : "monitor.2"));
    EXPECT_EQ(writer.moved_to(), "");
    EXPECT_EQ(shared.moved_to(), "") << "another host of this run has begun";
    const monitor::RunRecord next = monitor::read_run(folder.path());
    EXPECT_EQ(next.facts.world_size, 5 + host);
    EXPECT_EQ(next.ranks.size(), 2u);
    EXPECT_EQ(next.ranks.at(0).intervals.size(), 1u);
  }
  EXPECT_TRUE(fs::exists(folder / "monitor.1/rank_1.jsonl"));
}

TEST(RecordWriter, AfterAnHourALineCoversTenSecondsOfOneStart) {
  const TemporaryDirectory folder;
  Interval interval = steady_rank(0, 0.25).intervals.back();
  {
    RecordWriter writer(folder.path(), 0);
    writer.write(monitor::RunFacts{});
    monitor::GpuSample sample{};
    sample.gpus.resize(1);
    for (int i = 0; i < monitor::kFineLines + 35; ++i) {
      interval.start = i == monitor::kFineLines + 14;
      interval.step = i;
      interval.process->cores = i % 2;
      writer.add(0, interval);
      sample.unix_time_s = i;
      writer.add(sample, {{.index = 0}});
    }
  }
  const monitor::RunRecord run = monitor::read_run(folder.path());
  const auto& intervals = run.ranks.at(0).intervals;
  ASSERT_EQ(intervals.size(), monitor::kFineLines + 5u);
  const Interval& coarse = intervals[monitor::kFineLines];
  EXPECT_EQ(coarse.seconds, 10);
  EXPECT_EQ(coarse.steps, 100);
  EXPECT_EQ(coarse.step, monitor::kFineLines + 9);
  EXPECT_NEAR(coarse.host_s[ledger::index(Phase::kData)], 2.5, 1e-9);
  EXPECT_NEAR(coarse.process->cores, 0.5, 1e-9);
  EXPECT_EQ(intervals[monitor::kFineLines + 1].seconds, 4);
  EXPECT_TRUE(intervals[monitor::kFineLines + 2].start);
  EXPECT_EQ(intervals.back().seconds, 1);
  EXPECT_EQ(run.gpus.at(0).samples.size(), monitor::kFineLines + 3u);
}

TEST(RecordWriter, AFolderThatCannotBeMadeIsAnErrorAndALaterOneIsReportedOnce) {
  EXPECT_THROW(RecordWriter("/proc/none", 0), std::exception);
  const TemporaryDirectory folder;
  RecordWriter writer(folder.path(), 0);
  fs::remove_all(folder / "monitor");
  std::ofstream(folder / "monitor") << "in its place";
  writer.add(0, Interval{});
  EXPECT_THAT(writer.problem(), HasSubstr("monitor"));
  writer.add(0, Interval{});
  EXPECT_EQ(writer.problem(), "");
}

// ---------------------------------------------------------------- snapshot

TEST(Snapshot, IsTheDocumentOfTheContract) {
  monitor::RunView view;
  view.id = "r\"1";
  view.record.emplace().facts = {.world_size = 2, .total_steps = 1000};
  view.state = "running";
  monitor::RankState rank{.rank = 1, .pid = 17, .step = 120, .step_ms = 21.5, .phase = "backward"};
  rank.newest = steady_rank(1, 0.25).intervals[0];
  rank.gpu = 2;
  rank.position = monitor::Position{"all_reduce", 17, "started", 0.125};
  rank.log = {"</script>\x01\xff", "two"};
  view.ranks.push_back(rank);
  view.metrics = {
      {.step = 1, .values = {{"loss", 2.5}}},
      {.step = 2,
       .values = {{"loss", std::numeric_limits<double>::quiet_NaN()}, {"accuracy", 0.5}}}};
  view.mean_step_s = 0.5;
  view.findings = {finding("straggler", 1, "data")};
  view.gpus.gpus = {{.index = 2}};
  auto sample = std::make_shared<monitor::GpuSample>();
  sample->gpus.resize(1);
  sample->gpus[0].utilisation_percent = 97;
  view.gpus.newest = sample;
  const std::string text = monitor::snapshot_json(view);
  EXPECT_EQ(text.find('\n'), text.npos);
  const Node read = parse_json(text, "snapshot");
  EXPECT_EQ(read.at("run").at("id").text, "r\"1");
  EXPECT_EQ(read.at("run").at("state").text, "running");
  EXPECT_EQ(read.at("run").at("total_steps").integer, 1000);
  EXPECT_EQ(read.at("run").at("left_s").real, 440);
  const Node& one = read.at("ranks").items.at(0);
  EXPECT_EQ(one.at("state").text, "running");
  EXPECT_EQ(one.at("step").integer, 120);
  EXPECT_EQ(one.at("step_ms").real, 21.5);
  EXPECT_EQ(one.at("budget").at("data").real, 0.25);
  EXPECT_EQ(one.at("budget").at("forward").real, 0.75);
  EXPECT_EQ(one.at("cores").real, 1.5);
  EXPECT_EQ(one.at("threads").integer, 7);
  EXPECT_EQ(one.at("gpu").at("utilisation_percent").real, 97);
  EXPECT_TRUE(one.at("gpu").at("power_w").is(NodeKind::kNull));
  EXPECT_EQ(one.at("position").at("operation").text, "all_reduce");
  EXPECT_EQ(one.at("position").at("sequence").integer, 17);
  EXPECT_EQ(read.at("series").at("loss").items.at(0).items.at(1).real, 2.5);
  EXPECT_TRUE(read.at("series").at("loss").items.at(1).items.at(1).is(NodeKind::kNull));
  EXPECT_EQ(read.at("series").at("accuracy").items.size(), 1u);
  EXPECT_EQ(read.at("log").at("1").items.at(0).text, "</script>\x01\xEF\xBF\xBD");
  EXPECT_EQ(read.at("findings").items.at(0).at("cause").text, "data");
  EXPECT_TRUE(read.at("stall").is(NodeKind::kNull));
  EXPECT_TRUE(read.at("stall_table").is(NodeKind::kNull));
  EXPECT_FALSE(read.at("verdict").at("healthy").boolean);
}

// ---------------------------------------------------------------- sampler

TEST(RankSampler, IntervalsAreTheDifferencesOfTheLedger) {
  Rank rank("trains", 0);
  ASSERT_TRUE(soon([&] { return rank.ledger->step() > 3; }));
  RankSampler sampler(rank.started);
  EXPECT_EQ(sampler.close().steps, 0) << "it ran before anybody looked";
  const std::int64_t from = rank.ledger->step();
  ASSERT_TRUE(soon([&] { return rank.ledger->step() >= from + 20; }));
  const ledger::Totals before = rank.ledger->totals();
  const Interval interval = sampler.close();
  EXPECT_GE(interval.steps, 19);
  EXPECT_GE(interval.step, from + 19);
  double sum = 0;
  for (const double seconds : interval.host_s) sum += seconds;
  EXPECT_NEAR(sum, interval.seconds, 1e-6);
  EXPECT_GT(interval.host_s[ledger::index(Phase::kData)], 0.09);
  EXPECT_GE(interval.counts[ledger::index(Counter::kBatches)], 19u);
  EXPECT_LT(interval.process.value().cores, 0.9) << "it sleeps";
  EXPECT_TRUE(interval.resident_bytes > 0 && interval.threads >= 1);
  EXPECT_EQ(sampler.pid(), rank.process->pid());
  // Its last interval ends when it did, not when somebody looks.
  const ledger::Totals end = rank.ledger->totals();
  ::kill(rank.process->pid(), SIGKILL);
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_LE(sampler.close(end).seconds, 1e-9 * static_cast<double>(end.time_ns - before.time_ns));
}

TEST(RankSampler, StepsCountFromTheFirstOn) {
  Rank rank("trains", 0);
  RankSampler sampler(rank.started);
  ASSERT_TRUE(soon([&] { return rank.ledger->step() >= 10; }));
  const Interval interval = sampler.close();
  EXPECT_GE(interval.steps, 10);
  EXPECT_TRUE(interval.start && !sampler.close().start);
  double sum = 0;
  for (const double seconds : interval.host_s) sum += seconds;
  EXPECT_NEAR(sum, interval.seconds, 1e-6);
  EXPECT_GT(interval.host_s[ledger::index(Phase::kStartup)], 0);
}

TEST(RankSampler, OfARankWithoutStepsTheCollectivesOfAllAreKnown) {
  for (const int number : {0, 1}) {
    Rank rank("reduces", number);
    ASSERT_TRUE(
        soon([&] { return rank.ledger->opened() && !rank.ledger->read().records.empty(); }));
    RankSampler sampler(rank.started);
    EXPECT_FALSE(sampler.close().collective_share) << "since when is not known";
    std::this_thread::sleep_for(milliseconds(1000));
    const Interval interval = sampler.close();
    ASSERT_TRUE(interval.collective_share);
    EXPECT_NEAR(*interval.collective_share, number == 0 ? 36 / 46.0 : 4 / 46.0, 0.2);
    EXPECT_GE(interval.collectives, 3u);
    EXPECT_LE(interval.collectives, 26u);
    const Interval read = monitor::parse_interval(monitor::interval_json(interval), "line");
    EXPECT_EQ(read.collectives, interval.collectives);
    EXPECT_NEAR(*read.collective_share, *interval.collective_share, 1e-6);
  }
}

TEST(RankSampler, AProcessWithoutALedgerIsSeenFromOutside) {
  Rank rank("knows_nothing", 0);
  RankSampler sampler(rank.started);
  Interval interval;
  ASSERT_TRUE(soon([&] {
    std::this_thread::sleep_for(milliseconds(100));
    interval = sampler.close();
    return interval.process && interval.process->cores > 0.05;
  }));
  EXPECT_EQ(interval.steps, 0);
  EXPECT_EQ(interval.step, -1);
  EXPECT_EQ(interval.host_s, monitor::PhaseSeconds{});
}

// ---------------------------------------------------------------- the run

launch::LaunchPlan plan_of_two() {
  launch::LaunchPlan plan;
  plan.nproc_per_node = 2;
  plan.run_id = "two";
  plan.command = {"./train"};
  return plan;
}

LiveRunOptions without_gpus() {
  LiveRunOptions options;
  options.gpus.library = "/nonexistent/libnvidia-ml.so.1";
  return options;
}

// A run of one rank, which does this.
struct OneRank : LiveRun {
  OneRank(const LiveRunOptions& options, const std::string& body,
          const std::map<std::string, std::string>& variables = {})
      : LiveRun(options), zero(body, 0, variables) {
    run_started(plan_of_two());
    attempt_started({.world_size = 2, .local_ranks = 2});
    rank_started(zero.started);
  }
  Rank zero;
};

std::string state_of(const LiveRun& run, std::size_t rank) {
  const monitor::RunView view = run.view();
  return view.ranks.size() > rank ? name(view.ranks[rank].status) : "missing";
}

TEST(LiveRun, AProgressBarStandsBelowTheLogUntilItEnds) {
  using launch::OutputKind;
  LiveRun run(without_gpus());
  run.run_started(plan_of_two());
  run.attempt_started({.attempt = 0, .world_size = 2, .local_ranks = 2});
  run.rank_started({.rank = 0});
  const auto log = [&run] { return run.view().ranks.at(0).log; };
  run.output_progress(0, OutputKind::kErr, "10 %");
  run.output_progress(0, OutputKind::kErr, "20 %\r");
  EXPECT_THAT(log(), ElementsAre("20 %"));
  run.output_line(0, OutputKind::kOut, "loss 3");
  run.output_progress(0, OutputKind::kErr, "30 %");
  EXPECT_THAT(log(), ElementsAre("loss 3", "30 %"));
  run.output_progress(0, OutputKind::kOut, "eval 1");
  EXPECT_THAT(log(), ElementsAre("loss 3", "eval 1", "30 %"));
  run.output_progress(0, OutputKind::kErr, "\r     \r");
  EXPECT_THAT(log(), ElementsAre("loss 3", "eval 1"));
  run.output_line(0, OutputKind::kOut, "eval 2");
  EXPECT_THAT(log(), ElementsAre("loss 3", "eval 2"));
  for (int i = 0; i < 60; ++i) run.output_line(0, OutputKind::kOut, "line");
  run.output_progress(0, OutputKind::kErr, std::string(4096, 'x'));
  EXPECT_EQ(log().size(), 50u);
  EXPECT_EQ(log().back(), std::string(500, 'x'));
  run.output_progress(7, OutputKind::kErr, "of nobody");
}

TEST(LiveRun, GrowsWithItsRanksAndShowsTheirEnds) {
  std::atomic<int> asked{0};
  LiveRunOptions options = without_gpus();
  options.doctor = true;
  options.diagnose = [&](const monitor::RunRecord& record) {
    ++asked;
    const bool both = record.ranks.size() == 2 && record.ranks[1].intervals.size() > 2;
    return both ? std::vector<Finding>{finding("straggler", 1, "data")} : std::vector<Finding>{};
  };
  LiveRun run(options);
  EXPECT_FALSE(run.ready());
  run.run_started(plan_of_two());
  EXPECT_EQ(run.view().state, "starting");
  run.attempt_started({.attempt = 0, .world_size = 2, .local_ranks = 2});
  Rank zero("trains", 0);
  Rank one("trains", 1);
  run.rank_started(zero.started);
  run.rank_started(one.started);
  for (int i = 0; i < 60; ++i) run.output_line(1, launch::OutputKind::kErr, fmt::format("{}", i));
  run.output_line(0, launch::OutputKind::kOut, "10 %\r50 %\r100 %\r");
  EXPECT_TRUE(run.ready());

  std::vector<std::string> said;
  ASSERT_TRUE(soon([&] {
    for (std::string& line : run.tick()) said.push_back(line);
    return !said.empty();
  }));
  EXPECT_THAT(said, ElementsAre(HasSubstr("straggler (rank 1")));
  const monitor::RunRecord record = *run.view().record;
  ASSERT_EQ(record.ranks.size(), 2u);
  EXPECT_GT(budget_of(record.ranks[1]).share(Phase::kData), 0.6);
  EXPECT_EQ(record.facts.program, "./train");
  EXPECT_EQ(record.facts.world_size, 2);

  monitor::RunView view = run.view();
  EXPECT_EQ(view.state, "running");
  ASSERT_EQ(view.ranks.size(), 2u);
  EXPECT_THAT(view.ranks[0].log, ElementsAre("100 %"));
  EXPECT_EQ(view.ranks[1].log.size(), 50u);
  EXPECT_EQ(view.ranks[1].log.back(), "59");
  EXPECT_GT(view.ranks[0].step, 3);
  EXPECT_GT(view.ranks[0].step_ms, 9);
  EXPECT_EQ(view.ranks[0].position->operation, "all_reduce");
  EXPECT_FALSE(view.step_ms.empty());
  EXPECT_EQ(view.findings.at(0).rule, "straggler");

  ::kill(one.process->pid(), SIGSTOP);
  EXPECT_TRUE(soon([&] { return state_of(run, 1) == "stopped"; }));
  EXPECT_FALSE(run.ready());
  ::kill(one.process->pid(), SIGCONT);
  EXPECT_TRUE(soon([&] { return state_of(run, 1) == "running"; }));
  run.rank_ended({1, "killed by SIGKILL", true});
  run.rank_ended({0, "killed by SIGTERM", false});
  EXPECT_EQ(state_of(run, 1), "failed");
  EXPECT_EQ(state_of(run, 0), "ended");
  EXPECT_EQ(run.view().ranks[1].exit, "killed by SIGKILL");
  run.attempt_ended(0);

  // A new attempt begins with nothing.
  run.attempt_started({.attempt = 1, .world_size = 2, .local_ranks = 2});
  EXPECT_EQ(run.view().attempt, 1);
  EXPECT_THAT(run.view().ranks, IsEmpty());
  run.rank_started(zero.started);
  EXPECT_TRUE(soon([&] { return !run.view().record->ranks.empty(); }));
  const auto summary = run.run_ended({1, "rank 1 on h failed: killed by SIGKILL"});
  EXPECT_THAT(summary.front(), HasSubstr("[doctor] 1 of 2 ranks"));
  EXPECT_EQ(run.view().state, "failed");
  EXPECT_EQ(run.view().message, "Rank 1 on h failed: killed by SIGKILL.");
  EXPECT_GT(asked, 2);
}

TEST(LiveRun, RulesThatFailAreReportedOnce) {
  LiveRunOptions options = without_gpus();
  options.diagnose = [](const monitor::RunRecord&) -> std::vector<Finding> {
    throw std::runtime_error("a rule's mistake");
  };
  OneRank run(options, "trains");
  ASSERT_TRUE(soon([&] {
    const auto record = *run.view().record;
    return !record.ranks.empty() && record.ranks[0].intervals.size() >= 4;
  }));
  const auto said = run.tick();
  EXPECT_THAT(said, ElementsAre(HasSubstr("a rule's mistake")));
}

TEST(LiveRun, RecordsWhatDoctorReadsLater) {
  const TemporaryDirectory folder;
  const TemporaryDirectory output;
  append(output / "metrics.jsonl", "{\"step\": 5, \"loss\": 0.5, \"tokens_per_second\": 100}\n");
  LiveRunOptions options = without_gpus();
  options.record_dir = folder.path();
  {
    OneRank run(options, "trains", {{"OUTPUT_DIR", output.path()}});
    ASSERT_TRUE(soon([&] {
      const auto record = *run.view().record;
      return !record.ranks.empty() && record.ranks[0].intervals.size() >= 4;
    }));
    ASSERT_TRUE(soon([&] { return !run.view().metrics.empty(); }));
    EXPECT_EQ(monitor::newest_logged(run.view(), "loss"), 0.5);
    EXPECT_EQ(monitor::newest_logged(run.view(), "tokens_per_second"), 100);
    run.rank_ended({0, "exited with code 0", false});
    EXPECT_THAT(run.run_ended({0, ""}), IsEmpty()) << "without --doctor nothing is said";
  }
  const monitor::RunRecord run = monitor::read_run(folder.path());
  EXPECT_EQ(run.facts.program, "./train");
  ASSERT_EQ(run.ranks.size(), 1u);
  EXPECT_GT(budget_of(run.ranks[0]).steps, 10);
  EXPECT_THROW(LiveRun({.record_dir = "/proc/none"}), std::exception);
}

TEST(LiveRun, ARunThatWasAskedToStopHasNotFailed) {
  const auto state_after = [](const std::string& cause, int code = 143) {
    LiveRun run(without_gpus());
    run.run_ended({code, cause});
    return run.view().state;
  };
  EXPECT_EQ(state_after(""), "ended");
  EXPECT_EQ(state_after("", 130), "ended") << "by Ctrl-C";
  EXPECT_EQ(state_after("", 1), "failed") << "another launcher did not come";
  EXPECT_EQ(state_after("rank 1 on h stopped on request: exited with code 143"), "ended");
  EXPECT_EQ(state_after("rank 1 on h failed: killed by SIGTERM"), "failed");
}

// Ranks that record into their output_dir, where one of them is killed.
TEST(LiveRun, WritesTheEndIntoTheRecordOfTheRanks) {
  const TemporaryDirectory output;
  OneRank run(without_gpus(), "trains", {{"OUTPUT_DIR", output.path()}});
  monitor::RunFacts facts{.world_size = 2, .program = "trainer", .total_steps = 1000};
  monitor::write_facts(output.path(), facts);  // of an earlier run
  ASSERT_TRUE(soon([&] { return run.view().step_ms.size() >= 2; }));
  EXPECT_EQ(run.view().facts().total_steps, 0);
  facts.started_unix_s = run.view().time_s;
  monitor::write_facts(output.path(), facts);
  ASSERT_TRUE(soon([&] { return run.view().facts().total_steps == 1000; }));
  EXPECT_TRUE(seconds_left(run.view()));
  run.rank_ended({0, "killed by SIGKILL", true});
  run.run_ended({137, "rank 0 on h failed: killed by SIGKILL"});
  const monitor::RunFacts read = monitor::read_run(output.path()).facts;
  EXPECT_EQ(read.program, "trainer");
  EXPECT_EQ(read.failure, "rank 0 on h failed: killed by SIGKILL");
  EXPECT_EQ(read.failed_ranks.at("0").text, "killed by SIGKILL");
  EXPECT_FALSE(seconds_left(run.view()));
}

TEST(LiveRun, RecordsIntoTheOutputDirOnlyIfTheTrainerDoesNot) {
  for (const bool trainer : {false, true}) {
    const TemporaryDirectory folder;
    LiveRunOptions options = without_gpus();
    options.record_dir = folder.path();
    OneRank run(options, "trains", {{"OUTPUT_DIR", folder.path()}});
    ASSERT_TRUE(soon([&] { return run.view().step_ms.size() >= 4; }));
    const std::string line = monitor::interval_json(steady_rank(0, 0.5).intervals[0]) + "\n";
    if (trainer) append(folder / "monitor/rank_0.jsonl", line);
    run.rank_ended({0, "exited with code 0", false});
    run.run_ended({0, ""});
    if (trainer) {
      EXPECT_EQ(read_file(folder / "monitor/rank_0.jsonl"), line);
    } else {
      EXPECT_GT(budget_of(monitor::read_run(folder.path()).ranks.at(0)).steps, 10);
    }
  }
}

TEST(LiveRun, RecordsOnlyFactsWhileATrainerMayStartUp) {
  const TemporaryDirectory folder;
  LiveRunOptions options = without_gpus();
  options.record_dir = folder.path();
  OneRank run(options, "starts_up");
  std::this_thread::sleep_for(milliseconds(14'000));
  ASSERT_TRUE(run.zero.ledger->opened());
  EXPECT_THAT(monitor::read_run(folder.path()).ranks, IsEmpty());
  EXPECT_TRUE(fs::exists(folder / "monitor/run.json"));
  run.rank_ended({0, "killed by SIGKILL", true});
  run.run_ended({1, ""});
  EXPECT_EQ(monitor::read_run(folder.path()).ranks.size(), 1u);
}

TEST(LiveRun, GpusOfTheDriverAreInTheRecord) {
  const TemporaryDirectory folder;
  append(folder / "script", "devices 2\n0 utilisation 100 0\n1 utilisation 0 100\n");
  ::setenv("FAKE_NVML_SCRIPT", (folder / "script").c_str(), 1);
  for (const char* name : {"LOCKSTEP_DEVICE", "CUDA_VISIBLE_DEVICES"}) ::unsetenv(name);
  LiveRunOptions options;
  options.gpus.library = LOCKSTEP_FAKE_NVML_NEW;
  options.gpus.interval = milliseconds(20);
  options.record_dir = folder.path();
  OneRank run(options, "trains");
  ASSERT_TRUE(soon([&] {
    const auto record = *run.view().record;
    return !record.gpus.empty() && record.gpus[0].samples.size() >= 30;
  }));
  const monitor::RunRecord record = *run.view().record;
  EXPECT_EQ(record.facts.gpus_visible, 2);
  const auto& samples = record.gpus[0].samples;
  for (std::size_t i = 0; i < 30; ++i)
    EXPECT_EQ(*samples[i].gpus[0].utilisation_percent + *samples[i].gpus[1].utilisation_percent,
              100u);
  EXPECT_EQ(run.view().ranks.at(0).gpu, 0);
  run.run_ended({0, ""});
  EXPECT_GE(monitor::read_run(folder.path()).gpus.at(0).samples.size(), 30u);
}

// Under the real supervisor: a companion lives in its process and sees what the page would see.
TEST(LiveRun, ACompanionSeesTheRunAndIsGoneWithIt) {
  const TemporaryDirectory folder;
  launch::LaunchPlan plan = plan_of_two();
  plan.command = {fs::read_symlink("/proc/self/exe").string(), "--child=trains"};
  plan.stall_timeout = milliseconds(0);
  plan.shutdown_timeout = milliseconds(5000);
  LiveRunOptions options = without_gpus();
  options.companions.push_back([&](LiveRun& run) {
    struct Watcher {
      explicit Watcher(std::function<void(const std::atomic<bool>&)> body)
          : thread([this, body] { body(stop); }) {}
      ~Watcher() {
        stop = true;
        thread.join();
      }
      std::atomic<bool> stop{false};
      std::thread thread;
    };
    return std::make_shared<Watcher>([&](const std::atomic<bool>& stop) {
      const pid_t started = ::getpid();
      pid_t first = -1;
      while (!stop) {
        const monitor::RunView view = run.view();
        const bool trains = view.ranks.size() == 2 && view.ranks[0].step > 20 &&
                            view.ranks[1].step > 5 && view.ranks[0].newest &&
                            view.ranks[0].newest->steps > 0;
        if (trains && first < 0) {
          first = view.ranks[1].pid;
          append(folder / "seen", run.snapshot_json() + "\n");
          ::kill(first, SIGKILL);
        }
        if (first > 0 && view.ranks.size() == 2 &&
            view.ranks[1].status == monitor::RankStatus::kFailed)
          append(folder / "failed", view.ranks[1].exit);
        if (first > 0 && view.attempt == 1 && trains && view.ranks[1].pid != first) {
          append(folder / "restarted", "yes");
          ::kill(started, SIGTERM);
          return;
        }
        std::this_thread::sleep_for(milliseconds(5));
      }
    });
  });
  plan.max_restarts = 1;
  LiveRun run(options);
  testing::internal::CaptureStderr();
  EXPECT_EQ(launch::supervise(plan, &run), 143);
  const std::string said = testing::internal::GetCapturedStderr();
  const Node seen = parse_json(read_file(folder / "seen"), "seen");
  EXPECT_EQ(seen.at("ranks").items.size(), 2u) << said;
  EXPECT_GT(seen.at("ranks").items[0].at("budget").at("data").real, 0);
  EXPECT_THAT(read_file(folder / "failed"), HasSubstr("killed by SIGKILL"));
  EXPECT_EQ(read_file(folder / "restarted"), "yes");
}

}  // namespace
}  // namespace lockstep::dashboard
