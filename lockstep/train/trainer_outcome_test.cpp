// The outcome of a run: which step was the best, whether it is saved, and which rank gets which
// errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/manifest.h"
#include "lockstep/testing/worlds.h"
#include "lockstep/train/checkpoint.h"
#include "lockstep/train/disk_for_test.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/trainer_for_test.h"

namespace lockstep::train {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// ---------------------------------------------------------------- the best model

TEST(Best, IsSavedBetweenTheStepsThatAreDue) {
  io::TemporaryDirectory dir;
  Scored run(dir.path(), {0, 5, 0, 1, 0, 2, 0, 3});
  run.a.eval_steps = 2;
  run.a.save_steps = 4;
  run.a.load_best_model_at_end = true;
  const TrainerState& state = run.train();
  EXPECT_EQ(state.best_global_step, 2);
  EXPECT_EQ(state.best_model_checkpoint, dir / "checkpoint-2");
  EXPECT_THAT(steps_in(dir.path()), ElementsAre(8, 4, 2));
  auto best = network();
  Checkpoint(dir / "checkpoint-2").load_model(*best);
  EXPECT_TRUE(torch::equal(flat(*run.net), flat(*best)));
}

TEST(Best, HasADirectionThatIsSaidWhereTheNameDecidesIt) {
  const auto said = [](const std::string& metric, std::optional<bool> greater) {
    io::TemporaryDirectory dir;
    Scored run(dir.path(), {1, 2});
    run.a.metric_for_best_model = metric;
    run.a.greater_is_better = greater;
    ::testing::internal::CaptureStderr();
    run.train();
    return ::testing::internal::GetCapturedStderr();
  };
  const auto text = HasSubstr("the best model has the greatest eval_");
  const std::string mae = said("mae", {});
  EXPECT_THAT(mae,
              AllOf(HasSubstr("the greatest eval_mae"), HasSubstr("greater_is_better: false")));
  EXPECT_EQ(mae.find("the greatest"), mae.rfind("the greatest"));  // once
  EXPECT_THAT(said("mae", false), ::testing::Not(text));
  EXPECT_THAT(said("mae", true), ::testing::Not(text));
  EXPECT_THAT(said("my_loss", {}), ::testing::Not(text));
}

TEST(Best, IsNeverAValueThatIsNotFinite) {
  io::TemporaryDirectory dir;
  Scored run(dir.path(), {NAN, 1, INFINITY, 3, NAN, 2, -INFINITY, 2});
  run.a.early_stopping_patience = 4;
  ::testing::internal::CaptureStderr();
  const TrainerState& state = run.train();
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("step 1: eval_accuracy is not finite, so this evaluation chooses no "
                              "best model"),
                    HasSubstr("step 7: eval_accuracy is not finite")));
  EXPECT_EQ(state.best_global_step, 4);
  EXPECT_EQ(state.best_metric, 3);
  EXPECT_EQ(state.patience_used, 4) << "four evaluations have not become better";
  EXPECT_EQ(run.result.global_step, 8);
}

// ---------------------------------------------------------------- steps that are skipped

TEST(SkippedSteps, AHundredInARowEndTheRun) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.max_steps = 400;
  a.logging_steps = 25;
  // 87 in a row, and then 109 up to step 200.
  const auto bad = [](std::int64_t step) { return step >= 3 && step != 90; };
  Trainer trainer(World{}, spoiled(task_for(network(), dataset(64, 1)), bad), a);
  EXPECT_THAT(io::message_of<Error>([&] { trainer.train(); }),
              HasSubstr("[trainer] step 200: the last 109 steps in a row were skipped, because a "
                        "gradient was not finite, so nothing is trained any more. "));
  EXPECT_EQ(trainer.state().global_step, 200);
}

TEST(SkippedSteps, ARunWithoutAFiniteLossDoesNotLogZeroAndIsAnError) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.max_steps = 2;
  a.logging_steps = 2;
  const auto every = [](std::int64_t) { return true; };
  Trainer trainer(World{}, spoiled(task_for(network(), dataset(64, 1)), every), a);
  EXPECT_THAT(io::message_of<Error>([&] { trainer.train(); }),
              AllOf(HasSubstr("[trainer] step 2: all steps of this run were skipped"),
                    HasSubstr("learning rate is too high")));
  EXPECT_TRUE(std::isnan(*find_metric(trainer.state().log_history.front().values, "loss")));
}

TEST(SkippedSteps, NameTheRanksWhoseLossWasNotFinite) {
  io::TemporaryDirectory dir;
  ::testing::internal::CaptureStderr();
  testing::run_threads(3, [&](World& world) {
    auto a = arguments(dir / std::to_string(world.rank()));
    a.max_steps = 4;
    a.logging_steps = 4;
    a.average_tokens_across_devices = false;
    const auto bad = [&](std::int64_t step) { return world.rank() > 0 && step == world.rank(); };
    Trainer(world, spoiled(task_for(network(), dataset(64, 1)), bad), a).train();
  });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("step 4: 2 of the last 4 steps had a gradient that is not finite and were "
                        "skipped on all ranks: the loss of ranks 1, 2 was not finite."));
}

// The mean that is logged, where one rank's loss is not finite in one step.
TEST(SkippedSteps, TheFilterLeavesOutTheLossOfThatRankAlone) {
  for (const bool filter : {true, false}) {
    io::TemporaryDirectory dir;
    testing::run_threads(3, [&](World& world) {
      auto a = arguments(dir / std::to_string(world.rank()));
      a.logging_nan_inf_filter = filter;
      a.max_steps = a.logging_steps = 4;
      TrainerTask task = spoiled(task_for(network(), dataset(64, 1)),
                                 [&](std::int64_t step) { return world.rank() == 1 && step == 2; });
      std::vector<double> losses;
      task.loss = [&, loss = task.loss](const data::Batch& batch) {
        const LossOutput output = loss(batch);
        losses.push_back(output.loss.item<double>());
        return output;
      };
      Trainer trainer(world, task, a);
      trainer.train();
      const at::Tensor all = at::cat(world.all_gather(at::tensor(losses, at::kDouble)));
      const at::Tensor finite = all.masked_select(at::isfinite(all));
      ASSERT_EQ(all.numel(), 12);
      ASSERT_EQ(finite.numel(), 11);
      const double logged = *find_metric(trainer.state().log_history.front().values, "loss");
      if (filter) {
        EXPECT_NEAR(logged, finite.mean().item<double>(), 1e-6) << "without one of twelve";
      } else {
        EXPECT_TRUE(std::isnan(logged));
      }
    });
  }
}

// ---------------------------------------------------------------- evaluation

TEST(Evaluation, ThatIsAskedForAndImpossibleIsRefused) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  const auto refusal = [&](data::DatasetPtr eval_data = nullptr) {
    Trainer trainer(World{}, task_for(network(), dataset(8, 1), std::move(eval_data)), a);
    return io::message_of<UsageError>([&] { trainer.train(); });
  };
  a.eval_on_start = true;
  EXPECT_THAT(refusal(), HasSubstr("[trainer] eval_on_start asks for evaluations, and the task has "
                                   "no eval_data, or an empty one. Set it (in a training file: "
                                   "data.eval_bytes"));
  a.eval_strategy = Interval::kEpoch;
  EXPECT_THAT(refusal(), AllOf(HasSubstr("eval_strategy asks"), HasSubstr("eval_strategy: no.")));
  EXPECT_THAT(refusal(dataset(0, 1)), HasSubstr("eval_strategy asks for evaluations"));
  EXPECT_THAT(steps_in(dir.path()), ElementsAre());
}

// Means written by hand are 0 / 0 where a batch has no target.
TEST(Evaluation, BatchesWithoutTargetsDoNotCount) {
  io::TemporaryDirectory dir;
  const auto loss_of = [&](std::int64_t ignored) {
    const at::Tensor y = at::arange(12).remainder(kClasses).unsqueeze(1);
    y.narrow(0, 12 - ignored, ignored).fill_(data::kIgnoredTarget);
    auto net = network();
    TrainerTask task = task_for(net, nullptr, nullptr);
    task.eval_data = std::make_shared<data::TensorDataset>(at::ones({12, kFeatures}), y);
    task.totals = nullptr;
    task.loss = [](const data::Batch& batch) {
      const at::Tensor counts = batch.target.ne(data::kIgnoredTarget);
      return (batch.target * counts).sum().to(at::kFloat) / counts.sum();
    };
    auto a = arguments(dir.path());
    a.per_device_eval_batch_size = 4;
    Trainer trainer(World{}, task, a);
    return *find_metric(trainer.evaluate(), "eval_loss");
  };
  EXPECT_EQ(loss_of(0), 1.0);
  EXPECT_FLOAT_EQ(loss_of(4), (0 + 1 + 2 + 0 + 1 + 2 + 0 + 1) / 8.0);
  EXPECT_TRUE(std::isnan(loss_of(12))) << "0 would be the best loss there is";
}

TEST(Evaluation, ThatASignalCutsShortBeforeTheFirstStepIsNotReported) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.enable_jit_checkpoint = true;
  a.eval_on_start = true;
  a.max_steps = 2;
  a.per_device_eval_batch_size = 1;
  TrainerTask task = task_for(network(), dataset(16, 1), dataset(5, 2));
  task.loss = [loss = task.loss, calls = 0](const data::Batch& batch) mutable {
    if (++calls == 2) ::raise(SIGTERM);
    return loss(batch);
  };
  Trainer trainer(World{}, task, a);
  const TrainResult result = trainer.train();
  EXPECT_EQ(result.exit_code(), 143);
  EXPECT_EQ(result.checkpoint, dir / "checkpoint-0");
  EXPECT_TRUE(trainer.state().log_history.empty());
  a.resume_from_checkpoint = "auto";
  Trainer again(World{}, task_for(network(), dataset(16, 1), dataset(5, 2)), a);
  EXPECT_EQ(again.train().global_step, 2);
  EXPECT_NE(find_metric(again.state().log_history.front().values, "eval_loss"), nullptr);
}

// ---------------------------------------------------------------- stops, alerts and the disk

// Two ranks as threads; signals belong to the process, and rank 0 takes them.
struct TwoRanks {
  explicit TwoRanks(const std::string& output_dir) : a(arguments(output_dir)) {
    a.save_strategy = Interval::kSteps;
    a.save_steps = 2;
  }
  struct Listener : Observer {
    TwoRanks* all = nullptr;
    void on_alert(Event& event) override {
      const std::lock_guard lock(all->mutex);
      all->alerts[event.rank].push_back(*event.text);
    }
    void on_step_end(Event& event) override {
      if (event.rank == 0 && event.state.global_step == all->signal_after) ::raise(SIGTERM);
      if (event.rank == 1 && event.state.global_step == all->late_after)
        std::this_thread::sleep_for(std::chrono::milliseconds(1300));
    }
  };
  void train() {
    testing::run_threads(2, [&](World& world) {
      auto mine = a;
      mine.enable_jit_checkpoint = world.is_leader();
      Trainer trainer(world, task_for(network(), dataset(640, 1)), mine);
      const auto listener = std::make_shared<Listener>();
      listener->all = this;
      trainer.add(listener);
      const TrainResult result = trainer.train();
      const std::lock_guard lock(mutex);
      results[world.rank()] = result;
    });
    disk().fails_for = disk().slow_for = nullptr;
  }
  TrainingArguments a;
  std::int64_t signal_after = -1;  // this step's exchange: heard in its save, or in the next step
  std::int64_t late_after = -1;    // rank 1 comes late to what follows this step
  std::mutex mutex;
  std::map<int, std::vector<std::string>> alerts;
  std::map<int, TrainResult> results;
};

TEST(Stop, ThatCouldNotBeSavedIsNoSuccess) {
  io::TemporaryDirectory dir;
  TwoRanks run(dir.path());
  run.a.max_steps = 20;
  run.a.save_steps = 3;
  run.signal_after = 4;
  disk().fails_for = "/checkpoint-5.";
  run.train();
  for (const int rank : {0, 1}) {
    EXPECT_EQ(run.results[rank].stop_signal, SIGTERM);
    EXPECT_EQ(run.results[rank].global_step, 5);
    EXPECT_EQ(run.results[rank].durable_step, 3) << "rank " << rank;
    EXPECT_EQ(run.results[rank].exit_code(), 1) << "rank " << rank;
  }
  run.a.resume_from_checkpoint = "auto";
  run.signal_after = 7;
  run.train();
  for (const int rank : {0, 1}) {
    EXPECT_EQ(run.results[rank].durable_step, 8) << "rank " << rank;
    EXPECT_EQ(run.results[rank].exit_code(), 143) << "rank " << rank;
  }
}

TEST(Stop, ThatSavesWeightsAloneIsNoSuccess) {
  io::TemporaryDirectory dir;
  TwoRanks run(dir.path());
  run.a.max_steps = 20;
  run.a.save_only_model = true;
  run.signal_after = 4;
  run.train();
  EXPECT_EQ(run.results[0].checkpoint, dir / "checkpoint-4");
  for (const int rank : {0, 1}) {
    EXPECT_EQ(run.results[rank].durable_step, -1);
    EXPECT_EQ(run.results[rank].exit_code(), 1);
  }
}

// The disk takes longer than the 10 s in which a stop must be agreed.
TEST(Stop, IsHeardWhileTrainingWaitsForTheDisk) {
  io::TemporaryDirectory dir;
  TwoRanks run(dir.path());
  run.a.max_steps = 20;
  run.signal_after = 4;  // when the second save is due, and the first is being written
  disk().slow_ms = 12'500;
  disk().slow_for = "/checkpoint-2.";
  run.train();
  for (const int rank : {0, 1}) {
    EXPECT_EQ(run.results[rank].exit_code(), 143);
    EXPECT_EQ(run.results[rank].global_step, 4);
    EXPECT_THAT(run.alerts[rank],
                ElementsAre(AllOf(HasSubstr("step 4: training waited "),
                                  HasSubstr(" s for the save before this one. Save less often, or "
                                            "to a faster disk."))));
  }
  EXPECT_THAT(steps_in(dir.path()), ElementsAre(4, 2));
  EXPECT_TRUE(io::verify(dir / "checkpoint-4").empty());
}

TEST(Alert, IsReportedOnEveryRankAlsoAtTheEnd) {
  io::TemporaryDirectory dir;
  TwoRanks run(dir.path());
  run.a.max_steps = 6;
  disk().fails_for = "/checkpoint-2.";
  run.train();
  const auto not_saved = HasSubstr("checkpoint-2 was not saved; training continues.");
  EXPECT_THAT(run.alerts[0], Contains(not_saved));
  EXPECT_EQ(run.alerts[0], run.alerts[1]);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(run.results[rank].lost_step, -1) << "the last one was written";
    EXPECT_EQ(run.results[rank].exit_code(), 0);
  }
  run.alerts.clear();
  run.a.output_dir = dir / "second";
  disk().fails_for = "/checkpoint-6.";
  run.train();
  EXPECT_THAT(run.alerts[0], Contains(HasSubstr("checkpoint-6 was not saved.")));
  EXPECT_EQ(run.alerts[0], run.alerts[1]);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(run.results[rank].lost_step, 6) << "rank " << rank;
    EXPECT_EQ(run.results[rank].durable_step, 4);
    EXPECT_EQ(run.results[rank].exit_code(), 1) << "rank " << rank;
  }
}

// Longer than the limit for a slow disk, but no save was under way that anyone could have waited
// for.
TEST(Alert, ARankThatIsLateIsNoSlowDisk) {
  io::TemporaryDirectory dir;
  TwoRanks run(dir.path());
  run.a.max_steps = 3;
  run.late_after = 2;
  run.train();
  for (const int rank : {0, 1}) EXPECT_THAT(run.alerts[rank], ElementsAre());
  EXPECT_THAT(steps_in(dir.path()), ElementsAre(3, 2));
}

// ---------------------------------------------------------------- replicas

// Writes a tensor of the model only on rank 1, after the second step.
struct Writer : Observer {
  Writer(World ranks, at::Tensor tensor) : world(std::move(ranks)), target(std::move(tensor)) {}
  void on_step_end(Event& event) override {
    const torch::NoGradGuard no_grad;
    if (world.rank() == 1 && event.state.global_step == 2) target.add_(1);
  }
  World world;
  at::Tensor target;
};

std::vector<std::string> train_with_a_write(const std::string& output_dir, bool buffer) {
  return testing::run_threads_collecting(3, [&](World& world) {
    auto a = arguments(output_dir);
    a.max_steps = 3;
    a.save_strategy = Interval::kSteps;
    a.save_steps = 3;
    a.shard_optimizer = "false";
    auto net = network();
    net->push_back(torch::nn::BatchNorm1d(kClasses));
    // Buffers that the next forward does not broadcast again.
    a.ddp_broadcast_buffers = false;
    Trainer trainer(world, task_for(net, dataset(96, 1)), a);
    trainer.add(std::make_shared<Writer>(
        world, buffer ? net->named_buffers()["3.running_mean"] : net->parameters()[2]));
    trainer.train();
  });
}

TEST(Replicas, ThatDifferInAParameterAreAnErrorOnEveryRankAndAreNotSaved) {
  io::TemporaryDirectory dir;
  const std::vector<std::string> said = train_with_a_write(dir.path(), /*buffer=*/false);
  EXPECT_THAT(said, Each(HasSubstr("replicas differ: parameter '2.weight' on rank 1 is not")));
  EXPECT_THAT(steps_in(dir.path()), ElementsAre());
}

TEST(Replicas, ThatDifferInABufferAreAWarning) {
  io::TemporaryDirectory dir;
  ::testing::internal::CaptureStderr();
  const std::vector<std::string> said = train_with_a_write(dir.path(), /*buffer=*/true);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, Each(""));
  EXPECT_THAT(log, HasSubstr("replicas differ: buffer '3.running_mean' on rank"));
  EXPECT_THAT(steps_in(dir.path()), ElementsAre(3));
}

// ---------------------------------------------------------------- ranks that differ

TEST(Ranks, WithOtherWindowsAreRefused) {
  io::TemporaryDirectory dir;
  testing::run_threads(2, [&](World& world) {
    auto a = arguments(dir / std::to_string(world.rank()));
    a.gradient_accumulation_steps = 1 + world.rank();
    Trainer trainer(world, task_for(network(), dataset(64, 1)), a);
    EXPECT_THAT(io::message_of<UsageError>([&] { trainer.train(); }),
                HasSubstr("Give every rank the same arguments."));
  });
}

}  // namespace
}  // namespace lockstep::train
