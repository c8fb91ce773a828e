// Windows of several backward passes, and what else a training loop builds on reducers: sequences
// of checkpointed blocks, and sharded beside replicated optimizers.
#include "lockstep/parallel/accumulation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <mutex>

#include "lockstep/core/error.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/ema.h"
#include "lockstep/parallel/activation_checkpoint.h"
#include "lockstep/parallel/sharded_optimizer.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

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

struct Micro {
  at::Tensor data, target;
};

// Sample i of the data set; a function of its index, so that every cut of it can be made.
Micro samples(std::int64_t begin, std::int64_t count, bool tokens) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(77);
  const auto data = at::randn({64, 5}, generator, at::dtype(at::kDouble));
  auto target = at::arange(64).remainder(4);
  // Half of the first 16 have no target, and from 40 on nobody has.
  if (tokens)
    target = at::where(at::arange(64).remainder(2).logical_not().logical_and(at::arange(64) < 16),
                       at::full({64}, -100), target);
  if (tokens) target = at::where(at::arange(64) >= 40, at::full({64}, -100), target);
  return {data.narrow(0, begin, count), target.narrow(0, begin, count)};
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
std::int64_t count_of(const Micro& micro) {
  return micro.target.ne(-100).sum().item<std::int64_t>();
}

// What one process computes for all samples of a window at once.
std::vector<at::Tensor> of_one_batch(std::int64_t begin, std::int64_t count, bool tokens,
                                     double* loss_value) {
  Net net = make_net();
  const Micro all = samples(begin, count, tokens);
  const auto loss = loss_of(net->forward(all.data), all.target);
  loss.backward();
  *loss_value = loss.item<double>();
  std::vector<at::Tensor> gradients;
  for (const auto& p : net->parameters()) gradients.push_back(p.grad().clone());
  return gradients;
}

// Ranks x window, with micro-batches of the given sizes per rank, is one batch of all samples.
void check_window(const std::vector<std::vector<std::int64_t>>& sizes, std::int64_t steps,
                  bool tokens, bool epoch_known, decltype(loss_of)* loss = loss_of) {
  std::int64_t total = 0;
  for (const auto& of_rank : sizes)
    for (const auto size : of_rank) total += size;
  double wanted_loss = 0;
  const auto wanted = of_one_batch(0, total, tokens, &wanted_loss);
  const std::int64_t wanted_count = count_of(samples(0, total, tokens));
  run_threads(static_cast<int>(sizes.size()), [&](World& world) {
    DistributedDataParallel model{make_net(), world};
    Accumulation accumulation{model, {.steps = steps}};
    const auto& mine = sizes[static_cast<std::size_t>(world.rank())];
    if (epoch_known) accumulation.begin_epoch(static_cast<std::int64_t>(mine.size()));
    std::int64_t begin = 0;
    for (int rank = 0; rank < world.rank(); ++rank)
      for (const auto size : sizes[static_cast<std::size_t>(rank)]) begin += size;
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const Micro micro = samples(begin, mine[i], tokens);
      begin += mine[i];
      const bool ended = accumulation.backward(
          loss(model(micro.data), micro.target),
          {.count = count_of(micro), .last = !epoch_known && i + 1 == mine.size()});
      EXPECT_EQ(ended, i + 1 == mine.size()) << i;
    }
    const auto parameters = model.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      EXPECT_TENSOR_NEAR(parameters[i].grad(), wanted[i], kOrder);
    EXPECT_EQ(accumulation.last_window().count.item<std::int64_t>(), wanted_count);
    EXPECT_EQ(accumulation.last_window().batches, static_cast<std::int64_t>(mine.size()));
    EXPECT_NEAR(accumulation.last_window().loss.item<double>(), wanted_loss, kOrder);
  });
}

TEST(Accumulation, RanksTimesWindowIsOneBatch) {
  check_window({{8}}, 1, false, true);
  check_window({{4, 4, 4}}, 3, false, true);
  check_window({{4, 4}, {4, 4}}, 2, false, true);
  check_window({{2, 2, 2}, {2, 2, 2}, {2, 2, 2}}, 3, false, true);
}

TEST(Accumulation, SizesMayDiffer) {
  check_window({{4, 4, 4, 1}}, 4, false, true);
  check_window({{4, 4, 3}, {4, 4, 1}}, 3, false, true);
  check_window({{5, 1}, {1, 1}, {7, 2}}, 2, false, true);
}

TEST(Accumulation, TheShortLastWindowIsDividedByItsOwnLength) {
  check_window({{4, 4}, {4, 3}}, 4, false, true);
  check_window({{4, 4}, {4, 3}}, 4, false, false);
  check_window({{2}, {5}, {3}}, 8, false, false);
}

TEST(Accumulation, RanksMayDifferInTheNumberOfMicroBatches) {
  check_window({{4, 4, 4}, {4}}, 4, false, false);
}

TEST(Accumulation, TokensAreWeighedByWhatHasATarget) {
  check_window({{12, 4}, {9, 15}}, 2, true, true);
  // Ranks 1 and 2 have no target at all, and a micro-batch is empty.
  check_window({{20, 20}, {4, 0}, {4, 6}}, 2, true, true);
}

TEST(Accumulation, AWindowWithoutTargetsHasALossOfZero) {
  DistributedDataParallel model{make_net(), World()};
  Accumulation accumulation{model};
  const Micro micro = samples(40, 4, true);
  EXPECT_TRUE(accumulation.backward(loss_of(model(micro.data), micro.target), {.count = 0}));
  EXPECT_EQ(accumulation.last_window().count.item<std::int64_t>(), 0);
  EXPECT_EQ(accumulation.last_window().loss.item<double>(), 0);
}

TEST(Accumulation, AMeanOverNothingAddsNothing) {
  // At the window's end, on one rank alone and on all but one; and in its middle.
  check_window({{40, 8}}, 2, true, true, masked_mean);
  check_window({{20, 20}, {4, 0}, {4, 6}}, 2, true, true, masked_mean);
  check_window({{10, 10}, {20, 4}}, 2, true, true, masked_mean);
  check_window({{40, 3, 5}}, 3, true, false, masked_mean);
  check_window({{20}, {20}, {9}}, 1, true, true, masked_mean);
}

TEST(Accumulation, WhatIsNotANumberElsewhereStaysSo) {
  run_threads(2, [](World& world) {
    auto weight = at::ones({2}).set_requires_grad(true);
    const auto parallelism = of_one(weight, world);
    Accumulation accumulation{parallelism, {weight}, {.steps = 2}};
    // A part of the graph that both micro-batches use: nothing of the first may stay on it.
    const auto common = weight.view({2, 1});
    const auto none = at::zeros({});
    EXPECT_FALSE(accumulation.backward((common * none).sum() / none, {.count = 0}));
    EXPECT_TENSOR_EQ(weight.grad(), at::zeros({2}));
    EXPECT_TRUE(accumulation.backward((common * none).sum() / none, {.count = 1}));
    EXPECT_TRUE(weight.grad().isnan().all().item<bool>());
  });
}

TEST(Accumulation, ABatchWithoutTargetsCountsAsZeroAmongEqualOnes) {
  run_threads(2, [](World& world) {
    auto weight = at::ones({2}).set_requires_grad(true);
    const auto parallelism = of_one(weight, world);
    Accumulation accumulation{
        parallelism, {weight}, {.steps = 2, .weights = WindowWeights::kBatches}};
    const auto loss = [&](double n) { return (weight * n).sum() / at::full({}, n); };
    EXPECT_FALSE(accumulation.backward(loss(4), {.count = 4}));
    const int n = world.rank() == 0 ? 4 : 0;
    EXPECT_TRUE(accumulation.backward(loss(n), {.count = n}));
    EXPECT_TENSOR_EQ(weight.grad(), at::full({2}, 0.75));  // three of four
    EXPECT_EQ(accumulation.last_window().loss.item<double>(), world.rank() == 0 ? 2 : 1);
  });
}

// Rank 0 has micro-batches of 3 and 1, rank 1 of 2 and 6 (or none): the derivatives 1 and 5 of rank
// 0 weigh 3/4 and 1/4 there, and then both ranks the same.
TEST(Accumulation, OwnCountsWeighWithinARankAndRanksEqually) {
  for (const bool none : {false, true}) {
    run_threads(2, [&](World& world) {
      auto weight = at::ones({2}).set_requires_grad(true);
      const auto parallelism = of_one(weight, world);
      Accumulation accumulation{
          parallelism, {weight}, {.steps = 2, .weights = WindowWeights::kOwnCounts}};
      const bool first = world.rank() == 0;
      const std::int64_t counts[] = {first ? 3 : none ? 0 : 2, first ? 1 : none ? 0 : 6};
      EXPECT_FALSE(accumulation.backward(weight.sum(), {.count = counts[0]}));
      EXPECT_TRUE(accumulation.backward((weight * 5).sum(), {.count = counts[1]}));
      const double mine = 1 * 0.75 + 5 * 0.25, others = none ? 0 : 1 * 0.25 + 5 * 0.75;
      EXPECT_TENSOR_EQ(weight.grad(), at::full({2}, (mine + others) / 2));
      const Window& window = accumulation.last_window();
      EXPECT_EQ(window.count.item<std::int64_t>(), counts[0] + counts[1]);
      EXPECT_EQ(window.loss.item<double>(), 2 * (first ? mine : others));
    });
  }
}

TEST(Accumulation, SparseGradientsOfNothingAreNone) {
  run_threads(2, [](World& world) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(6, 2).sparse(true));
    DistributedDataParallel model{table, world};
    Accumulation accumulation{model, {.steps = 2}};
    const auto backward = [&](std::int64_t row, std::int64_t targets) {
      const auto mask = at::full({1}, targets);
      const auto rows = model(at::full({1}, row, at::kLong)).sum(1);
      return accumulation.backward((rows * mask).sum() / mask.sum(), {.count = targets});
    };
    EXPECT_FALSE(backward(world.rank(), 1));
    EXPECT_TRUE(backward(3, world.rank() == 0 ? 1 : 0));
    const at::Tensor grad = table->weight.grad();
    ASSERT_TRUE(grad.is_sparse());
    auto wanted = at::zeros({6, 2});
    for (const std::int64_t row : {0, 1, 3}) wanted[row].fill_(1.0 / 3);
    EXPECT_TENSOR_NEAR(grad.to_dense(), wanted, 1e-7);  // a few roundings of 6e-8 each
  });
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
TEST(Accumulation, NothingTakesPartInSyncBatchNorm) {
  const std::vector<std::vector<Micro>> parts{{samples(0, 6, true), samples(50, 4, true)},
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
    Accumulation accumulation{model, {.steps = 2}};
    bool ended = false;
    for (const Micro& micro : parts[static_cast<std::size_t>(world.rank())])
      ended = accumulation.backward(masked_mean(model(micro.data), micro.target),
                                    {.count = count_of(micro)});
    EXPECT_TRUE(ended);
    EXPECT_EQ(accumulation.last_window().count.item<std::int64_t>(), 10);
    const auto wanted = alone.parameters(), got = net->parameters();
    // Another order of sums, and what it does to variances that are divided by.
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_TENSOR_NEAR(got[i].grad(), wanted[i].grad(), 100 * kOrder);
  });
}

TEST(Accumulation, EpochsEndWindowsAndLeakNothing) {
  run_threads(2, [](World& world) {
    auto weight = at::ones({2}).set_requires_grad(true);
    const auto parallelism = of_one(weight, world);
    Accumulation accumulation{parallelism, {weight}, {.steps = 4}};
    for (int epoch = 0; epoch < 2; ++epoch) {
      accumulation.begin_epoch(10);
      std::vector<int> steps;
      for (int i = 0; i < 10; ++i) {
        // Gradients that are small whole numbers: every sum below is exact.
        const auto loss = (weight * static_cast<double>(i + world.rank() * 2)).sum();
        if (!accumulation.backward(loss, {.count = 8})) {
          EXPECT_FALSE(accumulation.at_boundary());
          continue;
        }
        steps.push_back(i);
        const int length = i == 9 ? 2 : 4;
        double mean = 0;
        for (int j = i - length + 1; j <= i; ++j) mean += (j + 1) * 1.0 / length;
        EXPECT_TENSOR_EQ(weight.grad(), at::full({2}, mean));  // bit for bit
        EXPECT_TRUE(accumulation.at_boundary());
        weight.mutable_grad() = at::Tensor();
      }
      EXPECT_EQ(steps, (std::vector<int>{3, 7, 9}));
    }
  });
}

TEST(Accumulation, SynchronisesAtTheEndAlone) {
  for (const auto weights :
       {WindowWeights::kCounts, WindowWeights::kBatches, WindowWeights::kOwnCounts}) {
    run_threads(2, [&](World& world) {
      auto weight = at::ones({2}).set_requires_grad(true);
      const auto parallelism = of_one(weight, world);
      Accumulation accumulation{parallelism, {weight}, {.steps = 4, .weights = weights}};
      const auto loss = [&] { return (weight * (world.rank() == 0 ? 1.0 : 3.0)).sum(); };
      // The flag is not read in forward: this graph was made before the window began.
      const auto early = loss();
      EXPECT_FALSE(accumulation.backward(loss(), {.count = 4}));
      EXPECT_TENSOR_EQ(weight.grad(), at::full({2}, world.rank() == 0 ? 0.25 : 0.75));
      EXPECT_TRUE(accumulation.backward(early, {.count = 4, .last = true}));
      EXPECT_TENSOR_EQ(weight.grad(), at::full({2}, 2.0));
    });
  }
}

TEST(Accumulation, ScaledLossesGiveTheSameGradients) {
  run_threads(2, [](World& world) {
    std::vector<at::Tensor> plain;
    for (const bool scaled : {false, true}) {
      DistributedDataParallel model{make_net(), world};
      Accumulation accumulation{model, {.steps = 2}};
      optim::SGD optimizer{model.parameters()};
      optim::GradScaler scaler{world, {.init_scale = 1024, .enabled = scaled}};
      for (const std::int64_t size : {3, 2}) {
        const Micro micro = samples(world.rank() * 5, size, false);
        const bool ended = accumulation.backward(loss_of(model(micro.data), micro.target),
                                                 {.count = size, .scaler = &scaler});
        EXPECT_EQ(ended, size == 2);
      }
      scaler.unscale_(optimizer);
      const auto parameters = model.parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (!scaled) plain.push_back(parameters[i].grad().clone());
        EXPECT_TENSOR_EQ(parameters[i].grad(), plain[i]);  // the scale is a power of two
      }
      EXPECT_LT(accumulation.last_window().loss.item<double>(), 10);  // of the loss, not the scaled
    }
  });
}

std::unique_ptr<optim::Optimizer> make_optimizer(bool share, auto& model,
                                                 const optim::Rule& options) {
  if (share) return std::make_unique<ShardedOptimizer>(model, options);
  return std::make_unique<optim::ReplicatedOptimizer>(model, options);
}

// Windows whose samples are not as many as planned, too: 3 + 1 and 3 + 2.
TEST(Accumulation, HasTheSameBitsWithAShardedOptimizer) {
  run_shm(2, [](World& world) {
    const auto train = [&](bool share) {
      DistributedDataParallel model{make_net(), world};
      const auto optimizer = make_optimizer(share, model, optim::SGDOptions{.lr = 0.5});
      Accumulation accumulation{model, {.steps = 2}};
      for (int step = 0; step < 3; ++step) {
        for (const std::int64_t size : {3, 1 + world.rank()}) {
          const Micro micro = samples(step * 8 + world.rank() * 4, size, false);
          if (!accumulation.backward(loss_of(model(micro.data), micro.target), {.count = size}))
            continue;
          optimizer->step({.max_grad_norm = 0.25});
          optimizer->zero_grad();
        }
      }
      std::vector<at::Tensor> result;
      for (const auto& p : model.parameters()) result.push_back(p.detach().clone());
      return result;
    };
    const auto replicated = train(false), shared = train(true);
    for (std::size_t i = 0; i < shared.size(); ++i) EXPECT_TENSOR_EQ(shared[i], replicated[i]);
  });
}

TEST(Accumulation, AnAbandonedWindowIsForgotten) {
  DistributedDataParallel model{make_net(), World()};
  Accumulation accumulation{model, {.steps = 2}};
  const Micro micro = samples(0, 4, false);
  const auto backward = [&] {
    return accumulation.backward(loss_of(model(micro.data), micro.target), {.count = 4});
  };
  EXPECT_FALSE(backward());
  EXPECT_THAT(message_of<UsageError>([&] { accumulation.begin_epoch(3); }),
              HasSubstr("in the middle of a window (1 of 2 micro-batches)"));
  accumulation.abandon();
  accumulation.begin_epoch(1);
  EXPECT_TRUE(backward());
  EXPECT_THAT(message_of<UsageError>(backward), HasSubstr("more micro-batches came than"));
}

TEST(Accumulation, RefusesWhatItCannotWeigh) {
  DistributedDataParallel model{make_net(), World()};
  EXPECT_THAT(message_of<UsageError>([&] { Accumulation(model, {.steps = 0}); }),
              HasSubstr("[Accumulation] steps = 0 is not a window"));
  EXPECT_THAT(message_of<UsageError>([&] { Accumulation(model, {.expected_count = -1}); }),
              HasSubstr("expected_count = -1"));
  EXPECT_THAT(message_of<UsageError>([&] { Accumulation(model.parallelism(), {}); }),
              HasSubstr("there are no parameters"));
  Accumulation accumulation{model};
  EXPECT_THAT(message_of<UsageError>([&] { return accumulation.backward(at::ones({2})); }),
              HasSubstr("the loss has 2 elements"));
  EXPECT_THAT(
      message_of<UsageError>([&] { return accumulation.backward(at::ones({}), {.count = -1}); }),
      HasSubstr("a micro-batch of -1 samples"));
  run_threads(2, [](World& world) {
    DistributedDataParallel uneven{make_net(), world};
    Accumulation windows{uneven, {.steps = 2}};
    EXPECT_THAT(message_of<UsageError>([&] { windows.begin_epoch(4 + world.rank()); }),
                HasSubstr("ranks have between 4 and 5 micro-batches"));
  });
}

TEST(Accumulation, OptionsOfOneRankAloneAreRefusedByAll) {
  run_threads(3, [](World& world) {
    DistributedDataParallel model{make_net(), world};
    const auto make = [&](AccumulationOptions odd) {
      return message_of<UsageError>(
          [&] { Accumulation{model, world.rank() == 1 ? odd : AccumulationOptions{.steps = 2}}; });
    };
    EXPECT_THAT(make({.steps = 0}),
                HasSubstr(world.rank() == 1 ? "[Accumulation] steps = 0 is not a window"
                                            : "[Accumulation] rank 1 refused these options. Its "
                                              "message: [Accumulation] steps = 0 is not a window"));
    EXPECT_THAT(make({.steps = 3}), HasSubstr("rank 1 has 'steps: 3', but rank 0 has 'steps: 2'"));
    EXPECT_THAT(make({.steps = 2, .weights = WindowWeights::kBatches}),
                HasSubstr("rank 1 has 'weights: kBatches', but rank 0 has 'weights: kCounts'"));
    EXPECT_THAT(make({.steps = 2, .expected_count = 8}),
                HasSubstr("rank 1 has 'expected_count: 8', but rank 0 has 'expected_count: 0'"));
    // Only the rank itself needs its own counts.
    Accumulation{model, {.weights = WindowWeights::kOwnCounts, .expected_count = 1 + world.rank()}};
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
      Accumulation accumulation{model, {.steps = 2}};
      for (int step = 0; step < 4; ++step) {
        const auto loss = model(at::ones({2, 4}) * (world.rank() + 1)).sum();
        if (!accumulation.backward(loss, {.count = 2})) continue;
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
  DistributedDataParallel model{make_net(), world};
  const auto optimizer =
      make_optimizer(share, model, optim::AdamWOptions{.lr = 0.5, .weight_decay = 0.125});
  EXPECT_EQ(optimizer->groups(), 1u);
  EXPECT_EQ(optimizer->lr(0), 0.5);
  if (from != nullptr) optimizer->load_state_dict(*from);
  optim::Ema ema{*model.module()};
  optim::GradScaler scaler{world, {.init_scale = 1024, .growth_interval = 2}};
  TrainedWith run;
  for (int step = 0; step < 5; ++step) {
    optimizer->set_lr(0, 0.25 / (step + 1));
    const Micro micro = samples(step * 8 + world.rank() * 4, 4, false);
    const double by = step == 1 && world.rank() == 1 ? kInf : 1;
    scaler.scale(loss_of(model(micro.data), micro.target) * by).backward();
    const auto result = optimizer->step({.max_grad_norm = 0.125, .scaler = &scaler});
    optimizer->zero_grad();
    run.norms.push_back(step == 1 ? 0 : result.grad_norm.item<double>());
    run.skipped.push_back(result.skipped.item<double>());
    run.scales.push_back(scaler.get_scale());
    ema.update();
    // Shared memory may be swapped out and back between steps.
    const auto averaged = ema.swap();
  }
  for (const auto& p : model.parameters()) run.parameters.push_back(p.detach().clone());
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
    DistributedDataParallel model{make_net(), world};
    ShardedOptimizer optimizer{model, optim::SGDOptions{.lr = 0.0}};
    const Micro micro = samples(0, 4, false);
    loss_of(model(micro.data), micro.target).backward();
    EXPECT_THAT(message_of<UsageError>([&] { optim::clip_grad_norm_(model.parameters(), 1); }),
                HasSubstr("belongs to a ShardedOptimizer"));
    EXPECT_GT(optimizer.step({.want_grad_norm = true}).norm(), 0);
    EXPECT_FALSE(optimizer.step().grad_norm.defined());
  });
}

}  // namespace
}  // namespace lockstep
