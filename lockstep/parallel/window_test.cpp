// Windows of several backward passes, and what else a training loop builds on reducers: sequences
// of checkpointed blocks, and sharded beside replicated optimizers.
#include "lockstep/data/window.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <mutex>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/ema.h"
#include "lockstep/parallel/activation_checkpoint.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using data::Batch;
using data::Window;
using data::WindowWeights;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_threads;

void run_shm(int size, const std::function<void(World&)>& body) {
  testing::ThreadOptions options;
  options.world.backend = "shm";
  run_threads(size, body, options);
}

struct NetImpl : torch::nn::Module {
  NetImpl() : a(5, 8), b(8, 4) {
    register_module("a", a);
    register_module("b", b);
  }
  at::Tensor forward(const at::Tensor& x) { return b(torch::tanh(a(x))); }
  torch::nn::Linear a, b;
};
TORCH_MODULE(Net);

// torch's module construction draws from one global generator: build nets one at a time.
Net make_net() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(3);
  Net net;
  net->to(at::kDouble);
  return net;
}

// For a list of one parameter, without a module.
std::shared_ptr<Parallelism> of_one(const at::Tensor& weight, const World& world) {
  return std::make_shared<DataParallel>(
      std::make_shared<Reducer>(std::vector<NamedTensor>{{"w", weight}}, std::vector<NamedTensor>{},
                                world),
      DataParallel::NamedParameters{{"w", weight}});
}

// Gradients are sums of fewer than 100 products in double, so 100 roundings of 1.1e-16 each, in
// values around one; the two sides differ only in their order.
constexpr double kOrder = 1e-13;

// Sample i of the data set; a function of its index, so that every cut of it can be made.
Batch samples(std::int64_t begin, std::int64_t count, bool tokens) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(77);
  const auto data = at::randn({64, 5}, generator, at::dtype(at::kDouble));
  auto target = at::arange(64).remainder(4);
  // Half of the first 16 have no target, and from 40 on nobody has.
  if (tokens)
    target = at::where(at::arange(64).remainder(2).logical_not().logical_and(at::arange(64) < 16),
                       at::full({64}, -100), target);
  if (tokens) target = at::where(at::arange(64) >= 40, at::full({64}, -100), target);
  Batch batch{.data = data.narrow(0, begin, count), .target = target.narrow(0, begin, count)};
  batch.tokens = batch.target.ne(-100).sum().item<std::int64_t>();
  return batch;
}

at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return torch::cross_entropy_loss(output, target);  // a mean over targets that are not -100
}
// The same, as it is often written by hand: without a target it is 0 / 0, in its backward too.
at::Tensor masked_mean(const at::Tensor& output, const at::Tensor& target) {
  const auto mask = target.ne(-100);
  const auto picked = at::log_softmax(output, 1).gather(1, target.clamp_min(0).unsqueeze(1));
  return (-picked.squeeze(1) * mask).sum() / mask.sum();
}

// What one process computes for all samples of a window at once.
std::vector<at::Tensor> of_one_batch(std::int64_t begin, std::int64_t count, bool tokens,
                                     double* loss_value) {
  Net net = make_net();
  const Batch all = samples(begin, count, tokens);
  const auto loss = loss_of(net->forward(all.data), all.target);
  loss.backward();
  *loss_value = loss.item<double>();
  std::vector<at::Tensor> gradients;
  for (const auto& p : net->parameters()) gradients.push_back(p.grad().clone());
  return gradients;
}

// The backwards of a window, and its mean loss over all ranks.
double run_window(auto& model, World& world, const Window& window, const auto& loss) {
  at::Tensor mean = at::zeros({}, at::kDouble);
  for (const data::MicroBatch& micro : window) {
    const at::Tensor weighed = loss(model(micro.data), micro.target) * micro.weight;
    model.backward(weighed, micro.last);
    mean += weighed.detach();
  }
  return all_reduce(world, mean.item<double>(), ReduceOp::kAvg);
}

// Ranks x window, with micro-batches of the given sizes per rank, is one batch of all samples.
void check_window(const std::vector<std::vector<std::int64_t>>& sizes, bool tokens,
                  decltype(loss_of)* loss = loss_of) {
  std::int64_t total = 0;
  for (const auto& of_rank : sizes)
    for (const auto size : of_rank) total += size;
  double wanted_loss = 0;
  const auto wanted = of_one_batch(0, total, tokens, &wanted_loss);
  run_threads(static_cast<int>(sizes.size()), [&](World& world) {
    DistributedDataParallel model{make_net(), world};
    std::int64_t begin = 0;
    for (int rank = 0; rank < world.rank(); ++rank)
      for (const auto size : sizes[static_cast<std::size_t>(rank)]) begin += size;
    std::vector<Batch> batches;
    for (const std::int64_t size : sizes[static_cast<std::size_t>(world.rank())]) {
      batches.push_back(samples(begin, size, tokens));
      begin += size;
    }
    EXPECT_NEAR(run_window(model, world, Window(batches, world), loss), wanted_loss, kOrder);
    const auto parameters = model.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      EXPECT_TENSOR_NEAR(parameters[i].grad(), wanted[i], kOrder);
  });
}

TEST(Window, RanksTimesWindowIsOneBatch) {
  check_window({{8}}, false);
  check_window({{4, 4, 4}}, false);
  check_window({{4, 4}, {4, 4}}, false);
  check_window({{2, 2, 2}, {2, 2, 2}, {2, 2, 2}}, false);
  check_window({{2, 2}, {2, 2}, {2, 2}, {2, 2}}, false);
}

TEST(Window, SizesMayDiffer) {
  check_window({{4, 4, 4, 1}}, false);
  check_window({{4, 4, 3}, {4, 4, 1}}, false);
  check_window({{5, 1}, {1, 1}, {7, 2}}, false);
  check_window({{2}, {5}, {3}, {1}}, false);
  // Replicas wait for each other at the window's end alone.
  check_window({{4, 4, 4}, {4}}, false);
}

TEST(Window, TokensAreWeighedByWhatHasATarget) {
  check_window({{12, 4}, {9, 15}}, true);
  // Ranks 1 and 2 have no target at all.
  check_window({{20, 20}, {4, 1}, {4, 6}}, true);
}

// Neither where torch's mean is none, nor where one written by hand is 0 / 0 in its backward too.
TEST(Window, AMeanOverNothingAddsNothing) {
  // At the window's end, on one rank alone and on all but one; and in its middle.
  for (decltype(loss_of)* loss : {loss_of, masked_mean}) {
    check_window({{40, 8}}, true, loss);
    check_window({{10, 10}, {20, 4}}, true, loss);
    check_window({{40, 3, 5}}, true, loss);
    check_window({{20}, {20}, {9}}, true, loss);
  }
  DistributedDataParallel model{make_net(), World()};
  World alone;
  EXPECT_EQ(run_window(model, alone, Window({samples(40, 4, true)}), masked_mean), 0);
  for (const at::Tensor& p : model.parameters()) EXPECT_TENSOR_NEAR(p.grad(), at::zeros_like(p), 0);
}

// Rank 0 has micro-batches of 3 and 1, rank 1 of 2 and 6 (or none): the derivatives 1 and 5 of rank
// 0 weigh 3/4 and 1/4 there, and then both ranks the same.
TEST(Window, OwnCountsWeighWithinARankAndRanksEqually) {
  for (const bool none : {false, true}) {
    run_threads(2, [&](World& world) {
      auto weight = at::ones({2}).set_requires_grad(true);
      const auto parallelism = of_one(weight, world);
      const bool first = world.rank() == 0;
      const std::int64_t one = first ? 3 : none ? 0 : 2, other = first ? 1 : none ? 0 : 6;
      const Window window({Batch{.tokens = one}, Batch{.tokens = other}}, world,
                          WindowWeights::kOwnCounts);
      EXPECT_EQ(window.tokens(), one + other);
      for (const double slope : {1.0, 5.0}) {
        const data::MicroBatch& micro = window[slope == 1 ? 0 : 1];
        parallelism->backward((weight * slope).sum() * micro.weight, micro.last);
      }
      const double mine = 1 * 0.75 + 5 * 0.25, others = none ? 0 : 1 * 0.25 + 5 * 0.75;
      EXPECT_TENSOR_EQ(weight.grad(), at::full({2}, (mine + others) / 2));
    });
  }
}

// A product has the loss's type, and the weight in full.
TEST(Window, AWeightIsANumber) {
  const Window window({Batch{.tokens = 1}, Batch{.tokens = 2}});
  for (const at::ScalarType type : {at::kBFloat16, at::kFloat, at::kDouble}) {
    const at::Tensor product = at::ones({}, type) * window[0].weight;
    EXPECT_EQ(product.scalar_type(), type);
    EXPECT_TENSOR_EQ(product, at::scalar_tensor(1.0 / 3, type));
  }
  EXPECT_FALSE(window[0].last);
  EXPECT_TRUE(window[1].last);
}

template <typename Norm>
struct Normed : torch::nn::Module {
  explicit Normed(Norm n) : a(5, 8), norm(std::move(n)), b(8, 4) {
    register_module("a", a);
    register_module("norm", norm);
    register_module("b", b);
    to(at::kDouble);
    const torch::NoGradGuard no_grad;
    auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
    for (auto& p : parameters()) p.copy_(at::randn(p.sizes(), generator, p.options()));
  }
  at::Tensor forward(const at::Tensor& x) { return b(norm(a(x))); }
  torch::nn::Linear a;
  Norm norm;
  torch::nn::Linear b;
};

// Samples without a target are part of the batch whose mean and variance the other ranks' losses
// depend on: their backward is needed, also in the middle of a window, and it is not zero.
TEST(Window, NothingTakesPartInSyncBatchNorm) {
  const std::vector<std::vector<Batch>> parts{{samples(0, 6, true), samples(50, 4, true)},
                                              {samples(40, 5, true), samples(16, 7, true)}};
  Normed alone(torch::nn::BatchNorm1d(8));
  for (std::size_t i = 0; i < 2; ++i) {
    const auto output = alone.forward(at::cat({parts[0][i].data, parts[1][i].data}));
    const auto target = at::cat({parts[0][i].target, parts[1][i].target});
    const auto sum = at::cross_entropy_loss(output, target, {}, at::Reduction::Sum);
    (sum / 10).backward();  // 3 targets in the first, 7 in the second
  }
  run_threads(2, [&](World& world) {
    using Norm = nn::SyncBatchNorm1d;
    const auto net = std::make_shared<Normed<Norm>>(Norm(world, torch::nn::BatchNormOptions(8)));
    DistributedDataParallel model{net, world};
    run_window(model, world, Window(parts[static_cast<std::size_t>(world.rank())], world),
               masked_mean);
    const auto wanted = alone.parameters(), got = net->parameters();
    // Another order of sums, and what it does to variances that are divided by.
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_TENSOR_NEAR(got[i].grad(), wanted[i].grad(), 100 * kOrder);
  });
}

struct Lookup : torch::nn::Module {
  explicit Lookup(bool sparse) : table(torch::nn::EmbeddingOptions(10, 3).sparse(sparse)), b(3, 4) {
    register_module("table", table);
    register_module("b", b);
    to(at::kDouble);
    const torch::NoGradGuard no_grad;
    auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
    for (auto& p : parameters()) p.copy_(at::randn(p.sizes(), generator, p.options()));
  }
  at::Tensor forward(const at::Tensor& ids) { return b(table(ids)); }
  torch::nn::Embedding table;
  torch::nn::Linear b;
};

Batch looked_up(std::int64_t begin, std::int64_t count) {
  const auto all = at::arange(begin, begin + count);
  return {.data = all.remainder(10), .target = all.remainder(4), .tokens = count};
}

// The ranks' rows differ, two of them are those of a batch that weighs nothing.
TEST(Window, SparseGradientsAreWeighedAsDenseOnes) {
  Lookup whole(/*sparse=*/false);
  const Batch all = looked_up(0, 15);
  loss_of(whole.forward(all.data), all.target).backward();
  run_threads(2, [&](World& world) {
    const auto net = std::make_shared<Lookup>(/*sparse=*/true);
    DistributedDataParallel model{net, world};
    const Batch nothing{.data = at::arange(8, 10), .target = at::full({2}, -100), .tokens = 0};
    const auto batches = world.rank() == 0
                             ? std::vector<Batch>{looked_up(0, 5), looked_up(5, 3)}
                             : std::vector<Batch>{nothing, looked_up(8, 1), looked_up(9, 6)};
    run_window(model, world, Window(batches, world), loss_of);
    EXPECT_TRUE(net->table->weight.grad().is_sparse());
    const auto wanted = whole.parameters(), got = net->parameters();
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_TENSOR_NEAR(got[i].grad().to_dense(), wanted[i].grad(), kOrder);
  });
}

// A weight hides what batches without tokens compute, and nothing else.
TEST(Window, ALossThatIsNotANumberReachesEveryRank) {
  for (const std::size_t broken : {0u, 1u}) {  // the one that ends the window, and the other
    run_threads(2, [&](World& world) {
      DistributedDataParallel model{make_net(), world};
      optim::ReplicatedOptimizer optimizer(model, optim::SGDOptions{.lr = 0.5});
      const std::int64_t begin = world.rank() * 8;
      std::vector<Batch> batches{samples(begin, 4, false), samples(begin + 4, 2, false)};
      if (world.rank() == 1) batches[broken].data.fill_(std::nan(""));
      EXPECT_TRUE(std::isnan(run_window(model, world, Window(batches, world), loss_of)));
      std::vector<at::Tensor> before;
      for (const at::Tensor& p : model.parameters()) {
        EXPECT_TRUE(p.grad().isnan().any().item<bool>());
        before.push_back(p.detach().clone());
      }
      EXPECT_EQ(optimizer.step({.skip_non_finite = true}).skipped.item<double>(), 1);
      const auto after = model.parameters();
      for (std::size_t i = 0; i < after.size(); ++i) EXPECT_TENSOR_EQ(after[i], before[i]);
    });
  }
}

TEST(Window, PassesMayHaveAForwardThatChangesItself) {
  const auto weight = at::ones({2}).set_requires_grad(true);
  const auto parallelism = of_one(weight, World());
  const Window window({looked_up(0, 1), looked_up(1, 1)});
  const auto losses = parallelism->run_window(passes_of(
      window, [weight, calls = 0](const Batch&) mutable { return (weight * ++calls).sum(); }));
  ASSERT_EQ(losses.size(), 2u);
  EXPECT_EQ(losses[0].item<double>(), 2);
  EXPECT_EQ(losses[1].item<double>(), 4);
  EXPECT_TENSOR_EQ(weight.grad(), at::full({2}, 1.5));
}

TEST(Window, SynchronisesAtTheEndAlone) {
  for (const auto weights : {WindowWeights::kCounts, WindowWeights::kOwnCounts}) {
    run_threads(2, [&](World& world) {
      auto weight = at::ones({2}).set_requires_grad(true);
      const auto parallelism = of_one(weight, world);
      const Window window({Batch{.tokens = 4}, Batch{.tokens = 4}}, world, weights);
      const auto loss = [&] { return (weight * (world.rank() == 0 ? 1.0 : 3.0)).sum(); };
      // The flag is not read in forward: this graph was made before the window began.
      const auto early = loss();
      parallelism->backward(loss() * window[0].weight, window[0].last);
      EXPECT_TENSOR_EQ(weight.grad(), at::full({2}, world.rank() == 0 ? 0.5 : 1.5));
      parallelism->backward(early * window[1].weight, window[1].last);
      EXPECT_TENSOR_EQ(weight.grad(), at::full({2}, 2.0));
    });
  }
}

// Only what the wrapper was told counts: a mistake is found on any number of ranks, and a program
// that means what it does is never refused.
TEST(Window, GradientsThatLackPassesAreNotStepped) {
  for (const int ranks : {1, 2})
    run_threads(ranks, [](World& world) {
      DistributedDataParallel model{make_net(), world};
      optim::SGD optimizer{model.parameters(), {.lr = 0.1}};
      optim::GradScaler scaler{world, {.init_scale = 2}};
      const auto loss = [&] { return scaler.scale(model(samples(0, 3, false).data).sum()); };
      const auto weights = [&] { return model.parameters()[0].detach().clone(); };
      const at::Tensor before = weights();
      model.backward(loss(), /*last=*/false);
      model.backward(loss(), /*last=*/false);
      for (const std::function<void()>& wrong : std::vector<std::function<void()>>{
               [&] { optimizer.step(); }, [&] { optimizer.step({.scaler = &scaler}); },
               [&] { optimizer.step({.max_grad_norm = 1}); }, [&] { scaler.step(optimizer); },
               [&] { optim::clip_grad_norm_(model.parameters(), 1); }})
        EXPECT_THAT(message_of<UsageError>(wrong),
                    HasSubstr("a step's backward passes are not complete"));
      EXPECT_TENSOR_EQ(weights(), before);
      const std::vector<std::function<void()>> complete{
          [&] { model.backward(loss(), /*last=*/true); },
          [&] { loss().backward(); },
          [&] { optimizer.zero_grad(); },
          [&] { optimizer.zero_grad(/*set_to_none=*/false); },
          [&] { torch::optim::SGD(model.parameters(), 0.1).zero_grad(); },
      };
      for (const auto& end : complete) {
        end();
        optimizer.step();
        model.backward(loss(), /*last=*/false);
      }
      optimizer.zero_grad();
      const NoSync local = model.no_sync();
      loss().backward();
      optimizer.step();
    });
}

TEST(Window, ScaledLossesGiveTheSameGradients) {
  run_threads(2, [](World& world) {
    std::vector<at::Tensor> plain;
    for (const bool scaled : {false, true}) {
      DistributedDataParallel model{make_net(), world};
      optim::SGD optimizer{model.parameters()};
      optim::GradScaler scaler{world, {.init_scale = 1024, .enabled = scaled}};
      const std::int64_t begin = world.rank() * 5;
      for (const auto& micro : Window({samples(begin, 3, false), samples(begin, 2, false)}, world))
        model.backward(scaler.scale(loss_of(model(micro.data), micro.target) * micro.weight),
                       micro.last);
      scaler.unscale_(optimizer);
      const auto parameters = model.parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (!scaled) plain.push_back(parameters[i].grad().clone());
        EXPECT_TENSOR_EQ(parameters[i].grad(), plain[i]);  // the scale is a power of two
      }
    }
  });
}

// Replicas, or ranks that divide the optimizer's state.
struct Ranks {
  Ranks(World& world, bool share, const optim::Rule& rule)
      : model(parallelize(*net, world, {.shard_optimizer = share})),
        optimizer(model->make_optimizer({{net->parameters(), rule}})) {}
  void backward(const Batch& micro, const at::Tensor& weight, bool last) {
    model->before_forward();
    const at::Tensor loss = loss_of(net(micro.data), micro.target);
    model->backward(model->watch(loss) * weight, last);
  }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> result;
    for (const auto& p : net->parameters()) result.push_back(p.detach().clone());
    return result;
  }
  Net net = make_net();
  std::shared_ptr<Parallelism> model;
  std::unique_ptr<optim::Optimizer> optimizer;
};

// Windows whose samples are not as many everywhere, too: 3 + 1 and 3 + 2.
TEST(Window, HasTheSameBitsWithAShardedOptimizer) {
  run_shm(2, [](World& world) {
    const auto train = [&](bool share) {
      Ranks ranks(world, share, optim::SGDOptions{.lr = 0.5});
      EXPECT_EQ(ranks.model->text(), share ? "state sharded over 2 ranks" : "replicated");
      for (int step = 0; step < 3; ++step) {
        const std::int64_t begin = step * 8 + world.rank() * 4;
        const Window window({samples(begin, 3, false), samples(begin, 1 + world.rank(), false)},
                            world);
        for (const auto& micro : window) ranks.backward(micro, micro.weight, micro.last);
        ranks.optimizer->step({.max_grad_norm = 0.25});
        ranks.optimizer->zero_grad();
      }
      return ranks.parameters();
    };
    const auto replicated = train(false), shared = train(true);
    for (std::size_t i = 0; i < shared.size(); ++i) EXPECT_TENSOR_EQ(shared[i], replicated[i]);
  });
}

TEST(Window, RefusesWhatItCannotWeigh) {
  EXPECT_THAT(message_of<UsageError>([] { Window({}); }),
              HasSubstr("[Window] there are no micro-batches"));
  EXPECT_THAT(message_of<UsageError>([] { Window({Batch{.tokens = -1}}); }),
              HasSubstr("a batch has -1 tokens"));
  // Where only one rank has no batches it learns so before the ranks count, and may do as it is
  // told: the gradients are those of the other one.
  const Batch all = samples(0, 4, false);
  Net alone = make_net();
  loss_of(alone->forward(all.data), all.target).backward();
  run_threads(2, [&](World& world) {
    DistributedDataParallel model{make_net(), world};
    std::vector<Batch> batches{all};
    if (world.rank() == 1) {
      const std::string refusal = message_of<UsageError>([&] { Window({}, world); });
      EXPECT_THAT(refusal, HasSubstr("Give a rank without data a batch whose tokens are 0"));
      batches = {Batch{.data = all.data, .target = at::full({4}, -100)}};
    }
    run_window(model, world, Window(batches, world), loss_of);
    const auto wanted = alone->parameters(), got = model.parameters();
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_TENSOR_NEAR(got[i].grad(), wanted[i].grad(), kOrder);
  });
}

// ---------------------------------------------------------------- checkpoint_sequential

struct Tower : torch::nn::Module {
  explicit Tower(std::size_t cut) : segments(cut) {
    for (int i = 0; i < 5; ++i)
      layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(4, 4)));
    register_module("layers", layers);
  }
  at::Tensor forward(at::Tensor x) {
    std::vector<SequentialBlock> blocks;
    for (auto& layer : blocks_of(*layers))
      blocks.push_back([layer, this](const at::Tensor& in) {
        ++runs;
        return torch::tanh(torch::dropout(layer(in), 0.25, /*train=*/true));
      });
    if (segments == 0) {
      for (const auto& block : blocks) x = block(x);
      return x;
    }
    return checkpoint_sequential(blocks, segments, x);
  }
  torch::nn::Sequential layers;
  std::size_t segments;
  int runs = 0;
};

TEST(CheckpointSequential, GivesTheSameBitsAndRunsAllButTheLastSegmentTwice) {
  std::vector<at::Tensor> plain;
  const std::vector<int> runs{5, 5, 7, 7, 8, 9};
  for (std::size_t segments = 0; segments <= 5; ++segments) {
    torch::manual_seed(9);
    Tower tower(segments);
    tower.forward(at::ones({3, 4})).sum().backward();
    const auto parameters = tower.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (segments == 0) plain.push_back(parameters[i].grad());
      EXPECT_TENSOR_EQ(parameters[i].grad(), plain[i]);
    }
    EXPECT_EQ(tower.runs, runs[segments]) << segments;
  }
  EXPECT_THAT(message_of<UsageError>([] { Tower(6).forward(at::ones({1, 4})); }),
              HasSubstr("[checkpoint_sequential] 6 segments of 5 blocks"));
  EXPECT_THAT(message_of<UsageError>([] { checkpoint_sequential({}, 0, at::ones({1})); }),
              HasSubstr("0 segments of 0 blocks"));
}

TEST(CheckpointSequential, WorksUnderEveryDdpOption) {
  struct Options {
    bool find_unused, static_graph, view;
  };
  for (const auto& o : std::vector<Options>{
           {false, false, true}, {true, false, true}, {false, true, true}, {false, false, false}}) {
    run_threads(2, [&](World& world) {
      DistributedDataParallel model{std::make_shared<Tower>(2),
                                    world,
                                    {.bucket_cap_mb = 0.0001,
                                     .find_unused_parameters = o.find_unused,
                                     .static_graph = o.static_graph,
                                     .gradient_as_bucket_view = o.view}};
      for (int step = 0; step < 4; ++step) {
        const bool last = step % 2 == 1;
        model.backward(model(at::ones({2, 4}) * (world.rank() + 1)).sum(), last);
        if (!last) continue;
        for (const auto& p : model.parameters()) {
          const auto parts = world.all_gather(p.grad());
          EXPECT_TENSOR_EQ(parts[0], parts[1]);
          EXPECT_GT(p.grad().abs().sum().item<double>(), 0);
        }
        model->zero_grad();
      }
    });
  }
}

// ---------------------------------------------------------------- sharded and replicated

struct TrainedWith {
  std::vector<at::Tensor> parameters;
  optim::TensorDict state;
  std::vector<double> norms, skipped, scales;
};

constexpr double kInf = std::numeric_limits<double>::infinity();

// Five steps, of which one has infinite gradients on rank 1 alone.
TrainedWith train_with(World& world, bool share, const optim::TensorDict* from = nullptr) {
  Ranks ranks(world, share, optim::AdamWOptions{.lr = 0.5, .weight_decay = 0.125});
  optim::Optimizer* const optimizer = ranks.optimizer.get();
  EXPECT_EQ(optimizer->groups(), 1u);
  EXPECT_EQ(optimizer->lr(0), 0.5);
  if (from != nullptr) optimizer->load_state_dict(*from);
  optim::Ema ema{*ranks.net};
  optim::GradScaler scaler{world, {.init_scale = 1024, .growth_interval = 2}};
  TrainedWith run;
  for (int step = 0; step < 5; ++step) {
    optimizer->set_lr(0, 0.25 / (step + 1));
    const Batch micro = samples(step * 8 + world.rank() * 4, 4, false);
    const double by = step == 1 && world.rank() == 1 ? kInf : 1;
    ranks.backward(micro, scaler.scale(at::scalar_tensor(by, at::kDouble)), /*last=*/true);
    const auto result = optimizer->step({.max_grad_norm = 0.125, .scaler = &scaler});
    optimizer->zero_grad();
    run.norms.push_back(step == 1 ? 0 : result.grad_norm.item<double>());
    run.skipped.push_back(result.skipped.item<double>());
    run.scales.push_back(scaler.get_scale());
    ema.update();
    // Shared memory may be swapped out and back between steps.
    const auto averaged = ema.swap();
  }
  run.parameters = ranks.parameters();
  run.state = optimizer->state_dict();
  return run;
}

TEST(Optimizers, ShardedDoesWhatReplicatedDoes) {
  run_shm(2, [](World& world) {
    const TrainedWith replicated = train_with(world, false);
    const TrainedWith shared = train_with(world, true);
    for (std::size_t i = 0; i < shared.parameters.size(); ++i)
      EXPECT_TENSOR_EQ(shared.parameters[i], replicated.parameters[i]);
    EXPECT_EQ(shared.norms, replicated.norms);
    EXPECT_EQ(shared.skipped, (std::vector<double>{0, 1, 0, 0, 0}));
    EXPECT_EQ(shared.skipped, replicated.skipped);
    EXPECT_EQ(shared.scales, (std::vector<double>{1024, 512, 512, 1024, 1024}));
    EXPECT_EQ(shared.scales, replicated.scales);
    // Either reads what the other wrote.
    ASSERT_EQ(shared.state.size(), replicated.state.size());
    for (const auto& [name, tensor] : shared.state) {
      ASSERT_EQ(replicated.state.count(name), 1u) << name;
      EXPECT_TENSOR_EQ(tensor, replicated.state.at(name));
    }
    const TrainedWith a = train_with(world, false, &shared.state);
    const TrainedWith b = train_with(world, true, &replicated.state);
    for (std::size_t i = 0; i < a.parameters.size(); ++i)
      EXPECT_TENSOR_EQ(a.parameters[i], b.parameters[i]);
  });
}

TEST(Optimizers, ShardedReportsTheNormWithoutClipping) {
  run_shm(2, [](World& world) {
    Ranks ranks(world, true, optim::SGDOptions{.lr = 0.0});
    ranks.backward(samples(0, 4, false), at::ones({}, at::kDouble), /*last=*/true);
    EXPECT_THAT(message_of<UsageError>([&] { optim::clip_grad_norm_(ranks.net->parameters(), 1); }),
                HasSubstr("belongs to FullyShard"));
    EXPECT_GT(ranks.optimizer->step({.want_grad_norm = true}).norm(), 0);
    EXPECT_FALSE(ranks.optimizer->step().grad_norm.defined());
  });
}

}  // namespace
}  // namespace lockstep
