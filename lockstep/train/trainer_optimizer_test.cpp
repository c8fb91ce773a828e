// An optimizer, parameter groups and a schedule of the task's own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/trainer_for_test.h"

namespace lockstep::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct OwnOptimizer {
  torch::nn::Sequential net = network();
  TrainerTask task = task_for(net, dataset(64, 1));
  std::shared_ptr<optim::AdamW> optimizer;

  // The first layer at a tenth of the rate, and without decay.
  OwnOptimizer() {
    const auto all = net->parameters();
    optimizer = std::make_shared<optim::AdamW>(
        std::vector{optim::AdamW::group({all[0], all[1]}, {.lr = 1e-3, .weight_decay = 0}),
                    optim::AdamW::group({all[2], all[3]}, {.lr = 1e-2, .weight_decay = 0.1})});
    task.param_groups = {{{all[0], all[1]}, optim::AdamWOptions{.lr = 1e-3, .weight_decay = 0}},
                         {{all[2], all[3]}, optim::AdamWOptions{.lr = 1e-2, .weight_decay = 0.1}}};
  }
};

double half_after_three(std::int64_t steps) {
  return steps < 3 ? 1 : 0.5;
}

TEST(OwnOptimizer, GroupsAndScheduleAreTheTasks) {
  io::TemporaryDirectory dir;
  OwnOptimizer own;
  own.task.schedule = half_after_three;
  auto a = arguments(dir.path());
  a.learning_rate = 7;  // nobody's
  a.max_grad_norm = 0;
  a.max_steps = 5;
  a.logging_steps = 1;
  a.save_strategy = Interval::kSteps;
  a.save_steps = 5;
  std::vector<std::vector<std::int64_t>> seen;
  own.task.loss = [&, loss = own.task.loss](const data::Batch& batch) {
    seen.push_back(batch.indices);
    return loss(batch);
  };
  Trainer trainer(World{}, own.task, a);
  trainer.train();
  // The same steps in a hand-written loop.
  OwnOptimizer twin;
  const auto samples = dataset(64, 1);
  for (std::size_t step = 0; step < seen.size(); ++step) {
    twin.optimizer->set_lr(0, 1e-3 * half_after_three(static_cast<std::int64_t>(step)));
    twin.optimizer->set_lr(1, 1e-2 * half_after_three(static_cast<std::int64_t>(step)));
    twin.task.loss(samples->get_batch(seen[step], {}).value()).loss.backward();
    twin.optimizer->step();
    twin.optimizer->zero_grad();
  }
  EXPECT_EQ(seen.size(), 5u);
  EXPECT_TRUE(torch::equal(flat(*own.net), flat(*twin.net)));
  std::vector<double> rates;
  for (const LogEntry& entry : trainer.state().log_history)
    if (const double* lr = find_metric(entry.values, "learning_rate")) rates.push_back(*lr);
  EXPECT_THAT(rates, ElementsAre(1e-3, 1e-3, 1e-3, 5e-4, 5e-4));
  EXPECT_THAT(io::get(dir / "checkpoint-5/scheduler.json"), HasSubstr("\"type\":\"custom\""));
}

TEST(OwnOptimizer, IsSavedAndResumedToTheBit) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir / "whole");
  a.max_steps = 8;
  a.save_strategy = Interval::kSteps;
  a.save_steps = 3;
  OwnOptimizer whole, again;
  Trainer(World{}, whole.task, a).train();
  a.output_dir = dir / "again";
  a.resume_from_checkpoint = dir / "whole/checkpoint-3";
  Trainer(World{}, again.task, a).train();
  EXPECT_TRUE(torch::equal(flat(*whole.net), flat(*again.net)));
}

TEST(OwnOptimizer, ThatCannotTrainTheModuleIsRefused) {
  io::TemporaryDirectory dir;
  OwnOptimizer still;
  for (optim::ParamGroup& group : still.task.param_groups)
    group.options.as<optim::AdamWOptions>().lr = 0;
  auto a = arguments(dir.path());
  a.max_steps = 2;
  EXPECT_THAT(io::message_of<UsageError>([&] { Trainer(World{}, still.task, a).train(); }),
              HasSubstr("every group of the task's optimizer has the learning rate 0"));
  TrainerTask other = task_for(network(), dataset(64, 1));
  other.param_groups = OwnOptimizer().task.param_groups;
  EXPECT_THAT(io::message_of<UsageError>([&] { Trainer(World{}, other, a).train(); }),
              HasSubstr("parameter"));
}

// An optimizer made by the task, for the wrapped model.
TEST(OwnOptimizer, MayBeMadeByTheTask) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir / "groups");
  a.max_steps = 4;
  OwnOptimizer groups, made;
  Trainer(World{}, groups.task, a).train();
  a.output_dir = dir / "made";
  made.task.make_optimizer = [net = made.net, given = std::exchange(made.task.param_groups, {})](
                                 Parallelism& parallelism) {
    return std::make_unique<optim::ReplicatedOptimizer>(net->named_parameters().pairs(), given,
                                                        parallelism.mesh().world());
  };
  Trainer(World{}, made.task, a).train();
  EXPECT_TRUE(torch::equal(flat(*groups.net), flat(*made.net)));
}

}  // namespace
}  // namespace lockstep::train
