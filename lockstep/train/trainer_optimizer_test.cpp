// The Trainer's optimizer: the task's own one, with its parameter groups and schedule; sharded and
// replicated ones, which are the same; and the learning rate that is logged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/testing/worlds.h"
#include "lockstep/train/train_optimizer.h"
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

// ---------------------------------------------------------------- sharded and replicated

struct Ended {
  at::Tensor weights;
  std::vector<double> norms, rates;
};

void on_ranks(int ranks, const std::string& backend, const std::function<void(World&)>& body) {
  testing::ThreadOptions options;
  options.world.backend = backend;
  testing::run_threads(ranks, body, options);
}

std::vector<double> logged(const TrainerState& state, const char* name) {
  std::vector<double> values;
  for (const LogEntry& entry : state.log_history)
    if (const double* value = find_metric(entry.values, name)) values.push_back(*value);
  return values;
}

// 45 samples: windows that end short, and batches that are not full.
Ended train_with(int ranks, const std::string& backend, TrainingArguments a) {
  const io::TemporaryDirectory folder;
  Ended run;
  a.output_dir = folder / "out";
  a.logging_steps = 1;
  a.gradient_accumulation_steps = 2;
  a.max_steps = 12;
  on_ranks(ranks, backend, [&](World& world) {
    torch::nn::Sequential net = network();
    Trainer trainer(world, task_for(net, dataset(45, 1)), a);
    trainer.train();
    const at::Tensor mine = flat(*net);
    EXPECT_TENSOR_EQ(world.all_gather(mine)[0], mine);
    if (world.is_leader())
      run = {mine, logged(trainer.state(), "grad_norm"), logged(trainer.state(), "learning_rate")};
    world.barrier();
  });
  return run;
}

struct Place {
  int ranks;
  const char* backend;
};

TEST(TrainerOptimizer, AutoShardsWhereItIsFasterOrNeeded) {
  const auto why = [](const ShardFacts& facts) { return reason_to_shard("auto", facts); };
  EXPECT_THAT(why({.ranks = 2, .share_memory = true}), HasSubstr("ranks share memory"));
  EXPECT_THAT(why({.ranks = 2, .lack_room = true}), HasSubstr("more than half of the free memory"));
  EXPECT_EQ(why({.ranks = 2}), "");
  EXPECT_EQ(why({.ranks = 1, .share_memory = true}), "");
  EXPECT_EQ(why({.ranks = 2, .share_memory = true, .unable = true}), "");
  EXPECT_EQ(why({.ranks = 2, .lack_room = true, .unable = true}), "");
  EXPECT_EQ(reason_to_shard("false", {.ranks = 2, .share_memory = true}), "");
  EXPECT_EQ(reason_to_shard("true", {.ranks = 1}), "shard_optimizer: true");
}

TEST(TrainerOptimizer, ShardedHasTheBitsOfReplicated) {
  for (const Place& place :
       {Place{1, "auto"}, Place{2, "shm"}, Place{3, "shm"}, Place{4, "shm"}, Place{2, "gloo"}}) {
    for (const char* optim : {"adamw", "sgd", "lion", "muon", "adafactor", "rmsprop"}) {
      SCOPED_TRACE(std::to_string(place.ranks) + " ranks, " + place.backend + ", " + optim);
      TrainingArguments a = arguments("");
      a.optim = optim;
      a.weight_decay = 0.1;
      a.max_grad_norm = 0.05;
      a.shard_optimizer = "false";
      const Ended replicated = train_with(place.ranks, place.backend, a);
      a.shard_optimizer = "true";
      const Ended sharded = train_with(place.ranks, place.backend, a);
      EXPECT_TENSOR_EQ(sharded.weights, replicated.weights);
      EXPECT_EQ(sharded.norms, replicated.norms);
      EXPECT_EQ(sharded.rates, replicated.rates);
      EXPECT_EQ(sharded.norms.size(), 12u);
    }
  }
}

TEST(TrainerOptimizer, OptimArgsAreTheOptionsOfTheRule) {
  const io::TemporaryDirectory folder;
  on_ranks(1, "shm", [&](World& world) {
    const auto rule_with = [&](const char* optim, const char* text) {
      TrainingArguments a = arguments(folder / "out");
      a.optim = optim;
      a.optim_args = text;
      a.max_steps = 1;
      Trainer trainer(world, task_for(network(), dataset(64, 1)), a);
      trainer.train();
    };
    rule_with("muon", "ns_steps=3, nesterov=false");
    const auto refusal = [&](const char* optim, const char* text) {
      return testing::message_of<UsageError>([&] { rule_with(optim, text); });
    };
    EXPECT_THAT(refusal("lion", "momentum=0.9"),
                HasSubstr("'momentum=0.9' is not an option of Lion"));
    EXPECT_THAT(refusal("lion", "lr"), HasSubstr("names of: lr, beta1, beta2"));
    EXPECT_THAT(refusal("rmsprop", "beta1=0.9"),
                HasSubstr("names of: lr, alpha, eps, weight_decay, momentum"));
    EXPECT_THAT(refusal("rmsprop", "alpha=-0.5"), HasSubstr("option alpha cannot be -0.5"));
    EXPECT_THAT(refusal("muon", "ns_steps=200"), HasSubstr("option ns_steps cannot be 200"));
  });
}

TEST(TrainerOptimizer, SkipsABadGradientOnAllRanks) {
  const io::TemporaryDirectory folder;
  on_ranks(2, "shm", [&](World& world) {
    TrainingArguments a = arguments(folder / "out");
    a.max_steps = 4;
    a.logging_steps = 1;
    torch::nn::Sequential net = network();
    TrainerTask task = task_for(net, dataset(64, 1));
    Trainer* self = nullptr;
    task.loss = [&, loss = task.loss](const data::Batch& batch) {
      const bool bad = world.rank() == 1 && self->state().global_step == 1;
      return LossOutput(loss(batch).loss * (bad ? INFINITY : 1.0));
    };
    Trainer trainer(world, task, a);
    self = &trainer;
    trainer.train();
    EXPECT_EQ(logged(trainer.state(), "skipped_steps"), std::vector<double>{1});
    const at::Tensor mine = flat(*net);
    EXPECT_TRUE(at::isfinite(mine).all().item<bool>());
    EXPECT_TENSOR_EQ(world.all_gather(mine)[0], mine);
  });
}

// A rate that an observer sets for one step is used and logged; the schedule sets the next.
TEST(TrainerOptimizer, LogsTheRateThatTheStepHad) {
  struct Bump : Observer {
    void on_optimizer_step(Event& event) override {
      ASSERT_NE(event.optimizer, nullptr);
      if (event.state.global_step == 2) event.optimizer->set_lr(0.125);
    }
  };
  for (const char* shard : {"true", "false"}) {
    const io::TemporaryDirectory folder;
    on_ranks(2, "shm", [&](World& world) {
      TrainingArguments a = arguments(folder / "out");
      a.shard_optimizer = shard;
      a.lr_scheduler_type = "constant";
      a.learning_rate = 0.5;
      a.optim = "sgd";
      a.max_grad_norm = 0;
      a.max_steps = 4;
      a.logging_steps = 1;
      torch::nn::Sequential net = network();
      Trainer trainer(world, task_for(net, dataset(64, 1)), a);
      trainer.add(std::make_shared<Bump>());
      trainer.train();
      EXPECT_EQ(logged(trainer.state(), "learning_rate"),
                (std::vector<double>{0.5, 0.5, 0.125, 0.5}));
    });
  }
}

// During training, ranks share the parameters' memory; afterwards no rank's writes reach another.
TEST(TrainerOptimizer, LeavesEveryRankMemoryOfItsOwnAndTheBestWeights) {
  const io::TemporaryDirectory folder;
  on_ranks(2, "shm", [&](World& world) {
    Scored scored(folder / "out", {0.1, 0.9, 0.5, 0.2}, world);
    scored.a.load_best_model_at_end = true;
    scored.a.shard_optimizer = "true";
    scored.train();
    EXPECT_EQ(scored.trainer->state().best_global_step, 2);
    torch::nn::Sequential best = network();
    Checkpoint(folder / "out/checkpoint-2").load_model(*best);
    EXPECT_TENSOR_EQ(flat(*scored.net), flat(*best));
    world.barrier();
    {
      const torch::NoGradGuard no_grad;
      for (at::Tensor& p : scored.net->parameters()) p.fill_(world.rank());
    }
    world.barrier();
    EXPECT_TENSOR_EQ(flat(*scored.net), at::full_like(flat(*best), world.rank()));
  });
}

TEST(TrainerOptimizer, AutoIsReplicatedWhereAModelCannotBeSharded) {
  for (const char* shard : {"auto", "true"}) {
    const io::TemporaryDirectory folder;
    on_ranks(2, "shm", [&](World& world) {
      torch::nn::Linear net(2, 2);
      {
        const torch::NoGradGuard no_grad;
        net->weight.fill_(0.5);
        net->bias.fill_(0.25);
      }
      net->register_buffer("same", net->weight.detach());  // the same memory
      TrainerTask task;
      task.module = net.ptr();
      task.train_data = std::make_shared<data::TensorDataset>(at::ones({16, 2}));
      task.loss = [&](const data::Batch& batch) { return net(batch.data).square().mean(); };
      TrainingArguments a = arguments(folder / "out");
      a.max_steps = 2;
      a.shard_optimizer = shard;
      Trainer trainer(world, task, a);
      if (a.shard_optimizer == "auto") {
        EXPECT_EQ(trainer.train().global_step, 2);
      } else {
        EXPECT_THAT(testing::message_of<UsageError>([&] { trainer.train(); }),
                    HasSubstr("'same' and 'weight' lie in the same memory"));
      }
    });
  }
}

}  // namespace

}  // namespace lockstep::train
