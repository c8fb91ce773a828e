// What DistributedDataParallel does with models that are not plain: sparse, frozen, mixed, with
// buffers, with uneven inputs; hooks and SyncBatchNorm.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::run_threads;

bool same_on_all(World& world, const at::Tensor& t) {
  bool same = true;
  const auto parts = world.all_gather(t.is_sparse() ? t.to_dense() : t);
  for (const auto& part : parts) same &= part.equal(parts[0]);
  return same;
}

struct Pair : torch::nn::Module {
  Pair() {
    a = register_module("a", torch::nn::Linear(4, 4));
    b = register_module("b", torch::nn::Linear(4, 4));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto h = a(x);
    return b(h.to(b->weight.scalar_type()));
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
};

at::Tensor input_of(const World& world) {
  return at::ones({2, 4}) * (world.rank() + 1);
}

// ---------------------------------------------------------------- kinds of parameters

TEST(Kinds, FrozenMixedTiedAndIgnoredParameters) {
  run_threads(3, [](World& world) {
    auto net = std::make_shared<Pair>();
    net->a->weight.set_requires_grad(false);
    net->b->to(torch::kDouble);
    net->register_parameter("tied", net->b->bias);
    net->register_parameter("local", torch::full({2}, static_cast<float>(world.rank())));
    DistributedDataParallel model{net, world, {.ignored_parameters = {"local"}}};
    const auto local = net->named_parameters()["local"];
    (model(input_of(world)).sum() + (local * (world.rank() + 1)).sum()).backward();
    EXPECT_FALSE(net->a->weight.grad().defined());
    EXPECT_TRUE(same_on_all(world, net->a->bias.grad()));
    EXPECT_TRUE(same_on_all(world, net->b->bias.grad()));
    EXPECT_EQ(net->b->bias.grad().scalar_type(), torch::kDouble);
    EXPECT_TRUE(local.grad().equal(torch::full({2}, world.rank() + 1.f)));
    EXPECT_TRUE(local.detach().equal(torch::full({2}, static_cast<float>(world.rank()))));
    model.verify_replicas();
  });
}

TEST(Kinds, NothingToTrainIsRefused) {
  EXPECT_THAT(message_of<UsageError>([] {
                run_threads(2, [](World& world) {
                  auto net = std::make_shared<Pair>();
                  for (auto& p : net->parameters()) p.set_requires_grad(false);
                  DistributedDataParallel model{net, world};
                });
              }),
              HasSubstr("none of the model's 4 parameters requires a gradient"));
}

TEST(Kinds, SparseEmbeddingGradients) {
  struct Bag : torch::nn::Module {
    Bag() {
      table = register_module(
          "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true)));
      head = register_module("head", torch::nn::Linear(3, 1));
    }
    at::Tensor forward(const at::Tensor& ids) { return head(table(ids)); }
    torch::nn::Embedding table{nullptr};
    torch::nn::Linear head{nullptr};
  };
  run_threads(3, [](World& world) {
    auto net = std::make_shared<Bag>();
    DistributedDataParallel model{net, world};
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const auto ids = torch::tensor({world.rank(), world.rank(), 7}, torch::kLong);
      model(ids).sum().backward();
      ASSERT_TRUE(net->table->weight.grad().is_sparse());
      const auto dense = net->table->weight.grad().to_dense();
      EXPECT_TRUE(same_on_all(world, dense));
      const auto head = net->head->weight.detach()[0];
      EXPECT_TRUE(at::allclose(dense[7], head));                // used once by each of 3
      EXPECT_TRUE(at::allclose(dense[0], head * (2.0 / 3.0)));  // twice by one of 3
      EXPECT_TRUE(at::allclose(dense[9], torch::zeros(3)));
    }
  });
}

// ---------------------------------------------------------------- equal replicas

TEST(Replicas, DifferentModelsAreNamedOnEveryRank) {
  std::atomic<int> named{0};
  run_threads(3, [&](World& world) {
    auto net = std::make_shared<Pair>();
    if (world.rank() == 2) net->b->weight.set_requires_grad(false);
    const auto text = message_of<UsageError>([&] { DistributedDataParallel model{net, world}; });
    EXPECT_THAT(text,
                HasSubstr("rank 0 has 'b.weight: shape [4, 4], Float on cpu, requires_grad=true', "
                          "rank 2 has 'b.weight: shape [4, 4], Float on cpu, "
                          "requires_grad=false'"));
    ++named;
  });
  EXPECT_EQ(named, 3);
}

TEST(Replicas, ALayerThatOnlyOneRankHasIsNamed) {
  run_threads(2, [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(2, 2));
    if (world.rank() == 1) net->push_back(torch::nn::Linear(2, 2));
    EXPECT_THAT(message_of<UsageError>([&] { DistributedDataParallel model{net, world}; }),
                AllOf(HasSubstr("rank 0 has '(no such parameter)'"),
                      HasSubstr("rank 1 has '1.weight: shape [2, 2]")));
  });
}

TEST(Replicas, DifferentOptionsAreNamed) {
  run_threads(3, [](World& world) {
    const auto wrap = [&](const std::function<void(DdpOptions&)>& change) {
      DdpOptions options;
      if (world.rank() == 1) change(options);
      return message_of<UsageError>(
          [&] { DistributedDataParallel model{std::make_shared<Pair>(), world, options}; });
    };
    const auto differs = [](const std::string& first, const std::string& other) {
      return HasSubstr("rank 0 has '" + first + "', rank 1 has '" + other + "'. Build the same");
    };
    EXPECT_THAT(
        wrap([](DdpOptions& o) { o.find_unused_parameters = true; }),
        differs("option find_unused_parameters: false", "option find_unused_parameters: true"));
    EXPECT_THAT(wrap([](DdpOptions& o) { o.bucket_cap_mb = 2.5; }),
                differs("option bucket_cap_mb: unset", "option bucket_cap_mb: 2.5"));
    EXPECT_THAT(wrap([](DdpOptions& o) { o.overlap = true; }),
                differs("option overlap: unset", "option overlap: true"));
    // They decide what lies in the buckets.
    EXPECT_THAT(wrap([](DdpOptions& o) { o.sparse_parameters = {"a.bias"}; }),
                differs("a.bias: shape [4], Float on cpu, requires_grad=true",
                        "a.bias: shape [4], Float on cpu, requires_grad=true, sparse"));
    EXPECT_THAT(
        wrap([](DdpOptions& o) { o.ignored_parameters = {"b.bias"}; }),
        differs("b.bias: shape [4], Float on cpu, requires_grad=true", "(no such parameter)"));
  });
}

// Gradients lie in the buckets as their parameters do: other strides would mix elements up.
TEST(Replicas, ParametersThatLieDifferentlyAreNamed) {
  run_threads(2, [](World& world) {
    const auto wrap = [&](std::int64_t channels, bool last) {
      torch::nn::Conv2d conv(torch::nn::Conv2dOptions(channels, 3, 3));
      if (last)
        conv->weight.set_data(conv->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
      return message_of<UsageError>([&] { DistributedDataParallel model{conv, world}; });
    };
    EXPECT_THAT(wrap(2, world.rank() == 1),
                HasSubstr("rank 0 has 'weight: shape [3, 2, 3, 3], Float on cpu, "
                          "requires_grad=true', rank 1 has 'weight: shape [3, 2, 3, 3], Float on "
                          "cpu, requires_grad=true, strides [18, 1, 6, 2]'"));
    EXPECT_EQ(wrap(2, true), "(nothing thrown)");
    EXPECT_EQ(wrap(1, world.rank() == 1), "(nothing thrown)");  // the same order of elements
  });
}

TEST(Replicas, WhatOneRankCannotWrapNoneWraps) {
  run_threads(3, [](World& world) {
    const bool odd = world.rank() == 1;
    const auto wrap = [&](const std::function<void(DdpOptions&)>& change) {
      DdpOptions options;
      if (odd) change(options);
      return message_of<UsageError>(
          [&] { DistributedDataParallel model{std::make_shared<Pair>(), world, options}; });
    };
    const auto refused = [&](const std::string& text) {
      return HasSubstr(odd ? "[reducer] " + text
                           : "[reducer] rank 1 refused to wrap the model. Its message: [reducer] " +
                                 text);
    };
    EXPECT_THAT(wrap([](DdpOptions& o) { o.bucket_cap_mb = -1; }),
                refused("bucket_cap_mb = -1 must be positive"));
    EXPECT_THAT(wrap([](DdpOptions& o) { o.ignored_parameters = {"c"}; }),
                refused("ignored_parameters names 'c', which the model does not have"));
    EXPECT_THAT(wrap([](DdpOptions& o) { o.static_graph = o.find_unused_parameters = true; }),
                refused("static_graph and find_unused_parameters are both set"));
    const std::string long_name(5000, 'c');
    const std::string cut = wrap([&](DdpOptions& o) { o.sparse_parameters = {long_name}; });
    EXPECT_THAT(cut, refused("sparse_parameters names 'cccc"));
    EXPECT_THAT(cut, ::testing::EndsWith(odd ? "named_parameters()." : "ccc..."));
    const auto net = std::make_shared<Pair>();
    EXPECT_THAT(message_of<UsageError>([&] {
                  Reducer reducer{{{"w", odd ? at::Tensor() : net->a->weight}}, {}, world};
                }),
                refused("parameter 'w' is an undefined tensor"));
    DistributedDataParallel model{net, world};
    model(input_of(world)).sum().backward();
    EXPECT_TRUE(same_on_all(world, net->a->bias.grad()));
  });
}

TEST(Replicas, VerifyNamesTensorAndRank) {
  run_threads(3, [](World& world) {
    auto net = std::make_shared<Pair>();
    DistributedDataParallel model{net, world};
    model.verify_replicas();
    if (world.rank() == 1) {
      torch::NoGradGuard no_grad;
      net->b->bias[3] += 1e-7;  // one bit is enough
    }
    EXPECT_THAT(message_of<CommError>([&] { model.verify_replicas(); }),
                HasSubstr("'b.bias' on rank 1"));
  });
}

TEST(Replicas, BuffersFollowRankZeroAtTheEndOfBackward) {
  run_threads(3, [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
    DistributedDataParallel model{net, world};
    net->forward(input_of(world) + at::randn({2, 4})).sum().backward();  // the raw module, too
    model.verify_replicas();
    DistributedDataParallel off{
        torch::nn::Sequential(torch::nn::BatchNorm1d(4)), world, {.broadcast_buffers = false}};
    off(at::randn({3, 4}) + world.rank()).sum().backward();
    EXPECT_THAT(message_of<CommError>([&] { off.verify_replicas(); }), HasSubstr("running_mean"));
  });
}

// The module whose buffers are saved by the graph: a constant, and BatchNorm's statistics, which
// its kernel writes past their version counters.
struct Normed : torch::nn::Module {
  Normed() {
    linear = register_module("linear", torch::nn::Linear(4, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    mask = register_buffer("mask", torch::tensor({1.f, 0.f, 2.f, 1.f}));
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(norm(linear(x) * mask)); }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor mask;
};

TEST(Replicas, TwoLiveGraphsOfAModelWithBuffers) {
  for (const int size : {2, 3}) {
    run_threads(size, [](World& world) {
      auto net = std::make_shared<Normed>();
      auto plain = std::make_shared<Normed>();
      DistributedDataParallel model{net, world};
      DistributedDataParallel copy{plain, world};  // of rank 0's values as well
      for (std::size_t i = 0; i < net->parameters().size(); ++i)
        plain->parameters()[i].set_data(net->parameters()[i].detach().clone());
      const auto batch = [&](int i) {
        return at::arange(12, at::kFloat).view({3, 4}).mul(i + world.rank()).sin();
      };
      // One rank's gradients of both graphs, then their mean.
      {
        const auto local = copy.no_sync();
        const auto a = plain->forward(batch(1)).sum(), b = plain->forward(batch(2)).sum();
        a.backward({}, /*retain_graph=*/true);
        b.backward();
        a.backward();
      }
      testing::average_gradients(world, plain->parameters());
      const auto a = model(batch(1)).sum(), b = model(batch(2)).sum();
      a.backward({}, /*retain_graph=*/true);
      b.backward();
      a.backward();
      for (std::size_t i = 0; i < net->parameters().size(); ++i)
        EXPECT_TRUE(
            at::allclose(net->parameters()[i].grad(), plain->parameters()[i].grad(), 1e-5, 1e-6))
            << i;
      model.verify_replicas();
    });
  }
}

// What really changes under a graph is refused on every rank, not on all but one.
TEST(Replicas, AGraphThatNeedsAnOverwrittenTensorIsRefusedOnEveryRank) {
  struct Scaled : torch::nn::Module {
    Scaled() {
      linear = register_module("linear", torch::nn::Linear(4, 4));
      scale = register_buffer("scale", torch::ones({4}));
    }
    at::Tensor forward(const at::Tensor& x) {
      {
        const torch::NoGradGuard no_grad;
        scale.mul_(0.5).add_(x.mean());
      }
      return linear(x) * scale;
    }
    torch::nn::Linear linear{nullptr};
    at::Tensor scale;
  };
  for (const int size : {2, 3}) {
    std::atomic<int> refused{0};
    run_threads(size, [&](World& world) {
      const auto expect_refused = [&](const at::Tensor& loss) {
        EXPECT_THAT(message_of<c10::Error>([&] { loss.backward(); }),
                    HasSubstr("modified by an inplace operation"));
        ++refused;
        world.barrier();
      };
      DistributedDataParallel model{std::make_shared<Scaled>(), world};
      const auto twice = model(input_of(world)).sum();
      twice.backward({}, /*retain_graph=*/true);
      expect_refused(twice);  // by the buffers' broadcast
      auto net = std::make_shared<Pair>();
      const auto early = net->forward(input_of(world)).sum();
      DistributedDataParallel wrapped{net, world};
      expect_refused(early);  // by the first broadcast
      at::Tensor late;
      wrapped.join([&] {
        for (int step = 0; step <= world.rank(); ++step) {
          net->zero_grad();
          wrapped(input_of(world)).sum().backward();
        }
        late = net->forward(input_of(world)).sum();
      });
      expect_refused(late);  // by the final model
    });
    EXPECT_EQ(refused, 3 * size);
  }
}

TEST(Replicas, SeveralModelsInOneBackward) {
  run_threads(2, [](World& world) {
    auto first = std::make_shared<Pair>();
    auto second = std::make_shared<Pair>();
    DistributedDataParallel a{first, world};
    DistributedDataParallel b{second, world};
    for (int step = 0; step < 2; ++step) {
      b(a(input_of(world))).sum().backward();
      EXPECT_TRUE(same_on_all(world, first->a->weight.grad()));
      EXPECT_TRUE(same_on_all(world, second->b->weight.grad()));
      first->zero_grad();
      second->zero_grad();
    }
  });
}

// ---------------------------------------------------------------- join

TEST(Join, UnevenInputsEndWithEqualReplicas) {
  for (const bool initial : {true, false}) {
    run_threads(3, [initial](World& world) {
      auto net = std::make_shared<Pair>();
      DistributedDataParallel model{net, world};
      const int steps = 2 + 2 * world.rank();
      at::Tensor last;
      model.join(
          [&] {
            for (int step = 0; step < steps; ++step) {
              net->zero_grad();
              model(input_of(world)).sum().backward();
              last = net->b->bias.grad().clone();
              torch::NoGradGuard no_grad;
              for (auto& p : net->parameters()) p.add_(p.grad(), -0.01);
            }
          },
          {.divide_by_initial_world_size = initial});
      model.verify_replicas();
      // The last rank's final steps were alone: d(sum)/d(b.bias) = 2 per row pair.
      if (world.rank() == 2) {
        EXPECT_TRUE(at::allclose(last, torch::full({4}, initial ? 2.0 / 3 : 2.0)));
      }
      net->zero_grad();
      model(input_of(world)).sum().backward();  // and the model continues as before
      EXPECT_TRUE(same_on_all(world, net->a->weight.grad()));
    });
  }
}

TEST(Join, WorksWithUnusedParametersStaticGraphsAndARankWithoutInput) {
  for (const bool find_unused : {true, false}) {
    run_threads(3, [find_unused](World& world) {
      auto net = std::make_shared<Pair>();
      DistributedDataParallel model{
          net, world, {.find_unused_parameters = find_unused, .static_graph = !find_unused}};
      model.join([&] {
        for (int step = 0; step < world.rank(); ++step) {
          model(input_of(world)).sum().backward();
          torch::NoGradGuard no_grad;
          for (auto& p : net->parameters()) p.add_(p.grad(), -0.01);
          net->zero_grad();
        }
      });
      model.verify_replicas();
    });
  }
}

TEST(Join, CanThrowOnEveryRankInstead) {
  std::atomic<int> thrown{0};
  run_threads(2, [&](World& world) {
    auto net = std::make_shared<Pair>();
    DistributedDataParallel model{net, world};
    const auto text = message_of<UsageError>([&] {
      model.join(
          [&] {
            for (int step = 0; step < 1 + world.rank(); ++step)
              model(input_of(world)).sum().backward();
          },
          {.throw_on_early_termination = true});
    });
    EXPECT_THAT(text, HasSubstr("throw_on_early_termination is set"));
    ++thrown;
  });
  EXPECT_EQ(thrown, 2);
}

// A rank that only takes part learns that the pass has failed, and remembers it like the others.
TEST(Join, APassThatFailsIsRememberedByARankThatHasRunOut) {
  run_threads(3, [](World& world) {
    auto net = std::make_shared<Pair>();
    DistributedDataParallel model{net, world, {.static_graph = true}};
    const auto text = message_of<UsageError>([&] {
      model.join([&] {
        if (world.rank() == 0) net->a(input_of(world)).sum().backward();
        if (world.rank() == 1) model(input_of(world)).sum().backward();
      });
    });
    EXPECT_THAT(text, HasSubstr("'b.weight' got 0 gradients on rank 0 but 1 on rank 1"));
    EXPECT_THAT(message_of<CommError>([&] { model(input_of(world)).sum().backward(); }),
                HasSubstr("the previous backward was interrupted after"));
  });
}

// Averages by the gradients' own tensors instead of the flat bucket.
Reduction average_slots(World& world, const Bucket& bucket) {
  std::vector<at::Tensor> flat;
  for (const auto& gradient : bucket.gradients) flat.push_back(gradient.flatten());
  const at::Tensor sum = at::cat(flat);
  EXPECT_EQ(sum.sum().item<float>(), bucket.data.sum().item<float>());
  return {world.all_reduce(sum), [sum, slots = bucket.gradients, size = world.size()] {
            std::int64_t begin = 0;
            for (const auto& slot : slots) {
              slot.copy_(sum.narrow(0, begin, slot.numel()).view(slot.sizes()) / size);
              begin += slot.numel();
            }
          }};
}

TEST(Join, AHookSeesZerosWhereARankHasRunOut) {
  for (const int size : {2, 3}) {
    run_threads(size, [](World& world) {
      const auto parameter = [] { return at::ones({3}).set_requires_grad(true); };
      std::vector<NamedTensor> list{{"v", parameter()}, {"w", parameter()}};
      Reducer reducer{list, {}, world, {.bucket_cap_mb = 0.00001}};
      reducer.register_comm_hook(average_slots);
      const int last = world.size() - 1;
      const auto step = [&](double scale) {
        for (auto& item : list) item.tensor.mutable_grad() = at::Tensor();
        ((list[0].tensor + list[1].tensor) * scale).sum().backward();
      };
      at::Tensor mine;
      reducer.join(
          [&] {
            step(56);
            mine = list[1].tensor.grad();
            if (world.rank() == last) step(1);
          },
          {});
      for (const auto& item : list)
        EXPECT_TRUE(item.tensor.grad().equal(
            at::full({3}, world.rank() == last ? 1.f / world.size() : 56.f)));
    });
  }
}

TEST(Join, WhatARankUsedWithoutSynchronisingCountsForNothingWhenItHasRunOut) {
  run_threads(3, [](World& world) {
    auto net = std::make_shared<Pair>();
    DistributedDataParallel model{net, world, {.find_unused_parameters = true}};
    model.join([&] {
      if (world.rank() == 0) {
        const auto local = model.no_sync();
        model(input_of(world)).sum().backward();
      } else {
        net->a(input_of(world)).sum().backward();
      }
    });
    EXPECT_EQ(net->b->weight.grad().defined(), world.rank() == 0);
  });
}

// ---------------------------------------------------------------- hooks

TEST(Hooks, CompressionRoundsAndAUsersOwnIsCalled) {
  run_threads(2, [](World& world) {
    auto net = std::make_shared<Pair>();
    DistributedDataParallel plain{net, world};
    plain(input_of(world) / 3).sum().backward();
    const auto exact = net->a->weight.grad().clone();
    for (const auto& [hook, digits] :
         std::vector<std::pair<CommHook, double>>{{hooks::all_reduce(), 0},
                                                  {hooks::fp16_compress(), 2e-3},
                                                  {hooks::bf16_compress(), 2e-2}}) {
      auto copy = std::make_shared<Pair>();
      for (std::size_t i = 0; i < 4; ++i)
        copy->parameters()[i].detach().copy_(net->parameters()[i].detach());
      DistributedDataParallel model{copy, world};
      model.register_comm_hook(hook);
      model(input_of(world) / 3).sum().backward();
      const auto got = copy->a->weight.grad();
      EXPECT_TRUE(at::allclose(got, exact, digits, 1e-7));
      EXPECT_EQ(got.equal(exact), digits == 0);
      EXPECT_THAT(message_of<UsageError>([&] { model.register_comm_hook(hook); }),
                  HasSubstr("already registered"));
    }
    int calls = 0;
    DistributedDataParallel own{std::make_shared<Pair>(), world, {.bucket_cap_mb = 0.00001}};
    own.register_comm_hook([&](World& w, const Bucket& bucket) -> Reduction {
      ++calls;
      EXPECT_EQ(bucket.gradients.size(), bucket.parameters.size());
      return {w.all_reduce(bucket.data), nullptr};
    });
    own(input_of(world)).sum().backward();
    EXPECT_EQ(calls, 4);
  });
}

TEST(Hooks, CannotBeRegisteredDuringBackward) {
  run_threads(2, [](World& world) {
    auto net = std::make_shared<Pair>();
    DistributedDataParallel model{net, world};
    std::string text;
    const auto h = net->a(input_of(world));
    // Reached after b's gradients, which opened the pass.
    h.register_hook([&](const at::Tensor&) {
      text = message_of<UsageError>([&] { model.register_comm_hook(hooks::all_reduce()); });
    });
    net->b(h).sum().backward();
    EXPECT_THAT(text, HasSubstr("register_comm_hook was called during backward"));
    EXPECT_TRUE(same_on_all(world, net->a->weight.grad()));
  });
}

// ---------------------------------------------------------------- SyncBatchNorm

TEST(SyncBatchNorm, EqualsPlainBatchNormOnTheWholeBatch) {
  constexpr int kRanks = 3;
  torch::manual_seed(5);
  // Ranks hold 1, 2 and 4 samples.
  const at::Tensor whole = torch::randn({7, 4, 3, 2}, torch::kDouble) * 3 + 10;
  const at::Tensor weights = torch::randn({7, 4, 3, 2}, torch::kDouble);
  auto plain = torch::nn::BatchNorm2d(4);
  plain->to(torch::kDouble);
  const at::Tensor all = whole.clone().requires_grad_(true);
  const at::Tensor expected = plain(all);
  (expected * weights).sum().backward();
  run_threads(kRanks, [&](World& world) {
    const std::int64_t begins[] = {0, 1, 3, 7};
    const auto begin = begins[world.rank()];
    const auto size = begins[world.rank() + 1] - begin;
    nn::SyncBatchNorm2d norm(world, torch::nn::BatchNormOptions(4));
    norm->to(torch::kDouble);
    const auto x = whole.narrow(0, begin, size).clone().requires_grad_(true);
    const auto y = norm(x);
    (y * weights.narrow(0, begin, size)).sum().backward();
    EXPECT_TRUE(at::allclose(y, expected.narrow(0, begin, size), 1e-9, 1e-11));
    EXPECT_TRUE(at::allclose(x.grad(), all.grad().narrow(0, begin, size), 1e-8, 1e-10));
    at::Tensor d_weight = norm->weight.grad().clone();
    world.all_reduce(d_weight).wait();
    EXPECT_TRUE(at::allclose(d_weight, plain->weight.grad(), 1e-9, 1e-10));
    EXPECT_TRUE(at::allclose(norm->running_mean, plain->running_mean, 1e-9, 1e-11));
    EXPECT_TRUE(at::allclose(norm->running_var, plain->running_var, 1e-9, 1e-11));
    EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 1);
    norm->eval();
    EXPECT_TRUE(norm(x).defined());
  });
}

// Rank r has r + 1 samples of the whole batch.
at::Tensor part_of(const at::Tensor& whole, const World& world) {
  return whole.narrow(0, world.rank() * (world.rank() + 1) / 2, world.rank() + 1);
}

// Two gradient penalties, one inside the other: needs third derivatives.
template <typename Model>
at::Tensor penalised(Model&& model, const at::Tensor& x, const at::Tensor& w) {
  const auto penalty = [&](const at::Tensor& loss) {
    const auto dx = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true,
                                          /*create_graph=*/true)[0];
    return loss + (dx.square() * w).sum();
  };
  return penalty(penalty((torch::tanh(model(x)) * w).sum()));
}

// BatchNorm written out: LibTorch's own takes the statistics for constants in third derivatives.
at::Tensor plain_norm(const torch::nn::BatchNorm2d& norm, const at::Tensor& x) {
  const auto centred = x - x.mean({0, 2, 3}, true);
  const auto y = centred / (centred.square().mean({0, 2, 3}, true) + norm->options.eps()).sqrt();
  if (!norm->weight.defined()) return y;
  return y * norm->weight.view({1, -1, 1, 1}) + norm->bias.view({1, -1, 1, 1});
}

TEST(SyncBatchNorm, HigherDerivativesEqualThoseOfOneProcessOnTheWholeBatch) {
  for (const int size : {2, 3}) {
    for (const bool affine : {true, false}) {
      SCOPED_TRACE(fmt::format("{} ranks{}", size, affine ? ", affine" : ""));
      torch::manual_seed(7);
      const auto whole = torch::randn({size * (size + 1) / 2, 4, 2, 2}, torch::kDouble) * 2 + 3;
      const auto weights = torch::randn(whole.sizes(), torch::kDouble);
      const auto options = torch::nn::BatchNormOptions(4).affine(affine);
      const auto scale = [](auto& norm) {
        const torch::NoGradGuard no_grad;
        norm->to(torch::kDouble);
        if (norm->weight.defined()) norm->weight.copy_(torch::linspace(0.5, 1.5, 4));
      };
      torch::nn::BatchNorm2d plain(options);
      scale(plain);
      const auto all = whole.clone().requires_grad_(true);
      penalised([&](const at::Tensor& x) { return plain_norm(plain, x); }, all, weights).backward();
      run_threads(size, [&](World& world) {
        nn::SyncBatchNorm2d norm(world, options);
        scale(norm);
        const auto x = part_of(whole, world).clone().requires_grad_(true);
        penalised(norm, x, part_of(weights, world)).backward();
        EXPECT_TENSOR_NEAR(x.grad(), part_of(all.grad(), world), 1e-8);
        if (!affine) return;
        for (const auto& [mine, expected] :
             {std::pair(norm->weight, plain->weight), std::pair(norm->bias, plain->bias)}) {
          at::Tensor sum = mine.grad().clone();
          world.all_reduce(sum).wait();
          EXPECT_TENSOR_NEAR(sum, expected.grad(), 1e-8);
        }
      });
    }
  }
}

TEST(SyncBatchNorm, AGradientPenaltyUnderDdpEqualsOneProcess) {
  const auto build = [](auto norm) {
    torch::nn::Sequential net(torch::nn::Linear(3, 4), norm, torch::nn::Linear(4, 2));
    const torch::NoGradGuard no_grad;
    net->to(torch::kDouble);
    for (auto& p : net->parameters())
      p.copy_(at::arange(1, p.numel() + 1, at::kDouble).sin().view(p.sizes()));
    return net;
  };
  for (const int size : {2, 3}) {
    torch::manual_seed(8);
    const auto whole = torch::randn({size * (size + 1) / 2, 3}, torch::kDouble);
    auto plain = build(torch::nn::BatchNorm1d(4));
    const auto all = whole.clone().requires_grad_(true);
    const auto run = [&](auto&& net, const at::Tensor& x) {
      const auto y = net(x).square().sum();
      const auto dx = torch::autograd::grad({y}, {x}, {}, true, true)[0];
      (y + dx.square().sum()).backward();
    };
    run([&](const at::Tensor& x) { return plain->forward(x); }, all);
    run_threads(size, [&](World& world) {
      auto net = build(nn::SyncBatchNorm1d(world, torch::nn::BatchNormOptions(4)));
      DistributedDataParallel model{net, world, {.bucket_cap_mb = 0.00001}};
      run(model, part_of(whole, world).clone().requires_grad_(true));
      for (std::size_t i = 0; i < net->parameters().size(); ++i)
        EXPECT_TENSOR_NEAR(net->parameters()[i].grad() * size, plain->parameters()[i].grad(), 1e-8);
    });
  }
}

TEST(SyncBatchNorm, AnEmptyBatchOnARankIsFineAndOneValueIsRefused) {
  run_threads(2, [](World& world) {
    nn::SyncBatchNorm1d norm(world, torch::nn::BatchNormOptions(2));
    const auto x = torch::randn({world.rank() == 0 ? 0 : 3, 2}).requires_grad_(true);
    norm(x).sum().backward();
    const auto means = world.all_gather(norm->running_mean);
    EXPECT_TRUE(means[0].equal(means[1]));
    EXPECT_THAT(message_of<UsageError>([&] { norm(torch::randn({world.rank() == 0 ? 1 : 0, 2})); }),
                HasSubstr("has 1 values per channel"));
  });
}

struct DebugMode {
  DebugMode() { ::setenv("LOCKSTEP_DEBUG", "1", 1); }
  ~DebugMode() { ::unsetenv("LOCKSTEP_DEBUG"); }
};

TEST(SyncBatchNorm, ARankThatSkipsItIsNamedInDebugMode) {
  struct Optional : torch::nn::Module {
    explicit Optional(const World& world)
        : norm(register_module("norm", nn::SyncBatchNorm1d(world, torch::nn::BatchNormOptions(4)))),
          head(register_module("head", torch::nn::Linear(4, 1))) {}
    at::Tensor forward(const at::Tensor& x, bool normalise) {
      return head(normalise ? norm(x) : x);
    }
    nn::SyncBatchNorm1d norm;
    torch::nn::Linear head;
  };
  const DebugMode debug;
  run_threads(2, [](World& world) {
    DistributedDataParallel model{
        std::make_shared<Optional>(world), world, {.find_unused_parameters = true}};
    const auto text =
        message_of<CommError>([&] { model(input_of(world), world.rank() == 0).sum().backward(); });
    EXPECT_THAT(text, HasSubstr("ranks call different operations"));
    EXPECT_THAT(text, HasSubstr("all_gather Float [9]"));
    EXPECT_THAT(text, HasSubstr("all_reduce Float"));
  });
}

}  // namespace
}  // namespace lockstep
