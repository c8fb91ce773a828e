// What ranks that divide an optimizer's state (Shard::kState) must agree on: how it is made, the
// state they load, the parameters they accept and who may write those; how a refusal is reported;
// and the program of docs/fully_shard.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <sstream>

#include "lockstep/comm/world_impl.h"
#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/io/tensors.h"
#include "lockstep/optim/schedule.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/sharded_for_test.h"
#include "lockstep/testing/worlds.h"

namespace {

using TensorDict = std::map<std::string, at::Tensor>;
using lockstep::optim::AdamWOptions;

void train(lockstep::World& world, torch::nn::Sequential net, const TensorDict& saved,
           const std::string& folder) {
  const lockstep::Mesh mesh(world, {{"shard", -1}});
  lockstep::FullyShard model(*net, mesh, {.shard = lockstep::Shard::kState});
  // Two groups: biases and norms are not decayed.
  const auto optimizer =
      model.make_optimizer(lockstep::optim::decay_groups(*net, AdamWOptions{.weight_decay = 0.1}));
  const std::vector<double> rates{3e-3, 6e-3};
  if (!saved.empty()) optimizer->load_state_dict(saved);  // the same state on every rank
  const auto schedule =
      lockstep::optim::make_schedule({.name = "cosine", .warmup_steps = 2, .total_steps = 10});

  for (int step = 0; step < 10; ++step) {
    for (std::size_t group = 0; group < optimizer->groups(); ++group)
      optimizer->set_lr(group, rates[group] * schedule.factor(step));
    const at::Tensor x = torch::randn({8, 20});
    model.before_forward();
    model.backward((net->forward(x) - x.sum(1, true)).square().mean());  // .grad is this rank's own
    // Averaged, clipped to norm 1 and applied; or skipped on all ranks.
    const auto result = optimizer->step({.max_grad_norm = 1.0, .skip_non_finite = true});
    optimizer->zero_grad();
    if (world.is_leader())
      std::printf("step %d: norm %.3f%s\n", step, result.norm(),
                  result.was_skipped() ? ", skipped" : "");
  }

  const TensorDict state = optimizer->state_dict();  // on every rank: it gathers the shares
  if (!world.is_leader()) return;
  lockstep::io::AtomicDir dir(folder);  // has its name when it is whole
  const auto write = [&](const std::string& name, const TensorDict& tensors) {
    std::vector<lockstep::io::TensorBytes> all;
    for (const auto& [key, tensor] : tensors)
      all.push_back(lockstep::io::bytes_of_tensor(key, tensor));
    dir.write(name, [&](lockstep::io::FileWriter& file) { write_safetensors(file, all); });
  };
  TensorDict weights;
  for (const auto& item : net->named_parameters()) weights[item.key()] = item.value();
  write("model.safetensors", weights);
  write("optimizer.safetensors", state);
  dir.commit();
}

}  // namespace

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using namespace sharded_for_test;

constexpr const char* kNothing = "(nothing thrown)";

// ---------------------------------------------------------------- the program of the documents

TEST(ShardedDocument, TrainsSavesAndContinuesAtAnotherNumberOfRanks) {
  const io::TemporaryDirectory folder;
  const auto run = [&](int ranks, const TensorDict& saved, const std::string& name) {
    run_threads(ranks, [&](World& world) {
      train(world, torch::nn::Sequential(torch::nn::Linear(20, 300), torch::nn::Linear(300, 1)),
            saved, folder / name);
    });
    TensorDict state;
    const io::SafetensorsFile file((folder / name) + "/optimizer.safetensors");
    for (const auto& entry : file.tensors()) state[entry.name] = io::tensor_of(file, entry);
    EXPECT_EQ(io::SafetensorsFile((folder / name) + "/model.safetensors").tensors().size(), 4u);
    return state;
  };
  const TensorDict first = run(2, {}, "first");
  EXPECT_EQ(first.at("0.weight.step").item<double>(), 10);
  EXPECT_EQ(run(3, first, "second").at("0.weight.step").item<double>(), 20);
}

// ---------------------------------------------------------------- the same on every rank

class StateAgreement : public ::testing::TestWithParam<const char*> {
 protected:
  static std::string who() { return "[fully_shard] "; }
  static void on_ranks(int ranks, const std::function<void(World&)>& body) {
    run_threads(ranks, body, GetParam());
  }
  struct Trained : Sharded {
    explicit Trained(World& world) : Sharded(world, AdamWOptions{.lr = 0.01}) { step(0); }
    using Sharded::step;
    void step(World&, const optim::StepOptions& options = {}) { step(0, options); }
  };
};
INSTANTIATE_TEST_SUITE_P(Backends, StateAgreement, ::testing::Values("shm", "gloo"),
                         [](const auto& backend) { return std::string(backend.param); });

TEST_P(StateAgreement, AnotherStateOnSomeRanksIsRefusedByAll) {
  on_ranks(3, [](World& world) {
    Trained trained(world);
    const TensorDict state = trained.optimizer->state_dict();
    const auto load = [&](const TensorDict& from) {
      return message_of<UsageError>([&] { trained.optimizer->load_state_dict(from); });
    };
    TensorDict other = state;
    if (world.rank() > 0) other["b.weight.exp_avg"] = state.at("b.weight.exp_avg") * 2;
    EXPECT_THAT(load(other), HasSubstr("load_state_dict(): 'b.weight.exp_avg' on ranks 1, 2 is not "
                                       "what it is on rank 0"));
    other = state;
    if (world.rank() == 1) other["a.bias.step"] = at::scalar_tensor(7, at::kDouble);
    EXPECT_THAT(load(other), HasSubstr("'a.bias.step' on rank 1 is not what"));
    // What one rank finds wrong with it, the others say.
    other = state;
    if (world.rank() == 1) other.erase("a.weight.exp_avg");
    EXPECT_THAT(load(other),
                AllOf(HasSubstr(who() + "the state has no 'a.weight.exp_avg'"),
                      HasSubstr(world.rank() == 1 ? "the state"
                                                  : "rank 1 refused load_state_dict(). Its "
                                                    "message: " +
                                                        who())));
    other = state;
    other["b.weight.step"] = at::zeros({3});
    EXPECT_THAT(load(other), HasSubstr("'b.weight.step' is not one number in the state"));
    other = state;
    if (world.rank() == 2) other["b.weight.exp_avg"] = at::Tensor();
    EXPECT_THAT(load(other), HasSubstr("'b.weight.exp_avg' is an undefined tensor in the state"));
    for (const auto& [name, tensor] : trained.optimizer->state_dict())
      EXPECT_TENSOR_EQ(tensor, state.at(name));
    EXPECT_EQ(load(state), kNothing);
    trained.step(world);
  });
}

TEST_P(StateAgreement, OtherParametersOnSomeRanksAreNotAccepted) {
  on_ranks(3, [](World& world) {
    Trained trained(world);
    const auto accept = [&] {
      return message_of<UsageError>([&] { trained.optimizer->sync_from_model(); });
    };
    at::Tensor& bias = trained.net->a->bias;
    const at::Tensor before = bias.detach().clone();
    world.barrier();
    bias.set_data(before + (world.rank() == 2 ? 1 : 0));
    EXPECT_THAT(accept(),
                HasSubstr("sync_from_model(): parameter 'a.bias' on rank 2 is not what it "
                          "is on rank 0"));
    bias.set_data(before + 1);
    EXPECT_EQ(accept(), kNothing);
    EXPECT_TENSOR_EQ(bias.detach(), before + 1);
    trained.step(world);
    // A change of kind is reported by the rank that made it.
    if (world.rank() == 1) bias.set_data(bias.detach().to(at::kDouble));
    EXPECT_THAT(
        accept(),
        HasSubstr(world.rank() == 1 ? "parameter 'a.bias' was moved to Double"
                                    : "rank 1 refused sync_from_model(). Its message: " + who()));
  });
}

// ---------------------------------------------------------------- another optimizer

TEST(StateAgreementWrites, AnotherWriterIsFoundWithoutAStep) {
  run_threads(3, [](World& world) {
    Sharded trained(world, AdamWOptions{.lr = 0.01});
    trained.step(0);
    const auto verify = [&] {
      return message_of<UsageError>([&] { trained.model.verify_parameters(); });
    };
    EXPECT_EQ(verify(), kNothing);
    world.barrier();
    if (world.rank() == 1) torch::optim::AdamW(trained.net->parameters(), 0.1).step();
    world.barrier();
    EXPECT_THAT(verify(),
                AllOf(HasSubstr("was written between steps"), HasSubstr("sync_from_model()")));
    trained.optimizer->sync_from_model();
    EXPECT_EQ(verify(), kNothing);
    world.barrier();
  });
}

// While gradients accumulate a backward refuses nothing: the step that follows does.
TEST(StateAgreementWrites, WritesWithinAWindowAreRefusedInItsStep) {
  run_threads(3, [](World& world) {
    Sharded trained(world, AdamWOptions{.lr = 0.01});
    trained.step(0);
    trained.optimizer->zero_grad();
    torch::optim::AdamW other(trained.net->parameters(), 0.1);
    for (int i = 0; i < 5; ++i) {
      trained.backward(trained.net(batch_of(world.rank(), i), true).mean(), /*last=*/i == 4);
      world.barrier();
      if (world.rank() == 1) other.step();
      world.barrier();
    }
    EXPECT_THAT(message_of<UsageError>([&] { trained.optimizer->step(); }),
                HasSubstr("was written between steps"));
    trained.optimizer->sync_from_model();
    trained.step(0);
  });
}

// ---------------------------------------------------------------- steps and loads

// torch::load gives parameters other memory; what step() writes must be the model's all the same.
TEST_P(StateAgreement, LoadedWeightsAreTrained) {
  on_ranks(2, [](World& world) {
    Trained trained(world);
    std::stringstream file;
    torch::save(trained.net, file);
    const at::Tensor saved = trained.net->a->weight.detach().clone();
    world.barrier();
    trained.step(world);
    torch::load(trained.net, file);
    EXPECT_THAT(message_of<UsageError>([&] { trained.step(world); }),
                HasSubstr("sync_from_model()"));
    trained.optimizer->sync_from_model();
    EXPECT_TENSOR_EQ(trained.net->a->weight.detach(), saved);
    world.barrier();
    trained.step(world);
    EXPECT_FALSE(at::equal(trained.net->a->weight.detach(), saved));
    trained.model.verify_parameters();
  });
}

TEST_P(StateAgreement, WhatIsMadeDifferentlyIsRefusedByAll) {
  on_ranks(3, [](World& world) {
    const Net net = make_net();
    FullyShard model(*net.ptr(), Mesh(world, {{"shard", -1}}), {.shard = Shard::kState});
    const bool odd = world.rank() == 1;
    const auto make_of = [&](const std::vector<optim::ParamGroup>& groups) {
      return message_of<UsageError>([&] { model.make_optimizer(groups); });
    };
    const auto make = [&](const optim::Rule& rule) { return make_of({{net->parameters(), rule}}); };
    const auto differs = [](const std::string& other, const std::string& first) {
      return HasSubstr("rank 1 has '" + other + "', but rank 0 has '" + first + "'. Each rank");
    };
    EXPECT_THAT(make(AdamWOptions{.lr = odd ? 0.02 : 0.01}), differs("lr = 0.02", "lr = 0.01"));
    EXPECT_THAT(make(AdamWOptions{.betas = {0.9, odd ? 0.99 : 0.999}}),
                differs("beta2 = 0.99", "beta2 = 0.999"));
    EXPECT_THAT(make(odd ? optim::Rule(optim::SGDOptions{}) : AdamWOptions{}),
                differs("options of SGD", "options of AdamW"));
    // The same groups with other members: nothing but the parameters' values would ever show it.
    const auto all = net->parameters();
    const std::vector<at::Tensor> most(all.begin() + 1, all.end() - 1);
    std::vector<optim::ParamGroup> groups{{most, AdamWOptions{}},
                                          {{all.back()}, AdamWOptions{.lr = 1}}};
    groups[0].options = AdamWOptions{.lr = odd ? 0.25 : 0.5};
    groups[0].params.push_back(all.front());
    EXPECT_THAT(make_of(groups), differs("lr of group 0 = 0.25", "lr of group 0 = 0.5"));
    groups[0] = {most, AdamWOptions{}};
    groups[odd ? 1 : 0].params.push_back(all.front());
    EXPECT_THAT(make_of(groups), differs("a.weight in group 1", "a.weight in group 0"));
    if (odd) groups = {{all, AdamWOptions{}}};
    EXPECT_THAT(make_of(groups), differs("groups: 1", "groups: 2"));
    // What one rank cannot make none makes.
    EXPECT_THAT(make(AdamWOptions{.lr = odd ? -1.0 : 0.01}),
                AllOf(HasSubstr("[AdamW] option lr cannot be -1"),
                      HasSubstr(odd ? "[AdamW]"
                                    : who() + "rank 1 refused to make the optimizer. Its "
                                              "message: [AdamW]")));
    // Two exchanges more often than they must would be felt in short runs.
    const auto& sequence = detail::Access::impl(world)->sequence;
    const std::uint64_t before = sequence.load();
    EXPECT_EQ(make(AdamWOptions{}), kNothing);
    EXPECT_EQ(sequence.load() - before, 1u);
  });
}

TEST_P(StateAgreement, ARefusalHasTheMessageOfTheRefusingRank) {
  on_ranks(3, [](World& world) {
    Trained trained(world);
    if (world.rank() > 0) trained.optimizer->set_lr(-world.rank());
    EXPECT_THAT(
        message_of<UsageError>([&] { trained.step(world); }),
        AllOf(HasSubstr(fmt::format("[AdamW] option lr cannot be -{}", std::max(world.rank(), 1))),
              HasSubstr(world.rank() > 0 ? "[AdamW]"
                                         : who() + "ranks 1, 2 refused this step. The message "
                                                   "of rank 1: [AdamW]")));
  });
}

TEST_P(StateAgreement, ADifferenceIsExplainedByWhatDiffers) {
  on_ranks(2, [](World& world) {
    Trained trained(world);
    const auto step = [&](const optim::StepOptions& options = {}) {
      return message_of<UsageError>([&] { trained.step(world, options); });
    };
    optim::Optimizer& optimizer = *trained.optimizer;
    const auto odd = [&](double here, double elsewhere) {
      return world.rank() == 1 ? here : elsewhere;
    };
    // A rank that skipped a step is one behind in its schedule.
    optimizer.set_lr(0, odd(0.25, 0.5));
    EXPECT_EQ(optimizer.lr(), odd(0.25, 0.5));
    EXPECT_THAT(step(), AllOf(HasSubstr("rank 1 has 'lr = 0.25', but rank 0 has 'lr = 0.5'"),
                              HasSubstr("skipped a step()"), HasSubstr("skip_non_finite")));
    optimizer.set_lr(0.5);
    optim::GradScaler scaler{world, {.init_scale = odd(512, 1024)}};
    EXPECT_THAT(
        step({.scaler = &scaler}),
        AllOf(HasSubstr("rank 1 has 'loss_scale = 512', but rank 0 has 'loss_scale = 1024'"),
              HasSubstr("change it by what step() returns"), Not(HasSubstr("schedule"))));
    EXPECT_THAT(
        step({.max_grad_norm = odd(1, 2)}),
        AllOf(HasSubstr("rank 1 has 'max_grad_norm = 1', but rank 0 has 'max_grad_norm = 2'"),
              HasSubstr("Set it identically on every rank"), Not(HasSubstr("schedule"))));
    EXPECT_THAT(
        step({.skip_non_finite = world.rank() == 1}),
        HasSubstr("rank 1 has 'skip_non_finite = 1', but rank 0 has 'skip_non_finite = 0'"));
    EXPECT_EQ(step(), kNothing);
    EXPECT_THAT(message_of<UsageError>([&] { optimizer.set_lr(1, 0.5); }),
                HasSubstr("there is no group 1. Groups count from 0; there is 1."));
    EXPECT_THAT(message_of<UsageError>([&] { static_cast<void>(optimizer.lr(1)); }),
                HasSubstr("there is no group 1"));
  });
}

// Some ranks refuse for what they alone have done, and all train on.
TEST_P(StateAgreement, WhatOneRankCannotStepNoneSteps) {
  on_ranks(3, [](World& world) {
    Trained trained(world);
    const bool odd = world.rank() == 1;
    const auto refuses = [&](const std::string& text, const optim::StepOptions& options = {}) {
      EXPECT_THAT(message_of<UsageError>([&] { trained.step(world, options); }),
                  AllOf(HasSubstr(text),
                        HasSubstr(odd ? "" : who() + "rank 1 refused this step. Its message: ")));
    };
    refuses("max_grad_norm = -1 must be positive", {.max_grad_norm = odd ? -1.0 : 0.0});
    at::Tensor& bias = trained.net->a->bias;
    if (odd) bias.set_data(bias.detach().clone());
    refuses("parameter 'a.bias' was ");
    trained.optimizer->sync_from_model();
    trained.step(world);
    // Clipped by torch, which has seen this rank's own gradients.
    trained.optimizer->zero_grad();
    trained.backward(trained.net->forward(batch_of(world.rank(), 0), true).sum());
    if (odd) torch::nn::utils::clip_grad_norm_(trained.net->parameters(), 1e-3);
    EXPECT_THAT(message_of<UsageError>([&] { trained.optimizer->step(); }),
                HasSubstr("torch::nn::utils::clip_grad_norm_"));
    trained.step(world);
    trained.model.verify_parameters();
  });
}

}  // namespace
}  // namespace lockstep
