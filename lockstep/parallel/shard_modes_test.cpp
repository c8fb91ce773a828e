// FullyShard's modes (Shard): the same training, whatever ranks divide.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/nn/block.h"
#include "lockstep/nn/divided.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/counting_allocator_for_test.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using io::message_of;
using testing::Count;
using testing::CountingAllocator;
using ::testing::HasSubstr;
using testing::this_rank;

constexpr std::int64_t kWidth = 7, kInner = 10;

at::Tensor drawn(at::IntArrayRef sizes, std::uint64_t seed) {
  const auto random = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(sizes, random) * 0.4;
}

// Ten, seven and one rows, and a parameter without dimensions. With kState each is rank 0's.
struct LayerImpl : torch::nn::Module, nn::Block {
  LayerImpl() {
    up = register_module("up", torch::nn::Linear(kWidth, kInner));
    down = register_module("down", torch::nn::Linear(kInner, kWidth));
    gain = register_parameter("gain", torch::ones({}));
    row = register_parameter("row", torch::ones({1, kWidth}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return run(
        [this](const std::vector<at::Tensor>& in) {
          return in[0] + down->forward(up->forward(in[0]).tanh()) * gain + row;
        },
        {x});
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  at::Tensor gain, row;
};

// With `blocks` two units and the root; without, the root alone.
struct Net : torch::nn::Module {
  explicit Net(std::uint64_t seed = 0, bool blocks = true) {
    first = register_module("first", torch::nn::Linear(kWidth, kWidth));
    for (int i = 0; i < 2 && blocks; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), std::make_shared<LayerImpl>()));
    last = register_module("last", torch::nn::Linear(kWidth, 3));
    frozen = register_parameter("frozen", torch::ones({kWidth}), /*requires_grad=*/false);
    unused = register_parameter("unused", torch::ones({3}));
    const torch::NoGradGuard no_grad;
    for (at::Tensor& p : parameters()) p.copy_(drawn(p.sizes(), ++seed));
  }
  at::Tensor loss(const at::Tensor& batch) {
    at::Tensor x = first->forward(batch) * frozen;
    for (const auto& layer : layers) x = layer->forward(x);
    return last->forward(x).square().mean();
  }
  std::vector<at::Tensor> trained() const {
    std::vector<at::Tensor> all = parameters();
    std::erase_if(all, [](const at::Tensor& p) { return !p.requires_grad(); });
    return all;
  }
  at::Tensor flat() const {
    std::vector<at::Tensor> all;
    for (const at::Tensor& p : parameters()) all.push_back(p.detach().flatten());
    return at::cat(all);
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  std::vector<std::shared_ptr<LayerImpl>> layers;
  at::Tensor frozen, unused;
};

constexpr int kMicroBatches = 2;

at::Tensor batch(int step, int micro, const World& world) {
  const int number = (step * kMicroBatches + micro) * world.size() + world.rank();
  return drawn({4, kWidth}, static_cast<std::uint64_t>(1000 + number)) * 2.5;
}

std::vector<optim::ParamGroup> groups_of(const Net& net, const optim::Rule& rule) {
  // Muon takes matrices alone.
  std::vector<optim::ParamGroup> groups{{{}, rule}, {{}, optim::AdamWOptions{.lr = 0.01}}};
  for (const at::Tensor& p : net.trained())
    groups[rule.is<optim::MuonOptions>() && (p.dim() != 2 || p.size(0) == 1) ? 1 : 0]
        .params.push_back(p);
  if (groups[1].params.empty()) groups.pop_back();
  return groups;
}

struct Rank {
  Rank(const Mesh& mesh, const optim::Rule& rule, FullyShardOptions options, bool blocks = true)
      : net(static_cast<std::uint64_t>(100 * mesh.world().rank()), blocks),
        model(net, mesh, options),
        optimizer(model.make_optimizer(groups_of(net, rule))) {}
  void backward(int step, double factor = 1, optim::GradScaler* scaler = nullptr) {
    for (int micro = 0; micro < kMicroBatches; ++micro) {
      model.before_forward();
      at::Tensor loss = net.loss(batch(step, micro, model.mesh().batch())) / kMicroBatches;
      if (scaler != nullptr) loss = scaler->scale(loss);
      model.backward(loss * factor, micro + 1 == kMicroBatches);
    }
  }
  optim::StepResult step(int number, const optim::StepOptions& options = {}, double factor = 1) {
    backward(number, factor, options.scaler);
    const optim::StepResult result = optimizer->step(options);
    optimizer->zero_grad();
    return result;
  }
  at::Tensor weights() {
    const auto whole = model.gathered();
    return net.flat();
  }
  void load(const at::Tensor& weights) {
    const torch::NoGradGuard no_grad;
    std::int64_t begin = 0;
    for (at::Tensor p : net.parameters()) {
      p.copy_(weights.narrow(0, begin, p.numel()).view(p.sizes()));
      begin += p.numel();
    }
  }
  Net net;
  FullyShard model;
  std::unique_ptr<optim::Optimizer> optimizer;
};

constexpr int kSteps = 5;

struct Trained {
  at::Tensor weights;
  std::vector<double> norms;
};

Trained train(const Mesh& mesh, const optim::Rule& rule, FullyShardOptions options, double max_norm,
              bool blocks = true) {
  Rank rank(mesh, rule, options, blocks);
  Trained trained;
  for (int step = 0; step < kSteps; ++step)
    trained.norms.push_back(
        rank.step(step, {.max_grad_norm = max_norm, .want_grad_norm = max_norm > 0}).norm());
  rank.model.verify_parameters();
  trained.weights = rank.weights().clone();
  return trained;
}

// DistributedDataParallel with an optimizer that every rank has whole.
Trained train_replicas(const Mesh& mesh, const optim::Rule& rule, double max_norm) {
  auto net = std::make_shared<Net>(static_cast<std::uint64_t>(100 * mesh.world().rank()));
  // A world of one has nothing to share, and `unused` no gradient.
  DistributedDataParallel model(net, mesh.world(), {.find_unused_parameters = true});
  optim::ReplicatedOptimizer optimizer(net->named_parameters().pairs(), groups_of(*net, rule));
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    for (int micro = 0; micro < kMicroBatches; ++micro)
      model.parallelism()->backward(
          model.parallelism()->watch(net->loss(batch(step, micro, mesh.world())) / kMicroBatches),
          micro + 1 == kMicroBatches);
    trained.norms.push_back(
        optimizer.step({.max_grad_norm = max_norm, .want_grad_norm = max_norm > 0}).norm());
    optimizer.zero_grad();
  }
  trained.weights = net->flat();
  return trained;
}

const optim::AdamWOptions kAdamW{.lr = 0.01, .weight_decay = 0.1};
const optim::AdamWOptions kRounded{.lr = 0.01, .weight_decay = 0.1, .bf16_state = true};

void expect_close(const at::Tensor& got, const at::Tensor& expected) {
  EXPECT_TRUE(at::allclose(got, expected, 1e-4, 1e-6)) << (got - expected).abs().max();
}

void expect_same(const Trained& got, const Trained& expected) {
  EXPECT_TENSOR_EQ(got.weights, expected.weights);
  EXPECT_EQ(got.norms, expected.norms);
}

using Axes = std::vector<MeshAxis>;
using Parameters = std::tuple<Axes, const char*>;

class ShardModesTest : public ::testing::TestWithParam<Parameters> {
 protected:
  static void on_ranks(const std::function<void(const Mesh&)>& body) {
    testing::ThreadOptions options;
    options.world.backend = std::get<1>(GetParam());
    testing::run_on_mesh(std::get<0>(GetParam()), body, options);
  }
};

// ---------------------------------------------------------------- training

// With kGradients training has the bits of kAll. With kState it has those of replicas, where sums
// have one order: the last elements of a tensor are rounded otherwise than those of rows.
TEST_P(ShardModesTest, EveryModeHasTheBitsOfTheOthers) {
  struct Case {
    optim::Rule rule;
    double max_norm;
  };
  for (const Case& row : {Case{kAdamW, 0}, Case{kAdamW, 0.02}, Case{kRounded, 0.02},
                          Case{optim::LionOptions{.lr = 1e-3}, 0},
                          Case{optim::SGDOptions{.lr = 0.1, .momentum = 0.9}, 0},
                          Case{optim::AdafactorOptions{.lr = 0.01}, 0.02}})
    on_ranks([&](const Mesh& mesh) {
      const optim::Rule& rule = row.rule;
      const double max_norm = row.max_norm;
      const Trained each = train(mesh, rule, {}, max_norm);
      const Trained once = train(mesh, rule, {.reduce_every_backward = false}, max_norm);
      expect_same(train(mesh, rule, {.shard = Shard::kGradients}, max_norm), each);
      expect_same(
          train(mesh, rule, {.shard = Shard::kGradients, .reduce_every_backward = false}, max_norm),
          once);
      expect_close(train(mesh, rule, {.shard = Shard::kState}, max_norm).weights, once.weights);
      for (const double norm : once.norms) EXPECT_TRUE(max_norm == 0 || norm > max_norm);
    });
}

TEST_P(ShardModesTest, EveryModeTrainsAsReplicas) {
  for (const optim::Rule& rule : {optim::Rule(kAdamW), optim::Rule(optim::MuonOptions{.lr = 0.02})})
    for (const double max_norm : {0.0, 0.02})
      on_ranks([&](const Mesh& mesh) {
        const Trained expected = train_replicas(mesh, rule, max_norm);
        for (const Shard shard : {Shard::kAll, Shard::kGradients, Shard::kState}) {
          const Trained got = train(mesh, rule, {.shard = shard}, max_norm);
          if (rule.is<optim::MuonOptions>()) {
            EXPECT_TRUE(at::allclose(got.weights, expected.weights, 1e-3, 1e-4));
          } else {
            expect_close(got.weights, expected.weights);
          }
          const bool in_order = mesh["shard"].shares_memory() || mesh.world().size() <= 2;
          if (shard == Shard::kState && in_order && mesh.size("data") == 1)
            expect_same(got, expected);
          for (std::size_t i = 0; i < got.norms.size(); ++i)
            EXPECT_NEAR(got.norms[i], expected.norms[i], 1e-5 * std::abs(expected.norms[i]));
        }
      });
}

TEST_P(ShardModesTest, AModuleWithoutBlocksIsOneUnit) {
  on_ranks([](const Mesh& mesh) {
    const Trained each = train(mesh, kAdamW, {}, 0.1, /*blocks=*/false);
    const Trained once = train(mesh, kAdamW, {.reduce_every_backward = false}, 0.1, false);
    expect_same(train(mesh, kAdamW, {.shard = Shard::kGradients}, 0.1, false), each);
    expect_close(train(mesh, kAdamW, {.shard = Shard::kState}, 0.1, false).weights, once.weights);
    Rank rank(mesh, kAdamW, {.shard = Shard::kState}, /*blocks=*/false);
    EXPECT_EQ(rank.model.units(), std::vector<std::string>{""});
  });
}

// Some ranks use layers that others leave out, which kState allows, because nothing is averaged in
// backward; `unused` has no gradient anywhere.
TEST_P(ShardModesTest, ALayerThatSomeRanksUseIsAveragedOverAll) {
  on_ranks([](const Mesh& mesh) {
    const auto loss_of = [&](Net& net, int step) {
      const at::Tensor x = batch(step, 0, mesh.world());
      return mesh.world().is_leader() ? net.loss(x)
                                      : net.last->forward(net.first->forward(x)).mean();
    };
    auto net = std::make_shared<Net>(static_cast<std::uint64_t>(100 * mesh.world().rank()));
    DistributedDataParallel model(net, mesh.world(), {.find_unused_parameters = true});
    optim::ReplicatedOptimizer optimizer(net->named_parameters().pairs(), groups_of(*net, kAdamW));
    Rank rank(mesh, kAdamW, {.shard = Shard::kState});
    const at::Tensor unused = rank.net.unused.detach().clone();
    for (int step = 0; step < 3; ++step) {
      const optim::StepOptions options{.max_grad_norm = step == 1 ? 0.02 : 0};
      model.parallelism()->backward(model.parallelism()->watch(loss_of(*net, step)), true);
      optimizer.step(options);
      optimizer.zero_grad();
      rank.model.before_forward();
      rank.model.backward(loss_of(rank.net, step));
      rank.optimizer->step(options);
      rank.optimizer->zero_grad();
    }
    expect_close(rank.weights(), net->flat());
    EXPECT_TENSOR_EQ(rank.net.unused, unused);
  });
}

TEST_P(ShardModesTest, EveryModeSkipsTheSameSteps) {
  on_ranks([](const Mesh& mesh) {
    World& world = mesh.world();
    std::optional<at::Tensor> expected;
    for (const FullyShardOptions& options : {FullyShardOptions{.reduce_every_backward = false},
                                             FullyShardOptions{.shard = Shard::kState}}) {
      optim::GradScaler scaler(world, {.init_scale = 1024, .growth_interval = 2});
      Rank rank(mesh, kAdamW, options);
      for (int step = 0; step < 6; ++step) {
        const bool bad = step == 3;
        const double factor =
            bad && world.rank() == world.size() - 1 ? std::numeric_limits<double>::infinity() : 1;
        const auto result = rank.step(step, {.max_grad_norm = 1, .scaler = &scaler}, factor);
        EXPECT_EQ(result.was_skipped(), bad) << step;
      }
      EXPECT_EQ(scaler.get_scale(), 1024 * 2);
      const auto result =
          rank.step(6, {.skip_non_finite = true}, world.is_leader() ? std::nan("") : 1);
      EXPECT_TRUE(result.was_skipped());
      const at::Tensor weights = rank.weights().clone();
      if (!expected) expected = weights;
      expect_close(weights, *expected);
    }
  });
}

// Gradients that were stepped and not cleared are there for the next backward to add to.
TEST_P(ShardModesTest, ASecondStepTakesTheSameGradients) {
  on_ranks([](const Mesh& mesh) {
    std::optional<at::Tensor> expected;
    for (const FullyShardOptions& options : {FullyShardOptions{.reduce_every_backward = false},
                                             FullyShardOptions{.shard = Shard::kState}}) {
      Rank rank(mesh, kAdamW, options);
      rank.backward(0);
      rank.optimizer->step();
      rank.optimizer->step();
      const at::Tensor weights = rank.weights().clone();
      if (!expected) expected = weights;
      expect_close(weights, *expected);
    }
  });
}

// What a step has clipped is what the next one, or another backward, begins with.
TEST_P(ShardModesTest, GradientsThatStayAreClipped) {
  on_ranks([](const Mesh& mesh) {
    for (const bool adds : {false, true}) {
      std::optional<at::Tensor> expected;
      for (const FullyShardOptions& options : {FullyShardOptions{.reduce_every_backward = false},
                                               FullyShardOptions{.shard = Shard::kState}}) {
        Rank rank(mesh, optim::SGDOptions{.lr = 0.1}, options);
        rank.backward(0);
        rank.optimizer->step({.max_grad_norm = 1e-3});
        if (adds) rank.backward(1);
        rank.optimizer->step();
        rank.optimizer->zero_grad();
        rank.step(2);  // nothing is left of it
        const at::Tensor weights = rank.weights().clone();
        if (!expected) expected = weights;
        expect_close(weights, *expected);
      }
    }
  });
}

// Where ranks share memory, .grad stays whole, so that a program may assign another one.
TEST(ShardModes, AGradientThatIsAssignedIsNotClipped) {
  testing::run_on_mesh({{"shard", 2}}, [](const Mesh& mesh) {
    Rank rank(mesh, optim::SGDOptions{.lr = 0.1}, {.shard = Shard::kState});
    rank.backward(0);
    rank.optimizer->step({.max_grad_norm = 1e-3});
    const torch::NoGradGuard no_grad;
    const at::Tensor before = rank.net.last->weight.detach().clone();
    for (at::Tensor& p : rank.net.trained()) p.mutable_grad() = at::ones_like(p);
    rank.optimizer->step();
    expect_close(rank.net.last->weight.detach(), before - 0.1);
  });
}

// As if its loss had been zero; and so in a step for which no rank has a pass.
TEST_P(ShardModesTest, ARankWithoutAPassAddsZeros) {
  on_ranks([](const Mesh& mesh) {
    const bool idle = !mesh.world().is_leader();
    std::optional<at::Tensor> expected;
    for (const bool passes : {true, false}) {
      Rank rank(mesh, kAdamW, {.shard = Shard::kState});
      for (const double max_norm : {0.0, 0.02}) {
        if (passes || !idle) rank.backward(0, idle ? 0 : 1);
        rank.optimizer->step({.max_grad_norm = max_norm});
        // Beside what the step before has averaged.
        if (passes || idle) rank.backward(1, idle ? 1 : 0);
        rank.optimizer->step({.max_grad_norm = max_norm});
        rank.optimizer->zero_grad();
        rank.optimizer->step();
      }
      const at::Tensor weights = rank.weights().clone();
      if (!expected) expected = weights;
      EXPECT_TENSOR_EQ(weights, *expected);
    }
  });
}

// ---------------------------------------------------------------- parameters between steps

TEST_P(ShardModesTest, ParametersAreWholeBetweenSteps) {
  on_ranks([](const Mesh& mesh) {
    for (const Shard shard : {Shard::kGradients, Shard::kState}) {
      Rank rank(mesh, kAdamW, {.shard = shard});
      EXPECT_FALSE(rank.model.divided());
      for (int step = 0; step < 2; ++step) {
        rank.step(step);
        const at::Tensor now = rank.net.flat().clone();  // without gathered()
        EXPECT_TENSOR_EQ(now, rank.weights());
        for (const at::Tensor& p : rank.net.parameters()) EXPECT_EQ(nn::rows_of(p), nullptr);
        // An evaluation, which some ranks make and others not.
        const torch::NoGradGuard no_grad;
        if (mesh.world().is_leader()) {
          rank.model.before_forward();
          EXPECT_TRUE(rank.net.loss(batch(9, 0, mesh.world())).isfinite().item<bool>());
        }
      }
      mesh.world().barrier();
    }
  });
}

TEST_P(ShardModesTest, WhatARankHoldsOfGradients) {
  on_ranks([](const Mesh& mesh) {
    const int ranks = mesh.size("shard");
    for (const Shard shard : {Shard::kAll, Shard::kGradients, Shard::kState}) {
      Rank rank(mesh, kAdamW, {.shard = shard});
      rank.backward(0);
      const at::Tensor& weight = rank.net.layers[0]->up->weight;
      const std::int64_t chunk = (kInner + ranks - 1) / ranks;
      const std::int64_t rows =
          std::clamp<std::int64_t>(kInner - mesh.rank("shard") * chunk, 0, chunk);
      EXPECT_EQ(weight.grad().size(0), shard == Shard::kState ? kInner : rows);
      rank.optimizer->zero_grad();
    }
  });
}

// Loaded weights, in the parameters' memory or in other memory, are what ranks step.
TEST_P(ShardModesTest, WeightsThatWereLoadedAreStepped) {
  on_ranks([](const Mesh& mesh) {
    Net other(7);
    std::optional<at::Tensor> expected;
    for (const Shard shard : {Shard::kAll, Shard::kGradients, Shard::kState})
      for (const bool replaces : {false, true}) {
        if (replaces && shard == Shard::kAll) continue;
        Rank rank(mesh, kAdamW, {.shard = shard, .reduce_every_backward = false});
        {
          const auto whole = rank.model.gathered();
          const torch::NoGradGuard no_grad;
          const auto from = other.parameters(), to = rank.net.parameters();
          for (std::size_t i = 0; i < to.size(); ++i) {
            at::Tensor into = to[i];
            if (replaces)
              into.set_data(from[i].detach().clone());
            else
              into.copy_(from[i]);
          }
          rank.optimizer->sync_from_model();
        }
        rank.step(0);
        rank.model.verify_parameters();
        const at::Tensor weights = rank.weights().clone();
        if (!expected) expected = weights;
        expect_close(weights, *expected);
      }
  });
}

TEST_P(ShardModesTest, AParameterThatWasWrittenBetweenStepsIsRefused) {
  on_ranks([](const Mesh& mesh) {
    for (const Shard shard : {Shard::kGradients, Shard::kState}) {
      Rank rank(mesh, kAdamW, {.shard = shard});
      rank.step(0);
      rank.backward(1);
      at::Tensor row = rank.net.layers[1]->row;
      {
        const torch::NoGradGuard no_grad;
        row.add_(mesh["shard"].shares_memory() ? 0 : 1);
      }
      EXPECT_THAT(message_of<UsageError>([&] { rank.optimizer->step(); }),
                  HasSubstr("'layer1.row' was written between steps"));
      rank.optimizer->sync_from_model();
      rank.optimizer->step();
      row.set_data(row.detach().clone());
      EXPECT_THAT(message_of<UsageError>([&] { rank.optimizer->step(); }),
                  HasSubstr("'layer1.row' was given other memory"));
      rank.optimizer->sync_from_model();
      rank.optimizer->zero_grad();
      rank.step(2);
    }
  });
}

// A loop that steps with the other one, and never here. SGD writes past the version counters.
TEST_P(ShardModesTest, AnotherOptimizerIsRefused) {
  on_ranks([](const Mesh& mesh) {
    for (const bool adam : {false, true}) {
      Rank rank(mesh, kAdamW, {.shard = Shard::kState});
      const at::Tensor before = rank.net.flat().clone();
      std::unique_ptr<torch::optim::Optimizer> other;
      if (adam)
        other = std::make_unique<torch::optim::AdamW>(rank.net.trained(), 0.1);
      else
        other = std::make_unique<torch::optim::SGD>(rank.net.trained(), 0.1);
      const auto turn = [&](int number) {
        return message_of<UsageError>([&] {
          rank.net.zero_grad();
          rank.backward(number);
          mesh.world().barrier();
          other->step();
          mesh.world().barrier();
        });
      };
      EXPECT_THAT(turn(0), HasSubstr("nothing thrown"));
      EXPECT_THAT(turn(1), HasSubstr("nothing thrown"));  // one write is left to step()
      EXPECT_THAT(turn(2), HasSubstr("is written between backward passes"));
      EXPECT_THAT(message_of<UsageError>([&] { rank.optimizer->step(); }),
                  HasSubstr("was written between steps"));
      mesh.world().barrier();
      rank.load(before);
      rank.optimizer->sync_from_model();
      rank.step(3);
    }
  });
}

TEST_P(ShardModesTest, TheModelHasMemoryOfItsOwnAfterwards) {
  on_ranks([](const Mesh& mesh) {
    for (const Shard shard : {Shard::kGradients, Shard::kState}) {
      auto rank = std::make_unique<Rank>(mesh, kAdamW, FullyShardOptions{.shard = shard});
      rank->step(0);
      const std::vector<at::Tensor> parameters = rank->net.parameters();
      const at::Tensor before = rank->weights().clone();
      rank.reset();
      mesh.world().barrier();
      const torch::NoGradGuard no_grad;
      if (mesh.world().is_leader())
        for (const at::Tensor& p : parameters) at::Tensor(p).zero_();
      mesh.world().barrier();
      std::vector<at::Tensor> all;
      for (const at::Tensor& p : parameters) all.push_back(p.detach().flatten());
      EXPECT_EQ(at::cat(all).equal(before), !mesh.world().is_leader());
    }
  });
}

// ---------------------------------------------------------------- state

TEST_P(ShardModesTest, StateContinuesInEveryMode) {
  for (const optim::Rule& rule : {optim::Rule(kAdamW), optim::Rule(optim::AdafactorOptions{})})
    on_ranks([&](const Mesh& mesh) {
      const std::vector<FullyShardOptions> modes{
          {.reduce_every_backward = false},
          {.shard = Shard::kGradients, .reduce_every_backward = false},
          {.shard = Shard::kState}};
      std::optional<at::Tensor> expected;
      optim::TensorDict first;
      for (const FullyShardOptions& from : modes) {
        Rank rank(mesh, rule, from);
        for (int step = 0; step < 2; ++step) rank.step(step);
        const optim::TensorDict state = rank.optimizer->state_dict();
        if (first.empty()) first = state;
        ASSERT_EQ(state.size(), first.size());
        for (const auto& [name, tensor] : first) expect_close(state.at(name), tensor);
        const at::Tensor weights = rank.weights().clone();
        for (const FullyShardOptions& to : modes) {
          Rank next(mesh, rule, to);
          {
            const auto whole = next.model.gathered();
            next.load(weights);
            next.optimizer->sync_from_model();
          }
          next.optimizer->load_state_dict(state);
          next.step(2);
          const at::Tensor got = next.weights().clone();
          if (!expected) expected = got;
          expect_close(got, *expected);
        }
      }
    });
}

// ---------------------------------------------------------------- refusals

TEST_P(ShardModesTest, LocalGradientsAreRefusedElsewhere) {
  on_ranks([](const Mesh& mesh) {
    if (mesh.world().size() == 1) return;
    for (const Shard shard : {Shard::kGradients, Shard::kState}) {
      Rank rank(mesh, kAdamW, {.shard = shard});
      rank.backward(0);
      EXPECT_THAT(message_of<UsageError>([&] { optim::clip_grad_norm_(rank.net.trained(), 1); }),
                  HasSubstr("belongs to FullyShard"));
      if (mesh.size("shard") > 1 || shard == Shard::kState) {  // or they are whole averages
        torch::nn::utils::clip_grad_norm_(rank.net.trained(), 1e-3);
        EXPECT_THAT(message_of<UsageError>([&] { rank.optimizer->step(); }),
                    HasSubstr("clip_grad_norm_"));
      }
      rank.optimizer->zero_grad();
      EXPECT_THAT(
          message_of<UsageError>([&] { rank.net.loss(batch(0, 0, mesh.world())).backward(); }),
          HasSubstr("past FullyShard::backward()"));
      rank.optimizer->zero_grad();
      rank.model.before_forward();
      rank.model.backward(rank.net.loss(batch(0, 0, mesh.world())), /*last=*/false);
      if (shard == Shard::kState) {
        EXPECT_THAT(message_of<UsageError>([&] { rank.optimizer->step(); }),
                    HasSubstr("with last = true"));
      }
      rank.optimizer->zero_grad();
      rank.step(0);
    }
  });
}

TEST_P(ShardModesTest, SaysWhatItDivides) {
  on_ranks([](const Mesh& mesh) {
    const auto text = [&](Shard shard) {
      return Rank(mesh, kAdamW, {.shard = shard}).model.text();
    };
    const std::string over = "sharded over " + std::to_string(mesh.size("shard"));
    EXPECT_THAT(text(Shard::kAll), HasSubstr("fully " + over));
    EXPECT_THAT(text(Shard::kGradients), HasSubstr("gradients and state " + over));
    EXPECT_THAT(text(Shard::kState), HasSubstr("state " + over));
    Net net;
    const auto refusal = [&](FullyShardOptions options) {
      return message_of<UsageError>([&] { FullyShard model(net, mesh, options); });
    };
    EXPECT_THAT(refusal({.shard = Shard::kState, .param_dtype = at::kBFloat16}),
                HasSubstr("Shard::kState keeps parameters whole and as they are, and does not go "
                          "with param_dtype"));
    EXPECT_THAT(refusal({.shard = Shard::kGradients, .cpu_offload = true}),
                HasSubstr("does not go with cpu_offload"));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, ShardModesTest,
    ::testing::Values(Parameters(Axes{{"shard", 1}}, "auto"), Parameters(Axes{{"shard", 2}}, "shm"),
                      Parameters(Axes{{"shard", 2}}, "gloo"), Parameters(Axes{{"shard", 3}}, "shm"),
                      Parameters(Axes{{"shard", 3}}, "gloo"), Parameters(Axes{{"shard", 4}}, "shm"),
                      Parameters(Axes{{"shard", 4}}, "gloo"),
                      Parameters(Axes{{"data", 2}, {"shard", 2}}, "shm"),
                      Parameters(Axes{{"data", 2}, {"shard", 1}}, "gloo")),
    [](const auto& mesh) {
      std::string name = std::get<1>(mesh.param);
      for (const MeshAxis& axis : std::get<0>(mesh.param))
        name += "_" + axis.name + std::to_string(axis.size);
      return name;
    });

// ---------------------------------------------------------------- memory

struct Deep : torch::nn::Module {
  static constexpr std::int64_t kRows = 256, kLayers = 8;
  Deep() {
    for (std::int64_t i = 0; i < kLayers; ++i)
      layers.push_back(register_module("layer" + std::to_string(i),
                                       std::make_shared<nn::BlockOf<torch::nn::LinearImpl>>(
                                           torch::nn::LinearOptions(kRows, kRows).bias(false))));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : layers) x = layer->forward(x).tanh();
    return x;
  }
  std::vector<std::shared_ptr<nn::BlockOf<torch::nn::LinearImpl>>> layers;
};

// Memory of a collective is freed by the thread that ends it, which may be a moment later.
void expect_soon(const Count& count, std::int64_t bytes) {
  constexpr std::int64_t kSmall = 64 << 10;  // activations, counters, flags
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (std::abs(count.live - bytes) > kSmall && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_NEAR(count.live, bytes, kSmall);
}

// Between steps, and between the last backward and the step: parameters, gradients, state.
TEST(ShardModesMemory, ARankHoldsWhatItsModeSays) {
  constexpr std::int64_t all = Deep::kLayers * Deep::kRows * Deep::kRows * 4;
  constexpr int kRanks = 2;
  CountingAllocator allocator;
  for (const Shard shard : {Shard::kAll, Shard::kGradients, Shard::kState})
    for (const char* const backend : {"shm", "gloo"}) {
      testing::ThreadOptions options;
      options.world.backend = backend;
      testing::run_on_mesh(
          {{"shard", kRanks}},
          [&](const Mesh& mesh) {
            const bool shared = mesh["shard"].shares_memory();  // which are not counted
            this_rank = std::make_shared<Count>();
            const std::shared_ptr<Count> count = this_rank;
            {
              Deep net;
              FullyShard model(net, mesh, {.shard = shard});
              const std::int64_t parameters = shared                 ? 0
                                              : shard == Shard::kAll ? all / kRanks
                                                                     : all;
              // Those of kState lie in shared memory, too.
              const std::int64_t gradients = shard != Shard::kState ? all / kRanks
                                             : shared               ? 0
                                                                    : all;
              expect_soon(*count, parameters);
              const auto optimizer =
                  model.make_optimizer({{net.parameters(), optim::AdamWOptions{.lr = 1e-3}}});
              for (int step = 0; step < 3; ++step) {
                model.before_forward();
                model.backward(net.forward(drawn({1, Deep::kRows}, 1)).square().mean());
                const std::int64_t state = step == 0 ? 0 : 2 * all / kRanks;
                expect_soon(*count, parameters + gradients + state);
                // Up to two ranks' gradients are averaged again rather than kept.
                optimizer->step({.max_grad_norm = step == 2 ? 1e-3 : 0});
                optimizer->zero_grad();
                expect_soon(*count, parameters + 2 * all / kRanks);
              }
            }
            this_rank.reset();
            mesh.world().barrier();
          },
          options);
    }
}

}  // namespace
}  // namespace lockstep
