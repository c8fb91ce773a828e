// FullyShard on models with blocks: the training of one process, with a part of the memory. What
// every Parallelism promises is in tests/conformance/parallelism_test.cpp, the Trainer's side in
// lockstep/train/own_parallelism_test.cpp.
#include "lockstep/parallel/fully_shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/models/lora.h"
#include "lockstep/nn/block.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/activation_checkpoint.h"
#include "lockstep/parallel/counting_allocator_for_test.h"
#include "lockstep/parallel/shard_unit.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using io::message_of;
using ::testing::AllOf;
using testing::Count;
using testing::CountingAllocator;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::this_rank;

constexpr std::int64_t kWidth = 7, kInner = 10, kOut = 3;

at::Tensor drawn(at::IntArrayRef sizes, std::uint64_t seed) {
  const auto random = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(sizes, random) * 0.4;
}

// Ten and seven rows, one row, and a parameter without dimensions. `shared` is in two blocks.
struct LayerImpl : torch::nn::Module, nn::Block {
  explicit LayerImpl(at::Tensor tied, std::uint64_t seed) {
    up = register_module("up", torch::nn::Linear(kWidth, kInner));
    down = register_module("down", torch::nn::Linear(kInner, kWidth));
    gain = register_parameter("gain", torch::ones({}));
    row = register_parameter("row", torch::ones({1, kWidth}));
    if (tied.defined()) shared = register_parameter("shared", tied);
    const torch::NoGradGuard no_grad;
    for (at::Tensor& p : parameters())
      if (!p.is_same(tied)) p.copy_(drawn(p.sizes(), seed++));
  }
  at::Tensor forward(const at::Tensor& x) {
    return run(
        [this](const std::vector<at::Tensor>& in) {
          if (look) look();
          at::Tensor y = down->forward(up->forward(in[0]).tanh()) * gain + row;
          if (shared.defined()) y = y.matmul(shared);
          return in[0] + y;
        },
        {x});
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  at::Tensor gain, row, shared;
  std::function<void()> look;
};
using LayerPtr = std::shared_ptr<LayerImpl>;
using Last = nn::BlockOf<torch::nn::LinearImpl>;

struct Net : torch::nn::Module {
  explicit Net(std::uint64_t seed = 0) {
    first = register_module("first", torch::nn::Linear(kWidth, kWidth));
    tied = drawn({kWidth, kWidth}, seed + 90);
    for (std::uint64_t i = 0; i < 3; ++i)
      layers.push_back(register_module(
          "layer" + std::to_string(i),
          std::make_shared<LayerImpl>(i == 1 ? at::Tensor() : tied, seed + 10 * i)));
    last = register_module("last", std::make_shared<Last>(kWidth, kOut));
    frozen = register_parameter("frozen", drawn({kWidth}, seed + 80), /*requires_grad=*/false);
    const torch::NoGradGuard no_grad;
    for (at::Tensor& p : first->parameters()) p.copy_(drawn(p.sizes(), seed + 60));
    for (at::Tensor& p : last->parameters()) p.copy_(drawn(p.sizes(), seed + 70));
  }
  at::Tensor forward(at::Tensor x) {
    x = first->forward(x) * frozen;
    for (const LayerPtr& layer : layers) {
      const auto call = [layer](const std::vector<at::Tensor>& in) {
        return layer->forward(in[0]);
      };
      x = checkpointed ? checkpoint(call, {x}) : layer->forward(x);
    }
    return last->forward(x);
  }
  torch::nn::Linear first{nullptr};
  std::vector<LayerPtr> layers;
  std::shared_ptr<Last> last;
  at::Tensor frozen, tied;
  bool checkpointed = false;
};

at::Tensor loss_of(Net& net, const at::Tensor& x) {
  return net.forward(x).square().mean();
}

at::Tensor batch(int number) {
  return drawn({4, kWidth}, static_cast<std::uint64_t>(1000 + number)) * 2.5;
}

std::vector<at::Tensor> unique_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& p : module.parameters())
    if (std::ranges::none_of(all, [&](const auto& other) { return other.is_same(p); }))
      all.push_back(p);
  return all;
}

std::vector<at::Tensor> trained(const torch::nn::Module& module) {
  std::vector<at::Tensor> all = unique_parameters(module);
  std::erase_if(all, [](const at::Tensor& p) { return !p.requires_grad(); });
  return all;
}

at::Tensor flat(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& p : unique_parameters(module)) all.push_back(p.detach().flatten());
  return at::cat(all);
}

std::vector<optim::ParamGroup> groups_of(const torch::nn::Module& module, const optim::Rule& rule) {
  // Muon takes matrices alone.
  std::vector<optim::ParamGroup> groups{{{}, rule}, {{}, optim::AdamWOptions{.lr = 0.01}}};
  const bool matrices = rule.is<optim::MuonOptions>();
  for (const at::Tensor& p : trained(module))
    groups[matrices && (p.dim() != 2 || p.size(0) == 1) ? 1 : 0].params.push_back(p);
  if (groups[1].params.empty()) groups.pop_back();
  return groups;
}

const optim::AdamWOptions kAdamW{.lr = 0.01, .weight_decay = 0.1};

// The same in one process.
struct Reference {
  Reference(int ranks, const optim::Rule& rule)
      : world_size(ranks), optimizer(net.named_parameters().pairs(), groups_of(net, rule)) {}
  optim::StepResult step(int number, const optim::StepOptions& options = {}) {
    loss = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      at::Tensor mine = loss_of(net, batch(number * world_size + rank)) / world_size;
      loss += mine.item<double>();
      if (options.scaler != nullptr) mine = options.scaler->scale(mine);
      (mine * factor).backward();
    }
    const optim::StepResult result = optimizer.step(options);
    optimizer.zero_grad();
    return result;
  }
  int world_size;
  Net net;
  optim::ReplicatedOptimizer optimizer;
  double loss = 0, factor = 1;
};

struct Rank {
  Rank(const Mesh& mesh, const optim::Rule& rule, FullyShardOptions options = {})
      : net(static_cast<std::uint64_t>(mesh.world().rank())),
        model(net, mesh, options),
        optimizer(model.make_optimizer(groups_of(net, rule))) {}
  at::Tensor mine(int number) const {
    World& ranks = model.mesh().batch();
    return batch(number * ranks.size() + ranks.rank());
  }
  optim::StepResult step(int number, const optim::StepOptions& options = {}) {
    model.before_forward();
    at::Tensor its_loss = loss_of(net, mine(number));
    loss = all_reduce(model.mesh().batch(), its_loss.item<double>(), ReduceOp::kAvg);
    if (options.scaler != nullptr) its_loss = options.scaler->scale(its_loss);
    model.backward(its_loss * factor);
    const optim::StepResult result = optimizer->step(options);
    optimizer->zero_grad();
    return result;
  }
  at::Tensor weights() {
    const auto whole = model.gathered();
    return flat(net).clone();
  }
  Net net;
  FullyShard model;
  std::unique_ptr<optim::Optimizer> optimizer;
  double loss = 0, factor = 1;
};

// AdamW moves a weight by lr times a ratio of gradients, which has their relative error: where
// terms cancel, adding in another order gives up to 1e-4 of a gradient, times an lr of 0.01.
void expect_close(const at::Tensor& got, const at::Tensor& expected) {
  EXPECT_TRUE(at::allclose(got, expected, 1e-4, 1e-6)) << (got - expected).abs().max();
}

using Axes = std::vector<MeshAxis>;
using Parameters = std::tuple<Axes, const char*>;

class FullyShardTest : public ::testing::TestWithParam<Parameters> {
 protected:
  static int ranks() {
    int all = 1;
    for (const MeshAxis& axis : std::get<0>(GetParam())) all *= axis.size;
    return all;
  }
  static void on_ranks(const std::function<void(const Mesh&)>& body) {
    testing::ThreadOptions options;
    options.world.backend = std::get<1>(GetParam());
    testing::run_on_mesh(std::get<0>(GetParam()), body, options);
  }
  // With two ranks there is one order of adding, and half of a sum is the sum of halves. What is
  // left is the rounding of a step: its kernels round the last elements of a tensor otherwise than
  // those before, as ATen's do, and rows of a parameter have other last ones.
  static void expect_equal(const at::Tensor& got, const at::Tensor& expected) {
    if (ranks() <= 2) {
      EXPECT_TRUE(at::allclose(got, expected, 1e-6, 1e-8)) << (got - expected).abs().max();
    } else {
      expect_close(got, expected);
    }
  }
};

// ---------------------------------------------------------------- training

TEST_P(FullyShardTest, TrainsAsOneProcess) {
  for (const optim::Rule& rule : {optim::Rule(kAdamW), optim::Rule(optim::AdamOptions{.lr = 0.01}),
                                  optim::Rule(optim::SGDOptions{.lr = 0.1, .momentum = 0.9}),
                                  optim::Rule(optim::LionOptions{.lr = 1e-3})}) {
    Reference one(ranks(), rule);  // computes as much as all ranks, so once for all of them
    std::vector<double> losses;
    for (int step = 0; step < 4; ++step) {
      one.step(step);
      losses.push_back(one.loss);
    }
    const at::Tensor expected = flat(one.net);
    for (const bool reshard : {true, false})
      on_ranks([&](const Mesh& mesh) {
        Rank rank(mesh, rule, {.reshard_after_forward = reshard});
        for (int step = 0; step < 4; ++step) {
          rank.step(step);
          const double loss = losses[static_cast<std::size_t>(step)];
          EXPECT_NEAR(rank.loss, loss, 1e-6 * loss);
        }
        expect_equal(rank.weights(), expected);
        rank.model.verify_parameters();
      });
  }
}

// Each whole tensor is stepped by one rank, which gathers it.
TEST_P(FullyShardTest, RulesForWholeTensorsTrainAsOneProcess) {
  struct Case {
    optim::Rule rule;
    bool bits;  // not where a matrix product's order of sums may depend on addresses
  };
  for (const Case& each : {Case{optim::Rule(optim::MuonOptions{.lr = 0.02}), false},
                           Case{optim::Rule(optim::AdafactorOptions{.lr = 0.01}), true}})
    on_ranks([&](const Mesh& mesh) {
      Reference one(mesh.world().size(), each.rule);
      Rank rank(mesh, each.rule);
      for (int step = 0; step < 4; ++step) {
        one.step(step);
        rank.step(step);
      }
      // Muon's five products and Adafactor's means of squares repeat a rounding of the gradient.
      const at::Tensor got = rank.weights(), expected = flat(one.net);
      EXPECT_TRUE(at::allclose(got, expected, 1e-3, 1e-4)) << (got - expected).abs().max();
      if (each.bits && mesh.world().size() <= 2) {
        EXPECT_TENSOR_EQ(got, expected);
      }
    });
}

TEST_P(FullyShardTest, ScalesLossesAsOneProcess) {
  on_ranks([](const Mesh& mesh) {
    World& world = mesh.world();
    const optim::GradScalerOptions scaling{.init_scale = 1024, .growth_interval = 2};
    optim::GradScaler one_scaler({}, scaling), scaler(world, scaling);
    Reference one(world.size(), kAdamW);
    Rank rank(mesh, kAdamW);
    for (int step = 0; step < 6; ++step) {
      const bool bad = step == 3;
      one.factor = bad ? std::numeric_limits<double>::infinity() : 1;
      rank.factor = bad && world.rank() == world.size() - 1 ? one.factor : 1;
      const auto expected = one.step(step, {.max_grad_norm = 1, .scaler = &one_scaler});
      const auto got = rank.step(step, {.max_grad_norm = 1, .scaler = &scaler});
      EXPECT_EQ(got.was_skipped(), bad) << step;
      EXPECT_EQ(scaler.get_scale(), one_scaler.get_scale()) << step;
      if (!bad) {
        EXPECT_NEAR(got.norm(), expected.norm(), 1e-5 * expected.norm());
      }
    }
    expect_close(rank.weights(), flat(one.net));
  });
}

TEST_P(FullyShardTest, PassesBeforeTheLastAddUp) {
  for (const bool every : {true, false})
    on_ranks([&](const Mesh& mesh) {
      Reference one(mesh.world().size(), kAdamW);
      Rank rank(mesh, kAdamW, {.reduce_every_backward = every});
      for (int step = 0; step < 3; ++step) {
        one.step(step);
        const auto halves = rank.mine(step).chunk(2);
        for (const bool last : {false, true}) {
          rank.model.before_forward();
          rank.model.backward(loss_of(rank.net, halves[last ? 1 : 0]) * 0.5, last);
          if (last || mesh.size("shard") == 1) continue;
          // This rank's rows of the average, or everything it has seen itself.
          const at::Tensor& weight = rank.net.layers[0]->up->weight;
          const std::int64_t rows =
              parallel::cut_rows(weight.sizes(), mesh.size("shard")).count(mesh.rank("shard"));
          EXPECT_EQ(weight.grad().size(0), every ? rows : weight.size(0));
        }
        rank.optimizer->step();
        rank.optimizer->zero_grad();
      }
      expect_close(rank.weights(), flat(one.net));
    });
}

// Outside of a block's own call, so that the block is gathered again inside the second forward.
TEST_P(FullyShardTest, ComputesCheckpointedBlocksAgain) {
  on_ranks([](const Mesh& mesh) {
    Reference one(mesh.world().size(), kAdamW);
    Rank rank(mesh, kAdamW);
    rank.net.checkpointed = true;
    for (int step = 0; step < 3; ++step) {
      one.step(step);
      rank.step(step);
    }
    expect_equal(rank.weights(), flat(one.net));
  });
}

TEST_P(FullyShardTest, AParameterThatNoRankUsesKeepsItsValue) {
  on_ranks([](const Mesh& mesh) {
    Rank rank(mesh, kAdamW);
    const at::Tensor before = rank.weights();
    rank.model.before_forward();
    const at::Tensor x = rank.net.first->forward(rank.mine(0));
    // No block is called.
    rank.model.backward(x.square().mean());
    EXPECT_FALSE(rank.net.layers[0]->row.grad().defined());
    EXPECT_TRUE(rank.net.first->weight.grad().defined());
    rank.optimizer->step();
    const at::Tensor after = rank.weights();
    const std::int64_t used = kWidth * kWidth + kWidth;
    std::int64_t first = 0;  // where `first` lies
    for (const auto& item : rank.net.named_parameters()) {
      if (item.key() == "first.weight") break;
      first += item.value().numel();
    }
    EXPECT_FALSE(after.narrow(0, first, used).equal(before.narrow(0, first, used)));
    const at::Tensor rest = at::cat({after.narrow(0, 0, first), after.slice(0, first + used)});
    EXPECT_TENSOR_EQ(rest, at::cat({before.narrow(0, 0, first), before.slice(0, first + used)}));
  });
}

// A forward that calls one block has begun to gather the next one, whose values then change.
TEST_P(FullyShardTest, AGatherFromBeforeAStepIsNotUsedAfterIt) {
  on_ranks([](const Mesh& mesh) {
    Reference one(mesh.world().size(), kAdamW);
    Rank rank(mesh, kAdamW);
    one.step(0);
    one.step(1);
    rank.model.before_forward();
    rank.model.backward(loss_of(rank.net, rank.mine(0)));
    {
      const torch::NoGradGuard no_grad;
      rank.model.before_forward();
      rank.net.layers[0]->forward(rank.mine(0));
    }
    rank.optimizer->step();
    rank.optimizer->zero_grad();
    rank.step(1);
    expect_equal(rank.weights(), flat(one.net));
  });
}

// ---------------------------------------------------------------- bundled models

models::CausalLmPtr small_gpt(bool lora) {
  torch::manual_seed(5);
  models::Gpt gpt{models::GptConfig{
      .n_layer = 3, .n_head = 2, .n_embd = 16, .vocab_size = 19, .n_positions = 8}};
  gpt->eval();  // without dropout
  if (lora) models::add_lora(*gpt, {.r = 4, .target_modules = {"c_attn", "c_fc"}});
  return gpt.ptr();
}

TEST_P(FullyShardTest, AGptWithTiedWeightsAndAdaptersTrainsAsOneProcess) {
  const auto ids_of = [](int number) {
    const auto random = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t(300 + number));
    return at::randint(0, 19, {2, 8}, random, at::kLong);
  };
  // Linear in the gradients: one that is nearly zero is not blown up.
  const optim::SGDOptions sgd{.lr = 0.3, .momentum = 0.9};
  for (const bool lora : {false, true})
    for (const bool checkpoints : {false, true}) {
      // Modules are drawn from the process's generator, so one thread makes them all.
      std::vector<models::CausalLmPtr> nets;
      for (int i = 0; i <= ranks(); ++i) nets.push_back(small_gpt(lora));
      on_ranks([&](const Mesh& mesh) {
        World& world = mesh.world();
        models::CausalLm& one = *nets.back();
        models::CausalLm& net = *nets[static_cast<std::size_t>(world.rank())];
        if (checkpoints) net.run_blocks_with(checkpoint);
        FullyShard model(net, mesh);
        EXPECT_THAT(model.units(),
                    ElementsAre("transformer.h.0", "transformer.h.1", "transformer.h.2", ""));
        const auto optimizer = model.make_optimizer(groups_of(net, sgd));
        // One of the ranks takes the steps of the one process.
        std::unique_ptr<optim::ReplicatedOptimizer> reference;
        if (world.rank() == 0)
          reference = std::make_unique<optim::ReplicatedOptimizer>(one.named_parameters().pairs(),
                                                                   groups_of(one, sgd));
        for (int step = 0; step < 3; ++step) {
          for (int r = 0; reference && r < world.size(); ++r) {
            const at::Tensor ids = ids_of(step * world.size() + r);
            (one.loss(ids, ids) / world.size()).backward();
          }
          if (reference) {
            reference->step();
            reference->zero_grad();
          }
          const at::Tensor ids = ids_of(step * world.size() + world.rank());
          model.before_forward();
          model.backward(net.loss(ids, ids));
          optimizer->step();
          optimizer->zero_grad();
        }
        const auto whole = model.gathered();
        if (reference) expect_close(flat(net), flat(one));
      });
    }
}

// ---------------------------------------------------------------- memory

// The storages that graphs hold, each as long as the parameter or empty.
class Storages {
 public:
  explicit Storages(FullyShard& model, const torch::nn::Module& module) {
    const auto whole = model.gathered();
    for (const at::Tensor& p : module.parameters())
      all_.emplace(p.unsafeGetTensorImpl(), p.storage());
  }
  std::size_t bytes(const at::Tensor& parameter) const {
    return all_.at(parameter.unsafeGetTensorImpl()).nbytes();
  }
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const auto& [parameter, storage] : all_) sum += storage.nbytes();
    return sum;
  }

 private:
  std::map<at::TensorImpl*, c10::Storage> all_;
};

TEST_P(FullyShardTest, StoragesAreEmptyBetweenUses) {
  on_ranks([](const Mesh& mesh) {
    const bool divided = mesh.size("shard") > 1;
    for (const bool reshard : {true, false}) {
      Rank rank(mesh, kAdamW, {.reshard_after_forward = reshard});
      const Storages storages(rank.model, rank.net);
      rank.step(0);
      EXPECT_EQ(storages.bytes() == 0, divided);
      const std::vector<LayerPtr>& layers = rank.net.layers;
      int looks = 0;
      for (std::size_t i = 0; i < layers.size(); ++i)
        layers[i]->look = [&, i] {
          ++looks;
          for (std::size_t j = 0; j < layers.size(); ++j) {
            const bool kept = j == i || (j < i && !reshard);
            EXPECT_EQ(storages.bytes(layers[j]->up->weight) > 0, kept || !divided) << i << j;
          }
        };
      rank.model.before_forward();
      const at::Tensor loss = loss_of(rank.net, rank.mine(1));
      EXPECT_EQ(looks, 3);
      EXPECT_EQ(storages.bytes(layers[1]->row) == 0, divided && reshard);
      EXPECT_GT(storages.bytes(rank.net.first->weight), 0);  // the root is kept
      EXPECT_GT(storages.bytes(rank.net.tied), 0);
      rank.model.backward(loss);
      EXPECT_EQ(storages.bytes() == 0, divided);
      const auto whole = rank.model.gathered();
      for (const at::Tensor& p : rank.net.parameters()) EXPECT_EQ(storages.bytes(p), p.nbytes());
    }
  });
}

struct Deep : torch::nn::Module {
  static constexpr std::int64_t kRows = 256, kLayers = 16;
  Deep() {
    for (std::int64_t i = 0; i < kLayers; ++i)
      layers.push_back(register_module(
          "layer" + std::to_string(i),
          std::make_shared<Last>(torch::nn::LinearOptions(kRows, kRows).bias(false))));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : layers) x = layer->forward(x).tanh();
    return x;
  }
  std::vector<std::shared_ptr<Last>> layers;
};

// Memory of a collective is freed by the thread that ends it, which may be a moment later.
void expect_soon(const Count& count, std::int64_t bytes) {
  constexpr std::int64_t kSmall = 64 << 10;  // activations, counters, padding, flags
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (std::abs(count.live - bytes) > kSmall && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_NEAR(count.live, bytes, kSmall);
}

// A rank's share of parameters, gradients and state, and in a step a few blocks more: the one that
// computes, its gradient, what the next gather brings and what the last reduction sends are four;
// the rest is what a busy thread of the backend has not freed yet. All would be 2 * kLayers = 32.
// Shared rows are not counted, and their gathers bring nothing.
TEST_P(FullyShardTest, ARankHoldsItsShareOfBytes) {
  CountingAllocator allocator;
  on_ranks([](const Mesh& mesh) {
    const std::int64_t ranks = mesh.size("shard");
    constexpr std::int64_t block = Deep::kRows * Deep::kRows * 4, all = Deep::kLayers * block;
    const bool shared = mesh["shard"].shares_memory();
    const std::int64_t rows = shared ? 0 : all / ranks;
    this_rank = std::make_shared<Count>();
    const std::shared_ptr<Count> count = this_rank;
    {
      Deep net;
      EXPECT_EQ(count->live, all);
      FullyShard model(net, mesh);
      expect_soon(*count, rows);
      const auto optimizer =
          model.make_optimizer({{net.parameters(), optim::AdamWOptions{.lr = 1e-3}}});
      for (int step = 0; step < 3; ++step) {
        count->peak = count->live.load();
        model.before_forward();
        model.backward(net.forward(drawn({1, Deep::kRows}, 1)).square().mean());
        const std::int64_t held = rows + (step == 0 ? 1 : 3) * all / ranks;
        expect_soon(*count, held);
        EXPECT_LE(count->peak, held + (shared ? 6 : ranks > 1 ? 12 : 1) * block) << step;
        if (step == 2 && mesh.world().is_leader())  // the table of docs/fully_shard.md
          std::printf("%d ranks: %.1f blocks%s, and %.1f of a step's\n", static_cast<int>(ranks),
                      static_cast<double>(held) / static_cast<double>(block),
                      shared ? " beside shared rows" : "",
                      static_cast<double>(count->peak - held) / static_cast<double>(block));
        optimizer->step();
        optimizer->zero_grad();
        expect_soon(*count, rows + 2 * all / ranks);
      }
    }
    this_rank.reset();
    mesh.world().barrier();
  });
}

// ---------------------------------------------------------------- state

TEST_P(FullyShardTest, ItsStateIsThatOfOneProcess) {
  for (const optim::Rule& rule : {optim::Rule(kAdamW), optim::Rule(optim::MuonOptions{.lr = 0.02}),
                                  optim::Rule(optim::AdafactorOptions{})})
    on_ranks([&](const Mesh& mesh) {
      Reference one(mesh.world().size(), rule);
      Rank rank(mesh, rule);
      for (int step = 0; step < 2; ++step) {
        one.step(step);
        rank.step(step);
      }
      const optim::TensorDict expected = one.optimizer.state_dict();
      const optim::TensorDict state = rank.optimizer->state_dict();
      ASSERT_EQ(state.size(), expected.size());
      for (const auto& [name, tensor] : expected) {
        ASSERT_TRUE(state.contains(name)) << name;
        EXPECT_TRUE(at::allclose(state.at(name), tensor, 1e-4, 1e-6)) << name;
      }
      EXPECT_TRUE(rank.optimizer->state_dict({.wanted = false}).empty());
      // Into one that begins elsewhere, with the parameters.
      Rank other(mesh, rule);
      {
        const auto whole = other.model.gathered();
        const torch::NoGradGuard no_grad;
        const auto from = unique_parameters(one.net), to = unique_parameters(other.net);
        for (std::size_t i = 0; i < to.size(); ++i) at::Tensor(to[i]).copy_(from[i]);
        other.optimizer->sync_from_model();
      }
      other.optimizer->load_state_dict(expected);
      one.step(2);
      other.step(2);
      const at::Tensor got = other.weights(), wanted = flat(one.net);
      EXPECT_TRUE(at::allclose(got, wanted, 1e-3, 1e-4)) << (got - wanted).abs().max();
    });
}

TEST_P(FullyShardTest, RefusesTheStateOfAnotherModelOnEveryRank) {
  on_ranks([](const Mesh& mesh) {
    Rank rank(mesh, kAdamW);
    rank.step(0);
    const optim::TensorDict state = rank.optimizer->state_dict();
    const auto refusal = [&](optim::TensorDict other) {
      return message_of<UsageError>([&] { rank.optimizer->load_state_dict(other); });
    };
    optim::TensorDict changed = state;
    changed.erase("layer0.gain.exp_avg");
    EXPECT_THAT(refusal(changed), HasSubstr("the state has no 'layer0.gain.exp_avg'"));
    changed = state;
    changed["layer9.exp_avg"] = at::zeros({1});
    EXPECT_THAT(refusal(changed), HasSubstr("holds 'layer9.exp_avg'"));
    changed = state;
    changed["layer0.row.exp_avg"] = at::zeros({2, kWidth});
    EXPECT_THAT(refusal(changed), HasSubstr("'layer0.row.exp_avg' has shape [2, 7]"));
    rank.optimizer->load_state_dict(state);
    rank.step(1);
  });
}

// ---------------------------------------------------------------- what a user gets wrong

TEST_P(FullyShardTest, AParameterUsedInPartsIsNamed) {
  on_ranks([](const Mesh& mesh) {
    if (mesh.size("shard") == 1) return;
    Rank rank(mesh, kAdamW);
    const at::Tensor x = rank.mine(0);
    const auto error = [](const std::function<void()>& body) {
      return message_of<c10::Error>(body);
    };
    EXPECT_THAT(error([&] { rank.net.forward(x); }),
                AllOf(HasSubstr("'first."), HasSubstr("before_forward()")));
    rank.model.before_forward();
    EXPECT_THAT(error([&] { rank.net.layers[0]->up->forward(x); }),
                AllOf(HasSubstr("'layer0.up."), HasSubstr("was used while its rows are divided"),
                      HasSubstr("nn::Block::run()")));
    EXPECT_THAT(error([&] { rank.net.layers[2]->gain.item<float>(); }), HasSubstr("'layer2.gain'"));
    EXPECT_THAT(error([&] { rank.net.layers[1]->row.clone(); }), HasSubstr("'layer1.row'"));
    const torch::NoGradGuard no_grad;
    EXPECT_THAT(error([&] { at::Tensor(rank.net.layers[1]->row).zero_(); }),
                HasSubstr("'layer1.row'"));
    torch::AutoGradMode again(true);
    rank.step(0);  // nothing was harmed
  });
}

TEST_P(FullyShardTest, AGradientFromOutsideOfItsBlockIsRefused) {
  on_ranks([](const Mesh& mesh) {
    if (mesh.world().size() == 1) return;
    Rank rank(mesh, kAdamW);
    rank.model.before_forward();
    {
      const auto whole = rank.model.gathered();
      const at::Tensor penalty = rank.net.layers[0]->up->weight.square().sum();
      const at::Tensor loss = loss_of(rank.net, rank.mine(0)) + penalty;
      EXPECT_THAT(message_of<UsageError>([&] { rank.model.backward(loss); }),
                  HasSubstr("'layer0.up.weight' after those of its block were averaged"));
    }
    EXPECT_THAT(message_of<UsageError>([&] { rank.optimizer->step(); }),
                HasSubstr("after a backward that failed"));
    rank.optimizer->zero_grad();
    rank.step(0);
  });
}

TEST_P(FullyShardTest, AParameterThatWasGivenOtherMemoryIsRefused) {
  on_ranks([](const Mesh& mesh) {
    if (mesh.size("shard") == 1) return;
    Rank rank(mesh, kAdamW);
    {
      const auto whole = rank.model.gathered();
      at::Tensor row = rank.net.layers[1]->row;
      row.set_data(row.detach().clone());
    }
    EXPECT_THAT(message_of<UsageError>([&] { rank.model.before_forward(); }),
                HasSubstr("'layer1.row' was given other memory"));
  });
}

TEST_P(FullyShardTest, OtherWaysToUseGradientsAreRefused) {
  on_ranks([](const Mesh& mesh) {
    Rank rank(mesh, kAdamW, {.reduce_every_backward = false});
    rank.model.before_forward();
    EXPECT_THAT(message_of<UsageError>([&] { loss_of(rank.net, rank.mine(0)).backward(); }),
                HasSubstr("past FullyShard::backward()"));
    rank.optimizer->zero_grad();
    rank.model.before_forward();
    rank.model.backward(loss_of(rank.net, rank.mine(0)), /*last=*/false);
    EXPECT_THAT(message_of<UsageError>([&] { optim::clip_grad_norm_(rank.net.parameters(), 1); }),
                HasSubstr("belongs to FullyShard"));
    if (mesh.world().size() > 1) {
      EXPECT_THAT(message_of<UsageError>([&] { rank.optimizer->step(); }),
                  HasSubstr("with last = true"));
    }
    rank.optimizer->zero_grad();
    rank.step(0);
  });
}

TEST_P(FullyShardTest, MeansWhatTheMeshMeans) {
  on_ranks([](const Mesh& mesh) {
    Rank rank(mesh, kAdamW);
    EXPECT_EQ(rank.model.mesh().text(), mesh.text());
    EXPECT_THAT(rank.model.text(),
                HasSubstr("fully sharded over " + std::to_string(mesh.size("shard")) + " rank"));
    EXPECT_THAT(rank.model.units(), ElementsAre("layer0", "layer1", "layer2", "last", ""));
    EXPECT_THAT(message_of<UsageError>([&] { FullyShard second(rank.net, mesh); }),
                HasSubstr("run by something else already"));
    const at::Tensor foreign = torch::ones({2}, torch::requires_grad());
    EXPECT_THAT(message_of<UsageError>([&] { rank.model.make_optimizer({{{foreign}, kAdamW}}); }),
                HasSubstr("1 of 1 parameters in the groups are not the divided model's"));
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, FullyShardTest,
                         ::testing::Values(Parameters(Axes{{"shard", 1}}, "auto"),
                                           Parameters(Axes{{"shard", 2}}, "shm"),
                                           Parameters(Axes{{"shard", 2}}, "gloo"),
                                           Parameters(Axes{{"shard", 3}}, "shm"),
                                           Parameters(Axes{{"shard", 4}}, "gloo"),
                                           Parameters(Axes{{"data", 2}, {"shard", 2}}, "shm"),
                                           Parameters(Axes{{"data", 2}, {"shard", 2}}, "gloo")),
                         [](const auto& mesh) {
                           std::string name = std::get<1>(mesh.param);
                           for (const MeshAxis& axis : std::get<0>(mesh.param))
                             name += "_" + axis.name + std::to_string(axis.size);
                           return name;
                         });

TEST(FullyShardRefusals, AMeshThatDividesNothing) {
  testing::run_threads(2, [](World& world) {
    Net net;
    EXPECT_THAT(message_of<UsageError>([&] { FullyShard model(net, world); }),
                AllOf(HasSubstr("no axis 'shard'"), HasSubstr("DistributedDataParallel")));
    const Mesh stages(world, {{"shard", 1}, {"pipeline", 2}});
    EXPECT_THAT(message_of<UsageError>([&] { FullyShard model(net, stages); }),
                HasSubstr("Make a Pipeline with it"));
    // It is as it was.
    EXPECT_TRUE(loss_of(net, batch(0)).isfinite().item<bool>());
  });
}

TEST(FullyShardRefusals, AModelThatDiffersOverRanks) {
  testing::run_threads(2, [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(4, 3 + world.rank()));
    const Mesh mesh(world, {{"shard", -1}});
    EXPECT_THAT(message_of<UsageError>([&] { FullyShard model(*net, mesh); }),
                HasSubstr("rank 1 has '0.weight: Float, shape [4, 4]'"));
  });
}

// Copies that differ are found, whoever wrote them.
TEST(FullyShardHybrid, ComparesTheCopies) {
  testing::run_threads(4, [](World& world) {
    const Mesh mesh(world, {{"data", 2}, {"shard", 2}});
    Rank rank(mesh, kAdamW);
    rank.model.verify_parameters();
    rank.model.verify_buffers();
    {
      const auto whole = rank.model.gathered();
      const torch::NoGradGuard no_grad;
      if (mesh.rank("data") == 1) rank.net.layers[1]->row.add_(1);
      rank.optimizer->sync_from_model();
    }
    // The second rank along "shard" holds no row of it.
    const std::string text = message_of<CommError>([&] { rank.model.verify_parameters(); });
    EXPECT_THAT(text,
                HasSubstr(mesh.rank("shard") == 0
                              ? "'layer1.row' on rank 1 along 'data' is not what it is on rank 0"
                              : "nothing thrown"));
  });
}

}  // namespace
}  // namespace lockstep
