#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <cmath>
#include <numeric>

#include "lockstep/comm/numbers.h"
#include "lockstep/comm/world_impl.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/kernels/step.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/clip.h"
#include "lockstep/parallel/sharded_for_test.h"
#include "lockstep/parallel/sharding.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using parallel::kBlock;
using ::testing::HasSubstr;
using testing::message_of;
using namespace sharded_for_test;

// ---------------------------------------------------------------- against the replicated step

std::vector<Case> cases() {
  return {{"adamw", optim::AdamWOptions{.lr = 0.01, .weight_decay = 0.1}},
          {"adamw_clipped", optim::AdamWOptions{.lr = 0.01}, 0.05},
          {"adamw_accumulated", optim::AdamWOptions{.lr = 0.01}, 0, 3},
          {"adamw_scaled", optim::AdamWOptions{.lr = 0.01}, 0.05, 2, 1024},
          {"adam", optim::AdamOptions{.lr = 0.01, .weight_decay = 0.1}},
          {"sgd", optim::SGDOptions{.lr = 0.1}},
          {"sgd_nesterov",
           optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true},
           0.05}};
}

// Doubles have kernels of their own; half types go through ATen, piece by piece.
std::vector<Case> cases_of(at::ScalarType dtype) {
  constexpr double kEps = 1e-3;  // half types have no 1e-8
  std::vector<Case> all{
      {"adamw", optim::AdamWOptions{.lr = 0.01, .eps = kEps, .weight_decay = 0.1}, 0.05, 2, 64},
      {"adam", optim::AdamOptions{.lr = 0.01, .eps = kEps, .weight_decay = 0.1}},
      {"sgd", optim::SGDOptions{.lr = 0.1}, 0, 2},
      {"sgd_nesterov",
       optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true},
       0.05}};
  for (Case& what : all) {
    what.dtype = dtype;
    what.name += std::string(" ") + c10::toString(dtype);
  }
  return all;
}

// Square sums of a gradient's blocks.
void add_block_sums(const at::Tensor& grad, std::vector<double>* sums) {
  const std::size_t first = sums->size();
  sums->resize(first + static_cast<std::size_t>(kernels::norm_blocks(grad.numel())));
  double* const out = sums->data() + first;
  if (grad.scalar_type() == at::kFloat) {
    kernels::block_norms(grad.const_data_ptr<float>(), grad.numel(), out);
  } else if (grad.scalar_type() == at::kDouble) {
    kernels::block_norms(grad.const_data_ptr<double>(), grad.numel(), out);
  } else {
    const at::Tensor squares = grad.reshape({-1}).to(at::kDouble).square();
    double* next = out;
    for (const at::Tensor& block : squares.split(kBlock))
      *next++ = at::constant_pad_nd(block, {0, kBlock - block.numel()}).sum().item<double>();
  }
}

// The global norm as its definition says: blocks of each parameter, parameters in order.
double norm_of(const std::vector<at::Tensor>& parameters) {
  std::vector<double> sums;
  for (const auto& p : parameters)
    if (p.grad().defined()) add_block_sums(p.grad(), &sums);
  return std::sqrt(kernels::add_blocks(sums.data(), static_cast<std::int64_t>(sums.size())));
}

// Over ranks, added in their order. So does shm; gloo has an order of its own from three ranks on.
void average(World& world, at::Tensor tensor) {
  if (world.backend() != "gloo") return world.all_reduce(tensor, ReduceOp::kAvg).wait();
  const bool half = tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
  const auto all = world.all_gather(tensor);
  at::Tensor sum = all[0].to(half ? at::kFloat : tensor.scalar_type(), false, /*copy=*/true);
  for (std::size_t rank = 1; rank < all.size(); ++rank) sum.add_(all[rank]);
  tensor.copy_(sum.div_(world.size()));
}

// All-reduced gradients, then lockstep::optim's optimizers on every rank.
class Replicated {
 public:
  Replicated(std::vector<at::Tensor> parameters, const Case& what)
      : Replicated(parameters, {{parameters, what.options}}, what) {}
  // `parameters` in the model's order, which is the norm's.
  Replicated(std::vector<at::Tensor> parameters, const std::vector<optim::ParamGroup>& groups,
             const Case& what)
      : parameters_(std::move(parameters)), what_(what) {
    for (const auto& group : groups) optimizers_.push_back(make(group));
  }

  void set_lr(std::size_t group, double lr) {
    optimizers_[group]->param_groups()[0].options().set_lr(lr);
  }

  void step() { step(what_.loss_scale); }
  void step(double loss_scale) {
    const torch::NoGradGuard no_grad;
    for (auto& p : parameters_)
      if (p.grad().defined() && loss_scale != 1) p.grad().mul_(1 / loss_scale);
    const bool half = std::any_of(parameters_.begin(), parameters_.end(), [](const auto& p) {
      return p.scalar_type() == at::kHalf || p.scalar_type() == at::kBFloat16;
    });
    if (what_.clip > 0 && !half) {
      optim::clip_grad_norm_(parameters_, what_.clip, {.by_blocks = true});
    } else if (what_.clip > 0) {
      const double coefficient = what_.clip / (norm_of(parameters_) + 1e-6);
      for (auto& p : parameters_)
        if (p.grad().defined() && coefficient < 1) p.grad().mul_(coefficient);
    }
    for (auto& optimizer : optimizers_) optimizer->step();
  }

 private:
  using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
  static Optimizer make(const optim::ParamGroup& group) {
    optim::NamedParameters names;
    for (const at::Tensor& param : group.params)
      names.emplace_back(std::to_string(names.size()), param);
    return std::make_unique<optim::Optimizer>(names, std::vector{group});
  }

  std::vector<at::Tensor> parameters_;
  std::vector<Optimizer> optimizers_;
  Case what_;
};

void backward_window(const auto& forward, World& world, const Case& what, int step,
                     optim::GradScaler& scaler) {
  for (int micro = 0; micro < what.accumulate; ++micro)
    scaler.scale(forward(batch_of(world.rank(), 10 * step + micro).to(what.dtype)).square().mean())
        .backward();
}

void expect_equal_to_replicated(World& world, const Case& what) {
  SCOPED_TRACE(what.name);
  Net net = make_net(), plain = make_net();
  net->to(what.dtype);
  plain->to(what.dtype);
  DistributedDataParallel model{
      net, world, {.bucket_cap_mb = 0.02, .find_unused_parameters = true}};
  ShardedOptimizer optimizer{model, what.options};
  optim::GradScaler scaler = scaler_of(world, what);
  Replicated reference(plain->parameters(), what);
  for (int step = 0; step < 5; ++step) {
    backward_window([&](const at::Tensor& x) { return model(x); }, world, what, step, scaler);
    backward_window([&](const at::Tensor& x) { return plain(x); }, world, what, step, scaler);
    const torch::NoGradGuard no_grad;
    for (auto& p : plain->parameters())
      if (p.grad().defined()) average(world, p.grad());
    optimizer.step({.max_grad_norm = what.clip, .scaler = &scaler});
    reference.step();
    optimizer.zero_grad();
    plain->zero_grad();
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_TENSOR_EQ(net->parameters()[i].detach(), plain->parameters()[i].detach());
  }
  model.verify_replicas();
}

class Sharded : public OverWorlds {};
INSTANTIATE_TEST_SUITE_P(Worlds, Sharded, all_worlds(), show);

TEST_P(Sharded, IsTheReplicatedStepBitForBit) {
  run([](World& world) {
    for (const Case& what : cases()) expect_equal_to_replicated(world, what);
  });
}

TEST_P(Sharded, IsTheReplicatedStepBitForBitInOtherTypes) {
  run([](World& world) {
    for (const at::ScalarType dtype : {at::kDouble, at::kHalf, at::kBFloat16})
      for (const Case& what : cases_of(dtype)) expect_equal_to_replicated(world, what);
  });
}

// A model of several types has a norm over all of them, and a finite flag.
TEST_P(Sharded, TypesMayBeMixed) {
  run([](World& world) {
    Net net = make_net(), plain = make_net();
    for (Net each : {net, plain}) each->b->to(at::kBFloat16);
    const Case what{"mixed", optim::SGDOptions{.lr = 0.1, .momentum = 0.9}, 0.05};
    DistributedDataParallel model{net, world, kSpareUnused};
    ShardedOptimizer optimizer{model, what.options};
    const optim::StepOptions options{.max_grad_norm = what.clip, .skip_non_finite = true};
    Replicated reference(plain->parameters(), what);
    const auto backward = [&](Net& each, int step) {
      const at::Tensor h = torch::tanh(each->a(batch_of(world.rank(), step)));
      each->b(h.to(at::kBFloat16)).square().mean().backward();
    };
    for (int step = 0; step < 3; ++step) {
      backward(net, step);
      backward(plain, step);
      const torch::NoGradGuard no_grad;
      for (auto& p : plain->parameters())
        if (p.grad().defined()) average(world, p.grad());
      const double norm = norm_of(plain->parameters());
      const optim::StepResult result = optimizer.step(options);
      EXPECT_FALSE(result.was_skipped());
      EXPECT_NEAR(result.norm(), norm, 1e-12 * norm);
      reference.step();
      optimizer.zero_grad();
      plain->zero_grad();
      for (std::size_t i = 0; i < net->parameters().size(); ++i)
        EXPECT_TENSOR_EQ(net->parameters()[i].detach(), plain->parameters()[i].detach());
    }
    if (world.rank() == world.size() - 1)
      net->b->bias.mutable_grad() = at::full_like(net->b->bias, NAN);
    const at::Tensor before = net->a->weight.detach().clone();
    EXPECT_TRUE(optimizer.step(options).was_skipped());
    EXPECT_TENSOR_EQ(net->a->weight.detach(), before);
    model.verify_replicas();
  });
}

// Other backends than shm have no greatest number of ranks.
TEST(ShardedStep, WithManyRanks) {
  if (!env::get_bool("LOCKSTEP_SOAK").value_or(false))
    GTEST_SKIP() << "20 s to connect every pair: run with ./dev test --soak";
  constexpr int kRanks = 65;
  rlimit files{};  // every pair of them has a connection, and all live in this process
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
  if (files.rlim_max < 8192) GTEST_SKIP() << "only " << files.rlim_max << " files may be open";
  const rlimit more{std::max<rlim_t>(files.rlim_cur, 8192), files.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &more), 0);
  run_threads(
      kRanks,
      [](World& world) {
        const at::Tensor weight = at::zeros({kBlock * (kRanks + 1)}).requires_grad_();
        auto reducer = std::make_shared<Reducer>(std::vector<NamedTensor>{{"weight", weight}},
                                                 std::vector<NamedTensor>{}, world);
        ShardedOptimizer optimizer{
            reducer, std::vector<optim::ParamGroup>{{{weight}, optim::SGDOptions{.lr = 1}}}};
        (weight.sum() * world.rank()).backward();
        optimizer.step();
        EXPECT_TENSOR_EQ(weight.detach(), at::full({weight.numel()}, -(kRanks - 1) / 2.0));
      },
      "gloo");
}

// Three kinds of options, rates that change with every step, windows of two backwards, clipping,
// and a step that is skipped because one rank has a bad gradient. What no rank uses is not decayed.
TEST_P(Sharded, GroupsClippedAccumulatedAndSkippedBitForBit) {
  run([](World& world) {
    Net net = make_net(), plain = make_net();
    DistributedDataParallel model{
        net, world, {.bucket_cap_mb = 0.02, .find_unused_parameters = true}};
    Case what{"groups", optim::AdamWOptions{}, 0.05, 2, 256};
    optim::GradScaler scaler = scaler_of(world, what);
    const auto groups_of = [](Net& each) {
      return std::vector<optim::ParamGroup>{
          {each->a->parameters(), optim::AdamWOptions{.lr = 0.2, .weight_decay = 0.1}},
          {each->b->parameters(), optim::SGDOptions{.lr = 0.01, .momentum = 0.9}},
          {each->spare->parameters(), optim::AdamOptions{.lr = 0.1, .weight_decay = 0.5}}};
    };
    ShardedOptimizer optimizer{model, groups_of(net)};
    Replicated reference(plain->parameters(), groups_of(plain), what);
    for (int step = 0; step < 6; ++step) {
      const bool bad = step == 2;
      for (Net* each : {&net, &plain}) {
        for (int micro = 0; micro < what.accumulate; ++micro) {
          at::Tensor x = batch_of(world.rank(), 10 * step + micro);
          if (bad && micro == 0 && world.rank() == world.size() - 1) x[0][0] = INFINITY;
          // The spare one is used by some ranks in some steps.
          const bool spare = step >= 3 && world.rank() == 0;
          const at::Tensor y = each == &net ? model(x, spare) : plain(x, spare);
          (y.square().mean() * scaler.get_scale()).backward();
        }
      }
      optimizer.set_lr(0, 0.2 / (step + 1));
      optimizer.set_lr(1, 0.01 * (step + 1));
      EXPECT_EQ(optimizer.lr(1), 0.01 * (step + 1));
      reference.set_lr(0, 0.2 / (step + 1));
      reference.set_lr(1, 0.01 * (step + 1));
      const torch::NoGradGuard no_grad;
      for (auto& p : plain->parameters()) {
        const bool used = any_rank(world, p.grad().defined());
        if (used && !p.grad().defined()) p.mutable_grad() = at::zeros_like(p);
        if (used) average(world, p.grad());
      }
      scaler.scale(at::zeros({}));  // by hand above
      what.loss_scale = scaler.get_scale();
      const optim::StepOptions options{.max_grad_norm = what.clip, .scaler = &scaler};
      EXPECT_EQ(optimizer.step(options).was_skipped(), bad);
      if (!bad) reference.step(what.loss_scale);
      optimizer.zero_grad();
      plain->zero_grad();
      for (std::size_t i = 0; i < net->parameters().size(); ++i)
        EXPECT_TENSOR_EQ(net->parameters()[i].detach(), plain->parameters()[i].detach());
    }
    model.verify_replicas();
  });
}

// As with a replicated optimizer, but no rank waits for another: all refuse the step.
TEST_P(Sharded, AParameterWithoutAGradientIsNamedOnEveryRank) {
  run([](World& world) {
    if (world.size() == 1) return;  // no error there, as with a replicated optimizer
    Net net = make_net();
    DistributedDataParallel model{net, world};
    ShardedOptimizer optimizer{model, optim::AdamWOptions{.lr = 0.1}};
    const at::Tensor before = net->a->weight.detach().clone();
    model(batch_of(world.rank(), 0), /*with_spare=*/!world.is_leader()).sum().backward();
    EXPECT_THAT(message_of<UsageError>([&] { optimizer.step(); }),
                HasSubstr("rank 0: 2 of 6 parameters got no gradient in step 0: spare.weight, "
                          "spare.bias"));
    EXPECT_TENSOR_EQ(net->a->weight.detach(), before);
    model(batch_of(world.rank(), 1), true).sum().backward();
    optimizer.step();
    EXPECT_FALSE(at::equal(net->a->weight.detach(), before));
    model.verify_replicas();
  });
}

TEST_P(Sharded, GradientsStayLocalUntilTheyAreAskedFor) {
  run([](World& world) {
    Net net = make_net();
    DistributedDataParallel model{net, world, kSpareUnused};
    ShardedOptimizer optimizer{model, optim::SGDOptions{.lr = 1}};
    const at::Tensor x = batch_of(world.rank(), 0);
    model(x).sum().backward();
    const at::Tensor local = net->b->weight.grad().clone();
    at::Tensor mean = local.clone();
    world.all_reduce(mean, ReduceOp::kAvg).wait();
    EXPECT_TENSOR_EQ(net->b->weight.grad(), local);
    optimizer.reduce_now();
    if (world.backend() == "gloo") {  // a bucket's order of adding is not that of one gradient
      EXPECT_TENSOR_NEAR(net->b->weight.grad(), mean, 1e-5);
      mean = net->b->weight.grad().clone();
    }
    EXPECT_TENSOR_EQ(net->b->weight.grad(), mean);
    const at::Tensor before = net->b->weight.detach().clone();
    optimizer.step();
    EXPECT_TENSOR_EQ(net->b->weight.detach(), before - mean);
  });
}

TEST(ShardedState, IsDividedByTheNumberOfRanks) {
  run_threads(4, [](World& world) {
    Net net = make_net();
    DistributedDataParallel model{net, world, kSpareUnused};
    ShardedOptimizer optimizer{model, optim::AdamWOptions{}};
    model(batch_of(world.rank(), 0)).sum().backward();
    optimizer.step();
    const double total = all_reduce(world, static_cast<double>(optimizer.state_bytes()));
    std::int64_t trained = net->a->weight.numel() + net->a->bias.numel() + net->b->weight.numel() +
                           net->b->bias.numel();
    EXPECT_EQ(total, static_cast<double>(trained) * 8);
  });
}

// ---------------------------------------------------------------- refusals

TEST(ShardedRefuses, WhatCannotBeMeant) {
  run_threads(2, [](World& world) {
    Net net = make_net();
    DistributedDataParallel model{net, world, kSpareUnused};
    const auto make = [&](std::vector<optim::ParamGroup> groups) {
      return message_of<UsageError>([&] { ShardedOptimizer{model, groups}; });
    };
    const optim::SGDOptions options;
    EXPECT_THAT(make({{{at::ones({2})}, options}}), HasSubstr("none of the given parameters"));
    EXPECT_THAT(make({{{net->a->weight, at::ones({2}).requires_grad_()}, options}}),
                HasSubstr("is not among those the model's wrapper keeps equal"));
    EXPECT_THAT(make({{net->parameters(), options}, {{net->a->weight}, options}}),
                HasSubstr("is in groups 0 and 1"));
    // Another optimizer would step it with this rank's own gradients.
    EXPECT_THAT(make({{net->a->parameters(), options}, {net->b->parameters(), options}}),
                HasSubstr("2 of the model's trainable parameters are in no group ('spare."));
    ShardedOptimizer optimizer{model, options};
    model(batch_of(world.rank(), 0)).sum().backward();
    EXPECT_THAT(message_of<UsageError>([&] { optimizer.step({.max_grad_norm = -1}); }),
                HasSubstr("max_grad_norm = -1"));
    optimizer.step();
  });
}

TEST(ShardedRefuses, WritesAndMovesBetweenSteps) {
  run_threads(2, [](World& world) {
    Net net = make_net();
    DistributedDataParallel model{net, world, kSpareUnused};
    ShardedOptimizer optimizer{model, optim::SGDOptions{.lr = 0.1}};
    const auto step = [&] { return refusal_of_step(model, optimizer); };
    EXPECT_EQ(step(), "(nothing thrown)");
    {
      const torch::NoGradGuard no_grad;
      net->a->bias.zero_();
    }
    EXPECT_THAT(step(), HasSubstr("'a.bias' was written between steps"));
    optimizer.sync_from_model();
    EXPECT_EQ(step(), "(nothing thrown)");
    net->b->bias.set_data(net->b->bias.detach().clone());
    EXPECT_THAT(step(), HasSubstr("'b.bias' was moved or replaced"));
  });
}

TEST(ShardedEnd, GivesTheModelBack) {
  for (const char* backend : {"shm", "gloo"}) {
    run_threads(
        2,
        [](World& world) {
          Net net = make_net();
          DistributedDataParallel model{net, world, kSpareUnused};
          {
            ShardedOptimizer optimizer{model, optim::SGDOptions{.lr = 0.1}};
            model(batch_of(world.rank(), 0)).sum().backward();
            optimizer.step();
            optimizer.zero_grad();
          }
          world.barrier();
          // Backward averages again, and each rank steps memory of its own.
          model(batch_of(world.rank(), 1), true).sum().backward();
          optim::SGD replicated{net->parameters(), {.lr = 0.1}};
          replicated.step();
          model.verify_replicas();
        },
        backend);
  }
}

TEST(ShardedStep, TwiceOnTheSameGradientsStepsTwice) {
  run_threads(2, [](World& world) {
    Net net = make_net(), plain = make_net();
    DistributedDataParallel model{net, world, kSpareUnused};
    const Case what{"clipped", optim::SGDOptions{.lr = 0.1, .momentum = 0.9}, 0.05};
    ShardedOptimizer optimizer{model, what.options};
    Replicated reference(plain->parameters(), what);
    model(batch_of(0, 0)).sum().backward();
    plain(batch_of(0, 0)).sum().backward();
    std::vector<at::Tensor> gradients;
    for (auto& p : plain->parameters())
      gradients.push_back(p.grad().defined() ? p.grad().clone() : at::Tensor());
    for (int turn = 0; turn < 2; ++turn) {
      optimizer.step({.max_grad_norm = what.clip});
      for (std::size_t i = 0; i < gradients.size(); ++i)
        if (gradients[i].defined()) plain->parameters()[i].grad().copy_(gradients[i]);
      reference.step();
    }
    EXPECT_TENSOR_EQ(net->a->weight.detach(), plain->a->weight.detach());
    EXPECT_TENSOR_EQ(net->b->bias.detach(), plain->b->bias.detach());
    EXPECT_TENSOR_EQ(net->a->weight.grad(), gradients[0]);
  });
}

// Pieces that several threads share.
TEST(ShardedStep, ThreadsChangeNoBit) {
  const auto weights_after = [](int ranks, int threads, const optim::StepOptions& options) {
    at::Tensor weights;
    run_threads(ranks, [&](World& world) {
      const int before = at::get_num_threads();
      at::set_num_threads(threads);
      Net net = make_net();
      {
        const torch::NoGradGuard no_grad;
        net->spare = net->replace_module("spare", torch::nn::Linear(700, 301));
        net->spare->weight.copy_(at::linspace(-1, 1, 700 * 301).view({301, 700}));
        net->spare->bias.zero_();
      }
      DistributedDataParallel model{net, world, kSpareUnused};
      ShardedOptimizer optimizer{model, optim::AdamWOptions{.lr = 0.01}};
      for (int step = 0; step < 3; ++step) {
        const at::Tensor x = at::linspace(step, world.rank() + 1, 2 * 700).view({2, 700});
        net->spare(x).square().mean().backward();
        optimizer.step(options);
        optimizer.zero_grad();
      }
      if (world.is_leader()) weights = net->spare->weight.detach().clone();
      at::set_num_threads(before);
      world.barrier();
    });
    return weights;
  };
  for (const int ranks : {1, 2, 3}) {
    for (const double clip : {0.0, 0.1}) {
      const optim::StepOptions options{.max_grad_norm = clip};
      const at::Tensor one = weights_after(ranks, 1, options);
      for (const int threads : {2, 3})
        EXPECT_TENSOR_EQ(weights_after(ranks, threads, options), one);
    }
  }
}

// Every exchange is a point where all ranks wait for the slowest.
TEST(ShardedStep, CommunicatesNoOftenerThanNeeded) {
  const auto exchanges = [](const std::string& backend, const optim::StepOptions& options,
                            float gradient) {
    std::uint64_t count = 0;
    run_threads(
        2,
        [&](World& world) {
          Net net = make_net();
          DistributedDataParallel model{net, world, kSpareUnused};
          ShardedOptimizer optimizer{model, optim::SGDOptions{.lr = 0.1}};
          (model(batch_of(world.rank(), 0)).sum() * gradient).backward();
          const auto& sequence = detail::Access::impl(world)->sequence;
          const std::uint64_t before = sequence.load();
          optimizer.step(options);
          if (world.is_leader()) count = sequence.load() - before;
        },
        backend);
    return count;
  };
  // What is there to step, and that all have stepped; between the two, the norm.
  EXPECT_EQ(exchanges("shm", {}, 1), 2u);
  EXPECT_EQ(exchanges("shm", {.max_grad_norm = 0.1}, 1), 3u);
  EXPECT_EQ(exchanges("shm", {.skip_non_finite = true}, INFINITY), 2u);
  // Gradients and parameters travel, and whoever has them need not wait for the others.
  EXPECT_EQ(exchanges("gloo", {}, 1), 3u);
}

TEST(ShardedRefuses, AnotherBackwardAfterReduceNow) {
  run_threads(2, [](World& world) {
    Net net = make_net();
    DistributedDataParallel model{net, world, kSpareUnused};
    ShardedOptimizer optimizer{model, optim::SGDOptions{.lr = 0.1}};
    model(batch_of(world.rank(), 0)).sum().backward();
    optimizer.reduce_now();
    model(batch_of(world.rank(), 1)).sum().backward();
    EXPECT_THAT(message_of<UsageError>([&] { optimizer.step(); }),
                HasSubstr("got another gradient after reduce_now()"));
    // Thought better of it: all is well again.
    optimizer.zero_grad();
    model(batch_of(world.rank(), 1)).sum().backward();
    optimizer.step();
  });
}

TEST(ShardedRefuses, CommunicationHooks) {
  run_threads(2, [](World& world) {
    const CommHook hook = [](World& w, const Bucket& bucket) -> Reduction {
      return {w.all_reduce(bucket.data)};
    };
    Net net = make_net();
    DistributedDataParallel model{net, world, kSpareUnused};
    ShardedOptimizer optimizer{model, optim::SGDOptions{}};
    EXPECT_THAT(message_of<UsageError>([&] { model.register_comm_hook(hook); }),
                HasSubstr("ShardedOptimizer"));
    EXPECT_THAT(message_of<UsageError>([&] { ShardedOptimizer{model, optim::SGDOptions{}}; }),
                HasSubstr("already"));
    Net other = make_net();
    DistributedDataParallel hooked{other, world};
    hooked.register_comm_hook(hook);
    EXPECT_THAT(message_of<UsageError>([&] { ShardedOptimizer{hooked, optim::SGDOptions{}}; }),
                HasSubstr("communication hook"));
  });
}

TEST(ShardedRefuses, AnotherOptimizerOnItsParameters) {
  run_threads(2, [](World& world) {
    Net net = make_net();
    DistributedDataParallel model{net, world, kSpareUnused};
    optim::SGD other{net->parameters(), {.lr = 0.1}};
    {
      ShardedOptimizer optimizer{model, optim::SGDOptions{}};
      model(batch_of(world.rank(), 0)).sum().backward();
      EXPECT_THAT(
          message_of<UsageError>([&] { other.step(); }),
          HasSubstr("[SGD] the parameter of shape [130, 40] belongs to a ShardedOptimizer"));
      world.barrier();
    }
    other.step();
  });
}

TEST(ShardedRefuses, WhatBackwardWouldHaveToReduce) {
  run_threads(2, [](World& world) {
    Net net = make_net();
    DistributedDataParallel model{net, world, kSpareUnused};
    ShardedOptimizer optimizer{model, optim::SGDOptions{}};
    EXPECT_THAT(message_of<UsageError>([&] { model.join([&] { optimizer.reduce_now(); }); }),
                HasSubstr("reduce_now() was called inside join()"));
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    DistributedDataParallel sparse{table, world};
    EXPECT_THAT(message_of<UsageError>([&] { ShardedOptimizer{sparse, optim::SGDOptions{}}; }),
                HasSubstr("'weight' has sparse gradients"));
  });
}

TEST(ShardedRefuses, AChangedModelOnAllRanksNamingTheParameter) {
  run_threads(3, [](World& world) {
    Net net = make_net();
    DistributedDataParallel model{net, world, kSpareUnused};
    ShardedOptimizer optimizer{model, optim::SGDOptions{.lr = 0.1}};
    const auto step = [&] { return refusal_of_step(model, optimizer); };
    if (world.rank() == 1) net->a->bias.set_requires_grad(false);
    EXPECT_THAT(step(), HasSubstr(world.rank() == 1
                                      ? "parameter 'a.bias' was frozen after the optimizer was made"
                                      : "rank 1 refused this step"));
    net->a->bias.set_requires_grad(true);
    EXPECT_EQ(step(), "(nothing thrown)");
    net->b->to(at::kDouble);
    optimizer.zero_grad();
    net->a(batch_of(0, 0)).sum().backward();
    EXPECT_THAT(message_of<UsageError>([&] { optimizer.step(); }),
                HasSubstr("'b.weight' was moved to Double"));
  });
}

}  // namespace
}  // namespace lockstep
