// The record of a run: what is written is what is read, and nothing else is taken for a record.
#include "lockstep/monitor/run_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <numeric>
#include <random>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"

namespace lockstep::monitor {
namespace {

using ledger::Counter;
using ledger::index;
using ledger::Phase;
using testing::HasSubstr;
using testing::StartsWith;

constexpr const char* kFacts = R"({"world_size":2,"program":"trainer"})";

double& of(PhaseSeconds& seconds, Phase phase) {
  return seconds[ledger::index(phase)];
}

Interval whole_interval() {
  Interval interval{.unix_time_s = 1763300000.25,
                    .seconds = 1.000000125,
                    .start = true,
                    .step = 41,
                    .steps = 7,
                    .resident_bytes = 5'000'000'000,
                    .threads = 9,
                    .cpu_limit_cores = 1.5,
                    .throttled_share = 0.25};
  of(interval.host_s, Phase::kNone) = 0.1;
  of(interval.host_s, Phase::kBackward) = 0.900000125;
  of(interval.device_s, Phase::kForward) = 0.3;
  interval.counts[ledger::index(Counter::kMicroBatches)] = 14;
  interval.counts[ledger::index(Counter::kCopyNs)] = 1ull << 40;
  interval.process = ProcessRates{.seconds = 1,
                                  .cores = 1.02,
                                  .system_cores = 0.02,
                                  .minor_faults_per_s = 1e5,
                                  .waiting_threads = 12.5};
  return interval;
}

// A folder with a record of these lines of rank 0.
class Folder {
 public:
  explicit Folder(const std::string& rank_0, const std::string& facts = kFacts) {
    std::filesystem::create_directories(path() + "/monitor");
    if (!facts.empty()) put("run.json", facts);
    put("rank_0.jsonl", rank_0);
  }
  void put(const std::string& name, const std::string& text) const {
    io::put(path() + "/monitor/" + name, text);
  }
  const std::string& path() const { return dir_.path(); }

 private:
  io::TemporaryDirectory dir_;
};

TEST(RunRecord, AnIntervalReadsBackAsItWasWritten) {
  const Interval before = whole_interval();
  const std::string line = interval_json(before);
  EXPECT_EQ(line.find('\n'), line.npos);
  const Interval after = parse_interval(line, "x");
  EXPECT_EQ(after.step, 41);
  EXPECT_EQ(after.host_s, before.host_s);
  EXPECT_EQ(after.device_s, before.device_s);
  EXPECT_EQ(after.counts, before.counts);
  ASSERT_TRUE(after.process.has_value());
  EXPECT_EQ(after.process->waiting_threads, 12.5);
  EXPECT_FALSE(after.process->run_delay_share.has_value());
  EXPECT_EQ(interval_json(after), line);
}

TEST(RunRecord, WhatIsZeroOrNotKnownIsLeftAway) {
  const std::string line = interval_json({.unix_time_s = 5, .seconds = 1});
  EXPECT_EQ(
      line,
      R"({"unix_time_s":5.0,"seconds":1.0,"step":-1,"steps":0,"resident_bytes":0,"threads":0})");
  const Interval read = parse_interval(line, "x");
  EXPECT_EQ(read.step, -1);
  EXPECT_FALSE(read.start);
  EXPECT_FALSE(read.process || read.cpu_limit_cores || read.throttled_share);
  EXPECT_THAT(interval_json(whole_interval()), HasSubstr(R"("host_s":{"other":0.1,"backward")"));
}

TEST(RunRecord, NumbersThatJsonDoesNotHaveAreNotWritten) {
  Interval interval = whole_interval();
  interval.process->cores = std::numeric_limits<double>::infinity();
  interval.process->minor_faults_per_s = std::numeric_limits<double>::quiet_NaN();
  interval.process->system_cores = -0.5;
  interval.resident_bytes = UINT64_MAX;
  const Interval read = parse_interval(interval_json(interval), "x");
  EXPECT_EQ(read.process->cores, 0);
  EXPECT_EQ(read.process->minor_faults_per_s, 0);
  EXPECT_EQ(read.process->system_cores, 0);
  EXPECT_EQ(read.resident_bytes, static_cast<std::uint64_t>(INT64_MAX));
}

TEST(RunRecord, FactsReadBackAsTheyWereWritten) {
  const RunFacts before{.world_size = 4,
                        .hosts = 2,
                        .device = "cuda",
                        .backend = "nccl",
                        .program = "a \"b\" \x01 \xc3\xa4",
                        .started_unix_s = 1763300000.5,
                        .cores = 16,
                        .ranks_on_host = 2,
                        .gpus_visible = 2,
                        .parameters = 124'000'000,
                        .per_device_batch = 8,
                        .accumulation = 4,
                        .optimizer = "sharded fused adamw",
                        .arguments = map_node({{"bf16", bool_node(true)}})};
  const std::string text = facts_json(before);
  const RunFacts after = parse_facts(text, "run.json");
  EXPECT_EQ(facts_json(after), text);
  EXPECT_EQ(after.program, before.program);
  EXPECT_TRUE(same_value(after.arguments, before.arguments));
}

TEST(RunRecord, SamplesOfGpusReadBackAsTheyWereWritten) {
  const std::vector<GpuIdentity> gpus = {{.index = 0, .name = "H200", .uuid = "GPU-1"},
                                         {.index = 1, .name = "H200", .uuid = "GPU-2"}};
  GpuSample sample{.unix_time_s = 7.5, .gpus = std::vector<GpuReading>(2)};
  sample.gpus[0] = {.utilisation_percent = 97,
                    .memory_used_bytes = 1ull << 36,
                    .power_w = 412.5,
                    .clock_reasons = 0x24,
                    .processes = {{.pid = 12, .memory_bytes = 34}, {.pid = 13}}};
  sample.gpus[1].problem = "GPU is lost";
  const Folder folder("");
  folder.put("gpus_1.jsonl", gpu_sample_json(sample, gpus) + "\n");
  const RunRecord run = read_run(folder.path());
  ASSERT_EQ(run.gpus.size(), 1u);
  EXPECT_EQ(run.gpus[0].host, 1);
  ASSERT_EQ(run.gpus[0].samples.size(), 1u);
  const GpuSample& read = run.gpus[0].samples[0];
  EXPECT_EQ(gpu_sample_json(read, run.gpus[0].gpus), gpu_sample_json(sample, gpus));
  EXPECT_EQ(read.gpus[0].power_w, 412.5);
  ASSERT_EQ(read.gpus[0].processes.size(), 2u);
  EXPECT_FALSE(read.gpus[0].processes[1].memory_bytes.has_value());
  EXPECT_EQ(read.gpus[1].problem, "GPU is lost");
  EXPECT_FALSE(read.gpus[1].utilisation_percent.has_value());
}

// ------------------------------------------------------------------ folders

TEST(RunRecord, RanksComeInOrderAndATornLastLineIsSkipped) {
  const std::string line = interval_json(whole_interval());
  const Folder folder(line + "\n" + line + "\n" + line.substr(0, line.size() / 2),
                      R"({"world_size":11})");
  folder.put("rank_10.jsonl", line);  // whole, but for its line break
  folder.put("rank_11.jsonl", line);  // of an earlier run, which had more
  folder.put("rank_2.jsonl", line + "\n");
  folder.put("rank_3.jsonl", "");
  folder.put("rank_4.jsonl", line.substr(0, 5));
  folder.put("rank_-1.jsonl", "not one of ours");
  folder.put("rank_x.jsonl", "not one of ours");
  const RunRecord run = read_run(folder.path());
  EXPECT_EQ(run.facts.world_size, 11);
  ASSERT_EQ(run.ranks.size(), 3u);
  EXPECT_EQ(run.ranks[0].rank, 0);
  EXPECT_EQ(run.ranks[0].intervals.size(), 2u);
  EXPECT_EQ(run.ranks[1].rank, 2);
  EXPECT_EQ(run.ranks[2].rank, 10);
  EXPECT_EQ(run.ranks[2].intervals.size(), 1u);
}

TEST(RunRecord, EverythingElseIsRefusedWithFileAndLine) {
  const std::string good = interval_json(whole_interval());
  const std::pair<std::string, const char*> cases[] = {
      {"{\"unix_time_s\":1", "ends inside"},
      {"", "empty"},
      {"[]", "a list"},
      {R"({"seconds":1})", "unix_time_s"},
      {R"({"unix_time_s":1})", "seconds"},
      {R"({"unix_time_s":1,"seconds":-1})", "0 or more"},
      {R"({"unix_time_s":1,"seconds":"1"})", "a string"},
      {R"({"unix_time_s":1,"seconds":1e999})", "too large"},
      {R"({"unix_time_s":1,"seconds":1,"step":-2})", "from -1"},
      {R"({"unix_time_s":1,"seconds":1,"steps":-1})", "from 0"},
      {R"({"unix_time_s":1,"seconds":1,"steps":1.5})", "whole number"},
      {R"({"unix_time_s":1,"seconds":1,"threads":4294967296})", "from 0 to 2147483647"},
      {R"({"unix_time_s":1,"seconds":1,"host_s":[1]})", "host_s must be a map"},
      {R"({"unix_time_s":1,"seconds":1,"host_s":{"data":null}})", "data must be a number"},
      {R"({"unix_time_s":1,"seconds":1,"counts":{"logs":-1}})", "logs must be from 0"},
      {R"({"unix_time_s":1,"seconds":1,"process":7})", "process must be a map"},
      {R"({"unix_time_s":1,"seconds":1} {})", "more follows"},
      {"{\"unix_time_s\":1,\"seconds\":1,\"\xff\":1}", "UTF-8"},
      {std::string(100'000, '['), "nested"},
      {std::string("\0\0\0\0", 4), "value"},
  };
  for (const auto& [bad, words] : cases) {
    const Folder folder(good + "\n" + bad + "\n" + good + "\n");
    const std::string text = message_of([&] { read_run(folder.path()); });
    EXPECT_THAT(text, StartsWith("[record] " + folder.path() + "/monitor/rank_0.jsonl:2:")) << bad;
    EXPECT_THAT(text, HasSubstr(words)) << bad;
  }
}

TEST(RunRecord, SamplesOfGpusAreReadAsStrictly) {
  for (const char* bad :
       {R"({"gpus":[]})", R"({"unix_time_s":1})", R"({"unix_time_s":1,"gpus":1})",
        R"({"unix_time_s":1,"gpus":[1]})", R"({"unix_time_s":1,"gpus":[{"index":1}]})",
        R"({"unix_time_s":1,"gpus":[{"index":0,"utilisation_percent":-1}]})",
        R"({"unix_time_s":1,"gpus":[{"index":0,"processes":[{"pid":-1}]}]})"}) {
    const Folder folder("");
    folder.put("gpus_0.jsonl", std::string(bad) + "\n");
    EXPECT_THAT(message_of([&] { read_run(folder.path()); }), HasSubstr("gpus_0.jsonl:1:")) << bad;
  }
}

TEST(RunRecord, KeysOfANewerVersionArePassedOver) {
  const Interval read = parse_interval(
      R"({"unix_time_s":1,"seconds":1,"new":{},"host_s":{"dreaming":1},"counts":{"sheep":2}})",
      "x");
  EXPECT_EQ(read.host_s, PhaseSeconds{});
}

TEST(RunRecord, AFolderWithoutOneSaysWhatWouldMakeOne) {
  const io::TemporaryDirectory empty;
  EXPECT_THAT(message_of([&] { read_run(empty.path()); }),
              testing::AllOf(HasSubstr("has no record"), HasSubstr("--record")));
  EXPECT_THAT(message_of([] { read_run("/nowhere"); }), HasSubstr("has no record"));
  const Folder ranks_alone("", "");
  EXPECT_THAT(message_of([&] { read_run(ranks_alone.path()); }), HasSubstr("rank 0's host"));
  const Folder not_facts("", "{}");
  EXPECT_THAT(message_of([&] { read_run(not_facts.path()); }), HasSubstr("world_size"));
  std::filesystem::create_directory(ranks_alone.path() + "/monitor/run.json");
  EXPECT_NE(message_of([&] { read_run(ranks_alone.path()); }), "(nothing thrown)");
}

// ------------------------------------------------------------------ budgets

// One second each.
class Seconds {
 public:
  Seconds& steps(std::int64_t steps, Phase phase, bool restarted = false) {
    now_ += 1;
    Interval interval{.unix_time_s = now_, .seconds = 1, .start = restarted, .steps = steps};
    of(interval.host_s, phase) = 1;
    interval.counts[ledger::index(Counter::kMicroBatches)] = static_cast<std::uint64_t>(steps);
    record_.intervals.push_back(interval);
    return *this;
  }
  Seconds& device(Phase phase, double seconds) {
    of(record_.intervals.back().device_s, phase) = seconds;
    return *this;
  }
  Interval budget(double skip_s = 0, double from_s = 0) const {
    return budget_of(record_, skip_s, from_s > 0 ? 1e9 + from_s : 0);
  }

 private:
  double now_ = 1e9;
  RankRecord record_;
};

// As a line that covers ten seconds, a window of the rules and a budget are made.
TEST(Join, AddsSumsAndTakesMeansByTime) {
  Interval first{.unix_time_s = 1e9, .seconds = 3, .start = true, .step = 10, .steps = 10};
  of(first.host_s, Phase::kForward) = 3;
  first.process = ProcessRates{.seconds = 3, .cores = 1};
  first.resident_bytes = 7;
  first.throttled_share = 0.5;
  Interval second{.unix_time_s = 1e9 + 1, .seconds = 1, .steps = 2};
  of(second.host_s, Phase::kForward) = 1;
  second.process = ProcessRates{.seconds = 1, .cores = 3, .run_delay_share = 0.25};
  second.resident_bytes = 5;
  second.throttled_share = 0.1;
  second.collective_share = 0.5;
  Interval both;
  join(both, first);
  EXPECT_EQ(interval_json(both), interval_json(first)) << "nothing comes before it";
  join(both, second);
  EXPECT_EQ(both.unix_time_s, 1e9 + 1);
  EXPECT_TRUE(both.start);
  EXPECT_EQ(both.step, 10) << "the second does not know its own";
  EXPECT_EQ(both.steps, 12);
  EXPECT_EQ(both.seconds, 4);
  EXPECT_EQ(of(both.host_s, Phase::kForward), 4);
  EXPECT_EQ(both.process->cores, 1.5);
  EXPECT_EQ(both.process->seconds, 4);
  EXPECT_EQ(both.process->run_delay_share, 0.25) << "of the one that is known";
  EXPECT_EQ(both.resident_bytes, 7u);
  EXPECT_DOUBLE_EQ(*both.throttled_share, 0.4);
  EXPECT_EQ(both.collective_share, 0.5);
}

TEST(RunBudget, SumsWhatStepsTookAndNotWhatSurroundsThem) {
  Seconds run;
  run.steps(0, Phase::kStartup).steps(10, Phase::kForward).steps(10, Phase::kData);
  run.steps(0, Phase::kSaving);
  const Interval budget = run.budget();
  EXPECT_EQ(budget.seconds, 2);
  EXPECT_EQ(budget.steps, 20);
  EXPECT_EQ(budget.step_s(), 0.1);
  EXPECT_EQ(budget.share(Phase::kData), 0.5);
  EXPECT_EQ(budget.share(Phase::kStartup), 0);
  EXPECT_EQ(budget.counts[ledger::index(Counter::kMicroBatches)], 20u);
}

TEST(RunBudget, StepsThatLastForSeveralIntervalsHaveTheirTime) {
  Seconds run;
  for (int step = 0; step < 4; ++step)
    run.steps(0, Phase::kForward).steps(0, Phase::kBackward).steps(1, Phase::kOptimizer);
  const Interval budget = run.budget();
  EXPECT_EQ(budget.steps, 3);  // the first has begun before there was a step to count from
  EXPECT_EQ(budget.step_s(), 3);
  EXPECT_DOUBLE_EQ(budget.share(Phase::kForward), 1.0 / 3);
}

// The first forward of a device lasts for seconds and is booked when it ends.
TEST(RunBudget, DeviceTimesThatBeganBeforeTheFirstIntervalDoNotCount) {
  Seconds run;
  run.steps(0, Phase::kForward).steps(0, Phase::kForward);
  run.steps(10, Phase::kForward).device(Phase::kForward, 3.0);
  for (int i = 0; i < 4; ++i) run.steps(10, Phase::kForward).device(Phase::kForward, 0.5);
  const Interval budget = run.budget();
  EXPECT_EQ(budget.steps, 40);
  EXPECT_EQ(budget.seconds, 4);
  EXPECT_DOUBLE_EQ(budget.device_s[ledger::index(Phase::kForward)], 2);
}

TEST(RunBudget, ARunThatIsStartedAgainDoesNotCountItsStart) {
  Seconds run;
  run.steps(10, Phase::kForward).steps(10, Phase::kForward).steps(0, Phase::kForward);
  run.steps(0, Phase::kStartup, /*restarted=*/true).steps(0, Phase::kStartup);
  run.steps(10, Phase::kForward);
  EXPECT_EQ(run.budget().seconds, 3);
  EXPECT_EQ(run.budget().share(Phase::kStartup), 0);
}

TEST(RunBudget, TheFirstSecondsCanBeSkipped) {
  Seconds run;
  for (int i = 0; i < 5; ++i) run.steps(i < 2 ? 2 : 10, Phase::kForward);
  EXPECT_EQ(run.budget(2).steps, 30);
  EXPECT_EQ(run.budget(2).seconds, 3);
  EXPECT_EQ(run.budget(100).seconds, 0);
  EXPECT_EQ(run.budget(100).step_s(), 0);
}

TEST(RunBudget, AnEarlierStartCanBeLeftAway) {
  Seconds run;
  run.steps(10, Phase::kData).steps(10, Phase::kData);
  run.steps(0, Phase::kStartup, /*restarted=*/true).steps(10, Phase::kForward);
  EXPECT_EQ(run.budget().steps, 30);
  const Interval budget = run.budget(0, 3);
  EXPECT_EQ(budget.steps, 10);
  EXPECT_EQ(budget.share(Phase::kData), 0);
}

// A clock that is set, or a host that sleeps, moves an interval by any time.
TEST(RunBudget, ALateIntervalIsNoRestart) {
  for (const double gap : {0.4, 0.6, 60.0}) {
    RankRecord rank;
    for (int i = 0; i < 3; ++i)
      rank.intervals.push_back(
          {.unix_time_s = 1e9 + i + (i > 0 ? gap : 0), .seconds = 1, .steps = i == 1 ? 0 : 10});
    EXPECT_EQ(budget_of(rank).seconds, 3) << gap;
  }
}

TEST(RunBudget, OneStepIsBetterThanNone) {
  EXPECT_EQ(Seconds().steps(1, Phase::kForward).budget().steps, 1);
  EXPECT_EQ(Seconds().budget().steps, 0);
}

// ---------------------------------------------------------------- clocks

// 20 intervals of a second with 5 steps each, by a clock that is that far ahead.
RankRecord rank_by(int rank, double ahead_s, std::int64_t first_step = 0, double begin = 1e9) {
  RankRecord record{.rank = rank};
  for (int i = 1; i <= 20; ++i) {
    Interval interval{.unix_time_s = begin + ahead_s + i, .seconds = 1};
    interval.start = i == 1;
    interval.step = first_step + 5 * i;
    interval.steps = 5;
    record.intervals.push_back(interval);
  }
  return record;
}

RunRecord of_two_hosts(RankRecord other) {
  RunRecord run;
  run.facts.world_size = 2;
  run.facts.ranks_on_host = 1;
  run.ranks = {rank_by(0, 0), std::move(other)};
  return run;
}

TEST(Clocks, RanksThatEndTheSameStepAreAtTheSameTime) {
  for (const double ahead : {-3600.0, 3600.0, 40.0, -1e8}) {
    RunRecord run = of_two_hosts(rank_by(1, ahead));
    run.gpus.push_back({.host = 1});
    run.gpus.back().samples.push_back({.unix_time_s = 1e9 + ahead + 7});
    align_clocks(run);
    for (std::size_t i = 0; i < 20; ++i)
      EXPECT_NEAR(run.ranks[1].intervals[i].unix_time_s, run.ranks[0].intervals[i].unix_time_s,
                  1e-6);
    EXPECT_NEAR(run.gpus[0].samples[0].unix_time_s, 1e9 + 7, 1e-6);
  }
}

TEST(Clocks, SmallDifferencesAndOneHostStayAsTheyAre) {
  RunRecord run = of_two_hosts(rank_by(1, 10));
  align_clocks(run);
  EXPECT_EQ(run.ranks[1].intervals[0].unix_time_s, 1e9 + 11);
  run = of_two_hosts(rank_by(1, 3600));
  run.facts.ranks_on_host = 2;
  align_clocks(run);
  EXPECT_EQ(run.ranks[1].intervals[0].unix_time_s, 1e9 + 3601);
  run = of_two_hosts(rank_by(1, 3600));
  run.ranks.erase(run.ranks.begin());  // rank 0's clock is not known
  align_clocks(run);
  EXPECT_EQ(run.ranks[0].intervals[0].unix_time_s, 1e9 + 3601);
}

// Rank 1 has no intervals of its own at rank 0's moments, and both have an earlier start.
TEST(Clocks, TheLastStartAndTheStepsBetweenCount) {
  RankRecord other = rank_by(1, -7200, 0, 1e9 - 500);
  for (const Interval& interval : rank_by(1, -7200 + 0.5, 2).intervals)
    other.intervals.push_back(interval);
  RunRecord run = of_two_hosts(other);
  RankRecord first = rank_by(0, 0, 0, 1e9 - 500);
  for (const Interval& interval : run.ranks[0].intervals) first.intervals.push_back(interval);
  run.ranks[0] = first;
  align_clocks(run);
  EXPECT_NEAR(run.ranks[1].intervals.back().unix_time_s, 1e9 + 20.4, 0.2);
  EXPECT_NEAR(run.ranks[1].intervals.front().unix_time_s, 1e9 - 499, 1);
}

TEST(Clocks, WithoutStepsTheStartCounts) {
  RankRecord other = rank_by(1, -7200);
  RunRecord run = of_two_hosts(other);
  for (RankRecord& rank : run.ranks)
    for (Interval& interval : rank.intervals) interval.step = -1, interval.steps = 0;
  align_clocks(run);
  EXPECT_NEAR(run.ranks[1].intervals[0].unix_time_s, 1e9 + 1, 1e-6);
  // One that is merely slow to start.
  run = of_two_hosts(rank_by(1, 0, 0, 1e9 + 90));
  for (RankRecord& rank : run.ranks)
    for (Interval& interval : rank.intervals) interval.step = -1, interval.steps = 0;
  align_clocks(run);
  EXPECT_EQ(run.ranks[1].intervals[0].unix_time_s, 1e9 + 91);
}

// ---------------------------------------------------------------- the budget of an interval

// The one definition of where time went: it adds up, and on a device time is the device's.

struct Measured {
  double seconds = 1;
  PhaseSeconds host_s{};
  PhaseSeconds device_s{};
  Measured& host(Phase phase, double value) {
    host_s[index(phase)] = value;
    return *this;
  }
  Measured& device(Phase phase, double value) {
    device_s[index(phase)] = value;
    return *this;
  }
  double spent(Phase phase) const { return spent_s(*this)[index(phase)]; }
  double sum() const {
    const PhaseSeconds spent = spent_s(*this);
    return std::accumulate(spent.begin(), spent.end(), 0.0);
  }
};

TEST(Budget, OfAHostIsWhatItDid) {
  Measured run;
  run.host(Phase::kData, 0.25).host(Phase::kForward, 0.5).host(Phase::kDeviceWait, 0.125);
  EXPECT_EQ(run.spent(Phase::kData), 0.25);
  EXPECT_EQ(run.spent(Phase::kForward), 0.5);
  EXPECT_EQ(run.spent(Phase::kDeviceWait), 0.125);  // a device whose times nobody measures
  EXPECT_EQ(run.spent(Phase::kNone), 0.125);
  EXPECT_EQ(idle_s(run.seconds, run.device_s), 1);
}

// Seen as forward 95 %, logging 31 %: 126 % of the time.
TEST(Budget, AHostThatLogsWhileTheDeviceComputesIsNotCountedTwice) {
  Measured run;
  run.host(Phase::kForward, 0.64).host(Phase::kLogging, 0.31).host(Phase::kNone, 0.05);
  run.device(Phase::kForward, 0.95).device(Phase::kNone, 0.05);
  EXPECT_DOUBLE_EQ(run.spent(Phase::kForward), 0.95);
  EXPECT_NEAR(run.spent(Phase::kLogging), 0.05, 1e-12);
  EXPECT_NEAR(run.sum(), 1, 1e-12);
  // The wait within logging is the device's time.
  run.host(Phase::kLogging, 0.01).host(Phase::kDeviceWait, 0.30);
  EXPECT_DOUBLE_EQ(run.spent(Phase::kLogging), 0.01);
  EXPECT_EQ(run.spent(Phase::kDeviceWait), 0);
  EXPECT_NEAR(run.spent(Phase::kNone), 0.04, 1e-12);
}

TEST(Budget, IdleTimeIsChargedOnceAndInOrder) {
  Measured run;
  run.device(Phase::kForward, 0.5);
  for (const Phase phase : {Phase::kStartup, Phase::kLogging, Phase::kEvaluation, Phase::kSaving,
                            Phase::kData, Phase::kForward})
    run.host(phase, 0.2);
  EXPECT_DOUBLE_EQ(run.spent(Phase::kData), 0.2);
  EXPECT_DOUBLE_EQ(run.spent(Phase::kSaving), 0.2);
  EXPECT_NEAR(run.spent(Phase::kEvaluation), 0.1, 1e-12);
  EXPECT_NEAR(run.spent(Phase::kLogging), 0, 1e-12);
  EXPECT_NEAR(run.spent(Phase::kStartup), 0, 1e-12);
  EXPECT_NEAR(run.sum(), 1, 1e-12);
  // What the device itself did for a phase is not charged to it again.
  run.device(Phase::kSaving, 0.15);
  EXPECT_DOUBLE_EQ(run.spent(Phase::kSaving), 0.2);
  EXPECT_NEAR(run.sum(), 1, 1e-12);
}

TEST(Budget, DeviceTimeThatIsBookedLateDoesNotExceedTheInterval) {
  Measured run;
  run.host(Phase::kData, 0.5);
  run.device(Phase::kForward, 2.4).device(Phase::kNone, 0.6);
  EXPECT_NEAR(run.spent(Phase::kForward), 0.8, 1e-12);
  EXPECT_NEAR(run.spent(Phase::kData), 0.2, 1e-12);
  EXPECT_NEAR(run.sum(), 1, 1e-12);
}

TEST(Budget, TimeBetweenPhasesAloneIsNoDevicesTime) {
  Measured run;
  run.host(Phase::kForward, 1).device(Phase::kNone, 1);
  EXPECT_FALSE(has_device_times(run.device_s));
  EXPECT_EQ(run.spent(Phase::kForward), 1);
}

TEST(Budget, AddsUpWhateverWasMeasured) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> part(0, 0.4);
  for (int i = 0; i < 2000; ++i) {
    Measured run;
    run.seconds = i % 10 == 0 ? 0 : 5 * part(random);
    for (std::size_t phase = 0; phase < ledger::kPhases; ++phase) {
      if (random() % 2 == 0) run.host_s[phase] = part(random);
      if (i % 3 != 0 && random() % 2 == 0) run.device_s[phase] = part(random);
    }
    EXPECT_NEAR(run.sum(), run.seconds, 1e-9);
    for (const double value : spent_s(run)) EXPECT_GE(value, 0);
    EXPECT_LE(idle_s(run.seconds, run.device_s), run.seconds);
  }
}

}  // namespace
}  // namespace lockstep::monitor
