// Every rule on records that are made up: with its cause, without it, and near its limit.
#include "lockstep/monitor/diagnosis.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "lockstep/monitor/record_for_test.h"
#include "lockstep/monitor/run_view.h"

namespace lockstep::monitor {
namespace {

using namespace for_test;
using ledger::Counter;
using ledger::Phase;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// ---------------------------------------------------------------- silence

TEST(Healthy, SaysNothing) {
  expect_silence(healthy());
  expect_silence(run_of({Shape{}}));
  EXPECT_TRUE(enough_to_judge(healthy()));
  expect_silence(RunRecord{});
  EXPECT_FALSE(enough_to_judge(RunRecord{}));
}

// Parts of a step that vary by 10 % from second to second, in runs of all lengths and sizes.
TEST(Healthy, SaysNothingWhenItsTimesVary) {
  std::mt19937 random(20261116);
  const auto between = [&](double a, double b) {
    return std::uniform_real_distribution<double>(a, b)(random);
  };
  for (int trial = 0; trial < 400; ++trial) {
    SCOPED_TRACE(trial);
    const Shape shape{.step_ms = between(2, 90),
                      .data = between(0, 0.05),
                      .forward = between(0.25, 0.35),
                      .backward = between(0.40, 0.50),
                      .communication = between(0, 0.10),
                      .optimizer = between(0.01, 0.09),
                      .logging = between(0, 0.01),
                      .saving = between(0, 0.02)};
    const std::vector<Shape> ranks(std::uniform_int_distribution<std::size_t>(1, 8)(random), shape);
    const int intervals = std::uniform_int_distribution<int>(1, 80)(random);
    RunRecord run = run_of(ranks, intervals, [&] { return between(0.9, 1.1); });
    change(run, [&](Interval& interval) {
      interval.process->cores *= between(0.9, 1.1);
      interval.process->run_delay_share = between(0, 0.1);
      interval.process->involuntary_switches_per_s = between(0, 200);
      at(interval.counts, Counter::kSaves) = 1;
    });
    expect_silence(run);
    if (HasFailure()) return;
  }
}

// Ranks that always differ by 10 % up and down are no straggler in a short record.
TEST(Healthy, SaysNothingOfRanksThatDifferALittle) {
  Shape slow;
  slow.step_ms = 22;
  Shape fast;
  fast.step_ms = 18;
  expect_silence(run_of({slow, fast}, 8));
}

TEST(Healthy, IsNotJudgedByItsStart) {
  RunRecord run = healthy();
  for (RankRecord& rank : run.ranks) {
    Interval start = rank.intervals.front();
    start.unix_time_s -= 1;
    start.steps = 1;
    start.host_s = {};
    at(start.host_s, Phase::kData) = 0.9 * start.seconds;
    at(start.host_s, Phase::kStartup) = 0.1 * start.seconds;
    rank.intervals.insert(rank.intervals.begin(), 1, start);
  }
  expect_silence(run);
}

TEST(Healthy, StepsMayTakeManyIntervals) {
  RunRecord run = healthy(60);
  int n = 0;
  change(run, [&](Interval& interval) {
    interval.steps = n++ % 5 == 4 ? 1 : 0;
    const double last = at(interval.host_s, Phase::kData);
    at(interval.host_s, Phase::kForward) += last;
    at(interval.host_s, Phase::kData) = 0;
    if (interval.steps == 1) {  // the only interval of five that waits at all
      at(interval.host_s, Phase::kData) = 0.3 * interval.seconds;
      at(interval.host_s, Phase::kForward) -= 0.28 * interval.seconds;
    }
  });
  expect_silence(run);
}

TEST(Healthy, AFewStepsAreNotJudged) {
  RunRecord run = run_of({Shape{.data = 0.5, .forward = 0.1, .backward = 0.2}});
  run.ranks[0].intervals.resize(1);
  run.ranks[0].intervals[0].steps = 9;
  expect_silence(run);
  EXPECT_FALSE(enough_to_judge(run));
  run.ranks[0].intervals[0].steps = 10;
  EXPECT_NE(find(diagnose(run), "loader-bound"), nullptr);
}

// A second run into the folder, or one that was resumed: what was before it is not its habit.
TEST(Healthy, IsNotJudgedByAnEarlierStart) {
  RunRecord run = healthy(20);
  const RunRecord before = run_of({Shape{.data = 0.5, .forward = 0.1, .backward = 0.2},
                                   Shape{.data = 0.5, .forward = 0.1, .backward = 0.2}});
  for (std::size_t r = 0; r < 2; ++r) {
    auto earlier = before.ranks[r].intervals;
    for (Interval& interval : earlier) interval.unix_time_s -= 1000;
    auto& all = run.ranks[r].intervals;
    all.insert(all.begin(), earlier.begin(), earlier.end());
  }
  EXPECT_NE(find(diagnose(run), "loader-bound"), nullptr);
  run.facts.started_unix_s = 1e9;
  expect_silence(run);
  EXPECT_TRUE(enough_to_judge(run));
  run.facts.started_unix_s = 2e9;
  EXPECT_FALSE(enough_to_judge(run));
}

// ---------------------------------------------------------------- data

Shape waiting_for_data(double share) {
  Shape shape;
  shape.data = share;
  shape.forward = 0.85 - share - shape.backward / 2;
  shape.backward /= 2;
  return shape;
}

TEST(LoaderBound, NamesTheWorkersThatSuffice) {
  RunRecord run = run_of({waiting_for_data(0.4), waiting_for_data(0.4)});
  change(run, [](Interval& interval) {  // 30 ms for a batch, 12 ms of a step without the wait
    at(interval.counts, Counter::kLoadNs) =
        at(interval.counts, Counter::kBatches) * std::uint64_t{30'000'000};
  });
  const Finding finding = only(run, "loader-bound");
  EXPECT_THAT(finding.remedy, HasSubstr("set dataloader_num_workers to 3 (now 1)"));
  EXPECT_THAT(finding.evidence, HasSubstr("40 %"));
  EXPECT_THAT(finding.evidence, HasSubstr("30.0 ms"));
  EXPECT_NEAR(finding.gain, 0.4, 1e-9);
}

TEST(LoaderBound, RanksThatLackCoresAreNotAskedForWorkers) {
  RunRecord run = run_of({waiting_for_data(0.4), waiting_for_data(0.4)});
  change(run, [](Interval& interval) { interval.process->run_delay_share = 0.35; });
  only(run, "cpu-starved");
}

TEST(LoaderBound, SaysWhenCoresAreMissing) {
  RunRecord run = run_of({waiting_for_data(0.4), waiting_for_data(0.4)});
  run.facts.cores = 2;
  run.facts.arguments = {};
  change(run, [](Interval& interval) {
    at(interval.counts, Counter::kLoadNs) =
        at(interval.counts, Counter::kBatches) * std::uint64_t{30'000'000};
  });
  EXPECT_THAT(only(run, "loader-bound").remedy, HasSubstr("6 threads on 2 cores"));
  run.facts.arguments = map_node({{"dataloader_num_workers", integer_node(8)}});
  EXPECT_THAT(only(run, "loader-bound").remedy, HasSubstr("3 workers would suffice and 8 are"));
  change(run, [](Interval& interval) { at(interval.counts, Counter::kBatches) = 0; });
  EXPECT_THAT(only(run, "loader-bound").remedy, HasSubstr("load batches ahead"));
}

Shape logging(double share) {
  Shape shape;
  shape.logging = share;
  shape.forward -= share;
  return shape;
}

TEST(Logging, CostsTooMuch) {
  RunRecord run = run_of({logging(0.15), logging(0.02)});
  run.ranks[1] = rank_of(1, Shape{.forward = 0.2, .communication = 0.15}, 40, [] { return 1.0; });
  change(run, [](Interval& interval) {
    at(interval.counts, Counter::kLogs) = static_cast<std::uint64_t>(interval.steps);
    at(interval.counts, Counter::kHostSyncs) = static_cast<std::uint64_t>(interval.steps);
  });
  const Finding finding = only(run, "logging-too-often");
  EXPECT_THAT(finding.remedy, HasSubstr("logging_steps to 20"));
  EXPECT_THAT(finding.evidence, HasSubstr("every 1.0 steps; 1.0 waits"));
  EXPECT_NEAR(finding.gain, 0.15 * 0.95, 0.005);
}

TEST(Logging, OfOneIntervalIsNoHabit) {
  RunRecord once = run_of({logging(0.2), logging(0.2)});
  change(once, [](Interval& interval) { at(interval.counts, Counter::kLogs) = 0; });
  at(once.ranks[0].intervals[9].counts, Counter::kLogs) = 2;
  expect_silence(once);
}

Shape saving(double share) {
  Shape shape;
  shape.saving = share;
  shape.forward -= share;
  return shape;
}

TEST(Saving, CostsTooMuch) {
  RunRecord run = run_of({saving(0.2), saving(0.2)});
  change(run, [](Interval& interval) { at(interval.counts, Counter::kSaves) = 5; });
  const Finding finding = only(run, "saving-too-often");
  EXPECT_EQ(finding.remedy, "set save_steps to 100.");
  EXPECT_NEAR(finding.gain, 0.2 * 0.9, 1e-6);
  run.facts.arguments = map_node({{"save_strategy", text_node("epoch")}});
  EXPECT_EQ(only(run, "saving-too-often").remedy,
            "set save_strategy to steps (now epoch) and save_steps to 100.");
}

// The checkpoints at the end of a run, and of the one before.
TEST(Saving, AtTheEndIsNoHabit) {
  RunRecord twice = run_of({saving(0.2), saving(0.2)});
  at(twice.ranks[0].intervals[39].counts, Counter::kSaves) = 2;
  expect_silence(twice);
}

TEST(Rules, HaveLimits) {
  const auto limit = [](const char* rule, auto shape, double above, double below) {
    for (const double share : {above, below}) {
      RunRecord run = run_of({shape(share), shape(share)});
      change(run, [](Interval& interval) { at(interval.counts, Counter::kSaves) = 1; });
      EXPECT_EQ(find(diagnose(run), rule) != nullptr, share == above) << rule << share;
    }
  };
  limit("loader-bound", waiting_for_data, 0.105, 0.095);
  limit("logging-too-often", logging, 0.032, 0.028);
  limit("saving-too-often", saving, 0.052, 0.048);
}

// ---------------------------------------------------------------- batches

Shape updating(double optimizer, double communication) {
  Shape shape;
  shape.optimizer = optimizer;
  shape.communication = communication;
  shape.forward = (0.95 - optimizer - communication) / 3;
  shape.backward = 2 * shape.forward;
  return shape;
}

TEST(MicroBatch, IsTooSmallForItsUpdate) {
  const Finding finding =
      only(run_of({updating(0.45, 0.05), updating(0.45, 0.05)}), "micro-batch-too-small");
  EXPECT_EQ(finding.cause, "update");
  EXPECT_THAT(finding.remedy, HasSubstr("per_device_train_batch_size from 8 to 16"));
  EXPECT_NEAR(finding.gain, 0.25, 0.01);
  expect_silence(run_of({updating(0.34, 0.05), updating(0.34, 0.05)}));
}

TEST(Accumulation, SynchronisesEveryMicroStep) {
  RunRecord run = run_of({updating(0.05, 0.12), updating(0.05, 0.12)});
  expect_silence(run);
  change(run, [](Interval& interval) { at(interval.counts, Counter::kUpdates) /= 4; });
  const Finding finding = only(run, "accumulation-synchronises");
  EXPECT_THAT(finding.remedy, HasSubstr("no_sync()"));
  EXPECT_THAT(finding.evidence, HasSubstr("4."));
  EXPECT_LE(finding.gain, 0.12);
  EXPECT_GT(finding.gain, 0.08);
  // Accumulation as it should be.
  change(run, [](Interval& interval) {
    at(interval.counts, Counter::kSynchronisedPasses) = at(interval.counts, Counter::kUpdates);
  });
  expect_silence(run);
}

// ---------------------------------------------------------------- communication

RunRecord communicating(double share, double bucket_mib, double buckets, double reduce_ms) {
  RunRecord run = run_of({updating(0.05, share), updating(0.05, share)});
  run.facts.optimizer = "replicated fused adamw";
  change(run, [&](Interval& interval) {
    const auto steps = static_cast<double>(interval.steps);
    at(interval.counts, Counter::kBuckets) = static_cast<std::uint64_t>(steps * buckets);
    at(interval.counts, Counter::kReducedBytes) =
        static_cast<std::uint64_t>(steps * buckets * bucket_mib * (1u << 20));
    at(interval.counts, Counter::kReduceNs) = static_cast<std::uint64_t>(steps * reduce_ms * 1e6);
  });
  return run;
}

TEST(CommunicationBound, NamesTheBucketsThatSuffice) {
  // 100 MiB in one bucket that takes 7 of 20 ms, of which backward could hide all but the last.
  Finding finding = only(communicating(0.35, 100, 1, 7), "communication-bound");
  EXPECT_THAT(finding.remedy, HasSubstr("lower ddp_bucket_cap_mb to 14"));
  EXPECT_NEAR(finding.gain, 0.29, 0.01);
  finding = only(communicating(0.35, 0.5, 40, 8), "communication-bound");
  EXPECT_THAT(finding.remedy, HasSubstr("raise ddp_bucket_cap_mb to 25"));
  EXPECT_LE(finding.gain, 0.35);
  finding = only(communicating(0.35, 25, 8, 18), "communication-bound");
  EXPECT_THAT(finding.remedy, HasSubstr("gradient_accumulation_steps (now 1)"));
  EXPECT_NEAR(finding.gain, 0.17, 0.01);
}

// The numbers that the run has, not those that its file says.
TEST(CommunicationBound, NamesTheKeysThatMakeAStepLarger) {
  RunRecord run = communicating(0.35, 25, 8, 18);
  run.facts.per_device_batch = 4;
  run.facts.accumulation = 2;
  EXPECT_THAT(only(run, "communication-bound").remedy,
              HasSubstr("raise per_device_train_batch_size (now 4) or gradient_accumulation_steps "
                        "(now 2) (the global batch grows with them); between hosts"));
  run.facts.arguments = map_node(
      {{"gradient_accumulation_steps", integer_node(1)}, {"global_batch_size", integer_node(16)}});
  EXPECT_THAT(only(run, "communication-bound").remedy,
              HasSubstr("reduce less often: raise global_batch_size (now 16); between hosts"));
}

TEST(CommunicationBound, AShardedOptimizerHasNoBuckets) {
  for (RunRecord run : {communicating(0.35, 100, 1, 7), communicating(0.35, 0.5, 40, 8)}) {
    run.facts.optimizer = "sharded fused adamw";
    EXPECT_THAT(only(run, "communication-bound").remedy, HasSubstr("reduce less often"));
  }
}

// Passes gather what fsdp divides, also those that only accumulate.
TEST(CommunicationBound, FsdpGathersLessOftenWithLargerPasses) {
  RunRecord run = communicating(0.35, 0, 0, 0);
  run.facts.per_device_batch = 4;
  run.facts.arguments = map_node({{"fsdp", text_node("full_shard")}});
  const Finding finding = only(run, "communication-bound");
  EXPECT_THAT(finding.what, HasSubstr("gathered parameters"));
  EXPECT_THAT(finding.remedy,
              AllOf(HasSubstr("per_device_train_batch_size (now 4)"), HasSubstr("shard_grad_op"),
                    Not(HasSubstr("hybrid_shard")), Not(HasSubstr("accumulation"))));
  run.facts.hosts = 2;
  EXPECT_THAT(only(run, "communication-bound").remedy, HasSubstr("hybrid_shard"));
  run.facts.arguments = map_node({{"fsdp", text_node("")}});
  EXPECT_THAT(only(run, "communication-bound").remedy, HasSubstr("accumulation"));
}

TEST(CommunicationBound, HasALimit) {
  only(communicating(0.22, 25, 4, 8), "communication-bound");
  expect_silence(communicating(0.19, 25, 4, 8));
  RunRecord shared = communicating(0.4, 25, 4, 8);  // something else runs on a rank's core
  change(shared, [](Interval& interval) { interval.process->run_delay_share = 0.25; }, 1);
  EXPECT_EQ(find(diagnose(shared), "communication-bound"), nullptr);
}

TEST(Straggler, ThatComputesSlowly) {
  const Finding finding = only(with_slow_rank(10, 20), "straggler");
  EXPECT_EQ(finding.rank, 1);
  EXPECT_EQ(finding.cause, "compute");
  EXPECT_NEAR(finding.gain, 10.0 / 21, 0.01);
  EXPECT_THAT(finding.evidence, HasSubstr("20.0 ms of its own work in a step, 10.0 ms"));
}

TEST(Straggler, HasALimitThatDependsOnTheLengthOfTheRecord) {
  only(with_slow_rank(10, 11.5), "straggler");
  expect_silence(with_slow_rank(10, 11.0));
  expect_silence(with_slow_rank(10, 11.5, 10));
  only(with_slow_rank(10, 13.5, 10), "straggler");
}

TEST(Straggler, IsSlowAllTheTime) {
  RunRecord run = with_slow_rank(10, 20);
  const RunRecord even = with_slow_rank(10, 10.001);
  for (std::size_t i = 0; i < 40; i += 3) run.ranks[1].intervals[i] = even.ranks[1].intervals[i];
  EXPECT_EQ(find(diagnose(run), "straggler"), nullptr);
}

// Ranks whose steps are not known, with the share of their time inside collectives.
RunRecord collectives_of(const std::vector<double>& shares, int intervals = 10) {
  RunRecord run;
  run.facts.world_size = static_cast<int>(shares.size());
  for (std::size_t rank = 0; rank < shares.size(); ++rank) {
    RankRecord& record = run.ranks.emplace_back(RankRecord{.rank = static_cast<int>(rank)});
    for (int i = 1; i <= intervals; ++i) {
      Interval& interval = record.intervals.emplace_back(
          Interval{.unix_time_s = 100.0 + i, .seconds = 1, .collective_share = 0});
      if (i < 3) continue;  // it starts up
      interval.collective_share = shares[rank];
      interval.collectives = 20;
      interval.process = usual_process();
    }
  }
  return run;
}

TEST(Straggler, WithoutStepsIsTheRankThatWaitsLeast) {
  const Finding finding = only(collectives_of({0.9, 0.1, 0.9}), "straggler");
  EXPECT_EQ(finding.rank, 1);
  EXPECT_EQ(finding.cause, "") << "what it does instead is not known";
  EXPECT_NEAR(finding.gain, 0.8, 1e-9);
  EXPECT_THAT(finding.evidence, HasSubstr("10 % of its time, 90 % on the others"));
  EXPECT_FALSE(enough_to_judge(collectives_of({0.9, 0.1})));
  EXPECT_THAT(nothing_found_text(collectives_of({0.9, 0.9})), HasSubstr("collectives are known"));
  EXPECT_THAT(nothing_found_text(RunRecord{}), HasSubstr("only CPU, memory and GPUs"));
}

TEST(Straggler, WithoutStepsHasTheSameLimits) {
  only(collectives_of({0.5, 0.28}), "straggler");
  expect_silence(collectives_of({0.5, 0.35}));
  only(collectives_of({0.5, 0.35}, 40), "straggler");
  expect_silence(collectives_of({0.5, 0.42}, 40));
  expect_silence(collectives_of({0.9, 0.1}, 5));  // three with collectives
  expect_silence(collectives_of({0.9}));
  RunRecord now_and_then = collectives_of({0.9, 0.1}, 12);
  for (std::size_t i = 0; i < 12; i += 2) now_and_then.ranks[1].intervals[i].collective_share = 0.9;
  expect_silence(now_and_then);
  RunRecord of_one_host = collectives_of({0.9, 0.1});
  of_one_host.facts.world_size = 4;
  expect_silence(of_one_host);
}

// As run() leaves it: the last interval has the passes.
TEST(NeverExchanged, SeparateModelsAreNoDataParallelRun) {
  const auto separate = [] {
    RunRecord run = run_of({Shape{}, Shape{}}, 4);
    change(run, [](Interval& interval) {
      interval.steps = 0;
      interval.step = -1;
      interval.counts = {};
    });
    for (RankRecord& rank : run.ranks)
      at(rank.intervals.back().counts, Counter::kSeparatePasses) = 100;
    return run;
  };
  const Finding finding = only(separate(), "never-exchanged");
  EXPECT_THAT(finding.what, HasSubstr("2 ranks trained and never exchanged a gradient"));
  EXPECT_THAT(finding.evidence, HasSubstr("100 backward passes"));
  EXPECT_THAT(finding.remedy, HasSubstr("lockstep::DistributedDataParallel"));
  RunRecord of_rank_1_averaged = separate();
  at(of_rank_1_averaged.ranks[1].intervals.back().counts, Counter::kSeparatePasses) = 0;
  expect_silence(of_rank_1_averaged);
  RunRecord collective = separate();  // a loader's, or a mean loss
  collective.ranks[0].intervals[1].collectives = 1;
  only(collective, "never-exchanged");
  RunRecord alone = separate();
  alone.facts.world_size = 1;
  alone.ranks.resize(1);
  expect_silence(alone);
}

TEST(Straggler, ThatWaitsForData) {
  RunRecord run = with_slow_rank(10, 30, 2);
  change(
      run,
      [](Interval& interval) {
        const double moved = 20.0 / 30 * at(interval.host_s, Phase::kBackward);
        at(interval.host_s, Phase::kBackward) -= moved;
        at(interval.host_s, Phase::kForward) /= 3;
        at(interval.host_s, Phase::kData) = 20e-3 * static_cast<double>(interval.steps);
        interval.process->cores = 0.4;
      },
      1);
  const Finding finding = only(run, "straggler");
  EXPECT_EQ(finding.rank, 1);
  EXPECT_EQ(finding.cause, "data");
  EXPECT_THAT(finding.remedy, HasSubstr("rank 1"));
}

// Other programs take the cores of all ranks: the difference between two of them is chance.
TEST(Straggler, IsNotNamedWhereEveryRankWaitsForACore) {
  RunRecord run = with_slow_rank(10, 20);
  EXPECT_NE(find(diagnose(run), "straggler"), nullptr);
  for (const int rank : {0, 1})
    change(run, [](Interval& interval) { interval.process->run_delay_share = 0.5; }, rank);
  EXPECT_EQ(find(diagnose(run), "straggler"), nullptr);
  EXPECT_NE(find(diagnose(run), "cpu-starved"), nullptr);
}

// Something runs on every core, and much more on that of one rank.
TEST(Straggler, IsNamedWhereItWaitsForACoreFarMoreThanTheOthers) {
  RunRecord run = with_slow_rank(10, 30);
  change(run, [](Interval& interval) { interval.process->run_delay_share = 0.12; }, 0);
  change(run, [](Interval& interval) { interval.process->run_delay_share = 0.64; }, 1);
  const std::vector<Finding> findings = diagnose(run);
  const Finding* const finding = find(findings, "straggler");
  ASSERT_NE(finding, nullptr);
  EXPECT_EQ(finding->rank, 1);
  EXPECT_EQ(finding->cause, "cpu-starved");
}

TEST(Straggler, WithoutACore) {
  RunRecord run = with_slow_rank(10, 30);
  change(
      run,
      [](Interval& interval) {
        interval.process->cores = 0.34;
        interval.process->run_delay_share = 0.64;
        interval.process->involuntary_switches_per_s = 110;
      },
      1);
  Finding finding = only(run, "straggler");
  EXPECT_EQ(finding.cause, "cpu-starved");
  EXPECT_EQ(finding.rank, 1);
  EXPECT_THAT(finding.evidence, HasSubstr("0.34 cores"));
  // As `lockstep run --record` leaves a rank that has ended.
  RunRecord ended = run;
  for (RankRecord& rank : ended.ranks) rank.intervals.back().process.reset();
  EXPECT_EQ(only(ended, "straggler").cause, "cpu-starved");
  // A kernel that does not count the wait.
  change(run, [](Interval& interval) { interval.process->run_delay_share.reset(); });
  EXPECT_EQ(only(run, "straggler").cause, "cpu-starved");
  change(run, [](Interval& interval) { interval.process->involuntary_switches_per_s = 3; });
  EXPECT_EQ(only(run, "straggler").cause, "compute");
  change(run, [](Interval& interval) { interval.throttled_share = 0.5; }, 1);
  EXPECT_EQ(only(run, "straggler").cause, "cpu-starved");
}

TEST(FindUnused, SearchesForNothing) {
  RunRecord run = healthy();
  change(run, [](Interval& interval) {
    at(interval.counts, Counter::kUnusedSearches) = static_cast<std::uint64_t>(interval.steps);
  });
  const Finding finding = only(run, "find-unused-parameters");
  EXPECT_THAT(finding.remedy, HasSubstr("ddp_find_unused_parameters: false"));
  EXPECT_THAT(finding_text(finding), HasSubstr("Expected gain: not known."));
  at(run.ranks[1].intervals[20].counts, Counter::kUnusedFound) = 1;
  expect_silence(run);
}

// ---------------------------------------------------------------- processes

TEST(PageFaults, EveryStep) {
  RunRecord run = healthy();
  const auto faults = [&](double per_s, double system) {
    change(run, [&](Interval& interval) {
      interval.process->minor_faults_per_s = per_s;
      interval.process->system_cores = system;
    });
  };
  faults(250'000, 0.2);  // 5000 in each step
  const Finding finding = only(run, "page-faults");
  EXPECT_THAT(finding.evidence, HasSubstr("5000 minor page faults in a step"));
  EXPECT_THAT(finding.remedy, HasSubstr("MALLOC_TRIM_THRESHOLD_"));
  EXPECT_NEAR(finding.gain, 0.125 / 0.98 * 0.95, 0.001);
  faults(250'000, 0.05);
  EXPECT_LT(only(run, "page-faults").gain, 0.05);
  faults(65'000, 0.2);
  only(run, "page-faults");
  faults(55'000, 0.2);
  expect_silence(run);
}

TEST(PageFaults, OfMemoryThatStaysAreFine) {
  RunRecord run = healthy();
  change(run, [resident = std::uint64_t{500} << 20](Interval& interval) mutable {
    interval.process->minor_faults_per_s = 100'000;
    interval.process->system_cores = 0.2;
    interval.resident_bytes = resident += 350u << 20;
  });
  expect_silence(run);
}

TEST(Threads, MoreThanCores) {
  RunRecord run = healthy();
  run.facts.cores = 2;
  expect_silence(run);
  run.facts.threads_per_rank = 2;
  Finding finding = only(run, "too-many-threads");
  EXPECT_EQ(finding.cause, "threads");
  EXPECT_THAT(finding.remedy, HasSubstr("OMP_NUM_THREADS=1"));
  change(run, [](Interval& interval) { interval.process->cores = 0.45; });
  expect_silence(run);
  change(run, [](Interval& interval) { interval.process->waiting_threads = 0.9; });
  finding = only(run, "too-many-threads");
  EXPECT_THAT(finding.evidence, HasSubstr("0.9 cores in use, 1.8 threads waiting for one"));
  run.facts.hosts = 2;
  EXPECT_EQ(find(diagnose(run), "too-many-threads"), nullptr);
  RunRecord four = run_of({Shape{}, Shape{}, Shape{}, Shape{}});
  four.facts.cores = 2;
  change(four, [](Interval& interval) { interval.process->cores = 0.5; });
  finding = only(four, "too-many-threads");
  EXPECT_EQ(finding.cause, "ranks");
  EXPECT_THAT(finding.remedy, HasSubstr("at most 2 ranks"));
}

// As one host of several has it: what its ranks wait for is on another one.
TEST(Diagnosis, APartOfTheRanksIsNotComparedWithTheOthers) {
  RunRecord run = with_slow_rank(10, 16);
  only(run, "straggler");
  for (const auto& present :
       {std::vector<int>{0, 2}, std::vector<int>{0, 1}, std::vector<int>{0}}) {
    RunRecord part = run;
    std::erase_if(part.ranks, [&](const RankRecord& rank) {
      return std::ranges::find(present, rank.rank) == present.end();
    });
    expect_silence(part);
    EXPECT_FALSE(enough_to_judge(part));
    EXPECT_THAT(nothing_found_text(part),
                HasSubstr(fmt::format("{} of 3 ranks are recorded here", present.size())));
  }
  EXPECT_EQ(missing_ranks_text(run), "");
}

// Every rank, on a machine that other programs use.
RunRecord starved(double delay_share, double cores) {
  RunRecord run = healthy();
  run.facts.cores = 2;
  change(run, [&](Interval& interval) {
    interval.process->run_delay_share = delay_share;
    interval.process->cores = cores;
  });
  return run;
}

TEST(CpuStarved, OtherProgramsUseTheCoresOfAllRanks) {
  const Finding finding = only(starved(0.31, 0.5), "cpu-starved");
  EXPECT_EQ(finding.rank, -1);
  EXPECT_EQ(finding.cause, "other-programs");
  EXPECT_THAT(finding.what, HasSubstr("wait for a core 31 % of the time"));
  EXPECT_THAT(finding.evidence, HasSubstr("1.0 of 2 cores"));
  EXPECT_NEAR(finding.gain, 0.31, 1e-9);
  EXPECT_NEAR(starved_share(starved(0.31, 0.5)).value_or(0), 0.31, 1e-9);
}

TEST(CpuStarved, HasALimit) {
  only(starved(0.11, 0.85), "cpu-starved");
  expect_silence(starved(0.10, 0.85));
  EXPECT_EQ(starved_share(starved(0.10, 0.85)), std::nullopt);
  RunRecord one = healthy();  // the other rank has its core
  change(one, [](Interval& interval) { interval.process->run_delay_share = 0.15; }, 1);
  expect_silence(one);
}

TEST(CpuStarved, OtherReasonsThanOtherPrograms) {
  Finding finding = only(starved(0.2, 0.97), "cpu-starved");
  EXPECT_EQ(finding.cause, "own-threads");
  EXPECT_THAT(finding.remedy, HasSubstr("dataloader_num_workers"));
  RunRecord limited = starved(0.5, 0.5);
  change(limited, [](Interval& interval) {
    interval.throttled_share = 0.6;
    interval.cpu_limit_cores = 1;
  });
  finding = only(limited, "cpu-starved");
  EXPECT_EQ(finding.cause, "quota");
  EXPECT_THAT(finding.evidence, HasSubstr("limited to 1.0 cores"));
  // Two threads of a rank, of which one computes: what takes its core is not the other one.
  RunRecord threads = starved(0.5, 0.5);
  threads.facts.threads_per_rank = 2;
  change(threads, [](Interval& interval) { interval.process->waiting_threads = 0.5; });
  finding = only(threads, "cpu-starved");
  EXPECT_EQ(finding.cause, "other-programs");
  EXPECT_THAT(finding_text(finding), HasSubstr("OMP_NUM_THREADS=1"));
  EXPECT_THAT(finding_text(finding), HasSubstr("Expected gain: not known."));
  EXPECT_THAT(finding_text(only(starved(0.5, 0.5), "cpu-starved")),
              ::testing::Not(HasSubstr("OMP_NUM_THREADS")));  // one thread
  change(threads, [](Interval& interval) { interval.process->waiting_threads = 1.2; });
  only(threads, "too-many-threads");  // that rule says more
  change(threads, [](Interval& interval) { interval.process->cores = 0.05; });
  EXPECT_EQ(only(threads, "cpu-starved").cause, "other-programs");  // the ranks use none
  RunRecord gpu = starved(0.3, 0.5);  // whose host is ahead of the device
  gpu.facts.device = "cuda";
  EXPECT_EQ(find(diagnose(gpu), "cpu-starved"), nullptr);
  RunRecord uncounted = starved(0.3, 0.5);
  change(uncounted, [](Interval& interval) { interval.process->run_delay_share.reset(); });
  expect_silence(uncounted);
}

// ---------------------------------------------------------------- all together

// Whatever a record holds: gains are shares, and none is above what its rule rests on.
TEST(Findings, NeverPromiseMoreThanTheirShare) {
  std::mt19937 random(7);
  const auto between = [&](double a, double b) {
    return std::uniform_real_distribution<double>(a, b)(random);
  };
  int found = 0;
  for (int trial = 0; trial < 500; ++trial) {
    SCOPED_TRACE(trial);
    std::vector<Shape> shapes(std::uniform_int_distribution<std::size_t>(1, 4)(random));
    double data = 0, communication = 0, logs = 0, saves = 0, optimizer = 0;
    for (Shape& shape : shapes) {
      shape = {.step_ms = between(2, 90)};
      double rest = 1;
      for (double* part : {&shape.data, &shape.communication, &shape.optimizer, &shape.logging,
                           &shape.saving, &shape.forward})
        rest -= * part = between(0, rest);
      data = std::max(data, shape.data);
      communication = std::max(communication, shape.communication);
      logs = std::max(logs, shape.logging);
      saves = std::max(saves, shape.saving);
      optimizer = std::max(optimizer, shape.optimizer);
    }
    RunRecord run = run_of(shapes, std::uniform_int_distribution<int>(1, 50)(random));
    run.facts.optimizer = "replicated fused adamw";
    const double faults = between(0, 4e5), system = between(0, 1);
    change(run, [&](Interval& interval) {
      at(interval.counts, Counter::kSaves) = 1;
      at(interval.counts, Counter::kUpdates) /= 3;
      interval.process->minor_faults_per_s = faults;
      interval.process->system_cores = system;
    });
    const auto findings = diagnose(run);
    const std::pair<const char*, double> limits[] = {
        {"loader-bound", data},
        {"communication-bound", communication},
        {"logging-too-often", logs},
        {"saving-too-often", saves},
        {"accumulation-synchronises", communication},
        {"micro-batch-too-small", optimizer + communication},
        {"page-faults", system / 0.98},
        {"straggler", 1}};
    for (const Finding& finding : findings) {
      ++found;
      EXPECT_GE(finding.gain, 0) << finding_text(finding);
      EXPECT_LE(finding.gain, 1) << finding_text(finding);
      for (const auto& [rule, limit] : limits)
        if (finding.rule == rule) {
          EXPECT_LE(finding.gain, limit + 1e-9) << finding_text(finding);
        }
    }
    EXPECT_TRUE(std::is_sorted(findings.begin(), findings.end(),
                               [](const auto& a, const auto& b) { return a.gain > b.gain; }));
    if (HasFailure()) return;
  }
  EXPECT_GT(found, 500);
}

// ---------------------------------------------------------------- what was logged

// A healthy run by its times, in whose folder these lines of metrics are.
std::string logged(const std::vector<std::pair<std::string, std::vector<double>>>& curves) {
  RunView view;
  view.record = healthy();
  for (const auto& [name, values] : curves)
    for (std::size_t i = 0; i < values.size(); ++i)
      if (values[i] != 0)
        view.metrics.push_back(
            {.step = static_cast<std::int64_t>(i + 1) * 100, .values = {{name, values[i]}}});
  std::ranges::stable_sort(view.metrics, {}, &MetricLine::step);
  conclude(view);
  EXPECT_LE(view.findings.size(), 1u) << all(view.findings);
  return all(view.findings);
}

TEST(NotFinite, LossesAndSkippedStepsAreFound) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(logged({{"loss", {3, 2, 1}}}), "");
  EXPECT_THAT(logged({{"loss", {3, nan, 2, nan, nan}}}),
              AllOf(HasSubstr("not-finite: The loss is not finite since step 400."),
                    HasSubstr("Evidence: The last 2 of 5 logged losses are not finite."),
                    HasSubstr("Change: a smaller learning rate; "), HasSubstr("skip_non_finite")));
  EXPECT_THAT(logged({{"loss", {nan}}}), HasSubstr("since step 100. Evidence: The last 1 of 1 "));
  EXPECT_EQ(logged({{"loss", {3, nan, 2}}}), "") << "it is finite again";
  EXPECT_THAT(logged({{"loss", {3, 2}}, {"skipped_steps", {0, 100}}}),
              AllOf(HasSubstr("At step 200 the gradient was not finite: 100 of the steps"),
                    HasSubstr("Evidence: 100 of 200 steps were skipped.")));
  // A scale of fp16 that is found, and now and then a step; and more than that.
  EXPECT_EQ(logged({{"loss", {3, 2, 1}}, {"skipped_steps", {17}}}), "");
  EXPECT_EQ(logged({{"loss", {3, 2, 1, 1, 1, 1}}, {"skipped_steps", {17, 5, 5}}}), "");
  EXPECT_THAT(logged({{"loss", {3, 2, 1, 1, 1, 1}}, {"skipped_steps", {17, 9, 5}}}),
              AllOf(HasSubstr("Steps are skipped again and again"),
                    HasSubstr("Evidence: 31 of 600 steps were skipped.")));
}

TEST(LowMfu, NamesTheLargestPart) {
  EXPECT_EQ(logged({{"mfu", {0.1, 0.45, 0.41, 0.42}}}), "");
  EXPECT_EQ(logged({{"mfu", {0.1, 0.2}}}), "") << "too few lines";
  EXPECT_THAT(logged({{"mfu", {0.45, 0.22, 0.21, 0.2}}}),
              AllOf(HasSubstr("low-mfu: The GPUs compute at 21 % of their peak rate."),
                    HasSubstr("The largest part of rank 0's time is backward, 50 %."),
                    HasSubstr("a larger per_device_train_batch_size")));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(logged({{"mfu", {0.1, 0.2, 0.2}}, {"loss", {3, nan, nan}}}),
              Not(HasSubstr("low-mfu")));
}

TEST(Findings, AsTextAndJson) {
  const Finding finding{.rule = "straggler",
                        .rank = 1,
                        .cause = "data",
                        .what = "What.",
                        .evidence = "20 ms.",
                        .remedy = "this.",
                        .gain = 0.154};
  EXPECT_EQ(finding_text(finding),
            "straggler (rank 1, data): What. Evidence: 20 ms. Change: this. Expected gain: about "
            "15 %.");
  EXPECT_EQ(to_json(findings_node({finding})),
            R"([{"rule":"straggler","rank":1,"cause":"data","what":"What.","evidence":"20 ms.",)"
            R"("remedy":"this.","gain":0.154}])");
  EXPECT_EQ(to_json(findings_node({})), "[]");
  Finding hostile = finding;
  hostile.evidence = "\x1b]0;title\a";
  EXPECT_THAT(finding_text(hostile), HasSubstr(R"(Evidence: \x1b]0;title\x07 Change)"));
}

}  // namespace
}  // namespace lockstep::monitor
