// Models that are changed after wrapping: frozen, unfrozen, moved; on all ranks, or on one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel/comm_hooks.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/testing/matchers.h"
#include "lockstep/testing/naive_ddp.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_threads;

struct TwoLinear : torch::nn::Module {
  TwoLinear() {
    a = register_module("a", torch::nn::Linear(4, 4));
    b = register_module("b", torch::nn::Linear(4, 4));
    register_buffer("seen", torch::zeros({3}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return b(a(x.to(a->weight.scalar_type())).to(b->weight.scalar_type()));
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
};

at::Tensor input_by_rank(const World& world) {
  return at::ones({2, 4}) * (world.rank() + 1);
}

// After a backward: what the mean over ranks must be, from a plain copy of the model.
void expect_mean_gradients(World& world, TwoLinear& net, double times = 1) {
  TwoLinear plain;
  for (std::size_t i = 0; i < 4; ++i) {
    at::Tensor p = plain.parameters()[i];
    p.set_data(net.parameters()[i].detach().clone());
    p.set_requires_grad(net.parameters()[i].requires_grad());
  }
  (plain.forward(input_by_rank(world)).sum() * times).backward();
  std::vector<at::Tensor> trained;
  for (const auto& p : plain.parameters())
    if (p.requires_grad()) trained.push_back(p);
  testing::average_gradients(world, trained);
  for (std::size_t i = 0; i < 4; ++i) {
    const auto expected = plain.parameters()[i].grad();
    const auto got = net.parameters()[i].grad();
    ASSERT_EQ(expected.defined(), got.defined()) << i;
    if (!expected.defined()) continue;
    EXPECT_EQ(got.scalar_type(), expected.scalar_type()) << i;
    EXPECT_TRUE(at::allclose(got, expected, 1e-5, 1e-6)) << i;
  }
}

struct Change {
  const char* name;
  const char* line;  // how the comparison shows it
  std::function<void(TwoLinear&)> make, take_back;
};

const std::vector<Change>& changes() {
  static const std::vector<Change> all{
      {"freeze", "'a.weight: shape [4, 4], Float on cpu, requires_grad=false, changed after",
       [](TwoLinear& net) { net.a->weight.set_requires_grad(false); },
       [](TwoLinear& net) { net.a->weight.set_requires_grad(true); }},
      {"unfreeze", "'b.bias: shape [4], Float on cpu, requires_grad=true, changed after",
       [](TwoLinear& net) { net.b->bias.set_requires_grad(true); },
       [](TwoLinear& net) { net.b->bias.set_requires_grad(false); }},
      {"one layer's dtype", "'b.weight: shape [4, 4], Double on cpu, requires_grad=true, changed",
       [](TwoLinear& net) { net.b->to(torch::kDouble); },
       [](TwoLinear& net) { net.b->to(torch::kFloat); }},
      // Drops every hook that LibTorch keeps on accumulators.
      {"every dtype", "'a.weight: shape [4, 4], Double on cpu, requires_grad=true, changed after",
       [](TwoLinear& net) { net.to(torch::kDouble); },
       [](TwoLinear& net) { net.to(torch::kFloat); }},
  };
  return all;
}

struct Kind {
  const char* name;
  DdpOptions options;
  bool hook = false;
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all{
      {"plain", {}},
      {"small buckets", {.bucket_cap_mb = 0.00001}},
      {"find_unused", {.bucket_cap_mb = 0.00001, .find_unused_parameters = true}},
      {"static_graph", {.static_graph = true}},
      {"own gradients", {.gradient_as_bucket_view = false}},
      {"hook", {.bucket_cap_mb = 0.00001}, true},
  };
  return all;
}

TEST(Change, OnAllRanksIsPlannedAgainThroughTheWrapperAndTheRawModule) {
  for (const Kind& kind : kinds()) {
    for (const bool raw : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, {}", kind.name, raw ? "raw" : "wrapped"));
      run_threads(2, [&](World& world) {
        auto net = std::make_shared<TwoLinear>();
        net->b->bias.set_requires_grad(false);
        DistributedDataParallel model{net, world, kind.options};
        if (kind.hook) model.register_comm_hook(hooks::all_reduce());
        const auto step = [&] {
          net->zero_grad();
          (raw ? net->forward(input_by_rank(world)) : model(input_by_rank(world))).sum().backward();
          expect_mean_gradients(world, *net);
        };
        step();
        for (const Change& change : changes()) {
          SCOPED_TRACE(change.name);
          change.make(*net);
          for (int i = 0; i < 3; ++i) step();
          change.take_back(*net);
          step();
        }
      });
    }
  }
}

TEST(Change, OnOneRankEndsEveryRankByNameAndCanBeTakenBack) {
  for (const int ranks : {2, 3}) {
    for (const Kind& kind : kinds()) {
      run_threads(ranks, [&](World& world) {
        auto net = std::make_shared<TwoLinear>();
        net->b->bias.set_requires_grad(false);
        DistributedDataParallel model{net, world, kind.options};
        if (kind.hook) model.register_comm_hook(hooks::all_reduce());
        const auto step = [&] {
          net->zero_grad();
          model(input_by_rank(world)).sum().backward();
        };
        step();
        int turn = 0;
        for (const Change& change : changes()) {
          SCOPED_TRACE(fmt::format("{} ranks, {}, {}", ranks, kind.name, change.name));
          const int culprit = turn++ % ranks;
          const bool mine = world.rank() == culprit;
          if (mine) change.make(*net);
          EXPECT_THAT(message_of<UsageError>(step),
                      AllOf(HasSubstr("the models differ between ranks"),
                            HasSubstr(fmt::format("rank {} has {}", culprit, change.line)),
                            HasSubstr("change it on all identically")));
          if (mine) change.take_back(*net);
          step();
          expect_mean_gradients(world, *net);
        }
      });
    }
  }
}

TEST(Change, DifferentOnEveryRankIsRefusedToo) {
  run_threads(2, [](World& world) {
    auto net = std::make_shared<TwoLinear>();
    DistributedDataParallel model{net, world};
    (world.rank() == 0 ? net->a : net->b)->bias.set_requires_grad(false);
    EXPECT_THAT(message_of<UsageError>([&] { model(input_by_rank(world)).sum().backward(); }),
                HasSubstr("rank 1 has 'a.bias: shape [4], Float on cpu, requires_grad=true'"));
  });
}

TEST(Change, InsideAnAccumulationWindowKeepsWhatWasAccumulated) {
  for (const bool view : {true, false}) {
    run_threads(2, [view](World& world) {
      auto net = std::make_shared<TwoLinear>();
      net->b->bias.set_requires_grad(false);
      DistributedDataParallel model{net, world, {.gradient_as_bucket_view = view}};
      for (int round = 0; round < 2; ++round) {
        net->zero_grad();
        {
          const auto guard = model.no_sync();
          if (round == 1) net->to(torch::kDouble);
          model(input_by_rank(world)).sum().backward();
          model(input_by_rank(world)).sum().backward();
        }
        model(input_by_rank(world)).sum().backward();
        expect_mean_gradients(world, *net, 3);
      }
    });
  }
}

TEST(Change, FreezingOneAndUnfreezingAnotherInsideAWindow) {
  run_threads(2, [](World& world) {
    auto net = std::make_shared<TwoLinear>();
    net->b->bias.set_requires_grad(false);
    DistributedDataParallel model{net, world};
    {
      const auto guard = model.no_sync();
      net->a->weight.set_requires_grad(false);
      net->b->bias.set_requires_grad(true);
      model(input_by_rank(world)).sum().backward();
    }
    model(input_by_rank(world)).sum().backward();
    expect_mean_gradients(world, *net, 2);
    EXPECT_FALSE(net->a->weight.grad().defined());
  });
}

TEST(Change, FreezingBetweenForwardAndBackward) {
  run_threads(2, [](World& world) {
    auto net = std::make_shared<TwoLinear>();
    DistributedDataParallel model{net, world};
    const auto loss = model(input_by_rank(world)).sum();
    net->a->weight.set_requires_grad(false);
    loss.backward();
    expect_mean_gradients(world, *net);
    EXPECT_FALSE(net->a->weight.grad().defined());
  });
}

TEST(Change, WhileAnotherRankHasRunOutOfInputs) {
  for (const bool on_all : {true, false}) {
    std::atomic<int> refused{0};
    run_threads(3, [&](World& world) {
      auto net = std::make_shared<TwoLinear>();
      DistributedDataParallel model{net, world};
      const auto text = message_of<UsageError>([&] {
        model.join([&] {
          const int steps = world.rank() == 0 ? 1 : 3;
          for (int step = 0; step < steps; ++step) {
            if (step == 1) net->a->bias.set_requires_grad(false);
            net->zero_grad();
            model(input_by_rank(world)).sum().backward();
          }
          // The first rank does it when its inputs are used up.
          if (on_all) net->a->bias.set_requires_grad(false);
        });
      });
      if (on_all) {
        EXPECT_EQ(text, "(nothing thrown)");
        model.verify_replicas();
      } else {
        EXPECT_THAT(text, HasSubstr("rank 1 has 'a.bias: shape [4], Float on cpu, "
                                    "requires_grad=false, changed after wrapping'"));
        ++refused;
      }
    });
    EXPECT_EQ(refused, on_all ? 0 : 3);
  }
}

TEST(Change, WrappersMayGoInAnyOrder) {
  run_threads(2, [](World& world) {
    auto net = std::make_shared<TwoLinear>();
    using Ddp = DistributedDataParallel<std::shared_ptr<TwoLinear>>;
    auto first = std::make_unique<Ddp>(net, world);
    auto second = std::make_unique<Ddp>(net, world);
    first.reset();
    net->to(torch::kDouble);
    net->forward(input_by_rank(world)).sum().backward();
    expect_mean_gradients(world, *net);
    auto third = std::make_unique<Ddp>(net, world);
    third.reset();
    net->zero_grad();
    net->to(torch::kFloat);
    net->forward(input_by_rank(world)).sum().backward();
    expect_mean_gradients(world, *net);
    second.reset();
    net->zero_grad();
    net->forward(input_by_rank(world)).sum().backward();  // nobody averages any more
    const auto parts = world.all_gather(net->a->weight.grad());
    EXPECT_FALSE(parts[0].equal(parts[1]));
  });
}

}  // namespace
}  // namespace lockstep
