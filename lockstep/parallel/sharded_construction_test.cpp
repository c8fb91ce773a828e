// ShardedConstruction: a model that is divided while it is made has the values of one that was made
// whole, and never stands whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/models/lora.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/nn/block.h"
#include "lockstep/nn/divided.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/counting_allocator_for_test.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/language_model_for_test.h"
#include "lockstep/testing/worlds.h"

namespace lockstep::construction {
namespace {

using io::message_of;
using ::testing::AllOf;
using testing::Count;
using testing::CountingAllocator;
using testing::flat;
using ::testing::HasSubstr;
using testing::this_rank;

// Generators are the process's, so the ranks, which are threads, make their models in turn.
template <typename Make>
auto in_turn(std::uint64_t seed, const Make& make) {
  static std::mutex alone;
  const std::lock_guard lock(alone);
  const optim::WithSeed seeded(seed);
  return make();
}

models::CausalLmConfig gpt_config() {
  return {.model = models::GptConfig{
              .n_layer = 6, .n_head = 2, .n_embd = 48, .vocab_size = 19, .n_positions = 8}};
}

// On 1 to 4 ranks, along "shard" alone and beside "data".
void on_meshes(const std::function<void(const Mesh&)>& body) {
  const std::vector<std::vector<MeshAxis>> meshes{
      {{"shard", 1}}, {{"shard", 2}}, {{"shard", 3}}, {{"shard", 4}}, {{"data", 2}, {"shard", 2}}};
  for (const std::vector<MeshAxis>& axes : meshes) testing::run_on_mesh(axes, body);
}

// A model that is made whole, cut, is the oracle.
struct Sizes {
  explicit Sizes(const models::CausalLm& whole) {
    for (const auto& item : whole.named_parameters()) {
      const auto bytes = static_cast<std::int64_t>(item.value().nbytes());
      all += bytes;
      (item.key().find(".h.") != std::string::npos ? blocks : root) += bytes;
    }
  }
  std::int64_t block() const { return blocks / 6; }
  std::int64_t all = 0, blocks = 0, root = 0;
};

TEST(ShardedConstructionTest, HasTheValuesOfAWholeModelAndAPartOfItsMemory) {
  CountingAllocator allocator;
  const auto whole = in_turn(5, [] { return models::make_causal_lm(gpt_config()); });
  const Sizes sizes(*whole);
  on_meshes([&](const Mesh& mesh) {
    this_rank = std::make_shared<Count>();
    const std::shared_ptr<Count> count = this_rank;
    {
      const auto net = in_turn(5, [&] {
        const ShardedConstruction divided(mesh);
        return models::make_causal_lm(gpt_config());
      });
      const int ranks = mesh.size("shard");
      // Shares are padded to whole rows; a block is drawn beside them, and moved to its memory.
      constexpr std::int64_t kPadding = 32 << 10;
      if (ranks > 1) {
        EXPECT_LE(count->live, sizes.blocks / ranks + sizes.root + kPadding);
        EXPECT_LE(count->peak, sizes.blocks / ranks + 2 * sizes.root + sizes.block() + kPadding);
      }
      FullyShard model(*net, mesh);
      EXPECT_EQ(model.divided(), ranks > 1);
      const auto gathered = model.gathered();
      EXPECT_TENSOR_EQ(flat(*net), flat(*whole));
    }
    this_rank.reset();
    mesh.world().barrier();
  });
}

TEST(ShardedConstructionTest, ReadsItsRowsOfAFolder) {
  const io::TemporaryDirectory folder;
  CountingAllocator allocator;
  const auto whole = in_turn(6, [] { return models::make_causal_lm(gpt_config()); });
  models::save_pretrained(*whole, folder / "model");
  const Sizes sizes(*whole);
  on_meshes([&](const Mesh& mesh) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      this_rank = std::make_shared<Count>();
      const std::shared_ptr<Count> count = this_rank;
      {
        const ShardedConstruction divided(mesh);
        const auto net = models::load_pretrained(folder / "model", {.dtype = type});
        if (mesh.size("shard") > 1 && type == at::kFloat) {
          EXPECT_LE(count->peak, sizes.blocks / mesh.size("shard") + 2 * sizes.root +
                                     sizes.block() + (32 << 10));
        }
        FullyShard model(*net, mesh);
        const auto gathered = model.gathered();
        EXPECT_TENSOR_EQ(flat(*net), flat(*whole).to(type));
      }
      this_rank.reset();
    }
    mesh.world().barrier();
  });
}

// What a module is given after it was divided belongs to its unit.
TEST(ShardedConstructionTest, TakesAdaptersThatComeLater) {
  const models::LoraConfig lora{.r = 4, .target_modules = {"c_attn"}};
  const auto make = [&] {
    const auto net = models::make_causal_lm(gpt_config());
    models::add_lora(*net, lora);
    net->eval();
    return net;
  };
  const auto one = in_turn(7, make);
  const at::Tensor ids = at::arange(16).remainder(19).view({2, 8});
  const auto trained = [](const torch::nn::Module& module) {
    std::vector<at::Tensor> all;
    for (const at::Tensor& p : module.parameters())
      if (p.requires_grad()) all.push_back(p);
    return all;
  };
  optim::SGD reference(trained(*one), {.lr = 0.5});
  for (int step = 0; step < 2; ++step) {
    one->loss(ids, ids).backward();
    reference.step();
    reference.zero_grad();
  }
  on_meshes([&](const Mesh& mesh) {
    const auto net = in_turn(7, [&] {
      const ShardedConstruction divided(mesh);
      return make();
    });
    FullyShard model(*net, mesh);
    const auto optimizer = model.make_optimizer({{trained(*net), optim::SGDOptions{.lr = 0.5}}});
    for (int step = 0; step < 2; ++step) {
      model.before_forward();
      model.backward(net->loss(ids, ids));
      optimizer->step();
      optimizer->zero_grad();
    }
    const auto gathered = model.gathered();
    // All ranks see the same batch; its gradients are added and divided, in another order.
    EXPECT_TRUE(at::allclose(flat(*net), flat(*one), 1e-5, 1e-6));
  });
}

// ---------------------------------------------------------------- state in parts

TEST(DividedState, HasEveryElementOnce) {
  for (const optim::Rule& rule :
       {optim::Rule(optim::AdamWOptions{}), optim::Rule(optim::AdafactorOptions{.lr = 0.01})})
    on_meshes([&](const Mesh& mesh) {
      const auto net = in_turn(8, [] { return models::make_causal_lm(gpt_config()); });
      net->eval();
      FullyShard model(*net, mesh);
      const auto optimizer = model.make_optimizer({{net->parameters(), rule}});
      const at::Tensor ids = at::arange(16).remainder(19).view({2, 8});
      model.before_forward();
      model.backward(net->loss(ids, ids));
      optimizer->step();
      const optim::TensorDict whole = optimizer->state_dict();
      const optim::TensorDict parts = optimizer->state_dict({.divided = true});
      ASSERT_EQ(parts.size(), whole.size());
      for (const auto& [name, expected] : whole) {
        const at::Tensor& part = parts.at(name);
        EXPECT_EQ(part.sizes(), expected.sizes()) << name;
        EXPECT_EQ(part.scalar_type(), expected.scalar_type()) << name;
        const nn::Rows* const rows = nn::rows_of(part);
        EXPECT_EQ(rows != nullptr, mesh.size("shard") > 1 && !name.ends_with(".step")) << name;
        if (rows == nullptr) {
          EXPECT_TENSOR_EQ(part, expected);
          continue;
        }
        at::Tensor count = at::zeros({expected.numel()});
        count.narrow(0, rows->begin, rows->values.numel()).fill_(1);
        EXPECT_TENSOR_EQ(rows->values,
                         expected.reshape({-1}).narrow(0, rows->begin, rows->values.numel()));
        mesh["shard"].all_reduce(count).wait();
        EXPECT_TENSOR_EQ(count, at::ones_like(count));
      }
    });
}

// ---------------------------------------------------------------- the types of what travels

struct Layer : torch::nn::Module, nn::Block {
  explicit Layer(const at::Tensor& shared = {}) {
    own = register_parameter("own", torch::ones({4, 4}));
    if (shared.defined()) register_parameter("shared", shared);
  }
  at::Tensor forward(const at::Tensor& x) {
    return run([this](const std::vector<at::Tensor>& in) { return in[0].matmul(own); }, {x});
  }
  at::Tensor own;
};

struct One : torch::nn::Module {
  One() { layer = register_module("layer", std::make_shared<Layer>()); }
  std::shared_ptr<Layer> layer;
};

// Weights and gradients are 1 + 2^-10, which bfloat16 rounds to 1; all sums are exact.
TEST(MixedPrecision, RoundsWhatTravelsAndNothingElse) {
  constexpr double kOne = 1 + 1.0 / 1024;
  struct Case {
    FullyShardOptions options;
    double weight, gradient;  // in forward, and of the step
  };
  const Case cases[] = {{{}, kOne, kOne},
                        {{.param_dtype = at::kBFloat16}, 1, 1},
                        {{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}, 1, kOne},
                        {{.reshard_after_forward = false, .reduce_dtype = at::kBFloat16}, kOne, 1}};
  const std::vector<std::vector<MeshAxis>> meshes{
      {{"shard", 2}}, {{"shard", 4}}, {{"data", 2}, {"shard", 2}}};
  for (const std::vector<MeshAxis>& axes : meshes)
    for (const Case& each : cases)
      testing::run_on_mesh(axes, [&](const Mesh& mesh) {
        One net;
        const torch::NoGradGuard no_grad;
        net.layer->own.fill_(kOne);
        FullyShard model(net, mesh, each.options);
        const auto optimizer =
            model.make_optimizer({{net.parameters(), optim::SGDOptions{.lr = 1}}});
        {
          const torch::AutoGradMode grad(true);
          model.before_forward();
          const at::Tensor loss = net.layer->forward(at::full({1, 4}, kOne)).sum();
          EXPECT_EQ(loss.item<double>(), 16 * kOne * each.weight);
          model.backward(loss);
        }
        {
          const auto exact = model.gathered();
          EXPECT_TENSOR_EQ(net.layer->own.detach(), at::full({4, 4}, kOne));
        }
        optimizer->step();
        const auto exact = model.gathered();
        EXPECT_TENSOR_EQ(net.layer->own.detach(), at::full({4, 4}, kOne - each.gradient));
      });
}

TEST(MixedPrecision, RefusesOtherTypes) {
  testing::run_threads(2, [](World& world) {
    torch::nn::Linear net(2, 2);
    EXPECT_THAT(message_of<UsageError>([&] {
                  FullyShard(*net, Mesh(world, {{"shard", -1}}), {.param_dtype = at::kInt});
                }),
                HasSubstr("floating-point types, and Int is none"));
  });
}

// ---------------------------------------------------------------- faults

struct Two : torch::nn::Module {
  explicit Two(const at::Tensor& shared = {}) {
    for (const char* name : {"first", "second"})
      layers.push_back(register_module(name, nn::made(std::make_shared<Layer>(shared))));
  }
  std::vector<std::shared_ptr<Layer>> layers;
};

TEST(ShardedConstructionRefusals, WhatAUserWouldGetWrong) {
  testing::run_threads(2, [](World& world) {
    const Mesh mesh(world, {{"shard", -1}}), other(world, {{"shard", -1}});
    EXPECT_THAT(message_of<UsageError>([&] { const ShardedConstruction divided(world); }),
                HasSubstr("has no axis 'shard'"));
    const auto make = [&](const at::Tensor& shared) {
      const ShardedConstruction divided(mesh);
      return std::make_shared<Two>(shared);
    };
    const auto net = make({});
    EXPECT_THAT(message_of<UsageError>([&] { net->layers[0]->forward(torch::ones({2, 4})); }),
                HasSubstr("Make a FullyShard, a Pipeline or a TensorParallel of the model first"));
    EXPECT_THAT(message_of<UsageError>([&] { FullyShard(*net, other); }),
                AllOf(HasSubstr("block 'first' was divided along another mesh"),
                      HasSubstr("the same Mesh")));
    EXPECT_THAT(message_of<UsageError>([&] { FullyShard(*make(torch::ones({4})), mesh); }),
                HasSubstr("is shared with another block"));
    const auto drawn = in_turn(static_cast<std::uint64_t>(world.rank()), [&] {
      const ShardedConstruction divided(mesh);
      return models::make_causal_lm(gpt_config());
    });
    EXPECT_THAT(message_of<UsageError>([&] { FullyShard(*drawn, mesh); }),
                AllOf(HasSubstr("fingerprint"), HasSubstr("the same seed")));
    EXPECT_THAT(message_of<UsageError>([&] {
                  const ShardedConstruction divided(mesh);
                  nn::made(std::make_shared<torch::nn::LinearImpl>(2, 2));
                }),
                HasSubstr("no nn::Block"));
    world.barrier();
  });
}

}  // namespace
}  // namespace lockstep::construction
