// Models that are changed after wrapping: frozen, unfrozen, moved, with new parameters; on all
// ranks, or on one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>

#include "lockstep/core/error.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/ddp.h"
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
void expect_mean_gradients(World& world, TwoLinear& net) {
  TwoLinear plain;
  for (std::size_t i = 0; i < 4; ++i) {
    at::Tensor p = plain.parameters()[i];
    p.set_data(net.parameters()[i].detach().clone());
    p.set_requires_grad(net.parameters()[i].requires_grad());
  }
  plain.forward(input_by_rank(world)).sum().backward();
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
  const char* line;  // how the error shows it
  std::function<void(TwoLinear&)> make, take_back;
};

const std::vector<Change>& changes() {
  static const std::vector<Change> all{
      {"freeze", "parameter 'a.weight' was frozen.",
       [](TwoLinear& net) { net.a->weight.set_requires_grad(false); },
       [](TwoLinear& net) { net.a->weight.set_requires_grad(true); }},
      {"unfreeze", "parameter 'b.bias' was unfrozen.",
       [](TwoLinear& net) { net.b->bias.set_requires_grad(true); },
       [](TwoLinear& net) { net.b->bias.set_requires_grad(false); }},
      {"one layer's dtype",
       "parameter 'b.weight' was moved to Double, parameter 'b.bias' was moved to Double.",
       [](TwoLinear& net) { net.b->to(torch::kDouble); },
       [](TwoLinear& net) { net.b->to(torch::kFloat); }},
      // Drops every hook that LibTorch keeps on accumulators.
      {"every dtype",
       "parameter 'a.weight' was moved to Double, parameter 'a.bias' was moved to Double, ",
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

// A model on one rank, with its last bias frozen, and its training step.
struct Wrapped {
  Wrapped(World& the_world, const Kind& the_kind) : world(the_world), kind(the_kind) {
    net->b->bias.set_requires_grad(false);
    wrap();
  }
  void wrap() {
    model.emplace(net, world, kind.options);
    if (kind.hook) model->register_comm_hook(hooks::all_reduce());
  }
  void step(bool raw = false) {
    net->zero_grad();
    const at::Tensor input = input_by_rank(world);
    (raw ? net->forward(input) : (*model)(input)).sum().backward();
  }

  World& world;
  const Kind& kind;
  std::shared_ptr<TwoLinear> net = std::make_shared<TwoLinear>();
  std::optional<DistributedDataParallel<std::shared_ptr<TwoLinear>>> model;
};

TEST(Change, OnAllRanksIsRefusedUntilTheModelIsWrappedAgain) {
  for (const Kind& kind : kinds()) {
    for (const bool raw : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, {}", kind.name, raw ? "raw" : "wrapped"));
      run_threads(2, [&](World& world) {
        Wrapped wrapped(world, kind);
        TwoLinear& net = *wrapped.net;
        const auto step = [&] { wrapped.step(raw); };
        step();
        for (const Change& change : changes()) {
          SCOPED_TRACE(change.name);
          change.make(net);
          EXPECT_THAT(message_of<UsageError>(step),
                      AllOf(HasSubstr("changed after it was wrapped: on ranks 0, 1 "),
                            HasSubstr(change.line), HasSubstr("wrap the model again")));
          wrapped.wrap();
          for (int i = 0; i < 2; ++i) step();
          expect_mean_gradients(world, net);
          change.take_back(net);
          wrapped.wrap();
          step();
          expect_mean_gradients(world, net);
        }
      });
    }
  }
}

TEST(Change, OnOneRankEndsEveryRankByNameAndCanBeTakenBack) {
  for (const int ranks : {2, 3}) {
    for (const Kind& kind : kinds()) {
      run_threads(ranks, [&](World& world) {
        Wrapped wrapped(world, kind);
        TwoLinear& net = *wrapped.net;
        const auto step = [&] { wrapped.step(); };
        step();
        int turn = 0;
        for (const Change& change : changes()) {
          SCOPED_TRACE(fmt::format("{} ranks, {}, {}", ranks, kind.name, change.name));
          const int culprit = turn++ % ranks;
          const bool mine = world.rank() == culprit;
          if (mine) change.make(net);
          EXPECT_THAT(message_of<UsageError>(step),
                      AllOf(HasSubstr(fmt::format("on rank {} {}", culprit, change.line)),
                            HasSubstr("wrap the model again")));
          if (mine) change.take_back(net);
          step();
          expect_mean_gradients(world, net);
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
    EXPECT_THAT(
        message_of<UsageError>([&] { model(input_by_rank(world)).sum().backward(); }),
        HasSubstr("on rank 0 parameter 'a.bias' was frozen; on rank 1 parameter 'b.bias' was "
                  "frozen."));
  });
}

TEST(Change, WithoutSynchronisingIsRefusedWhenRanksSynchronise) {
  run_threads(2, [](World& world) {
    auto net = std::make_shared<TwoLinear>();
    DistributedDataParallel model{net, world};
    const auto backward = [&] { model(input_by_rank(world)).sum().backward(); };
    {
      const auto guard = model.no_sync();
      net->to(torch::kDouble);
      backward();
    }
    EXPECT_THAT(message_of<UsageError>(backward),
                HasSubstr("parameter 'a.weight' was moved to Double"));
  });
}

TEST(Change, BetweenForwardAndBackwardIsRefused) {
  run_threads(2, [](World& world) {
    auto net = std::make_shared<TwoLinear>();
    DistributedDataParallel model{net, world};
    const auto loss = model(input_by_rank(world)).sum();
    net->a->weight.set_requires_grad(false);
    EXPECT_THAT(message_of<UsageError>([&] { loss.backward(); }),
                HasSubstr("parameter 'a.weight' was frozen"));
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
      EXPECT_THAT(text, HasSubstr(fmt::format("on ranks {}1, 2 parameter 'a.bias' was frozen.",
                                              on_all ? "0, " : "")));
      ++refused;
    });
    EXPECT_EQ(refused, 3);
  }
}

static_assert(detail::PointsToModule<std::shared_ptr<TwoLinear>>);
static_assert(detail::PointsToModule<torch::nn::Linear>);
static_assert(detail::PointsToModule<torch::nn::Sequential>);
static_assert(!detail::PointsToModule<TwoLinear>);  // DistributedDataParallel{*net, world}
static_assert(!detail::PointsToModule<torch::nn::LinearImpl>);

// ---------------------------------------------------------------- parameters that are new

// In place of the one that was wrapped; returns that one.
torch::nn::Linear replace_b(TwoLinear& net, torch::nn::Linear layer) {
  const torch::nn::Linear before = net.b;
  net.b = net.replace_module("b", std::move(layer));
  return before;
}

TEST(Change, AReplacedLayerIsRefusedByEveryRankAndCanBeTakenBack) {
  for (const Kind& kind : kinds()) {
    run_threads(3, [&](World& world) {
      Wrapped wrapped(world, kind);
      TwoLinear& net = *wrapped.net;
      const auto step = [&] { wrapped.step(); };
      step();
      for (const int culprit : {0, 2, -1}) {  // -1: every rank
        SCOPED_TRACE(fmt::format("{}, {}", kind.name, culprit));
        const bool mine = culprit < 0 || world.rank() == culprit;
        torch::nn::Linear before = net.b;
        if (mine) before = replace_b(net, torch::nn::Linear(4, 4));
        const std::string who = culprit < 0 ? "ranks 0, 1, 2" : fmt::format("rank {}", culprit);
        EXPECT_THAT(message_of<UsageError>(step),
                    HasSubstr(fmt::format("on {} parameter 'b.weight' was replaced, parameter "
                                          "'b.bias' was replaced. ",
                                          who)));
        if (mine) replace_b(net, before);
        step();
        expect_mean_gradients(world, net);
      }
    });
  }
}

TEST(Change, ALayerThatWasAppendedIsRefusedThoughBackwardReachesNoOther) {
  run_threads(2, [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    net->ptr(0)->named_parameters()["weight"].set_requires_grad(false);
    net->ptr(0)->named_parameters()["bias"].set_requires_grad(false);
    DistributedDataParallel model{net, world};
    torch::nn::Linear head(4, 2);
    net->push_back(head);
    const auto through_all = [&] { model.forward(at::ones({2, 4})).sum().backward(); };
    EXPECT_THAT(message_of<UsageError>(through_all),
                HasSubstr("on ranks 0, 1 parameter '2.weight' was added, parameter '2.bias' was "
                          "added. "));
    const auto through_head = [&] {
      model.reducer().watch(head->forward(at::ones({2, 4}))).sum().backward();
    };
    EXPECT_THAT(message_of<UsageError>(through_head), HasSubstr("parameter '2.weight' was added"));
    head->weight.set_requires_grad(false);  // one that is not trained has no gradient to miss
    head->bias.set_requires_grad(false);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      through_all();
      const auto parts = world.all_gather(net->ptr(1)->named_parameters()["weight"].grad());
      EXPECT_TRUE(parts[0].equal(parts[1]));
    }
    head->bias.set_requires_grad(true);
    EXPECT_THAT(message_of<UsageError>(through_all),
                HasSubstr("on ranks 0, 1 parameter '2.bias' was added. "));
  });
}

TEST(Change, ALayerThatWasAppendedIsRefusedAroundTheWrapperToo) {
  run_threads(2, [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(4, 4));
    DistributedDataParallel model{net, world};
    model.forward(at::ones({2, 4})).sum().backward();
    {
      const auto guard = model.no_sync();
      model.forward(at::ones({2, 4})).sum().backward();
      net->push_back(torch::nn::Linear(4, 2));
      model.forward(at::ones({2, 4})).sum().backward();
    }
    EXPECT_THAT(
        message_of<UsageError>([&] { net->forward(at::ones({2, 4})).sum().backward(); }),
        HasSubstr("on ranks 0, 1 parameter '1.weight' was added, parameter '1.bias' was added. "));
  });
}

TEST(Change, AParameterThatIsIgnoredMayBeReplaced) {
  run_threads(2, [](World& world) {
    auto net = std::make_shared<TwoLinear>();
    DistributedDataParallel model{net, world, {.ignored_parameters = {"b.weight", "b.bias"}}};
    replace_b(*net, torch::nn::Linear(4, 4));
    model(input_by_rank(world)).sum().backward();
    const auto parts = world.all_gather(net->a->weight.grad());
    EXPECT_TRUE(parts[0].equal(parts[1]));
  });
}

TEST(Change, WrappersMayGoInAnyOrder) {
  run_threads(2, [](World& world) {
    auto net = std::make_shared<TwoLinear>();
    using Ddp = DistributedDataParallel<std::shared_ptr<TwoLinear>>;
    auto first = std::make_unique<Ddp>(net, world);
    auto second = std::make_unique<Ddp>(net, world);
    first.reset();
    net->forward(input_by_rank(world)).sum().backward();
    expect_mean_gradients(world, *net);
    // Drops every hook that LibTorch keeps on accumulators.
    net->to(torch::kDouble);
    net->to(torch::kFloat);
    net->zero_grad();
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
