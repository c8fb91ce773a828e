#include "lockstep/parallel/ddp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <torch/torch.h>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
#include "lockstep/core/ledger.h"
#include "lockstep/optim/amp.h"
#include "lockstep/parallel/activation_checkpoint.h"
#include "lockstep/parallel/reducer.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::run_threads;

struct NetImpl : torch::nn::Module {
  NetImpl() : a(6, 8), b(8, 8), c(8, 3) {
    register_module("a", a);
    register_module("b", b);
    register_module("c", c);
  }
  at::Tensor forward(const at::Tensor& x) { return c(torch::tanh(b(torch::relu(a(x))))); }
  torch::nn::Linear a, b, c;
};
TORCH_MODULE(Net);

Net make_net(int seed = 0) {
  torch::manual_seed(seed);
  return Net();
}

at::Tensor batch_of(int rank, int step = 0) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 + 17 * rank + step);
  return at::randn({5, 6}, generator);
}

std::vector<at::Tensor> gradients_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  for (const auto& p : module.parameters())
    result.push_back(p.grad().defined() ? p.grad().clone() : at::Tensor());
  return result;
}

void expect_close(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    EXPECT_TRUE(at::allclose(a[i], b[i], 1e-6, 1e-7)) << "tensor " << i;
}

// torch's module construction draws from one global generator: build nets one at a time.
std::mutex build_mutex;
Net locked_net(int seed = 0) {
  std::lock_guard<std::mutex> lock(build_mutex);
  return make_net(seed);
}

class DdpAtSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, DdpAtSize, ::testing::Values(1, 2, 3, 4, 7));

TEST_P(DdpAtSize, AveragesLikeOneAllReducePerParameter) {
  run_threads(GetParam(), [](World& world) {
    for (const bool view : {true, false}) {
      Net net = locked_net(world.rank());  // different weights: init_sync must make them equal
      DistributedDataParallel model{
          net,
          world,
          {.bucket_cap_mb = 0.0002, .gradient_as_bucket_view = view, .force_reducer = true}};
      model.verify_replicas();
      for (int step = 0; step < 4; ++step) {
        Net plain = locked_net();
        for (std::size_t i = 0; i < plain->parameters().size(); ++i)
          plain->parameters()[i].detach().copy_(net->parameters()[i].detach());
        plain(batch_of(world.rank(), step)).square().mean().backward();
        testing::average_gradients(world, plain->parameters());
        model(batch_of(world.rank(), step)).square().mean().backward();
        expect_close(gradients_of(*net), gradients_of(*plain));
        for (auto& p : net->parameters()) {
          torch::NoGradGuard no_grad;
          p.add_(p.grad(), -0.1);
          if (step % 2 == 0)
            p.mutable_grad() = at::Tensor();
          else
            p.grad().zero_();
        }
        model.verify_replicas();
      }
      EXPECT_GT(model.reducer().bucket_count(), 1u);
    }
  });
}

TEST(Ddp, OverASubWorldAveragesWithinIt) {
  run_threads(4, [](World& world) {
    const int stage = world.rank() % 2;
    std::optional<World> half = world.split(stage);
    const auto make = [&] {  // another model on each half
      std::lock_guard<std::mutex> lock(build_mutex);
      torch::manual_seed(stage);
      return torch::nn::Linear(6, 3 + stage);
    };
    torch::nn::Linear net = make(), plain = make();
    DistributedDataParallel model{net, *half, {.force_reducer = true}};
    for (int step = 0; step < 3; ++step) {
      model(batch_of(world.rank(), step)).square().mean().backward();
      plain(batch_of(world.rank(), step)).square().mean().backward();
      testing::average_gradients(*half, plain->parameters());
      expect_close(gradients_of(*net), gradients_of(*plain));
      net->zero_grad();
      plain->zero_grad();
      model.verify_replicas();
    }
  });
}

TEST(Ddp, RawModuleSynchronisesAndNoSyncWorksAfterForward) {
  run_threads(2, [](World& world) {
    Net net = locked_net();
    DistributedDataParallel model{net, world};
    const auto loss = net(batch_of(world.rank())).sum();  // the raw module
    loss.backward();
    const auto synced = gradients_of(*net);
    EXPECT_EQ(world.all_gather(synced[0])[0].equal(world.all_gather(synced[0])[1]), true);
    net->zero_grad();
    // PyTorch reads the flag in forward; here it counts when backward runs.
    const auto late = model(batch_of(world.rank())).sum();
    {
      auto guard = model.no_sync();
      late.backward();
    }
    const auto parts = world.all_gather(net->parameters()[0].grad());
    EXPECT_FALSE(parts[0].equal(parts[1]));
  });
}

TEST(Ddp, TwoBackwardsBeforeOneStepAdd) {
  run_threads(2, [](World& world) {
    Net net = locked_net();
    DistributedDataParallel model{net, world};
    model(batch_of(world.rank(), 0)).sum().backward();
    model(batch_of(world.rank(), 1)).sum().backward();
    Net plain = locked_net();
    (plain(batch_of(world.rank(), 0)).sum() + plain(batch_of(world.rank(), 1)).sum()).backward();
    testing::average_gradients(world, plain->parameters());
    expect_close(gradients_of(*net), gradients_of(*plain));
  });
}

TEST(Ddp, GradientsAreBucketAliasesThatStockOptimizersCanUse) {
  run_threads(2, [](World& world) {
    Net net = locked_net();
    DistributedDataParallel model{net, world};
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    void* before = nullptr;
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad(step % 2 == 0);
      model(batch_of(world.rank(), step)).sum().backward();
      optimizer.step();
      void* now = net->parameters()[0].grad().data_ptr();
      if (step > 1) {
        EXPECT_EQ(now, before) << "the gradient left its bucket";
      }
      before = now;
    }
    model.verify_replicas();
  });
}

TEST(Ddp, WrapsHoldersPointersSequentialsAndSeveralInputs) {
  struct Two : torch::nn::Module {
    Two() : left(register_module("left", torch::nn::Linear(2, 2))) {}
    std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& y) {
      return {left(x), left(y)};
    }
    torch::nn::Linear left;
  };
  run_threads(2, [](World& world) {
    DistributedDataParallel a{std::make_shared<Two>(), world, {.find_unused_parameters = true}};
    auto [u, v] = a(at::ones({1, 2}), at::ones({1, 2}) * world.rank());
    (u.sum() + v.sum()).backward();
    a.verify_replicas();
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::ReLU(), torch::nn::Linear(3, 1));
    DistributedDataParallel b{net, world};
    b(at::ones({4, 2})).sum().backward();
    std::vector<NamedTensor> list{{"w", at::ones({3}).set_requires_grad(true)}};
    Reducer reducer{list, {}, world};
    (list[0].tensor * (world.rank() + 1)).sum().backward();
    EXPECT_TRUE(list[0].tensor.grad().equal(at::full({3}, 1.5)));
  });
}

// ---------------------------------------------------------------- with LibTorch's own tools

struct Lines : torch::data::datasets::Dataset<Lines> {
  torch::data::Example<> get(std::size_t index) override {
    const auto x = torch::full({6}, static_cast<float>(index) / 32);
    return {x, torch::full({3}, 2 * x[0].item<float>() - 1)};
  }
  torch::optional<std::size_t> size() const override { return 32; }
};

TEST(Ddp, TrainsWithTorchsDataLoaderSamplerAndOptimizer) {
  run_threads(2, [](World& world) {
    Net net = locked_net(world.rank());
    DistributedDataParallel model{net, world};
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.2).momentum(0.5));
    const auto ranks = static_cast<std::size_t>(world.size());
    const auto rank = static_cast<std::size_t>(world.rank());
    std::vector<double> losses;
    for (std::size_t epoch = 0; epoch < 8; ++epoch) {
      torch::data::samplers::DistributedRandomSampler sampler(32, ranks, rank,
                                                              /*allow_duplicates=*/false);
      sampler.set_epoch(epoch);
      auto loader = torch::data::make_data_loader(Lines().map(torch::data::transforms::Stack<>()),
                                                  std::move(sampler), /*batch_size=*/4);
      at::Tensor seen = at::zeros({32});
      double sum = 0;
      for (auto& batch : *loader) {
        optimizer.zero_grad();
        const auto loss = torch::mse_loss(model(batch.data), batch.target);
        loss.backward();
        optimizer.step();
        sum += loss.item<double>();
        seen.index_add_(0, (batch.data.select(1, 0) * 32).round().to(at::kLong), at::ones({4}));
      }
      world.all_reduce(seen).wait();
      EXPECT_TRUE(seen.equal(at::ones({32}))) << seen;  // every sample once, by one rank
      losses.push_back(all_reduce(world, sum, ReduceOp::kAvg));
      model.verify_replicas();
    }
    EXPECT_LT(losses.back(), losses.front() / 2);
  });
}

// ---------------------------------------------------------------- unused parameters

struct Branches : torch::nn::Module {
  Branches() {
    left = register_module("left", torch::nn::Linear(2, 2));
    right = register_module("right", torch::nn::Linear(2, 2));
    never = register_module("never", torch::nn::Linear(2, 2));
  }
  at::Tensor forward(const at::Tensor& x, int which) {
    if (which == 0) return left(x);
    if (which == 1) return right(x);
    return x * 1.0;
  }
  torch::nn::Linear left{nullptr}, right{nullptr}, never{nullptr};
};

TEST(Ddp, UnusedParametersAreNamed) {
  const std::string text = message_of<UsageError>([] {
    run_threads(2, [](World& world) {
      DistributedDataParallel model{std::make_shared<Branches>(), world};
      model(at::ones({1, 2}), 0).sum().backward();
    });
  });
  EXPECT_THAT(text, HasSubstr("4 of 6 parameters got no gradient in step 0: right.weight, "
                              "right.bias, never.weight, never.bias"));
  EXPECT_THAT(text, HasSubstr("set find_unused_parameters = true"));
}

TEST(Ddp, FindUnusedGivesTheReducedValueAndLeavesTheRest) {
  for (const bool view : {true, false}) {
    run_threads(3, [view](World& world) {
      auto net = std::make_shared<Branches>();
      DistributedDataParallel model{
          net, world, {.find_unused_parameters = true, .gradient_as_bucket_view = view}};
      net->never->weight.mutable_grad() = at::full({2, 2}, 0.1f);
      const at::Tensor saved = net->never->weight.grad().clone();
      for (int step = 0; step < 3; ++step) {
        // Rank 0 takes the left branch, the others the right one.
        model(at::ones({1, 2}), world.rank() == 0 ? 0 : 1).sum().backward();
        EXPECT_TRUE(at::allclose(net->left->weight.grad(), at::full({2, 2}, 1.0 / 3)));
        EXPECT_TRUE(at::allclose(net->right->weight.grad(), at::full({2, 2}, 2.0 / 3)));
        EXPECT_TRUE(net->never->weight.grad().equal(saved));
        EXPECT_FALSE(net->never->bias.grad().defined());
        for (auto* layer : {&net->left, &net->right}) (*layer)->zero_grad();
      }
    });
  }
}

TEST(Ddp, ARankWhoseLossUsesNoParameterIsCoveredByTheWrapper) {
  run_threads(2, [](World& world) {
    auto net = std::make_shared<Branches>();
    DistributedDataParallel model{net, world, {.find_unused_parameters = true}};
    model(at::ones({1, 2}), world.rank() == 0 ? 0 : 2).sum().backward();
    EXPECT_TRUE(net->left->weight.grad().equal(at::full({2, 2}, 0.5)));
  });
}

// ---------------------------------------------------------------- graphs of other shapes

struct Deep : torch::nn::Module {
  explicit Deep(bool check) : checkpointed(check) {
    for (int i = 0; i < 4; ++i)
      layers.push_back(register_module("l" + std::to_string(i), torch::nn::Linear(4, 4)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) {
      const auto block = [&layer](const std::vector<at::Tensor>& in) {
        return torch::tanh(torch::dropout(layer(in[0]), 0.3, true));
      };
      x = checkpointed ? checkpoint(block, {x}) : block({x});
    }
    return x;
  }
  bool checkpointed;
  std::vector<torch::nn::Linear> layers;
};

// What autocasting has converted for one step must not be computed with in the next.
TEST(Checkpoint, UnderAutocastTheNextStepSeesTheNewWeights) {
  auto run = [](bool checkpointed) {
    torch::manual_seed(3);
    Deep net(checkpointed);
    std::vector<float> losses;
    for (int step = 0; step < 4; ++step) {
      at::Tensor loss;
      {
        const optim::Autocast autocast(c10::Device(c10::kCPU), at::kBFloat16);
        loss = net.forward(at::ones({2, 4})).sum();
      }
      loss.backward();
      losses.push_back(loss.item<float>());
      const torch::NoGradGuard no_grad;
      for (auto& p : net.parameters()) p.sub_(p.grad(), 0.5);
      net.zero_grad();
    }
    return losses;
  };
  EXPECT_EQ(run(true), run(false));
}

// Its backward runs another one, over everything in the block.
TEST(Checkpoint, RefusesToBeDifferentiatedAgainOrInPart) {
  torch::manual_seed(3);
  Deep net(true);
  const auto x = at::ones({2, 4}).requires_grad_(true);
  const auto y = net.forward(x).sum();
  EXPECT_THAT(message_of<UsageError>([&] { y.backward({}, true, /*create_graph=*/true); }),
              HasSubstr("create_graph = true reached a checkpointed block"));
  EXPECT_THAT(message_of<UsageError>([&] { torch::autograd::grad({y}, {x}, {}, true, true); }),
              HasSubstr("create_graph = true reached a checkpointed block"));
  EXPECT_THAT(message_of<UsageError>([&] { torch::autograd::grad({y}, {x}, {}, true); }),
              HasSubstr("torch::autograd::grad, or backward with a list of inputs"));
  EXPECT_THAT(message_of<UsageError>([&] { y.backward({}, true, false, {{x}}); }),
              HasSubstr("torch::autograd::grad, or backward with a list of inputs"));
  for (const auto& p : net.parameters()) EXPECT_FALSE(p.grad().defined());
  y.backward();
  EXPECT_TRUE(x.grad().defined());
}

struct Shared : torch::nn::Module {
  Shared() { layer = register_module("layer", torch::nn::Linear(4, 4)); }
  at::Tensor forward(at::Tensor x) {
    for (int i = 0; i < 2; ++i)
      x = checkpoint([this](const auto& in) { return torch::tanh(layer(in[0])); }, {x});
    return x;
  }
  torch::nn::Linear layer{nullptr};
};

TEST(Ddp, StaticGraphCountsAParameterUsedInTwoCheckpointedBlocks) {
  run_threads(2, [](World& world) {
    auto net = std::make_shared<Shared>();
    DistributedDataParallel model{net, world, {.static_graph = true}};
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model(at::ones({2, 4}) * (world.rank() + 1)).sum().backward();
      const auto parts = world.all_gather(net->layer->weight.grad());
      EXPECT_TRUE(parts[0].equal(parts[1]));
    }
  });
  EXPECT_THAT(message_of<UsageError>([] {
                run_threads(2, [](World& world) {
                  DistributedDataParallel model{
                      std::make_shared<Shared>(), world, {.overlap = true}};
                  model(at::ones({2, 4})).sum().backward();
                });
              }),
              HasSubstr("set static_graph = true"));
}

TEST(Ddp, StaticGraphRefusesGraphsThatDifferOnEveryRank) {
  std::atomic<int> refused{0};
  run_threads(3, [&](World& world) {
    auto net = std::make_shared<Shared>();
    DistributedDataParallel model{net, world, {.static_graph = true}};
    const auto text = message_of<UsageError>([&] {
      auto x = model(at::ones({2, 4}));
      if (world.rank() == 2) x = x + net->forward(at::ones({2, 4}));
      x.sum().backward();
    });
    EXPECT_THAT(text, HasSubstr("static_graph: parameter 'layer.weight' got 4 gradients on rank 2 "
                                "but 2 on rank 0"));
    ++refused;
  });
  EXPECT_EQ(refused, 3);
}

torch::nn::Linear unbiased(int in, int out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

// Registered in the order opposite to the one that the first plan hopes for.
struct Backwards : torch::nn::Module {
  Backwards()
      : last(register_module("last", unbiased(6, 7))),
        middle(register_module("middle", unbiased(5, 6))),
        first(register_module("first", unbiased(4, 5))) {}
  at::Tensor forward(const at::Tensor& x) { return last(middle(first(x))); }
  torch::nn::Linear last, middle, first;
};

TEST(Ddp, TheFirstBackwardsOrderIsThePlanFromTheSecondOn) {
  for (const bool static_graph : {false, true}) {
    run_threads(2, [static_graph](World& world) {
      DistributedDataParallel model{
          std::make_shared<Backwards>(),
          world,
          {.bucket_cap_mb = 0.00001, .static_graph = static_graph, .overlap = true}};
      std::vector<std::int64_t> widths;
      model.register_comm_hook([&](World& w, const Bucket& bucket) -> Reduction {
        widths.push_back(bucket.parameters[0].size(0));
        return {w.all_reduce(bucket.data, ReduceOp::kAvg), nullptr};
      });
      for (int step = 0; step < 3; ++step) model(at::ones({2, 4})).sum().backward();
      EXPECT_EQ(widths, (std::vector<std::int64_t>{5, 6, 7, 7, 6, 5, 7, 6, 5}));
    });
  }
}

// A cap that no integer holds, which a plain cast turns negative on x86.
TEST(Ddp, AnInfiniteBucketCapIsOneBucket) {
  run_threads(2, [](World& world) {
    auto net = std::make_shared<Backwards>();
    DistributedDataParallel model{net, world, {.bucket_cap_mb = INFINITY, .overlap = true}};
    int buckets = 0;
    model.register_comm_hook([&](World& w, const Bucket& bucket) -> Reduction {
      ++buckets;
      return {w.all_reduce(bucket.data, ReduceOp::kAvg), nullptr};
    });
    model(at::ones({2, 4})).sum().backward();
    EXPECT_EQ(buckets, 1);
  });
}

TEST(Ddp, AnotherOrderKeepsGradients) {
  run_threads(2, [](World& world) {
    for (const double cap : {0.00001, 25.0}) {
      auto net = std::make_shared<Backwards>();
      DistributedDataParallel model{net, world, {.bucket_cap_mb = cap, .overlap = true}};
      const auto backward = [&](float scale) { model(at::full({2, 4}, scale)).sum().backward(); };
      const auto places = [&] {
        std::vector<const char*> all;
        for (const auto& p : net->parameters())
          all.push_back(static_cast<const char*>(p.grad().const_data_ptr()));
        return all;
      };
      {
        const auto guard = model.no_sync();
        backward(1);
      }
      const auto before = places();
      const at::Tensor held = net->first->weight.grad();  // stays the gradient, wherever it lies
      const at::Tensor local = held.clone();
      backward(static_cast<float>(world.rank()));
      EXPECT_NE(places(), before) << "this must be another order";
      // Gradients are linear in the input: mean over ranks of 1 and of the rank.
      EXPECT_TENSOR_NEAR(net->first->weight.grad(), local * 1.5, 1e-6);
      EXPECT_TRUE(held.is_same(net->first->weight.grad()));
      net->zero_grad();
      backward(static_cast<float>(world.rank()));
      EXPECT_TENSOR_NEAR(net->first->weight.grad(), local * 0.5, 1e-6);
    }
  });
}

TEST(Ddp, CoresAreCountedOverAllRanks) {
  const std::vector<int> cores = allowed_cpus();
  if (cores.size() < 2) GTEST_SKIP() << "one core";
  run_threads(2, [&](World& world) {
    const int paid = static_cast<int>(cgroup_quota_cores().value_or(1e6));
    const auto expected = [&](int count) { return std::max(1, std::min(count, paid)); };
    EXPECT_EQ(cores_of_ranks(world), expected(static_cast<int>(cores.size())));
    // Each rank is a thread, and bound to a core of its own.
    cpu_set_t before, one;
    ASSERT_EQ(::sched_getaffinity(0, sizeof before, &before), 0);
    CPU_ZERO(&one);
    CPU_SET(cores[static_cast<std::size_t>(world.rank())], &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(allowed_cpus().size(), 1u);
    EXPECT_EQ(cores_of_ranks(world), expected(2));
    ASSERT_EQ(::sched_setaffinity(0, sizeof before, &before), 0);
  });
  EXPECT_TRUE(parallel::oversubscribed(4, 4, 16));
  EXPECT_FALSE(parallel::oversubscribed(4, 3, 16));
}

TEST(Ddp, WithoutOverlapBucketsAreReducedWhenBackwardHasEnded) {
  run_threads(2, [](World& world) {
    for (const bool overlap : {false, true}) {
      Net net = locked_net();
      DistributedDataParallel model{net, world, {.bucket_cap_mb = 0.0001, .overlap = overlap}};
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        model(batch_of(world.rank())).sum().backward();
        const StepTiming& timing = model.last_timing();
        ASSERT_GT(timing.buckets.size(), 2u);
        for (const auto& bucket : timing.buckets) {
          EXPECT_GE(bucket.completed_ms, bucket.launched_ms);
          if (!overlap) {
            EXPECT_GE(bucket.launched_ms, timing.last_gradient_ms);
          }
        }
        if (overlap) {
          EXPECT_LT(timing.buckets[0].launched_ms, timing.last_gradient_ms);
        }
      }
      Net plain = locked_net();
      plain(batch_of(world.rank())).sum().backward();
      testing::average_gradients(world, plain->parameters());
      expect_close(gradients_of(*net), gradients_of(*plain));
    }
    // Several megabytes, and no small bucket first or last.
    torch::nn::Linear wide(1024, 1500);  // 5.9 MiB and 6 KB
    DistributedDataParallel large{wide, world, {.overlap = false}};
    EXPECT_EQ(large.reducer().bucket_count(), 1u);
    DistributedDataParallel early{wide, world, {.overlap = true}};
    EXPECT_EQ(early.reducer().bucket_count(), 1u);
    torch::nn::Sequential two(torch::nn::Linear(1024, 1500), torch::nn::Linear(1500, 400));
    EXPECT_EQ((DistributedDataParallel{two, world, {.overlap = false}}.reducer().bucket_count()),
              1u);
    EXPECT_EQ((DistributedDataParallel{two, world, {.overlap = true}}.reducer().bucket_count()),
              2u);
    // The default's size, given explicitly, is the first bucket's too.
    DistributedDataParallel given{two, world, {.bucket_cap_mb = 25, .overlap = true}};
    EXPECT_EQ(given.reducer().bucket_count(), 1u);
  });
}

TEST(Ddp, StaticGraphNoticesAChangedGraph) {
  run_threads(2, [](World& world) {
    auto net = std::make_shared<Branches>();
    DistributedDataParallel model{net, world, {.static_graph = true}};
    for (int step = 0; step < 3; ++step) model(at::ones({1, 2}), 0).sum().backward();
    EXPECT_FALSE(net->right->weight.grad().defined());
    EXPECT_TRUE(net->left->bias.grad().equal(at::full({2}, 3.f)));
    EXPECT_THAT(message_of<UsageError>([&] { model(at::ones({1, 2}), 1).sum().backward(); }),
                HasSubstr("The graph is not static"));
  });
}

TEST(Ddp, OutputsMayBeChangedInPlaceUnderFindUnused) {
  run_threads(2, [](World& world) {
    Net net = locked_net();
    DistributedDataParallel model{net, world, {.find_unused_parameters = true}};
    model(batch_of(world.rank())).relu_().sum().backward();
    const auto parts = world.all_gather(net->parameters()[0].grad());
    EXPECT_TRUE(parts[0].equal(parts[1]));
  });
}

TEST(Ddp, GradientPenaltyWorksAndCreateGraphIsRefused) {
  run_threads(2, [](World& world) {
    Net net = locked_net();
    DistributedDataParallel model{net, world};
    const auto x = batch_of(world.rank()).requires_grad_(true);
    const auto y = model(x).sum();
    const auto dx = torch::autograd::grad({y}, {x}, {}, true, true)[0];
    (y + dx.square().sum()).backward();
    model.reducer().verify_replicas();
    const auto parts = world.all_gather(net->parameters()[0].grad());
    EXPECT_TRUE(parts[0].equal(parts[1]));
    EXPECT_THAT(message_of<UsageError>([&] { model(x).sum().backward({}, true, true); }),
                HasSubstr("create_graph"));
  });
}

TEST(Ddp, AnInterruptedBackwardIsForgottenOrRefused) {
  struct Thrower : torch::autograd::Function<Thrower> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
      return x.view_as(x);
    }
    static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                            const std::vector<at::Tensor>&) {
      throw std::runtime_error("planted");
    }
  };
  run_threads(2, [](World& world) {
    Net net = locked_net();
    DistributedDataParallel model{net, world};  // one bucket: nothing was sent yet
    const auto h = torch::relu(net->a(batch_of(world.rank())));
    EXPECT_THROW(net->c(torch::tanh(net->b(Thrower::apply(h)))).sum().backward(),
                 std::runtime_error);
    net->zero_grad();
    model(batch_of(world.rank())).sum().backward();
    const auto parts = world.all_gather(net->parameters()[0].grad());
    EXPECT_TRUE(parts[0].equal(parts[1]));

    Net other = locked_net();
    DistributedDataParallel fine{other, world, {.bucket_cap_mb = 0.0001, .overlap = true}};
    const auto g = torch::relu(other->a(batch_of(world.rank())));
    EXPECT_THROW(other->c(torch::tanh(other->b(Thrower::apply(g)))).sum().backward(),
                 std::runtime_error);
    EXPECT_THAT(message_of<CommError>([&] { fine(batch_of(0)).sum().backward(); }),
                HasSubstr("interrupted after"));
  });
}

}  // namespace
}  // namespace lockstep
