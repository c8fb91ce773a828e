// The seam between training and parallelism: a Parallelism that the Trainer has never heard of,
// whose ranks each own a part of the model, trains, evaluates, saves and resumes as data
// parallelism does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/io/files_for_test.h"
#include "lockstep/testing/matchers.h"
#include "lockstep/testing/naive_shard.h"
#include "lockstep/testing/worlds.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/trainer_for_test.h"

namespace lockstep::train {
namespace {

struct Trained {
  at::Tensor weights;
  std::vector<LogEntry> log;
};

// 45 samples and 5 to evaluate on: short windows, batches that are not full, ranks without one.
Trained run_trainer(World& world, const TrainingArguments& a, bool sharded) {
  torch::nn::Sequential net = network();
  TrainerTask task = task_for(net, dataset(45, 1), dataset(5, 2));
  if (sharded)
    task.make_parallelism = [](const std::shared_ptr<torch::nn::Module>& module, World ranks) {
      return std::make_shared<testing::NaiveShard>(*module, std::move(ranks));
    };
  Trainer trainer(world, task, a);
  trainer.train();
  return {flat(*net), trainer.state().log_history};
}

TrainingArguments arguments_in(const std::string& folder) {
  TrainingArguments a = arguments(folder);
  a.logging_steps = 1;
  a.gradient_accumulation_steps = 2;
  a.max_steps = 8;
  a.max_grad_norm = 0;
  a.shard_optimizer = "false";
  a.eval_strategy = a.save_strategy = Interval::kSteps;
  a.eval_steps = 3;
  a.save_steps = 4;
  return a;
}

void expect_same_log(const Trained& one, const Trained& other, double tolerance) {
  ASSERT_EQ(one.log.size(), other.log.size());
  for (std::size_t i = 0; i < one.log.size(); ++i)
    for (const char* name : {"loss", "grad_norm", "eval_loss", "eval_accuracy"}) {
      const double* a = find_metric(one.log[i].values, name);
      const double* b = find_metric(other.log[i].values, name);
      ASSERT_EQ(a == nullptr, b == nullptr) << name << " in entry " << i;
      if (a == nullptr) continue;
      EXPECT_NEAR(*a, *b, tolerance) << name << " in entry " << i;
    }
}

class OwnParallelism : public ::testing::TestWithParam<std::tuple<int, const char*>> {
 protected:
  static void on_ranks(const std::function<void(World&)>& body) {
    testing::ThreadOptions options;
    options.world.backend = std::get<1>(GetParam());
    testing::run_threads(std::get<0>(GetParam()), body, options);
  }
  // With two ranks there is one order of adding gradients.
  static void expect_equal(const at::Tensor& one, const at::Tensor& other) {
    if (std::get<0>(GetParam()) <= 2) {
      EXPECT_TENSOR_EQ(one, other);
    } else {
      EXPECT_TRUE(at::allclose(one, other, 1e-5, 1e-6));
    }
  }
};

TEST_P(OwnParallelism, TrainsAndEvaluatesAsDataParallelism) {
  for (const char* rule : {"adamw", "sgd", "muon"}) {
    const io::TemporaryDirectory folder;
    on_ranks([&](World& world) {
      TrainingArguments a = arguments_in(folder / "replicated");
      a.optim = rule;
      const Trained expected = run_trainer(world, a, /*sharded=*/false);
      a.output_dir = folder / "sharded";
      const Trained got = run_trainer(world, a, /*sharded=*/true);
      expect_equal(got.weights, expected.weights);
      expect_same_log(got, expected, 1e-5);
      world.barrier();
    });
  }
}

TEST_P(OwnParallelism, ClipsByTheNormOfAllRanks) {
  const io::TemporaryDirectory folder;
  on_ranks([&](World& world) {
    TrainingArguments a = arguments_in(folder / "replicated");
    a.max_grad_norm = 0.1;
    const Trained expected = run_trainer(world, a, /*sharded=*/false);
    a.output_dir = folder / "sharded";
    const Trained got = run_trainer(world, a, /*sharded=*/true);
    EXPECT_TRUE(at::allclose(got.weights, expected.weights, 1e-5, 1e-6));
    expect_same_log(got, expected, 1e-5);
    world.barrier();
  });
}

// A checkpoint holds the whole model and the whole state, whoever wrote it.
TEST_P(OwnParallelism, ResumesWhatEitherSaved) {
  const io::TemporaryDirectory folder;
  on_ranks([&](World& world) {
    TrainingArguments a = arguments_in(folder / "whole");
    const Trained expected = run_trainer(world, a, /*sharded=*/false);
    for (const bool saver : {false, true}) {
      a.output_dir = folder / (saver ? "by_shards" : "by_replicas");
      run_trainer(world, a, saver);
      world.barrier();
      a.resume_from_checkpoint = a.output_dir + "/checkpoint-4";
      for (const bool sharded : {false, true}) {
        a.output_dir = folder / (std::string(saver ? "s" : "r") + (sharded ? "s" : "r"));
        expect_equal(run_trainer(world, a, sharded).weights, expected.weights);
      }
      a.resume_from_checkpoint.reset();
      world.barrier();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, OwnParallelism,
                         ::testing::Values(std::tuple(1, "auto"), std::tuple(2, "shm"),
                                           std::tuple(2, "gloo"), std::tuple(3, "gloo")),
                         [](const auto& world) {
                           return std::string(std::get<1>(world.param)) +
                                  std::to_string(std::get<0>(world.param));
                         });

}  // namespace
}  // namespace lockstep::train
