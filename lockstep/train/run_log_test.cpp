// RunLog and StopRequest in loops that are not the Trainer's. What page and monitor make of a log
// with real ranks is in tests/dashboard/run_test.py, what TensorBoard reads in
// tests/train/events_test.py.
#include "lockstep/train/run_log.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cmath>
#include <filesystem>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/monitor/run_record.h"
#include "lockstep/testing/worlds.h"
#include "lockstep/train/stop_request.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;

template <typename Call>
std::string refusal_of(Call&& call) {
  return io::message_of<UsageError>(call);
}

TEST(RunLog, WritesWhatRankZeroHandsOver) {
  const io::TemporaryDirectory out;
  testing::run_threads(3, [&](World& world) {
    RunLog run_log{out.path(), world, {.total_steps = 4}};
    const at::Tensor accuracy = at::full({1, 1}, 0.5, at::kFloat).requires_grad_();
    run_log.log({{"loss", 2.5 + world.rank()}, {"accuracy", accuracy}, {"epoch", 0.25}}, 1);
    run_log.log({{"loss", 1}, {"worst", NAN}}, 2);
  });
  EXPECT_EQ(io::get(out / "metrics.jsonl"),
            "{\"step\":1,\"epoch\":0.25,\"loss\":2.5,\"accuracy\":0.5}\n"
            "{\"step\":2,\"loss\":1.0,\"worst\":null}\n");
  EXPECT_FALSE(std::filesystem::is_empty(out / "runs"));
  const monitor::RunRecord record = monitor::read_run(out.path());
  EXPECT_EQ(record.facts.total_steps, 4);
  EXPECT_EQ(record.facts.world_size, 3);
  EXPECT_EQ(record.ranks.size(), 3u);
  EXPECT_GT(record.facts.ended_unix_s, 0);
  EXPECT_EQ(record.facts.failure, "");
}

TEST(RunLog, AFreshRunSupersedesAnEarlierOnesFiguresAndOneThatContinuesDoesNot) {
  const io::TemporaryDirectory out;
  const auto run = [&](RunLogOptions options, std::int64_t first, std::int64_t last) {
    testing::run_threads(1, [&](World& world) {
      RunLog run_log{out.path(), world, options};
      for (std::int64_t step = first; step <= last; ++step) run_log.log({{"loss", 1.5}}, step);
    });
    return io::get(out / "metrics.jsonl");
  };
  const std::string two = run({}, 1, 2);
  io::put(out / "monitor/rank_7.jsonl", "");  // a rank that this run does not have
  EXPECT_EQ(run({}, 1, 2), two);
  EXPECT_EQ(io::get(out / "metrics.superseded.jsonl"), two);
  EXPECT_FALSE(std::filesystem::exists(out / "monitor/rank_7.jsonl"));
  EXPECT_TRUE(std::filesystem::exists(out / "monitor/rank_0.jsonl"));
  EXPECT_EQ(run({.resumed_at = 1}, 2, 3), two + "{\"step\":3,\"loss\":1.5}\n");
  EXPECT_EQ(io::get(out / "metrics.superseded.jsonl"), two + "{\"step\":2,\"loss\":1.5}\n");
}

TEST(RunLog, AStepThatIsRepeatedIsThereOnce) {
  const io::TemporaryDirectory out;
  testing::run_threads(1, [&](World& world) {
    RunLog run_log{out.path(), world, {.tensorboard = false, .record = false}};
    for (const std::int64_t step : {1, 2, 3}) run_log.log({{"loss", 1}}, step);
    run_log.log({{"loss", 0.5}}, 2);
    run_log.log({{"eval_loss", 0.25}}, 2);
  });
  EXPECT_EQ(io::get(out / "metrics.jsonl"),
            "{\"step\":1,\"loss\":1.0}\n{\"step\":2,\"loss\":0.5}\n"
            "{\"step\":2,\"eval_loss\":0.25}\n");
  EXPECT_FALSE(std::filesystem::exists(out / "runs"));
  EXPECT_FALSE(std::filesystem::exists(out / "monitor"));
}

TEST(RunLog, RefusesOnEveryRankWhatIsNoFigure) {
  const io::TemporaryDirectory out;
  testing::run_threads(2, [&](World& world) {
    RunLog run_log{out.path(), world};
    EXPECT_THAT(refusal_of([&] { run_log.log({{"loss", at::zeros({3})}}, 1); }),
                HasSubstr("[log] loss has 3 elements, and one number is logged."));
    EXPECT_THAT(refusal_of([&] { run_log.log({{"step", 1}}, 1); }),
                HasSubstr("the step as the second argument: log({{\"loss\", loss}}, step)."));
    EXPECT_THAT(refusal_of([&] { run_log.log({{"loss", 1}}, -1); }), HasSubstr("step is -1"));
    world.barrier();
  });
}

TEST(RunLog, WarnsOnceOfValuesThatAreNotFinite) {
  const io::TemporaryDirectory out;
  ::testing::internal::CaptureStderr();
  testing::run_threads(1, [&](World& world) {
    RunLog run_log{out.path(), world};
    run_log.log({{"loss", 1}}, 1);
    run_log.log({{"grad_norm", NAN}}, 2);
    run_log.log({{"loss", NAN}}, 3);
  });
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("step 2: grad_norm is not finite."));
  EXPECT_THAT(text, HasSubstr("step({.skip_non_finite = true})"));
  EXPECT_EQ(text.find("step 3"), std::string::npos);
}

TEST(RunLog, ALoopThatThrowsHasFailed) {
  const io::TemporaryDirectory out;
  testing::run_threads(1, [&](World& world) {
    try {
      RunLog run_log{out.path(), world};
      run_log.log({{"loss", 1}}, 1);
      throw std::runtime_error("diverged");
    } catch (const std::runtime_error&) {
    }
  });
  const monitor::RunFacts facts = monitor::read_run(out.path()).facts;
  EXPECT_EQ(facts.failure, "an exception ended the loop of rank 0");
  EXPECT_EQ(io::get(out / "metrics.jsonl"), "{\"step\":1,\"loss\":1.0}\n");
}

// ---------------------------------------------------------------- stop requests

TEST(StopRequest, ASignalIsHeardAtTheNextStepAndHandlersComeBack) {
  struct sigaction before {
  }, after{};
  ::sigaction(SIGTERM, nullptr, &before);
  {
    StopRequest stop{World{}};
    EXPECT_FALSE(stop.received());
    EXPECT_EQ(stop.exit_code(), 0);
    EXPECT_THAT(io::message_of<UsageError>([] { StopRequest{World{}}; }),
                HasSubstr("two wait for stop signals in one process (StopRequest, or a Trainer)"));
    ::raise(SIGUSR1);
    EXPECT_TRUE(stop.received());
    EXPECT_TRUE(stop.received());
    EXPECT_EQ(stop.signal(), SIGUSR1);
    EXPECT_EQ(stop.exit_code(), 143);
  }
  ::sigaction(SIGTERM, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
}

}  // namespace
}  // namespace lockstep
