// Rules beyond AdamW, Adam and SGD with Shard::kState: over elements, over whole tensors, both in
// one model, and one that is not of this tree; and the files of such optimizers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <sstream>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/io/tensors.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/parallel/sharded_for_test.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {

// A rule as a user writes it: in the namespace of the program.
struct TigerOptions {
  static constexpr std::string_view kName = "Tiger";
  double lr = 1e-3, beta = 0.95;
  void each(const optim::OptionVisitor& option) {
    option("lr", lr);
    option("beta", beta, {.below = 1});
  }
};
std::unique_ptr<optim::UpdateRule> make_rule(const TigerOptions& options);

class TigerRule final : public optim::RuleOf<TigerOptions> {
 public:
  using RuleOf::RuleOf;
  std::vector<optim::StateSpec> state(at::IntArrayRef sizes) const override {
    return {{"exp_avg", sizes.vec()}};
  }
  void update(const std::vector<optim::StepItem>& items, const at::Tensor&) const override {
    for (const optim::StepItem& item : items) {
      item.state[0].lerp_(item.grad, 1 - options.beta);
      item.param.add_(item.state[0].sign(), -options.lr);
    }
  }
};
std::unique_ptr<optim::UpdateRule> make_rule(const TigerOptions& options) {
  return std::make_unique<TigerRule>(options);
}

namespace {

using namespace sharded_for_test;
using ::testing::HasSubstr;
using Groups = std::vector<optim::ParamGroup>;

struct RuleCase {
  std::string name;
  std::function<Groups(Net&)> groups;
};

std::vector<RuleCase> rule_cases() {
  const auto all = [](optim::Rule rule) {
    return [rule](Net& net) { return Groups{{net->parameters(), rule}}; };
  };
  return {{"lion", all(optim::LionOptions{.lr = 0.01, .weight_decay = 0.1})},
          {"adamw, rounded", all(optim::AdamWOptions{.lr = 0.01, .bf16_state = true})},
          {"adafactor", all(optim::AdafactorOptions{.lr = 0.01})},
          {"adafactor with a first moment",
           all(optim::AdafactorOptions{.lr = 0.01, .beta1 = 0.9, .scale_parameter = true})},
          {"rmsprop", all(optim::RMSpropOptions{.lr = 0.01, .weight_decay = 0.1})},
          {"rmsprop with momentum", all(optim::RMSpropOptions{.lr = 0.01, .momentum = 0.9})},
          {"muon and adamw",
           [](Net& net) { return optim::muon_groups(*net, {.lr = 0.02}, {.lr = 0.01}); }},
          {"a rule of one's own", all(TigerOptions{.lr = 0.01})}};
}

template <typename Optimizer, typename Backward>
void train_steps(Net& net, World& world, Optimizer& optimizer, const Backward& backward, int from,
                 int to) {
  for (int step = from; step < to; ++step) {
    backward(net(batch_of(world.rank(), step), true).square().mean());
    optimizer.step({.max_grad_norm = 0.5, .skip_non_finite = true});
    optimizer.zero_grad();
    optimizer.set_lr(optimizer.lr() * 0.9);
  }
}
void train_steps(Sharded& sharded, int from, int to) {
  train_steps(
      sharded.net, sharded.model.mesh().world(), *sharded.optimizer,
      [&](const at::Tensor& loss) { sharded.backward(loss); }, from, to);
}
// Replicas. The reducer's hooks average in any backward.
void train_steps(DistributedDataParallel<Net>& model, optim::Optimizer& optimizer, int from,
                 int to) {
  train_steps(
      model.module(), model.world(), optimizer, [&](const at::Tensor& loss) { loss.backward(); },
      from, to);
}

class ShardedRules : public OverWorlds {};
INSTANTIATE_TEST_SUITE_P(Worlds, ShardedRules, all_worlds(), show);

TEST_P(ShardedRules, HaveTheBitsOfReplicatedOnesAndContinueFromEachOthersState) {
  run([](World& world) {
    for (const RuleCase& what : rule_cases()) {
      SCOPED_TRACE(what.name);
      Net net = make_net(), plain = make_net(), resumed = make_net();
      DistributedDataParallel<Net> other{plain, world};
      Sharded sharded(world, what.groups(net), net);
      optim::ReplicatedOptimizer replicated(other, what.groups(plain));
      train_steps(sharded, 0, 3);
      train_steps(other, replicated, 0, 3);
      expect_equal_weights(net, plain);
      const optim::TensorDict state = sharded.optimizer->state_dict(),
                              theirs = replicated.state_dict();
      ASSERT_EQ(state.size(), theirs.size());
      for (const auto& [name, tensor] : theirs) {
        SCOPED_TRACE(name);
        ASSERT_TRUE(state.contains(name));
        EXPECT_TENSOR_EQ(state.at(name), tensor);
      }
      // What one has written the other continues from.
      {
        const torch::NoGradGuard no_grad;
        for (std::size_t i = 0; i < net->parameters().size(); ++i)
          resumed->parameters()[i].copy_(plain->parameters()[i]);
      }
      Sharded continued(world, what.groups(resumed), resumed);
      continued.optimizer->load_state_dict(theirs);
      for (std::size_t g = 0; g < replicated.groups(); ++g)
        continued.optimizer->set_lr(g, replicated.lr(g));
      train_steps(continued, 3, 5);
      train_steps(other, replicated, 3, 5);
      expect_equal_weights(resumed, plain);
    }
  });
}

// As the sharded optimizers of releases 0.2 and 0.3 wrote it: whole tensors under
// <parameter>.<state> and the number of steps, in float64, under <parameter>.step.
TEST(ShardedFiles, ThoseOfEarlierReleasesLoad) {
  const io::TemporaryDirectory folder;
  optim::TensorDict written;
  std::vector<io::TensorBytes> all;
  for (const auto& item : make_net()->named_parameters()) {
    const at::IntArrayRef sizes = item.value().sizes();
    const at::Tensor values = at::linspace(0.1, 0.9, item.value().numel()).view(sizes);
    written[item.key() + ".exp_avg"] = values - 0.5;
    written[item.key() + ".exp_avg_sq"] = values;
    written[item.key() + ".step"] = at::scalar_tensor(7, at::kDouble);
  }
  for (const auto& [name, tensor] : written) all.push_back(io::bytes_of_tensor(name, tensor));
  {
    io::AtomicDir dir(folder / "checkpoint");
    dir.write("optimizer.safetensors", [&](io::FileWriter& file) { write_safetensors(file, all); });
    dir.commit();
  }
  optim::TensorDict state;
  const io::SafetensorsFile file(folder / "checkpoint/optimizer.safetensors");
  for (const auto& entry : file.tensors()) state[entry.name] = io::tensor_of(file, entry);
  for (const int ranks : {2, 3})
    run_threads(ranks, [&](World& world) {
      const optim::AdamWOptions adamw{.lr = 0.01};
      Net plain = make_net();
      DistributedDataParallel<Net> other{plain, world};
      optim::ReplicatedOptimizer replicated(other, adamw);
      Sharded sharded(world, adamw);
      sharded.optimizer->load_state_dict(state);
      replicated.load_state_dict(state);
      const optim::TensorDict read = sharded.optimizer->state_dict();
      ASSERT_EQ(read.size(), written.size());
      for (const auto& [name, tensor] : written) EXPECT_TENSOR_EQ(read.at(name), tensor);
      train_steps(sharded, 0, 2);
      train_steps(other, replicated, 0, 2);
      expect_equal_weights(sharded.net, plain);
    });
}

TEST(ShardedWholeTensors, WholeTensorsAreSteppedByOneRankAndTheirStateExistsOnce) {
  run_threads(2, [](World& world) {
    Net net = make_net();
    Sharded sharded(world, optim::muon_groups(*net, {}, {}), net);
    train_steps(sharded, 0, 1);
    std::int64_t whole = 0;
    for (const auto& item : net->named_parameters())
      whole += item.value().numel() * (item.value().dim() == 2 ? 1 : 2);
    const std::int64_t mine =
        sharded.optimizer->state_bytes() / static_cast<std::int64_t>(sizeof(float));
    EXPECT_EQ(all_reduce(world, static_cast<int>(mine)), whole);
    EXPECT_LT(mine, whole);
  });
}

TEST(ShardedWholeTensors, WhatARuleCannotStepIsRefusedOnEveryRank) {
  run_threads(2, [](World& world) {
    const auto refusal = [](const auto& body) { return testing::message_of<UsageError>(body); };
    EXPECT_THAT(refusal([&] { Sharded(world, optim::MuonOptions{}); }),
                HasSubstr("is not a matrix"));
    Sharded sharded(world, optim::AdamWOptions{});
    sharded.optimizer->options() = optim::LionOptions{};
    EXPECT_THAT(refusal([&] { sharded.step(0); }), HasSubstr("has options of another optimizer"));
  });
}

// torch's schedulers know both by their base class, and so does a loop written for torch::optim.
TEST(OneOptimizer, TorchsSchedulersAndLoopsDriveReplicatedAndShardedOnes) {
  const auto train = [](Net& net, World& world, torch::optim::Optimizer& optimizer,
                        const std::function<void(const at::Tensor&)>& backward) {
    torch::optim::StepLR schedule(optimizer, /*step_size=*/2, /*gamma=*/0.5);
    for (int step = 0; step < 5; ++step) {
      const at::Tensor loss = optimizer.step([&] {
        optimizer.zero_grad();
        at::Tensor value = net(batch_of(world.rank(), step), true).square().mean();
        backward(value);
        return value;
      });
      EXPECT_GT(loss.item<double>(), 0);
      schedule.step();
    }
    return optimizer.param_groups()[0].options().get_lr();
  };
  const auto walk = [](const at::Tensor& loss) { loss.backward(); };
  run_threads(2, [&](World& world) {
    Net plain = make_net(), third = make_net();
    DistributedDataParallel<Net> other{plain, world}, listed{third, world};
    Sharded sharded(world, optim::LionOptions{.lr = 0.01});
    optim::Lion replicated{other, {.lr = 0.01}}, of_list{listed.parameters(), {.lr = 0.01}};
    const double lr = train(sharded.net, world, *sharded.optimizer,
                            [&](const at::Tensor& loss) { sharded.backward(loss); });
    EXPECT_LT(lr, 0.01);
    EXPECT_EQ(sharded.optimizer->lr(), lr);
    EXPECT_EQ(train(plain, world, replicated, walk), lr);
    EXPECT_EQ(train(third, world, of_list, walk), lr);
    EXPECT_EQ(replicated.options().lr, lr);
    expect_equal_weights(sharded.net, plain);
    expect_equal_weights(third, plain);
    of_list.name_parameters(third->named_parameters().pairs());
    replicated.load_state_dict(of_list.state_dict());
    of_list.load_state_dict(sharded.optimizer->state_dict());
    const optim::TensorDict one = replicated.state_dict(), other_one = of_list.state_dict();
    ASSERT_EQ(one.size(), other_one.size());
    for (const auto& [name, tensor] : one) EXPECT_TENSOR_EQ(tensor, other_one.at(name));
  });
}

// Functions of the base class that a divided state does not have say so, on every rank.
TEST(OneOptimizer, AShardedOneRefusesWhatOnlyAReplicatedOneCanDo) {
  run_threads(2, [](World& world) {
    Sharded sharded(world, optim::AdamWOptions{});
    optim::Optimizer& optimizer = *sharded.optimizer;
    const auto refusal = [](const auto& body) { return testing::message_of<UsageError>(body); };
    std::stringstream file;
    EXPECT_THAT(refusal([&] { torch::save(optimizer, file); }), HasSubstr("Use state_dict()"));
    optim::GradScaler scaler{world};
    sharded.backward(scaler.scale(sharded.net(batch_of(world.rank(), 0), true).sum()));
    EXPECT_THAT(refusal([&] { scaler.step(optimizer); }), HasSubstr("step({.max_grad_norm"));
    optimizer.step({.scaler = &scaler});
    const at::Tensor more = at::ones({2}).set_requires_grad(true);
    const auto group = optim::AdamW::group({more}, {});
    EXPECT_THAT(refusal([&] { optimizer.add_param_group(group); }),
                HasSubstr("Make a new optimizer with all groups"));
    torch::optim::Optimizer& base = optimizer;  // whose function is not virtual
    if (world.rank() == 1) base.add_param_group(group);
    EXPECT_THAT(refusal([&] { sharded.step(1); }), HasSubstr("some were added or removed"));
  });
}

// Replicated and sharded the same: what is switched off stays, and what is switched on is made.
TEST(ShardedWholeTensors, StateFollowsOptionsThatChange) {
  const auto switches = [](optim::Optimizer& optimizer, const auto& train) {
    const auto set = [&](double momentum, double beta1) {
      optimizer.options(0).template as<optim::SGDOptions>().momentum = momentum;
      optimizer.options(1).template as<optim::AdafactorOptions>().beta1 = beta1;
    };
    int step = 0;
    for (const auto& [momentum, beta1] :
         {std::pair{0.9, 0.0}, {0.0, 0.9}, {0.9, 0.0}, {0.9, 0.9}}) {
      set(momentum, beta1);
      train(step, step + 2);
      step += 2;
    }
  };
  run_threads(2, [&](World& world) {
    const auto groups = [](Net& net) {
      return Groups{{net->a->parameters(), optim::SGDOptions{.lr = 0.01, .momentum = 0.9}},
                    {net->b->parameters(), optim::AdafactorOptions{.lr = 0.01}},
                    {net->spare->parameters(), optim::AdamOptions{}}};
    };
    Net net = make_net(), plain = make_net();
    DistributedDataParallel<Net> other{plain, world};
    Sharded sharded(world, groups(net), net);
    optim::ReplicatedOptimizer replicated(other, groups(plain));
    switches(*sharded.optimizer, [&](int from, int to) { train_steps(sharded, from, to); });
    switches(replicated, [&](int from, int to) { train_steps(other, replicated, from, to); });
    expect_equal_weights(net, plain);
    replicated.load_state_dict(sharded.optimizer->state_dict());
  });
}

}  // namespace
}  // namespace lockstep
