// What ranks with a ShardedOptimizer must agree on: how it is made, the state they load, the
// parameters they accept and who may write those; how a refusal is reported; and the program of
// docs/ddp.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <sstream>
#include <tuple>

#include "lockstep/comm/world_impl.h"
#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/io/tensors.h"
#include "lockstep/optim/schedule.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/parallel/sharded_for_test.h"
#include "lockstep/testing/processes.h"
#include "lockstep/testing/worlds.h"

namespace {

using TensorDict = std::map<std::string, at::Tensor>;
using lockstep::optim::AdamWOptions;

void train(lockstep::World& world, torch::nn::Sequential net, const TensorDict& saved,
           const std::string& folder) {
  lockstep::DistributedDataParallel model{net, world};
  // Two groups: biases and norms are not decayed.
  lockstep::ShardedOptimizer optimizer{
      model, lockstep::optim::decay_groups(*net, AdamWOptions{.weight_decay = 0.1})};
  const std::vector<double> rates{3e-3, 6e-3};
  if (!saved.empty()) optimizer.load_state_dict(saved);  // the same state on every rank
  const auto schedule =
      lockstep::optim::make_schedule({.name = "cosine", .warmup_steps = 2, .total_steps = 10});

  for (int step = 0; step < 10; ++step) {
    for (std::size_t group = 0; group < optimizer.groups(); ++group)
      optimizer.set_lr(group, rates[group] * schedule.factor(step));
    const at::Tensor x = torch::randn({8, 20});
    (model(x) - x.sum(1, true)).square().mean().backward();  // .grad is this rank's own
    // Averaged, clipped to norm 1 and applied; or skipped on all ranks.
    const auto result = optimizer.step({.max_grad_norm = 1.0, .skip_non_finite = true});
    optimizer.zero_grad();
    if (world.is_leader())
      std::printf("step %d: norm %.3f%s\n", step, result.norm(),
                  result.was_skipped() ? ", skipped" : "");
  }

  const TensorDict state = optimizer.state_dict();  // on every rank: it gathers the shares
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

struct Trained {
  explicit Trained(World& world)
      : net(make_net()), model(net, world), optimizer(model, optim::AdamWOptions{.lr = 0.01}) {
    step(world);
  }
  void step(World& world, const optim::StepOptions& options = {}) {
    optimizer.zero_grad();
    model(batch_of(world.rank(), 0), true).sum().backward();
    optimizer.step(options);
  }
  Net net;
  DistributedDataParallel<Net> model;
  ShardedOptimizer optimizer;
};

void on_both(int ranks, const std::function<void(World&)>& body) {
  for (const char* backend : {"shm", "gloo"}) run_threads(ranks, body, backend);
}

TEST(ShardedAgreement, AnotherStateOnSomeRanksIsRefusedByAll) {
  on_both(3, [](World& world) {
    Trained trained(world);
    const TensorDict state = trained.optimizer.state_dict();
    const auto load = [&](const TensorDict& from) {
      return message_of<UsageError>([&] { trained.optimizer.load_state_dict(from); });
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
                AllOf(HasSubstr("[ShardedOptimizer] the state has no 'a.weight.exp_avg'"),
                      HasSubstr(world.rank() == 1 ? "the state"
                                                  : "rank 1 refused load_state_dict()"
                                                    ". Its message: [Sharded")));
    other = state;
    other["b.weight.step"] = at::zeros({3});
    EXPECT_THAT(load(other), HasSubstr("'b.weight.step' is not one number in the state"));
    other = state;
    if (world.rank() == 2) other["b.weight.exp_avg"] = at::Tensor();
    EXPECT_THAT(load(other), HasSubstr("'b.weight.exp_avg' is an undefined tensor in the state"));
    for (const auto& [name, tensor] : trained.optimizer.state_dict())
      EXPECT_TENSOR_EQ(tensor, state.at(name));
    EXPECT_EQ(load(state), kNothing);
    trained.step(world);
  });
}

TEST(ShardedAgreement, OtherParametersOnSomeRanksAreNotAccepted) {
  on_both(3, [](World& world) {
    Trained trained(world);
    const auto accept = [&] {
      return message_of<UsageError>([&] { trained.optimizer.sync_from_model(); });
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
    if (world.rank() == 1) bias.set_requires_grad(false);
    EXPECT_THAT(
        accept(),
        HasSubstr(world.rank() == 1 ? "parameter 'a.bias' was frozen"
                                    : "rank 1 refused sync_from_model(). Its message: [Sharded"));
  });
}

// ---------------------------------------------------------------- making it

// Rank 1 is the odd one. All continue in the same world afterwards.
class Making {
 public:
  explicit Making(World& world) : world_(world), net(make_net()), model(net, world) {}

  bool odd() const { return world_.rank() == 1; }
  std::string make(const std::vector<optim::ParamGroup>& groups) {
    return message_of<UsageError>([&] { ShardedOptimizer{model, groups}; });
  }
  std::string make(const optim::Rule& options) {
    return make(std::vector<optim::ParamGroup>{{net->parameters(), options}});
  }
  // The message of rank 1, and from the others who it was.
  auto refused(const std::string& text) const {
    return AllOf(HasSubstr(text),
                 HasSubstr(odd() ? "["
                                 : "[ShardedOptimizer] rank 1 refused to make the optimizer. "
                                   "Its message: ["));
  }

 private:
  World& world_;

 public:
  Net net;
  DistributedDataParallel<Net> model;
};

TEST(ShardedAgreement, WhatOneRankCannotMakeNoneMakes) {
  on_both(3, [](World& world) {
    Making test(world);
    const bool odd = test.odd();
    const AdamWOptions options{.lr = 0.01};
    EXPECT_THAT(test.make(AdamWOptions{.lr = odd ? -1.0 : 0.01}),
                test.refused("[AdamW] option lr cannot be -1"));
    auto some = test.net->parameters();
    if (odd) some.pop_back();
    EXPECT_THAT(test.make(std::vector<optim::ParamGroup>{{some, options}}),
                test.refused("is in no group ('spare.bias')"));
    // A model that is taken, on one rank.
    {
      Net other = make_net();
      DistributedDataParallel more{other, world};
      ShardedOptimizer first{test.model, options};
      EXPECT_THAT(
          message_of<UsageError>([&] { ShardedOptimizer{odd ? test.model : more, options}; }),
          test.refused("this model already has a ShardedOptimizer"));
      more(batch_of(world.rank(), 0), true).sum().backward();  // not deferred
      EXPECT_TENSOR_EQ(world.all_gather(other->a->bias.grad())[0], other->a->bias.grad());
    }
    if (odd) test.net->a->bias.set_requires_grad(false);
    EXPECT_THAT(test.make(options),
                test.refused("parameter 'a.bias' was frozen after the model was wrapped"));
    if (odd) test.net->a->bias.set_requires_grad(true);
    if (odd) test.net->b->to(at::kDouble);
    EXPECT_THAT(test.make(options), test.refused("parameter 'b.weight' was moved to Double"));
    if (odd) test.net->b->to(at::kFloat);
    ShardedOptimizer optimizer{test.model, options};
    test.model(batch_of(world.rank(), 0), true).sum().backward();
    EXPECT_THAT(
        message_of<UsageError>([&] { optimizer.step({.max_grad_norm = odd ? -1.0 : 0.0}); }),
        AllOf(
            HasSubstr("max_grad_norm = -1 must be positive"),
            HasSubstr(odd ? "[optimizer]" : "rank 1 refused this step. Its message: [optimizer]")));
    optimizer.step();
    test.model.verify_replicas();
  });
}

// ---------------------------------------------------------------- another optimizer

TEST(ShardedAgreement, AnotherWriterIsFoundWithoutAStep) {
  run_threads(3, [](World& world) {
    Trained trained(world);
    const auto verify = [&] {
      return message_of<UsageError>([&] { trained.model.verify_replicas(); });
    };
    EXPECT_EQ(verify(), kNothing);
    torch::optim::AdamW other(trained.net->parameters(), 0.1);
    world.barrier();
    if (world.rank() == 1) other.step();
    world.barrier();
    EXPECT_THAT(verify(),
                AllOf(HasSubstr("parameter 'spare.bias' was written between steps"),
                      HasSubstr("call sync_from_model()"),
                      HasSubstr(world.rank() == 1 ? "another optimizer (torch::optim) must not"
                                                  : "[ddp] rank 1 refused verify_replicas(). Its "
                                                    "message: [ShardedOptimizer] parameter")));
    trained.optimizer.sync_from_model();
    EXPECT_EQ(verify(), kNothing);
    world.barrier();
    // A loop that steps with the other one, and never here.
    const auto turn = [&] {
      return message_of<UsageError>([&] {
        trained.net->zero_grad();
        trained.model(batch_of(world.rank(), 0), true).sum().backward();
        other.step();
      });
    };
    EXPECT_EQ(turn(), kNothing);
    EXPECT_EQ(turn(), kNothing);  // one write is left to step()
    EXPECT_THAT(turn(), AllOf(HasSubstr("is written between backward passes, and step() is not"),
                              HasSubstr("call sync_from_model()")));
    trained.optimizer.sync_from_model();
    trained.step(world);
  });
}

// One rank's loop writes parameters between the backward passes of a step: it refuses the third,
// and the others, who are in step() by then, say so. All are still at the same point.
TEST(ShardedAgreement, WhatABackwardRefusesTheStepsOfTheOthersSay) {
  for (const bool steps : {false, true}) {
    run_threads(3, [steps](World& world) {
      Trained trained(world);
      torch::optim::AdamW other(trained.net->parameters(), 0.1);
      const bool odd = world.rank() == 1;
      const auto window = [&] {
        trained.optimizer.zero_grad();
        for (int i = 0; i < 4; ++i) {
          trained.model(batch_of(world.rank(), i), true).sum().backward();
          if (odd) other.step();
        }
        trained.optimizer.step();
      };
      const std::string text = "parameter 'spare.bias' is written between backward passes";
      EXPECT_THAT(message_of<UsageError>(window),
                  AllOf(HasSubstr(text),
                        HasSubstr(odd ? "[ShardedOptimizer] parameter"
                                      : "[ShardedOptimizer] rank 1 refused this step. Its message: "
                                        "[ShardedOptimizer] parameter")));
      // A rank that still calls step() gets the same message as the others.
      if (odd && steps) {
        EXPECT_THAT(message_of<UsageError>([&] { trained.optimizer.step(); }), HasSubstr(text));
      }
      trained.optimizer.sync_from_model();
      trained.step(world);
      trained.model.verify_replicas();
    });
  }
}

// While gradients accumulate a backward refuses nothing: the step() that follows does.
TEST(ShardedAgreement, WritesWithinAWindowAreRefusedInItsStep) {
  run_threads(3, [](World& world) {
    Trained trained(world);
    torch::optim::AdamW other(trained.net->parameters(), 0.1);
    trained.optimizer.zero_grad();
    for (int i = 0; i < 5; ++i) {
      trained.model.parallelism()->backward(trained.model(batch_of(world.rank(), i), true).mean(),
                                            /*last=*/i == 4);
      if (world.rank() == 1) other.step();
    }
    EXPECT_THAT(message_of<UsageError>([&] { trained.optimizer.step(); }),
                AllOf(HasSubstr("parameter 'spare.bias' was written between steps"),
                      HasSubstr(world.rank() == 1 ? "[Sharded" : "rank 1 refused this step")));
    trained.optimizer.sync_from_model();
    trained.step(world);
  });
}

// torch::optim::SGD writes past the version counters.
TEST(ShardedAgreement, DebugModeFindsWritesWithoutAVersion) {
  ::setenv("LOCKSTEP_DEBUG", "1", 1);
  run_threads(2, [](World& world) {
    Trained trained(world);
    const auto verify = [&] {
      return message_of<UsageError>([&] { trained.model.verify_replicas(); });
    };
    EXPECT_EQ(verify(), kNothing);
    torch::optim::SGD other(trained.net->parameters(), 0.1);
    world.barrier();
    if (world.rank() == 1) other.step();
    world.barrier();
    EXPECT_THAT(verify(), HasSubstr("written between steps"));
    trained.optimizer.sync_from_model();
    EXPECT_EQ(verify(), kNothing);
  });
  ::unsetenv("LOCKSTEP_DEBUG");
}

// ---------------------------------------------------------------- real processes

// Nobody waits for the deadline, and a program that catches the refusal continues.
TEST(ShardedAgreement, ProcessesRefuseTogetherAndAtOnce) {
  for (const char* backend : {"shm", "gloo"}) {
    const auto ranks = testing::run_processes(
        2,
        [](World& world) {
          const bool odd = world.rank() == 1;
          const auto start = std::chrono::steady_clock::now();
          const auto refused = [&](const std::string& text, const std::function<void()>& body) {
            EXPECT_THAT(message_of<UsageError>(body),
                        AllOf(HasSubstr(text), HasSubstr(odd ? "" : "rank 1 refused ")));
          };
          Net net = make_net();
          refused("bucket_cap_mb = -1", [&] {
            DdpOptions options;
            if (odd) options.bucket_cap_mb = -1;
            DistributedDataParallel{net, world, options};
          });
          DistributedDataParallel model{net, world, kSpareUnused};
          refused("option lr cannot be -1",
                  [&] { ShardedOptimizer{model, AdamWOptions{.lr = odd ? -1.0 : 0.1}}; });
          ShardedOptimizer optimizer{model, AdamWOptions{.lr = 0.1}};
          model(batch_of(world.rank(), 0), true).sum().backward();
          optimizer.step();
          model.verify_replicas();
          EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
        },
        {.env = {{"LOCKSTEP_BACKEND", backend}, {"LOCKSTEP_TIMEOUT_S", "60"}}});
    for (const auto& rank : ranks) EXPECT_EQ(rank.exit_code, 0) << rank.output;
  }
}

// ---------------------------------------------------------------- memory that is shared

// Every parameter gets memory of its own, which would untie what set_data has tied.
TEST(ShardedAgreement, ParametersThatShareMemoryAreRefusedByBothNames) {
  struct Tied {
    const char* name;
    std::function<void(NetImpl&)> tie;
    std::vector<std::string> ignored = {};
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
      {"'b.bias' and 'ignored'",
       [&](NetImpl& net) { net.register_parameter("ignored", twin_of(net.b->bias, true)); },
       {"ignored"}},
  };
  for (const auto& place :
       std::vector<sharded_for_test::WorldCase>{{"shm", 2}, {"shm", 3}, {"gloo", 2}}) {
    const auto body = [&](World& world) {
      for (const Tied& tied : cases) {
        SCOPED_TRACE(tied.name);
        Net net = make_net();
        tied.tie(*net);
        DistributedDataParallel model{net, world, {.ignored_parameters = tied.ignored}};
        std::vector<at::Tensor> trained;
        for (const auto& item : net->named_parameters())
          if (tied.ignored.empty() || item.key() != tied.ignored[0])
            trained.push_back(item.value());
        const std::vector<optim::ParamGroup> groups{{trained, optim::AdamWOptions{.lr = 0.1}}};
        const void* const before = net->a->bias.const_data_ptr();
        EXPECT_THAT(message_of<UsageError>([&] { ShardedOptimizer{model, groups}; }),
                    HasSubstr(fmt::format("{} lie in the same memory", tied.name)));
        EXPECT_EQ(net->a->bias.const_data_ptr(), before);
      }
      // Beside each other in one storage is not the same memory.
      Net net = make_net();
      const at::Tensor flat = at::ones({200});
      net->a->bias.set_data(flat.narrow(0, 0, 130));
      net->b->bias.set_data(flat.narrow(0, 130, 70));
      DistributedDataParallel model{net, world, kSpareUnused};
      ShardedOptimizer optimizer{model, optim::AdamWOptions{.lr = 0.01}};
      model(batch_of(world.rank(), 0), true).sum().backward();
      optimizer.step();
      // Nor may they be tied later: each has its place already.
      net->b->bias.set_data(net->a->bias.detach().narrow(0, 0, 70));
      EXPECT_THAT(message_of<UsageError>([&] { optimizer.sync_from_model(); }),
                  HasSubstr("'a.bias' and 'b.bias' lie in the same memory"));
    };
    run_threads(place.size, body, place.backend);
  }
}

// ---------------------------------------------------------------- both that divide the state

// ShardedOptimizer, and FullyShard with Shard::kState.
using Way = std::tuple<bool, const char*>;
class DividedState : public ::testing::TestWithParam<Way> {
 protected:
  static bool fully() { return std::get<0>(GetParam()); }
  static std::string who() { return fully() ? "[fully_shard] " : "[ShardedOptimizer] "; }
  static void on_ranks(int ranks, const std::function<void(World&)>& body) {
    run_threads(ranks, body, std::get<1>(GetParam()));
  }
  static std::shared_ptr<Parallelism> make_model(const Net& net, World& world) {
    const Mesh mesh = fully() ? Mesh(world, {{"shard", -1}}) : Mesh(world);
    return parallelize(*net.ptr(), mesh, {.shard = {.shard = Shard::kState}});
  }

  struct Trained {
    explicit Trained(World& world)
        : net(make_net()),
          model(make_model(net, world)),
          optimizer(model->make_optimizer({{net->parameters(), AdamWOptions{.lr = 0.01}}}, true)) {
      step(world);
    }
    void step(World& world, const optim::StepOptions& options = {}) {
      optimizer->zero_grad();
      model->before_forward();
      model->backward(model->watch(net->forward(batch_of(world.rank(), 0), true).sum()), true);
      optimizer->step(options);
    }
    Net net;
    std::shared_ptr<Parallelism> model;
    std::unique_ptr<optim::Optimizer> optimizer;
  };
};
INSTANTIATE_TEST_SUITE_P(Ways, DividedState,
                         ::testing::Combine(::testing::Bool(), ::testing::Values("shm", "gloo")),
                         [](const auto& way) {
                           return std::string(std::get<0>(way.param) ? "kState_" : "sharded_") +
                                  std::get<1>(way.param);
                         });

// torch::load gives parameters other memory; what step() writes must be the model's all the same.
TEST_P(DividedState, LoadedWeightsAreTrained) {
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
    trained.model->verify_parameters();
  });
}

TEST_P(DividedState, WhatIsMadeDifferentlyIsRefusedByAll) {
  on_ranks(3, [](World& world) {
    const Net net = make_net();
    const auto model = make_model(net, world);
    const bool odd = world.rank() == 1;
    const auto make_of = [&](const std::vector<optim::ParamGroup>& groups) {
      return message_of<UsageError>([&] { model->make_optimizer(groups, true); });
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
    const std::uint64_t expected = fully() ? 1 : world.backend() == "shm" ? 3 : 2;
    EXPECT_EQ(sequence.load() - before, expected);
  });
}

TEST_P(DividedState, ARefusalHasTheMessageOfTheRefusingRank) {
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

TEST_P(DividedState, ADifferenceIsExplainedByWhatDiffers) {
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
TEST_P(DividedState, WhatOneRankCannotStepNoneSteps) {
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
    trained.model->before_forward();
    trained.model->backward(
        trained.model->watch(trained.net->forward(batch_of(world.rank(), 0), true).sum()), true);
    if (odd) torch::nn::utils::clip_grad_norm_(trained.net->parameters(), 1e-3);
    EXPECT_THAT(message_of<UsageError>([&] { trained.optimizer->step(); }),
                HasSubstr("torch::nn::utils::clip_grad_norm_"));
    trained.step(world);
    trained.model->verify_parameters();
  });
}

}  // namespace
}  // namespace lockstep
