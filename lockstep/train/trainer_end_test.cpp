// How a run ends: with its best model, by a signal, on a full disk; and what the run that continues
// makes up for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

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

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// ---------------------------------------------------------------- the best model

TEST(Trainer, ABestModelThatIsGoneLeavesTheLastWeights) {
  struct Remover : Observer {
    void on_step_end(Event& event) override {
      // Later than the next save, which has waited for it.
      const auto& s = event.state;
      if (s.best_model_checkpoint && s.global_step > *s.best_global_step + 20)
        std::filesystem::remove_all(*s.best_model_checkpoint);
    }
  };
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.num_train_epochs = 50;
  a.learning_rate = 0.02;
  a.eval_strategy = Interval::kEpoch;
  a.save_strategy = Interval::kEpoch;
  a.load_best_model_at_end = true;
  a.early_stopping_patience = 3;
  auto net = network();
  Trainer trainer(World{}, task_for(net, dataset(64, 1), dataset(40, 2)), a);
  trainer.add(std::make_shared<Remover>());
  const TrainResult result = trainer.train();
  ASSERT_FALSE(std::filesystem::exists(trainer.state().best_model_checkpoint.value()));
  auto last = network();
  Checkpoint(result.checkpoint).load_model(*last);
  EXPECT_TRUE(torch::equal(flat(*net), flat(*last)));
}

TEST(Trainer, TheBestModelComesBackAndPatienceEnds) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.num_train_epochs = 50;
  a.learning_rate = 0.02;
  a.eval_strategy = Interval::kEpoch;
  a.save_strategy = Interval::kEpoch;
  a.save_total_limit = 2;
  a.load_best_model_at_end = true;
  a.early_stopping_patience = 3;
  auto net = network();
  // Classes of another teacher: the better the training samples fit, the worse these do.
  Trainer trainer(World{}, task_for(net, dataset(64, 1), dataset(40, 2)), a);
  const TrainResult result = trainer.train();
  EXPECT_LT(result.global_step, 50 * 16);
  ASSERT_TRUE(trainer.state().best_model_checkpoint);
  EXPECT_EQ(trainer.state().patience_used, 3);
  EXPECT_EQ(*trainer.state().best_global_step, result.global_step - 3 * 16);
  auto best = network();
  Checkpoint(*trainer.state().best_model_checkpoint).load_model(*best);
  EXPECT_TRUE(torch::equal(flat(*net), flat(*best)));
  const auto retained = io::list_numbered(dir.path(), kCheckpointPrefix);
  EXPECT_EQ(retained.size(), 2u);
}

// Keeps one checkpoint besides the best, which is loaded at the end.
struct KeepsTheBest : Scored {
  KeepsTheBest(const World& ranks, const std::string& output_dir, std::vector<double> by_step)
      : Scored(output_dir, std::move(by_step), ranks) {
    a.save_total_limit = 1;
    a.load_best_model_at_end = true;
  }
};

// Runs `body` while there is no room for a folder of this name; returns what was logged.
std::string without_room_for(const char* name, const std::function<void()>& body) {
  disk().fails_for = name;
  ::testing::internal::CaptureStderr();
  body();
  disk().fails_for = nullptr;
  return ::testing::internal::GetCapturedStderr();
}

// Only the rank that writes knows that the second checkpoint found no room.
TEST(Trainer, TheBestThatWasSavedStaysUntilABetterOneIsDurable) {
  for (const int ranks : {1, 2}) {
    io::TemporaryDirectory dir;
    std::vector<at::Tensor> ends(static_cast<std::size_t>(ranks));
    const std::string said = without_room_for("/checkpoint-2.", [&] {
      testing::run_threads(ranks, [&](World& world) {
        KeepsTheBest run(world, dir.path(), {1, 3, 0, 2});
        run.train();
        EXPECT_EQ(run.result.checkpoint, world.is_leader() ? dir / "checkpoint-4" : "");
        EXPECT_EQ(run.trainer->state().best_global_step, 2);
        ends[static_cast<std::size_t>(world.rank())] = flat(*run.net);
      });
    });
    EXPECT_THAT(said, HasSubstr("checkpoint-2 was not saved; training continues."));
    EXPECT_THAT(said, HasSubstr("step 2 was the best (accuracy 3) and could not be saved. " +
                                (dir / "checkpoint-1") + ", the best that was, is loaded."));
    EXPECT_THAT(steps_in(dir.path()), ElementsAre(4, 1));
    // What a run that continues from here keeps.
    EXPECT_EQ(Checkpoint(dir / "checkpoint-4").state().best_model_checkpoint, dir / "checkpoint-1");
    auto best = network();
    Checkpoint(dir / "checkpoint-1").load_model(*best);
    for (const at::Tensor& end : ends) EXPECT_TRUE(torch::equal(end, flat(*best)));
  }
}

// Moved folders are common: from a scratch disk, or because the experiment got a better name.
TEST(Trainer, TheBestIsFoundWhereTheRunsFolderIsNow) {
  for (const int ranks : {1, 2}) {
    io::TemporaryDirectory dir;
    std::vector<at::Tensor> ends(static_cast<std::size_t>(ranks));
    const auto train = [&](const std::string& output_dir, std::vector<double> scores) {
      testing::run_threads(ranks, [&](World& world) {
        KeepsTheBest run(world, output_dir, scores);
        run.a.save_total_limit = 2;
        run.a.resume_from_checkpoint = "auto";
        run.train();
        EXPECT_EQ(run.trainer->state().best_model_checkpoint, output_dir + "/checkpoint-1");
        ends[static_cast<std::size_t>(world.rank())] = flat(*run.net);
      });
    };
    train(dir / "before", {9, 1, 2});
    std::filesystem::rename(dir / "before", dir / "after");
    train(dir / "after", {9, 1, 2, 1, 2, 3});
    EXPECT_THAT(steps_in(dir / "after"), ElementsAre(6, 1));
    auto best = network();
    Checkpoint(dir / "after/checkpoint-1").load_model(*best);
    for (const at::Tensor& end : ends) EXPECT_TRUE(torch::equal(end, flat(*best)));
  }
}

TEST(Trainer, WithoutRoomForTheFirstBestTheLastWeightsStay) {
  io::TemporaryDirectory dir;
  KeepsTheBest run(World{}, dir.path(), {3, 1});
  EXPECT_THAT(without_room_for("/checkpoint-1.", [&] { run.train(); }),
              HasSubstr("the best model, " + (dir / "checkpoint-1") + ", cannot be loaded: "));
  EXPECT_EQ(run.trainer->state().best_global_step, 1);
  EXPECT_THAT(steps_in(dir.path()), ElementsAre(2));
  auto last = network();
  Checkpoint(dir / "checkpoint-2").load_model(*last);
  EXPECT_TRUE(torch::equal(flat(*run.net), flat(*last)));
}

// ---------------------------------------------------------------- stop signals

// Whether a signal comes now. Asked at each batch: whether it is a training batch, and after how
// many steps.
using When = std::function<bool(bool training, std::int64_t step)>;

// The steps that were evaluated by a run that a signal has ended, and by the one that continues.
std::vector<std::int64_t> evaluated(TrainingArguments a, std::int64_t saved, const When& when) {
  io::TemporaryDirectory dir;
  a.output_dir = dir.path();
  a.enable_jit_checkpoint = true;
  a.max_steps = 6;
  a.per_device_eval_batch_size = 2;
  {
    TrainerTask task = task_for(network(), dataset(64, 1), dataset(5, 2));
    Trainer* self = nullptr;
    task.loss = [&, loss = task.loss](const data::Batch& batch) {
      if (when(at::GradMode::is_enabled(), self->state().global_step)) ::raise(SIGTERM);
      return loss(batch);
    };
    Trainer trainer(World{}, task, a);
    self = &trainer;
    ::testing::internal::CaptureStderr();
    const TrainResult result = trainer.train();
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                HasSubstr("step " + std::to_string(saved) +
                          ": stop requested by SIGTERM: "
                          "saving, then leaving"));
    EXPECT_EQ(result.exit_code(), 143);
    EXPECT_EQ(result.checkpoint, checkpoint_path(dir.path(), saved));
  }
  a.resume_from_checkpoint = "auto";
  Trainer again(World{}, task_for(network(), dataset(64, 1), dataset(5, 2)), a);
  EXPECT_EQ(again.train().exit_code(), 0);
  EXPECT_EQ(again.state().global_step, 6);
  std::vector<std::int64_t> steps;
  for (const LogEntry& entry : again.state().log_history)
    if (find_metric(entry.values, "eval_loss") != nullptr) steps.push_back(entry.step);
  return steps;
}

TEST(Trainer, AnEvaluationThatASignalPreventedIsMadeUp) {
  auto a = arguments("");
  a.eval_strategy = Interval::kSteps;
  a.eval_steps = 4;
  const auto in_step = [](std::int64_t number) {
    return [=](bool training, std::int64_t step) { return training && step == number - 1; };
  };
  EXPECT_THAT(evaluated(a, 4, in_step(4)), ElementsAre(4, 6));
  a.eval_strategy = Interval::kEpoch;
  EXPECT_THAT(evaluated(a, 3, in_step(3)), ElementsAre(6));
  EXPECT_THAT(evaluated(a, 6, in_step(6)), ElementsAre(6)) << "at the end of the run";
  a.per_device_train_batch_size = 16;  // 4 steps an epoch
  EXPECT_THAT(evaluated(a, 4, in_step(4)), ElementsAre(4, 6)) << "at the end of an epoch";
}

TEST(Trainer, AnEvaluationThatASignalCutShortIsMadeUpAndNotReported) {
  auto a = arguments("");
  const auto in_evaluation = [](std::int64_t after) {
    return [=](bool training, std::int64_t step) { return !training && step == after; };
  };
  a.eval_strategy = Interval::kSteps;
  a.eval_steps = 4;
  EXPECT_THAT(evaluated(a, 4, in_evaluation(4)), ElementsAre(4, 6));
  a.eval_on_start = true;
  EXPECT_THAT(evaluated(a, 0, in_evaluation(0)), ElementsAre(0, 4, 6));
  a.eval_on_start = false;
  a.eval_strategy = Interval::kEpoch;
  a.per_device_train_batch_size = 16;
  EXPECT_THAT(evaluated(a, 4, in_evaluation(4)), ElementsAre(4, 6));
  a.save_strategy = Interval::kSteps;  // the step is saved before its epoch ends
  a.save_steps = 2;
  EXPECT_THAT(evaluated(a, 4, in_evaluation(4)), ElementsAre(4, 6));
}

}  // namespace
}  // namespace lockstep::train
