// What a Trainer records about its run, and what it says about waits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/core/helpers_for_test.h"
#include "lockstep/monitor/diagnosis.h"
#include "lockstep/testing/worlds.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/trainer_for_test.h"

namespace lockstep::train {
namespace {

using ledger::Counter;
using ::testing::HasSubstr;

// The sum over a rank's intervals.
std::uint64_t total(const monitor::RankRecord& rank, Counter counter) {
  std::uint64_t sum = 0;
  for (const monitor::Interval& interval : rank.intervals)
    sum += interval.counts[ledger::index(counter)];
  return sum;
}

// Takes its time for each sample.
class Slow : public data::Dataset {
 public:
  explicit Slow(data::DatasetPtr inner) : inner_(std::move(inner)) {}
  std::int64_t size() const override { return inner_->size(); }
  data::Example get(std::int64_t index, data::SampleRandom& random) const override {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return inner_->get(index, random);
  }

 private:
  data::DatasetPtr inner_;
};

TEST(TrainerRecord, FactsAndWhatARankDid) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.max_steps = 10;
  a.gradient_accumulation_steps = 2;
  a.logging_steps = 5;
  a.eval_strategy = a.save_strategy = Interval::kSteps;
  a.eval_steps = a.save_steps = 5;
  Trainer trainer(World{}, task_for(network(), dataset(64, 1), dataset(8, 2)), a);
  trainer.train();
  const monitor::RunRecord run = monitor::read_run(dir.path());
  EXPECT_EQ(run.facts.world_size, 1);
  EXPECT_EQ(run.facts.hosts, 1);
  EXPECT_EQ(run.facts.device, "cpu");
  EXPECT_EQ(run.facts.backend, "single");
  EXPECT_EQ(run.facts.program, "trainer");
  EXPECT_GT(run.facts.started_unix_s, 1.7e9);
  EXPECT_GE(run.facts.cores, 1);
  EXPECT_EQ(run.facts.parameters, 6 * 8 + 8 + 8 * 3 + 3);
  EXPECT_EQ(run.facts.per_device_batch, 4);
  EXPECT_EQ(run.facts.accumulation, 2);
  EXPECT_EQ(run.facts.optimizer, "replicated fused adamw");
  EXPECT_EQ(run.facts.arguments.at("max_steps").integer, 10);
  ASSERT_EQ(run.ranks.size(), 1u);
  const monitor::RankRecord& rank = run.ranks[0];
  EXPECT_EQ(total(rank, Counter::kMicroBatches), 20u);
  EXPECT_EQ(total(rank, Counter::kLogs), 2u);
  EXPECT_EQ(total(rank, Counter::kSaves), 2u);
  EXPECT_EQ(total(rank, Counter::kEvaluations), 2u);
  EXPECT_EQ(total(rank, Counter::kBatches), 20u) << "none of an evaluation";
  EXPECT_GT(total(rank, Counter::kLoadNs), 0u);
  EXPECT_GE(total(rank, Counter::kHostSyncs), 6u);
  EXPECT_EQ(rank.intervals.back().step, 10);
  const monitor::Interval budget = monitor::budget_of(rank);
  EXPECT_EQ(budget.steps, 10);
  EXPECT_GT(budget.share(ledger::Phase::kForward), 0);
  EXPECT_GT(budget.share(ledger::Phase::kSaving), 0);
}

TEST(TrainerRecord, ARunThatContinuesAppendsAndAnotherOneStartsItsOwn) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.save_strategy = Interval::kSteps;
  a.save_steps = 4;
  const auto train = [&](std::int64_t steps, const char* resume) {
    a.max_steps = steps;
    a.resume_from_checkpoint = resume;
    Trainer(World{}, task_for(network(), dataset(64, 1)), a).train();
    const monitor::RunRecord run = monitor::read_run(dir.path());
    return run.ranks.at(0).intervals.size();
  };
  const std::size_t first = train(4, "never");
  EXPECT_GT(train(8, "auto"), first);
  EXPECT_EQ(monitor::read_run(dir.path()).facts.arguments.at("max_steps").integer, 8);
  a.overwrite_output_dir = true;
  train(4, "never");
  EXPECT_EQ(monitor::budget_of(monitor::read_run(dir.path()).ranks.at(0)).steps, 4);
}

TEST(TrainerRecord, EveryRankHasAFile) {
  io::TemporaryDirectory dir;
  testing::run_threads(3, [&](World& world) {
    auto a = arguments(dir.path());
    a.max_steps = 4;
    Trainer(world, task_for(network(), dataset(64, 1)), a).train();
  });
  const monitor::RunRecord run = monitor::read_run(dir.path());
  EXPECT_EQ(run.facts.world_size, 3);
  EXPECT_EQ(run.facts.ranks_on_host, 3);
  EXPECT_EQ(run.ranks.size(), 3u);
}

TEST(TrainerRecord, OneRankMayRecordAlone) {
  io::TemporaryDirectory dir;
  testing::run_threads(2, [&](World& world) {
    auto a = arguments(dir.path());
    a.max_steps = 20;
    a.shard_optimizer = "auto";
    a.record_run = world.is_leader();
    Trainer(world, task_for(network(), dataset(64, 1)), a).train();
  });
  const monitor::RunRecord run = monitor::read_run(dir.path());
  EXPECT_EQ(run.facts.world_size, 2);
  EXPECT_EQ(run.facts.hosts, 1);
  EXPECT_EQ(run.ranks.size(), 1u);
}

TEST(TrainerRecord, CanBeSwitchedOffAndAFolderInTheWayStopsNobody) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.max_steps = 4;
  a.record_run = false;
  Trainer(World{}, task_for(network(), dataset(64, 1)), a).train();
  EXPECT_FALSE(std::filesystem::exists(dir / "monitor"));
  io::TemporaryDirectory other;
  io::put(other / "monitor", "");
  a = arguments(other.path());
  a.max_steps = 4;
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(Trainer(World{}, task_for(network(), dataset(64, 1)), a).train().global_step, 4);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("without a record"));
}

// Losses stay on the device between two lines of the log.
TEST(TrainerRecord, TheHostReadsWhatIsLogged) {
  const auto syncs = [](double logging_steps) {
    io::TemporaryDirectory dir;
    auto a = arguments(dir.path());
    a.max_steps = 20;
    a.logging_steps = logging_steps;
    Trainer(World{}, task_for(network(), dataset(64, 1)), a).train();
    return total(monitor::read_run(dir.path()).ranks.at(0), Counter::kHostSyncs);
  };
  const std::uint64_t once = syncs(20), each_step = syncs(1);
  EXPECT_LT(once, 20u) << "a read in every step";
  EXPECT_GE(each_step, once + 19);
}

// An evaluation and a save between two lines are not steps.
TEST(TrainerRecord, ThroughputIsThatOfTheSteps) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.max_steps = 10;
  a.logging_steps = 5;
  a.per_device_train_batch_size = 4;
  a.eval_strategy = Interval::kSteps;
  a.eval_steps = 5;
  const auto slow = std::make_shared<Slow>(dataset(400, 2));
  Trainer trainer(World{}, task_for(network(), dataset(64, 1), slow), a);
  const auto begin = std::chrono::steady_clock::now();
  trainer.train();
  ASSERT_GT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(800));
  std::vector<double> rates;
  for (const LogEntry& entry : trainer.state().log_history)
    if (const double* rate = find_metric(entry.values, "samples_per_second"))
      rates.push_back(*rate);
  ASSERT_EQ(rates.size(), 2u);
  EXPECT_GT(rates[1], 100) << "20 samples, with the evaluation in at least 0.4 s";
}

// ---------------------------------------------------------------- waits

struct Logged {
  std::vector<double> data;
  std::vector<double> communication;
  std::string log;
  std::vector<monitor::Finding> findings;  // from `lockstep doctor --run`
  int advice() const {                     // lines of it in the log
    int lines = 0;
    for (std::size_t at = log.find("lockstep doctor --run"); at != log.npos;
         at = log.find("lockstep doctor --run", at + 1))
      ++lines;
    return lines;
  }
};

Logged train_and_listen(const data::DatasetPtr& data, std::int64_t steps, int ranks = 1) {
  io::TemporaryDirectory dir;
  Logged logged;
  ::testing::internal::CaptureStderr();
  testing::run_threads(ranks, [&](World& world) {
    auto a = arguments(dir.path());
    a.max_steps = steps;
    a.logging_steps = 5;
    Trainer trainer(world, task_for(network(), data), a);
    trainer.train();
    if (!world.is_leader()) return;
    for (const LogEntry& entry : trainer.state().log_history) {
      if (const double* value = find_metric(entry.values, "data_wait_percent"))
        logged.data.push_back(*value);
      if (const double* value = find_metric(entry.values, "communication_percent"))
        logged.communication.push_back(*value);
    }
  });
  logged.log = ::testing::internal::GetCapturedStderr();
  logged.findings = monitor::diagnose(monitor::read_run(dir.path()));
  return logged;
}

TEST(TrainerWaits, ASlowLoaderIsInTheLogAndNamedOnceAsTheDoctorDoes) {
  const Logged logged = train_and_listen(std::make_shared<Slow>(dataset(64, 1)), 25);
  ASSERT_EQ(logged.data.size(), 5u);
  for (const double percent : logged.data) {
    EXPECT_GT(percent, 50);
    EXPECT_LE(percent, 100);
  }
  EXPECT_TRUE(logged.communication.empty()) << "a rank alone waits for nobody";
  // On a machine that others use, the cores are what the ranks lack.
  ASSERT_FALSE(logged.findings.empty()) << logged.log;
  EXPECT_TRUE(std::ranges::any_of(logged.findings, [](const auto& finding) {
    return finding.rule == "loader-bound" || finding.rule == "cpu-starved";
  })) << logged.log;
  EXPECT_THAT(logged.log, HasSubstr(finding_text(logged.findings.front())));
  EXPECT_EQ(logged.advice(), 1) << logged.log;
}

TEST(TrainerWaits, WhatTheDoctorDoesNotFindIsNotSaid) {
  for (const int ranks : {1, 2}) {
    const Logged logged = train_and_listen(dataset(64, 1), 25, ranks);
    EXPECT_EQ(logged.advice(), logged.findings.empty() ? 0 : 1) << logged.log;
    if (logged.findings.empty()) continue;
    EXPECT_THAT(logged.log, HasSubstr(finding_text(logged.findings.front())));
  }
  EXPECT_EQ(train_and_listen(dataset(64, 1), 5).advice(), 0) << "too few steps to judge";
}

TEST(TrainerWaits, SeveralRanksLogBothShares) {
  const Logged logged = train_and_listen(dataset(64, 1), 10, 2);
  ASSERT_EQ(logged.data.size(), 2u);
  ASSERT_EQ(logged.communication.size(), 2u);
  for (const double percent : logged.communication) {
    EXPECT_GE(percent, 0);
    EXPECT_LE(percent, 100);
  }
}

}  // namespace
}  // namespace lockstep::train
