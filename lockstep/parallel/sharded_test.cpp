// FullyShard with Shard::kState: the bits of replicas, and what it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>

#include "lockstep/comm/numbers.h"
#include "lockstep/comm/world_impl.h"
#include "lockstep/core/error.h"
#include "lockstep/kernels/step.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/clip.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/parallel/sharded_for_test.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

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
    if (dtype == at::kHalf) what.loss_scale = 1;  // unscaled, its gradients lose bits
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
    for (const at::Tensor& block : squares.split(kernels::kNormBlock))
      *next++ =
          at::constant_pad_nd(block, {0, kernels::kNormBlock - block.numel()}).sum().item<double>();
  }
}

// The global norm as its definition says: blocks of each parameter, parameters in order.
double norm_of(const std::vector<at::Tensor>& parameters) {
  std::vector<double> sums;
  for (const auto& p : parameters)
    if (p.grad().defined()) add_block_sums(p.grad(), &sums);
  return std::sqrt(kernels::add_blocks(sums.data(), static_cast<std::int64_t>(sums.size())));
}

void average(World& world, at::Tensor tensor) {
  world.all_reduce(tensor, ReduceOp::kAvg).wait();
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

template <typename Backward>
void backward_window(Net& net, World& world, const Case& what, int step, optim::GradScaler& scaler,
                     const Backward& backward) {
  for (int micro = 0; micro < what.accumulate; ++micro) {
    const at::Tensor x = batch_of(world.rank(), 10 * step + micro).to(what.dtype);
    backward(scaler.scale(net(x).square().mean()), micro + 1 == what.accumulate);
  }
}

void walk(const at::Tensor& loss, bool) {
  loss.backward();
}

void expect_equal_to_replicated(World& world, const Case& what) {
  SCOPED_TRACE(what.name);
  Net net = make_net(), plain = make_net();
  net->to(what.dtype);
  plain->to(what.dtype);
  Sharded sharded(world, what.options, net);
  optim::GradScaler scaler = scaler_of(world, what);
  Replicated reference(plain->parameters(), what);
  for (int step = 0; step < 5; ++step) {
    backward_window(net, world, what, step, scaler,
                    [&](const at::Tensor& loss, bool last) { sharded.backward(loss, last); });
    backward_window(plain, world, what, step, scaler, walk);
    const torch::NoGradGuard no_grad;
    for (auto& p : plain->parameters())
      if (p.grad().defined()) average(world, p.grad());
    sharded.optimizer->step({.max_grad_norm = what.clip, .scaler = &scaler});
    reference.step();
    sharded.optimizer->zero_grad();
    plain->zero_grad();
    expect_equal_weights(net, plain);
  }
  sharded.model.verify_parameters();
}

class StateSharded : public OverWorlds {};
INSTANTIATE_TEST_SUITE_P(Worlds, StateSharded, all_worlds(), show);

TEST_P(StateSharded, IsTheReplicatedStepBitForBit) {
  run([](World& world) {
    for (const Case& what : cases()) expect_equal_to_replicated(world, what);
  });
}

TEST_P(StateSharded, IsTheReplicatedStepBitForBitInOtherTypes) {
  run([](World& world) {
    for (const at::ScalarType dtype : {at::kDouble, at::kHalf, at::kBFloat16})
      for (const Case& what : cases_of(dtype)) expect_equal_to_replicated(world, what);
  });
}

// A model of several types has a norm over all of them, and a finite flag.
TEST_P(StateSharded, TypesMayBeMixed) {
  run([](World& world) {
    Net net = make_net(), plain = make_net();
    for (Net each : {net, plain}) each->b->to(at::kBFloat16);
    const Case what{"mixed", optim::SGDOptions{.lr = 0.1, .momentum = 0.9}, 0.05};
    Sharded sharded(world, what.options, net);
    const optim::StepOptions options{.max_grad_norm = what.clip, .skip_non_finite = true};
    Replicated reference(plain->parameters(), what);
    const auto loss_of = [&](Net& each, int step) {
      const at::Tensor h = torch::tanh(each->a(batch_of(world.rank(), step)));
      return each->b(h.to(at::kBFloat16)).square().mean();
    };
    for (int step = 0; step < 3; ++step) {
      sharded.backward(loss_of(net, step));
      loss_of(plain, step).backward();
      const torch::NoGradGuard no_grad;
      for (auto& p : plain->parameters())
        if (p.grad().defined()) average(world, p.grad());
      const double norm = norm_of(plain->parameters());
      const optim::StepResult result = sharded.optimizer->step(options);
      EXPECT_FALSE(result.was_skipped());
      EXPECT_NEAR(result.norm(), norm, 1e-12 * norm);
      reference.step();
      sharded.optimizer->zero_grad();
      plain->zero_grad();
      expect_equal_weights(net, plain);
    }
    const at::Tensor before = net->a->weight.detach().clone();
    sharded.backward(loss_of(net, 3) * (world.rank() == world.size() - 1 ? NAN : 1));
    EXPECT_TRUE(sharded.optimizer->step(options).was_skipped());
    EXPECT_TENSOR_EQ(net->a->weight.detach(), before);
    sharded.model.verify_parameters();
  });
}

// Three kinds of options, rates that change with every step, windows of two backwards, clipping,
// and a step that is skipped because one rank has a bad gradient. What no rank uses is not decayed.
TEST_P(StateSharded, GroupsClippedAccumulatedAndSkippedBitForBit) {
  run([](World& world) {
    Net net = make_net(), plain = make_net();
    Case what{"groups", optim::AdamWOptions{}, 0.05, 2, 256};
    optim::GradScaler scaler = scaler_of(world, what);
    const auto groups_of = [](Net& each) {
      return std::vector<optim::ParamGroup>{
          {each->a->parameters(), optim::AdamWOptions{.lr = 0.2, .weight_decay = 0.1}},
          {each->b->parameters(), optim::SGDOptions{.lr = 0.01, .momentum = 0.9}},
          {each->spare->parameters(), optim::AdamOptions{.lr = 0.1, .weight_decay = 0.5}}};
    };
    Sharded sharded(world, groups_of(net), net);
    optim::Optimizer& optimizer = *sharded.optimizer;
    Replicated reference(plain->parameters(), groups_of(plain), what);
    for (int step = 0; step < 6; ++step) {
      const bool bad = step == 2;
      for (int micro = 0; micro < what.accumulate; ++micro) {
        at::Tensor x = batch_of(world.rank(), 10 * step + micro);
        if (bad && micro == 0 && world.rank() == world.size() - 1) x[0][0] = INFINITY;
        // The spare one is used by some ranks in some steps.
        const bool spare = step >= 3 && world.rank() == 0;
        const double scale = scaler.get_scale();
        sharded.backward(net(x, spare).square().mean() * scale, micro + 1 == what.accumulate);
        (plain(x, spare).square().mean() * scale).backward();
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
      expect_equal_weights(net, plain);
    }
    sharded.model.verify_parameters();
  });
}

TEST(StateShardedState, IsDividedByTheNumberOfRanks) {
  run_threads(4, [](World& world) {
    Sharded sharded(world, optim::AdamWOptions{});
    sharded.step(0);
    const double total = all_reduce(world, static_cast<double>(sharded.optimizer->state_bytes()));
    std::int64_t elements = 0;
    for (const at::Tensor& p : sharded.net->parameters()) elements += p.numel();
    EXPECT_EQ(total, static_cast<double>(elements) * 8);
  });
}

// Pieces that several threads share.
TEST(StateShardedStep, ThreadsChangeNoBit) {
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
      Sharded sharded(world, optim::AdamWOptions{.lr = 0.01}, net);
      for (int step = 0; step < 3; ++step) {
        const at::Tensor x = at::linspace(step, world.rank() + 1, 2 * 700).view({2, 700});
        sharded.backward(net->spare(x).square().mean());
        sharded.optimizer->step(options);
        sharded.optimizer->zero_grad();
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
TEST(StateShardedStep, CommunicatesNoOftenerThanNeeded) {
  const auto exchanges = [](const std::string& backend, const optim::StepOptions& options) {
    std::uint64_t count = 0;
    run_threads(
        2,
        [&](World& world) {
          Sharded sharded(world, optim::SGDOptions{.lr = 0.1});
          sharded.backward(sharded.net(batch_of(world.rank(), 0)).sum());
          const auto& sequence = detail::Access::impl(world)->sequence;
          const std::uint64_t before = sequence.load();
          sharded.optimizer->step(options);
          if (world.is_leader()) count = sequence.load() - before;
        },
        backend);
    return count;
  };
  // What is there to step, and that all have stepped; between the two, the norm.
  EXPECT_EQ(exchanges("shm", {}), 2u);
  EXPECT_EQ(exchanges("shm", {.max_grad_norm = 0.1}), 3u);
  // Gradients and parameters travel, and whoever has them need not wait for the others.
  EXPECT_EQ(exchanges("gloo", {}), 3u);
}

// ---------------------------------------------------------------- ranks that differ

struct NetWithNorm : torch::nn::Module {
  NetWithNorm() {
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    last = register_module("last", torch::nn::Linear(4, 2));
  }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear last{nullptr};
};

// Those of the first rank that has had a pass.
TEST(StateShardedUneven, ARankWithoutAPassGetsTheBuffersOfAnother) {
  for (const bool broadcasts : {true, false})
    for (const char* const backend : {"shm", "gloo"})
      run_threads(
          3,
          [&](World& world) {
            NetWithNorm net;
            FullyShard model(net, Mesh(world, {{"shard", -1}}),
                             {.shard = Shard::kState, .broadcast_buffers = broadcasts});
            const auto optimizer =
                model.make_optimizer({{net.parameters(), optim::SGDOptions{.lr = 0.1}}});
            if (world.rank() > 0) {
              model.before_forward();
              model.backward(
                  net.last(net.norm(batch_of(world.rank(), 0).narrow(1, 0, 4))).square().sum());
            }
            const at::Tensor mine = net.norm->running_mean.clone();
            optimizer->step();
            const at::Tensor expected =
                broadcasts ? world.all_gather(mine)[1] : world.all_gather(mine)[world.rank()];
            EXPECT_TENSOR_EQ(net.norm->running_mean, expected);
            if (broadcasts) model.verify_buffers();
            model.verify_parameters();
          },
          backend);
}

// ---------------------------------------------------------------- layouts of memory

TEST_P(StateSharded, AConvolutionInChannelsLastIsTrained) {
  run([](World& world) {
    std::map<std::string, at::Tensor> states[2];
    for (const bool last : {false, true}) {
      torch::nn::Conv2d net = [&] {
        static std::mutex mutex;
        const std::lock_guard lock(mutex);
        torch::manual_seed(1);
        return torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 60, 5));
      }();
      if (last) net->weight.set_data(net->weight.contiguous(at::MemoryFormat::ChannelsLast));
      FullyShard model(*net, Mesh(world, {{"shard", -1}}), {.shard = Shard::kState});
      const auto optimizer =
          model.make_optimizer({{net->parameters(), optim::AdamWOptions{.lr = 0.01}}});
      auto generator = at::make_generator<at::CPUGeneratorImpl>(7 + world.rank());
      at::Tensor x = at::randn({2, 3, 9, 9}, generator);
      if (last) x = x.contiguous(at::MemoryFormat::ChannelsLast);
      for (int step = 0; step < 2; ++step) {
        model.before_forward();
        model.backward(net(x).square().mean());
        optimizer->step({.max_grad_norm = 0.1});
        optimizer->zero_grad();
      }
      auto state = optimizer->state_dict();
      EXPECT_TRUE(state.at("weight.exp_avg").is_contiguous());
      optimizer->load_state_dict(state);
      for (const auto& [name, tensor] : optimizer->state_dict())
        EXPECT_TENSOR_EQ(tensor, state.at(name));
      states[last ? 1 : 0] = std::move(state);
      world.barrier();
    }
    // Convolutions round differently in the two layouts.
    for (const auto& [name, tensor] : states[0])
      EXPECT_TENSOR_NEAR(tensor, states[1].at(name), 1e-5);
  });
}

// ---------------------------------------------------------------- refusals

TEST(StateShardedGraph, RetainedAcrossAStepIsRefused) {
  run_threads(2, [](World& world) {
    Sharded sharded(world, optim::SGDOptions{.lr = 0.1});
    sharded.backward(sharded.net(batch_of(world.rank(), 0)).sum());
    const at::Tensor retained = sharded.net(batch_of(world.rank(), 1)).square().sum();
    sharded.optimizer->step();
    EXPECT_THAT(message_of<c10::Error>([&] { sharded.model.backward(retained); }),
                HasSubstr("modified by an inplace operation"));
  });
}

struct DebugMode {
  DebugMode() { ::setenv("LOCKSTEP_DEBUG", "1", 1); }
  ~DebugMode() { ::unsetenv("LOCKSTEP_DEBUG"); }
};

// A write to raw memory raises no version counter, and this element is not among the three of a
// parameter that are always compared.
TEST(StateShardedDebug, EveryElementIsCompared) {
  const DebugMode debug;
  for (const char* const backend : {"shm", "gloo"})
    run_threads(
        3,
        [](World& world) {
          Sharded sharded(world, optim::SGDOptions{.lr = 0.1});
          for (int i = 0; i < 3; ++i) EXPECT_EQ(sharded.refusal_of_step(), "(nothing thrown)");
          world.barrier();
          const torch::NoGradGuard no_grad;
          const std::int64_t at = 5;
          const at::Tensor before = sharded.net->a->weight.detach().clone();
          world.barrier();
          if (world.rank() == 1) sharded.net->a->weight.data_ptr<float>()[at] = 7;
          world.barrier();
          EXPECT_THAT(message_of<UsageError>([&] { sharded.model.verify_parameters(); }),
                      HasSubstr("parameter 'a.weight' was written between steps"));
          const at::AutoGradMode with_grad(true);
          EXPECT_THAT(sharded.refusal_of_step(),
                      HasSubstr("parameter 'a.weight' was written between steps"));
          world.barrier();
          if (world.rank() == 1)
            sharded.net->a->weight.data_ptr<float>()[at] = before.data_ptr<float>()[at];
          world.barrier();
          EXPECT_EQ(sharded.refusal_of_step(), "(nothing thrown)");
        },
        backend);
}

TEST(StateShardedRefuses, SparseEmbeddings) {
  run_threads(2, [](World& world) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    for (const Shard shard : {Shard::kState, Shard::kGradients})
      EXPECT_THAT(message_of<UsageError>(
                      [&] { FullyShard(*table, Mesh(world, {{"shard", -1}}), {.shard = shard}); }),
                  HasSubstr("parameter 'weight' belongs to a sparse embedding"));
  });
}

TEST(StateShardedRefuses, ParametersThatAreIgnored) {
  run_threads(2, [](World& world) {
    const Net net = make_net();
    EXPECT_THAT(message_of<UsageError>([&] {
                  parallelize(
                      *net.ptr(), world,
                      {.data = {.ignored_parameters = {"a.bias"}}, .shard_optimizer = true});
                }),
                HasSubstr("ignored_parameters names 'a.bias'. Leave one of them out"));
  });
}

TEST(StateShardedRefuses, AChangedModelOnAllRanksNamingTheParameter) {
  run_threads(3, [](World& world) {
    Sharded sharded(world, optim::SGDOptions{.lr = 0.1});
    Net& net = sharded.net;
    if (world.rank() == 1) net->a->bias.set_requires_grad(false);
    EXPECT_THAT(sharded.refusal_of_step(),
                HasSubstr("rank 1 has 'a.bias is frozen', but rank 0 has 'a.bias is trained'"));
    net->a->bias.set_requires_grad(false);  // on every rank
    EXPECT_EQ(sharded.refusal_of_step(), "(nothing thrown)");
    net->a->bias.set_requires_grad(true);
    EXPECT_EQ(sharded.refusal_of_step(), "(nothing thrown)");
    net->b->to(at::kDouble);
    sharded.optimizer->zero_grad();
    sharded.backward(net->a(batch_of(0, 0)).sum());
    EXPECT_THAT(message_of<UsageError>([&] { sharded.optimizer->step(); }),
                HasSubstr("'b.weight' was moved to Double after the model was divided"));
    EXPECT_THAT(message_of<UsageError>([&] { sharded.optimizer->sync_from_model(); }),
                HasSubstr("'b.weight' was moved to Double after the model was divided"));
  });
}

// Every parameter gets memory of its own, which would untie what set_data has tied.
TEST(StateShardedRefuses, ParametersThatShareMemoryByBothNames) {
  struct Tied {
    const char* names;
    std::function<void(NetImpl&)> tie;
  };
  const auto twin_of = [](const at::Tensor& tensor, bool trained) {
    at::Tensor twin = at::zeros(tensor.sizes());
    twin.set_data(tensor);
    return twin.set_requires_grad(trained);
  };
  const std::vector<Tied> cases{
      {"'a.bias' and 'twin'",
       [&](NetImpl& net) { net.register_parameter("twin", twin_of(net.a->bias.detach(), true)); }},
      {"'b.weight' and 'part'",
       [&](NetImpl& net) {
         net.register_parameter("part", twin_of(net.b->weight.detach().narrow(0, 7, 2), true));
       }},
      {"'a.weight' and 'frozen'",
       [&](NetImpl& net) {
         net.register_parameter("frozen", twin_of(net.a->weight.detach().t(), false), false);
       }},
      {"'b.bias' and 'buffer'",
       [](NetImpl& net) { net.register_buffer("buffer", net.b->bias.detach().narrow(0, 69, 1)); }},
  };
  for (const char* const backend : {"shm", "gloo"})
    run_threads(
        2,
        [&](World& world) {
          const optim::AdamWOptions adamw{.lr = 0.01};
          for (const Tied& tied : cases) {
            SCOPED_TRACE(tied.names);
            Net net = make_net();
            tied.tie(*net);
            const void* const before = net->a->bias.const_data_ptr();
            EXPECT_THAT(message_of<UsageError>([&] { Sharded(world, adamw, net); }),
                        HasSubstr(fmt::format("{} lie in the same memory", tied.names)));
            EXPECT_EQ(net->a->bias.const_data_ptr(), before);
          }
          // Beside each other in one storage is not the same memory.
          Net net = make_net();
          const at::Tensor flat = at::ones({200});
          net->a->bias.set_data(flat.narrow(0, 0, 130));
          net->b->bias.set_data(flat.narrow(0, 130, 70));
          Sharded sharded(world, adamw, net);
          sharded.step(0);
          // Nor may they be tied later: each has its place already.
          net->b->bias.set_data(net->a->bias.detach().narrow(0, 0, 70));
          EXPECT_THAT(message_of<UsageError>([&] { sharded.optimizer->sync_from_model(); }),
                      HasSubstr("'a.bias' and 'b.bias' lie in the same memory"));
        },
        backend);
}

}  // namespace
}  // namespace lockstep
