// ShardedOptimizer where ranks have different numbers of batches, and other layouts of memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <optional>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/parallel/sharded_for_test.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using namespace sharded_for_test;

class ShardedUneven : public OverWorlds {};
INSTANTIATE_TEST_SUITE_P(Worlds, ShardedUneven, all_worlds(), show);

// ---------------------------------------------------------------- uneven inputs

// Trains `batches` steps with a rate that falls, and returns the model's parameters.
std::vector<at::Tensor> train_unevenly(World& world, bool sharded, const Case& what,
                                       const JoinOptions& join) {
  Net net = make_net();
  DistributedDataParallel model{net, world, kSpareUnused};
  std::optional<ShardedOptimizer> ours;
  std::optional<optim::AdamW> theirs;
  if (sharded) {
    ours.emplace(model, what.options);
  } else {
    theirs.emplace(net->parameters(), what.options.as<optim::AdamWOptions>());
  }
  model.join(
      [&] {
        for (int step = 0; step < 1 + 2 * ((world.rank() + 1) % world.size()); ++step) {
          const double lr = 0.01 / (1 + step);
          model(batch_of(world.rank(), step)).square().mean().backward();
          if (ours) {
            ours->set_lr(lr);
            ours->step({.max_grad_norm = what.clip});
            ours->zero_grad();
          } else {
            theirs->options().lr = lr;
            theirs->step();
            theirs->zero_grad();
          }
        }
      },
      join);
  model.verify_replicas();
  std::vector<at::Tensor> result;
  for (const auto& p : net->parameters()) result.push_back(p.detach().clone());
  world.barrier();
  return result;
}

TEST_P(ShardedUneven, ARankThatHasRunOutKeepsSteppingItsShare) {
  if (GetParam().backend == "gloo" && GetParam().size > 2)
    GTEST_SKIP() << "the replicated step's all-reduce adds in gloo's own order";
  run([](World& world) {
    const Case what{"adamw", optim::AdamWOptions{.weight_decay = 0.1}};
    for (const bool initial : {true, false}) {
      const JoinOptions join{.divide_by_initial_world_size = initial};
      const auto sharded = train_unevenly(world, true, what, join);
      const auto replicated = train_unevenly(world, false, what, join);
      for (std::size_t i = 0; i < sharded.size(); ++i) EXPECT_TENSOR_EQ(sharded[i], replicated[i]);
    }
    // Clipped, too: the norm needs everybody.
    Case clipped = what;
    clipped.clip = 0.01;
    const auto small = train_unevenly(world, true, clipped, {});
    const auto large = train_unevenly(world, true, what, {});
    EXPECT_FALSE(at::equal(small[0], large[0]));
  });
}

// A rank that runs out with a gradient it has not stepped (half a window) adds it to nobody's step.
TEST(ShardedJoin, WhatIsLeftOverIsNotTheOthers) {
  run_threads(3, [](World& world) {
    std::vector<at::Tensor> ends;
    for (const bool leftover : {false, true}) {
      Net net = make_net();
      DistributedDataParallel model{net, world, kSpareUnused};
      ShardedOptimizer optimizer{model, optim::SGDOptions{.lr = 0.1}};
      const auto backward = [&](int step) {
        model(batch_of(world.rank(), step)).square().mean().backward();
      };
      for (int epoch = 0; epoch < 2; ++epoch) {
        model.join([&] {
          for (int step = 0; step < (world.rank() == 0 ? 1 : 4); ++step) {
            backward(step);
            optimizer.step();
            optimizer.zero_grad();
          }
        });
      }
      model.join([&] {  // rank 0 has idled, and now leaves without a step at all
        if (world.rank() == 0 && leftover) backward(0);
        for (int step = 0; step < (world.rank() == 0 ? 0 : 3); ++step) {
          backward(step);
          optimizer.step();
          optimizer.zero_grad();
        }
      });
      ends.push_back(net->a->weight.detach().clone());
      world.barrier();
    }
    EXPECT_TENSOR_EQ(ends[0], ends[1]);
  });
}

TEST(ShardedJoin, EndsEarlyOnAllRanksWhenAsked) {
  run_threads(2, [](World& world) {
    EXPECT_THAT(message_of<UsageError>([&] {
                  train_unevenly(world, true, {"adamw", optim::AdamWOptions{}},
                                 {.throw_on_early_termination = true});
                }),
                HasSubstr("throw_on_early_termination is set"));
  });
}

// ---------------------------------------------------------------- layouts of memory

TEST_P(ShardedUneven, StateHasTheParametersShapeAlsoInChannelsLast) {
  run([](World& world) {
    std::map<std::string, at::Tensor> states[2];
    for (const bool last : {false, true}) {
      torch::nn::Conv2d net = [&] {
        static std::mutex mutex;
        const std::lock_guard lock(mutex);
        torch::manual_seed(1);
        return torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 40, 5));
      }();
      if (last) net->weight.set_data(net->weight.contiguous(at::MemoryFormat::ChannelsLast));
      DistributedDataParallel model{net, world, kSpareUnused};
      ShardedOptimizer optimizer{model, optim::AdamWOptions{.lr = 0.01}};
      auto generator = at::make_generator<at::CPUGeneratorImpl>(7 + world.rank());
      const at::Tensor x = at::randn({2, 3, 9, 9}, generator);
      model(x).square().mean().backward();
      optimizer.step();
      auto state = optimizer.state_dict();
      EXPECT_TRUE(state.at("weight.exp_avg").is_contiguous());
      optimizer.load_state_dict(state);
      for (const auto& [name, tensor] : optimizer.state_dict())
        EXPECT_TENSOR_EQ(tensor, state.at(name));
      states[last ? 1 : 0] = std::move(state);
      world.barrier();
    }
    // Convolutions round differently in the two layouts.
    for (const auto& [name, tensor] : states[0])
      EXPECT_TENSOR_NEAR(tensor, states[1].at(name), 1e-5);
  });
}

TEST(ShardedGraph, RetainedAcrossAStepIsRefused) {
  run_threads(2, [](World& world) {
    Net net = make_net();
    DistributedDataParallel model{net, world, kSpareUnused};
    ShardedOptimizer optimizer{model, optim::SGDOptions{.lr = 0.1}};
    model(batch_of(world.rank(), 0)).sum().backward();
    const at::Tensor retained = model(batch_of(world.rank(), 1)).square().sum();
    optimizer.step();
    EXPECT_THAT(message_of<c10::Error>([&] { retained.backward(); }),
                HasSubstr("modified by an inplace operation"));
  });
}

struct DebugMode {
  DebugMode() { ::setenv("LOCKSTEP_DEBUG", "1", 1); }
  ~DebugMode() { ::unsetenv("LOCKSTEP_DEBUG"); }
};

// A write past LibTorch bumps no version; the owner of the elements detects it.
TEST(ShardedDebug, AWriteThroughAPointerIsFoundByTheOwner) {
  const DebugMode debug;
  run_threads(3, [](World& world) {
    Net net = make_net();
    DistributedDataParallel model{net, world, kSpareUnused};
    ShardedOptimizer optimizer{model, optim::SGDOptions{.lr = 0.1}};
    const auto step = [&] { return refusal_of_step(model, optimizer); };
    for (int i = 0; i < 3; ++i) EXPECT_EQ(step(), "(nothing thrown)");
    world.barrier();
    if (world.rank() == 1) net->a->weight.data_ptr<float>()[0] = 7;
    world.barrier();
    const std::string text = step();
    EXPECT_THAT(text, HasSubstr("of parameter 'a.weight' were written between steps"));
    const bool mine = text.find("refused this step") == text.npos;
    EXPECT_EQ(all_reduce(world, mine ? 1 : 0), 1) << text;
    optimizer.sync_from_model();
    EXPECT_EQ(step(), "(nothing thrown)");
  });
}

}  // namespace
}  // namespace lockstep
