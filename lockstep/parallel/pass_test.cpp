// When a pass of the reducer begins and ends: backwards inside others, and those that fail.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::run_threads;

// A call too many turned synchronisation off for good; only the guard NoSync, which pairs the
// calls, can make them.
template <typename T>
concept SetsSync = requires(T& reducer) { reducer.set_sync(true); };
static_assert(!SetsSync<Reducer>);

class PassAtSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, PassAtSize, ::testing::Values(2, 3));

struct TwoWays : torch::nn::Module {
  TwoWays() {
    left = register_module("left", torch::nn::Linear(2, 2));
    right = register_module("right", torch::nn::Linear(2, 2));
    never = register_module("never", torch::nn::Linear(2, 2));
  }
  at::Tensor forward(const at::Tensor& x, int which) { return which == 0 ? left(x) : right(x); }
  at::Tensor all(const at::Tensor& x) { return left(x) + right(x) + never(x); }
  torch::nn::Linear left{nullptr}, right{nullptr}, never{nullptr};
};

at::Tensor ones() {
  return at::ones({1, 2});
}
// A loss that differs over ranks by this factor has weights with this mean gradient.
double scale_of(const World& world) {
  return world.rank() + 1;
}
at::Tensor mean_of(const World& world) {
  return at::full({2, 2}, (world.size() + 1) / 2.f);
}

// Runs something in the middle of a backward.
struct During : torch::autograd::Function<During> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x,
                            std::function<void()> body) {
    bodies().push_back(std::move(body));
    return x.clone();
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                          const std::vector<at::Tensor>& gradients) {
    const auto body = std::move(bodies().back());
    bodies().pop_back();
    const torch::AutoGradMode on(true);
    body();
    return {gradients[0], at::Tensor()};
  }
  static std::vector<std::function<void()>>& bodies() {
    static thread_local std::vector<std::function<void()>> list;
    return list;
  }
};

// The whole backward of a wrapped model may lie inside another one.
void run_during_backward(const std::function<void()>& body) {
  During::apply(ones().set_requires_grad(true) * 2, body).sum().backward();
}

// The whole backward of a wrapped model, inside another one that does not know of it.
TEST_P(PassAtSize, ANestedBackwardThatMissesAParameterNamesItOrCountsItAsUnused) {
  run_threads(GetParam(), [](World& world) {
    const auto missing = [&](auto& model) {
      return [&] { (model(ones(), 0) * scale_of(world)).sum().backward(); };
    };
    auto net = std::make_shared<TwoWays>();
    DistributedDataParallel model{net, world};
    const auto refused = HasSubstr("4 of 6 parameters got no gradient in step 0: right.weight");
    EXPECT_THAT(message_of<UsageError>([&] { run_during_backward(missing(model)); }), refused);
    EXPECT_THAT(message_of<UsageError>(
                    [&] { run_during_backward([&] { run_during_backward(missing(model)); }); }),
                refused);
    // In a node that nothing follows.
    const auto leaf = ones().set_requires_grad(true);
    leaf.register_hook([&](const at::Tensor&) {
      const torch::AutoGradMode on(true);
      missing(model)();
    });
    EXPECT_THAT(message_of<UsageError>([&] { leaf.sum().backward(); }), refused);
    // Nothing was sent: the step can be repeated, nested or not.
    const auto all = [&] { (net->all(ones()) * scale_of(world)).sum().backward(); };
    for (const bool inside : {false, true}) {
      net->zero_grad();
      inside ? run_during_backward(all) : all();
      EXPECT_TENSOR_NEAR(net->never->weight.grad(), mean_of(world), 1e-6);
    }
    for (const bool find_unused : {true, false}) {
      auto other = std::make_shared<TwoWays>();
      DistributedDataParallel lenient{
          other, world, {.find_unused_parameters = find_unused, .static_graph = !find_unused}};
      for (int step = 0; step < 3; ++step) {
        other->zero_grad();
        run_during_backward(missing(lenient));
        EXPECT_TENSOR_NEAR(other->left->weight.grad(), mean_of(world), 1e-6);
        EXPECT_FALSE(other->right->weight.grad().defined());
      }
    }
  });
}

// Parts of the model in nested backwards, one after the other or in one node.
TEST_P(PassAtSize, NestedBackwardsAddUpToOnePass) {
  run_threads(GetParam(), [](World& world) {
    auto net = std::make_shared<TwoWays>();
    DistributedDataParallel model{net, world};
    const auto part = [&](torch::nn::Linear& layer) {
      return [&] { (layer(ones()) * scale_of(world)).sum().backward(); };
    };
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      const auto both = [&] {
        part(net->left)();
        part(net->right)();
      };
      const auto x = (net->never(ones()) * scale_of(world)).sum();
      if (step % 2 == 0)
        During::apply(x, both).backward();
      else
        During::apply(During::apply(x, part(net->left)), part(net->right)).backward();
      for (auto* layer : {&net->left, &net->right, &net->never})
        EXPECT_TENSOR_NEAR((*layer)->weight.grad(), mean_of(world), 1e-6);
      // Where the accumulator of a parameter follows, which outlives the graph.
      net->zero_grad();
      ((During::apply(net->never->weight, both).sum() + net->never->bias.sum()) * scale_of(world))
          .backward();
      for (auto* layer : {&net->left, &net->right, &net->never})
        EXPECT_TENSOR_NEAR((*layer)->weight.grad(), mean_of(world), 1e-6);
      EXPECT_TRUE(torch::autograd::impl::hooks(net->never->weight).empty());
    }
  });
}

TEST_P(PassAtSize, AnOuterBackwardThatFailsLeavesNothingBehind) {
  run_threads(GetParam(), [](World& world) {
    auto net = std::make_shared<TwoWays>();
    DistributedDataParallel model{net, world, {.bucket_cap_mb = 0.00001, .overlap = false}};
    const auto failing = [&](bool later) {
      const auto fail = [] { throw std::runtime_error("planted"); };
      const auto x = ones().set_requires_grad(true) * 2;
      return During::apply(later ? During::apply(x, fail) : x,
                           [=] {
                             net->left(ones()).mul(100).sum().backward();
                             if (!later) fail();
                           })
          .sum();
    };
    const auto step = [&] {
      net->zero_grad();
      (net->all(ones()) * scale_of(world)).sum().backward();
    };
    for (const bool later : {false, true}) {
      EXPECT_THROW(failing(later).backward(), std::runtime_error);
      step();
      for (auto* layer : {&net->left, &net->right, &net->never})
        EXPECT_TENSOR_NEAR((*layer)->weight.grad(), mean_of(world), 1e-6);
    }
    const auto retained = failing(false);  // its graph lives on, and what waits for its end
    EXPECT_THROW(retained.backward(), std::runtime_error);
    EXPECT_THAT(message_of<UsageError>(step), HasSubstr("an earlier backward did not finish"));
    step();
    EXPECT_TENSOR_NEAR(net->left->weight.grad(), mean_of(world), 1e-6);
  });
}

// The first gradient opens the pass and counts unused parameters, which may fail halfway.
TEST_P(PassAtSize, APassThatCouldNotBeOpenedIsForgotten) {
  run_threads(GetParam(), [](World& world) {
    auto net = std::make_shared<TwoWays>();
    DistributedDataParallel model{
        net, world, {.bucket_cap_mb = 0.00001, .find_unused_parameters = true, .overlap = true}};
    const auto backward = [&](int which) {
      (model(ones(), which) * scale_of(world)).sum().backward();
    };
    for (int i = 0; i < 2; ++i) {
      net->never->bias.mutable_grad() = at::ones({7});  // of another shape
      EXPECT_THROW(backward(0), c10::Error);
    }
    net->zero_grad();
    backward(1);
    EXPECT_TENSOR_NEAR(net->right->weight.grad(), mean_of(world), 1e-6);
    EXPECT_FALSE(net->left->weight.grad().defined());
    EXPECT_FALSE(net->never->bias.grad().defined());
  });
}

// A change of the model is announced with the old buckets: what was sent cannot be taken back.
TEST_P(PassAtSize, AnAnnouncementThatFailsIsRemembered) {
  run_threads(GetParam(), [](World& world) {
    auto net = std::make_shared<TwoWays>();
    DistributedDataParallel model{net, world};
    bool fails = false;
    model.register_comm_hook([&](World& w, const Bucket& bucket) -> Reduction {
      if (fails) throw std::runtime_error("planted");
      return {w.all_reduce(bucket.data, ReduceOp::kAvg), nullptr};
    });
    const auto step = [&] { net->all(ones()).sum().backward(); };
    step();
    net->never->bias.set_requires_grad(false);
    fails = true;
    EXPECT_THROW(step(), std::runtime_error);
    fails = false;
    for (int i = 0; i < 2; ++i)
      EXPECT_THAT(message_of<CommError>(step), HasSubstr("interrupted after 1 of 1 buckets"));
  });
}

}  // namespace
}  // namespace lockstep
