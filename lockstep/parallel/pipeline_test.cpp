// Pipeline: torch's orders, programs that cannot wait in a circle, the training of one process, and
// what a user would get wrong. The Trainer's side is in tests/train/pipeline_test.py.
#include "lockstep/parallel/pipeline.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/data/window.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/models/lora.h"
#include "lockstep/nn/block.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/language_model_for_test.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using parallel::compute_order;
using parallel::pipeline_programs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::flat;
using ::testing::HasSubstr;
using testing::message_of;
using Kind = PipelineStep::Kind;

constexpr auto kAll = {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B,
                       PipelineSchedule::kInterleaved1F1B};

// ---------------------------------------------------------------- orders

TEST(PipelineSchedule, HasTorchsOrders) {
  const char* python = std::getenv("LOCKSTEP_PYTHON");
  const char* source = std::getenv("LOCKSTEP_SOURCE");
  ASSERT_TRUE(python != nullptr && source != nullptr) << "run by ctest";
  const std::string command =
      fmt::format("'{}' '{}/lockstep/parallel/pipeline_oracle.py'", python, source);
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string said;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) said += static_cast<char>(c);
  ASSERT_EQ(::pclose(pipe), 0);
  std::istringstream lines(said);
  int compared = 0;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string schedule, theirs;
    PipelineShape shape;
    int rank = 0;
    words >> schedule >> shape.ranks >> shape.stages_per_rank >> shape.micro_batches >> rank >>
        std::ws;
    std::getline(words, theirs);
    for (const PipelineSchedule ours : kAll)
      if (schedule == parallel::name(ours)) {
        ++compared;
        ASSERT_EQ(parallel::show(compute_order(ours, shape, rank)), theirs) << line;
      }
  }
  EXPECT_EQ(compared, 810);
}

// Runs programs as the strictest device does: a message ends when both ranks are at it, and a rank
// does nothing else meanwhile. Returns whether all came to their end.
bool ends_without_buffers(const std::vector<std::vector<PipelineStep>>& programs) {
  std::vector<std::size_t> at(programs.size());
  const auto head = [&](std::size_t rank) -> const PipelineStep* {
    return at[rank] < programs[rank].size() ? &programs[rank][at[rank]] : nullptr;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t rank = 0; rank < programs.size(); ++rank) {
      const PipelineStep* const step = head(rank);
      if (step == nullptr) continue;
      if (step->peer < 0) {
        ++at[rank], moved = true;
        continue;
      }
      const bool forward = step->kind == Kind::kSendOutput;
      if (!forward && step->kind != Kind::kSendGradient) continue;
      const PipelineStep* const other = head(static_cast<std::size_t>(step->peer));
      if (other == nullptr || other->peer != static_cast<int>(rank) ||
          other->kind != (forward ? Kind::kRecvInput : Kind::kRecvGradient) ||
          other->stage != step->stage + (forward ? 1 : -1) ||
          other->micro_batch != step->micro_batch)
        continue;
      ++at[static_cast<std::size_t>(step->peer)];
      ++at[rank], moved = true;
    }
  }
  for (std::size_t rank = 0; rank < programs.size(); ++rank)
    if (at[rank] != programs[rank].size()) return false;
  return true;
}

TEST(PipelineSchedule, NoTwoRanksWaitForEachOther) {
  for (const PipelineSchedule schedule : kAll)
    for (int ranks = 1; ranks <= 5; ++ranks)
      for (int locals = 1; locals <= 3; ++locals)
        for (int m = 1; m <= 11; ++m) {
          const PipelineShape shape{.ranks = ranks, .stages_per_rank = locals, .micro_batches = m};
          const auto programs = pipeline_programs(schedule, shape);
          ASSERT_TRUE(ends_without_buffers(programs))
              << parallel::name(schedule) << ' ' << ranks << ' ' << locals << ' ' << m;
          for (int rank = 0; rank < ranks; ++rank)  // the messages change no order
            ASSERT_EQ(parallel::show(programs[static_cast<std::size_t>(rank)]),
                      parallel::show(compute_order(schedule, shape, rank)));
        }
}

TEST(PipelineSchedule, AReceiveThatComesTooEarlyIsFound) {
  auto programs = pipeline_programs(PipelineSchedule::k1F1B, {.ranks = 2, .micro_batches = 4});
  for (auto& steps : programs)  // both receive first
    std::ranges::stable_sort(steps, {}, [](const PipelineStep& step) {
      return step.kind != Kind::kRecvInput && step.kind != Kind::kRecvGradient;
    });
  EXPECT_FALSE(ends_without_buffers(programs));
}

TEST(PipelineSchedule, BlocksAreSplitWithMoreInTheMiddle) {
  EXPECT_THAT(parallel::split_blocks(8, 4), ElementsAre(0, 2, 4, 6, 8));
  EXPECT_THAT(parallel::split_blocks(6, 4), ElementsAre(0, 1, 3, 5, 6));
  EXPECT_THAT(parallel::split_blocks(3, 2), ElementsAre(0, 2, 3));
  EXPECT_THAT(parallel::split_blocks(3, 3), ElementsAre(0, 1, 2, 3));
}

// ---------------------------------------------------------------- a model

constexpr std::int64_t kWidth = 6;

// Without a BLAS, none of which promises equal bits for equal operands in every call: these tests
// compare bits.
at::Tensor product(const at::Tensor& x, const at::Tensor& weight) {
  return (x.unsqueeze(2) * weight).sum(1);
}

struct NetOptions {
  int blocks = 8;
  bool tied = false;
  bool frozen_front = false;  // nothing before block 5 is trained
};

struct Net : torch::nn::Module, nn::Staged {
  explicit Net(std::uint64_t seed, NetOptions options = {}) : tied(options.tied) {
    auto random = at::make_generator<at::CPUGeneratorImpl>(seed);
    const auto drawn = [&] { return at::randn({kWidth, kWidth}, random) * 0.4; };
    embed = register_parameter("embed", drawn());
    for (int i = 0; i < options.blocks; ++i)
      blocks.push_back(register_parameter("block" + std::to_string(i), drawn()));
    bias = register_parameter("bias", at::zeros({1, kWidth}));
    if (!tied) head = register_parameter("head", drawn());
    if (!options.frozen_front) return;
    embed.set_requires_grad(false);
    for (std::size_t i = 0; i < 5; ++i) blocks[i].set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& samples) {
    at::Tensor x = stage().first ? product(samples, embed) : stage().input;
    for (std::size_t i = stage().begin; i < stage().end_of(blocks.size()); ++i) {
      if (look) look(i);
      x = x + product(x, blocks[i]).tanh();
    }
    return stage().last ? product(x + bias, tied ? embed.t() : head) : x;
  }
  at::Tensor loss(const at::Tensor& samples) {
    const at::Tensor y = forward(samples);
    return stage().last ? y.square().mean() : y;
  }
  Parts parts() const override {
    Parts parts{.first = {embed}, .last = {bias, tied ? embed : head}};
    for (const at::Tensor& block : blocks) parts.blocks.push_back({block});
    return parts;
  }
  bool tied;
  at::Tensor embed, bias, head;
  std::vector<at::Tensor> blocks;
  std::function<void(std::size_t)> look;
};

// Micro-batch `k` of a step on a data rank; one of them is shorter.
at::Tensor samples(int step, int k, int rank) {
  auto random = at::make_generator<at::CPUGeneratorImpl>(
      static_cast<std::uint64_t>(1000 * step + 10 * k + rank));
  return at::randn({k == 1 ? 2 : 3, kWidth}, random);
}

const optim::AdamWOptions kAdamW{.lr = 0.05};

// Trains a Net by any parallelism, with the same windows.
struct Trained {
  Trained(std::shared_ptr<Net> model, std::shared_ptr<Parallelism> way, int micro_batches,
          const optim::Rule& rule = kAdamW)
      : net(std::move(model)),
        parallelism(std::move(way)),
        optimizer(parallelism->make_optimizer(groups(rule))),
        micro_batches(micro_batches) {}

  std::vector<optim::ParamGroup> groups(const optim::Rule& rule) const {
    std::vector<at::Tensor> trained;
    for (const at::Tensor& each : net->parameters())
      if (each.requires_grad()) trained.push_back(each);
    return {{trained, rule}};
  }
  void backward(int step) {
    World& ranks = parallelism->mesh().batch();
    std::vector<data::Batch> batches;
    for (int k = 0; k < micro_batches; ++k) {
      const at::Tensor x = samples(step, k, ranks.rank());
      batches.push_back({.data = x, .tokens = x.size(0)});
    }
    const data::Window window(batches, ranks);
    const auto losses = parallelism->run_window(passes_of(
        window, [this](const data::Batch& batch) { return net->loss(batch.data); }, scaler));
    loss = 0;
    for (std::size_t i = 0; i < losses.size(); ++i)
      loss += losses[i].item<double>() * window[i].weight.item<double>();
    loss = all_reduce(ranks, loss, ReduceOp::kAvg);
  }
  optim::StepResult step(int number, const optim::StepOptions& options = {}) {
    backward(number);
    const optim::StepResult result = optimizer->step(options);
    optimizer->zero_grad();
    return result;
  }
  at::Tensor weights() {
    const std::shared_ptr<void> whole = parallelism->gathered();
    return flat(*net).clone();
  }

  std::shared_ptr<Net> net;
  std::shared_ptr<Parallelism> parallelism;
  std::unique_ptr<optim::Optimizer> optimizer;
  int micro_batches;
  optim::GradScaler* scaler = nullptr;
  double loss = 0;
};

// With rank 0's weights, which are those of seed 0.
Trained pipelined(const Mesh& mesh, PipelineOptions options, int micro_batches,
                  const NetOptions& net_options = {}, const optim::Rule& rule = kAdamW) {
  auto net = std::make_shared<Net>(static_cast<std::uint64_t>(mesh.world().rank()), net_options);
  auto way = std::make_shared<Pipeline>(*net, mesh, options);
  return {net, way, micro_batches, rule};
}

// The same samples without stages: in one process, or in one for each rank along "data".
Trained whole(const Mesh& mesh, int micro_batches, const NetOptions& net_options = {},
              const optim::Rule& rule = kAdamW) {
  auto net = std::make_shared<Net>(0, net_options);
  auto way = std::make_shared<DataParallel>(*net, Mesh(mesh.batch()));
  return {net, way, micro_batches, rule};
}

std::vector<PipelineOptions> ways(int ranks, int blocks) {
  std::vector<PipelineOptions> all{{PipelineSchedule::kGPipe}, {PipelineSchedule::k1F1B}};
  for (int locals = 1; locals * ranks <= blocks && locals <= 3; ++locals)
    all.push_back({PipelineSchedule::kInterleaved1F1B, locals});
  return all;
}

void on_mesh(int stages, int copies, const std::function<void(const Mesh&)>& body) {
  testing::run_on_mesh({{"pipeline", stages}, {"data", copies}}, body);
}

class PipelineTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, PipelineTest, ::testing::Values(1, 2, 3, 4));

// Every sum has the same order: micro-batch by micro-batch.
TEST_P(PipelineTest, HasTheBitsOfOneProcess) {
  on_mesh(GetParam(), 1, [](const Mesh& mesh) {
    for (const PipelineOptions& options : ways(mesh.size("pipeline"), 8))
      for (const int m : {1, 3, 4}) {
        Trained one = whole(mesh, m), run = pipelined(mesh, options, m);
        for (int step = 0; step < 3; ++step) {
          one.step(step);
          run.step(step);
          ASSERT_EQ(run.loss, one.loss) << parallel::name(options.schedule) << m;
        }
        ASSERT_TRUE(testing::tensors_equal(run.weights(), one.weights()));
        run.parallelism->verify_parameters();
        run.parallelism->verify_buffers();
      }
  });
}

// Stages add up a shared gradient over micro-batches before it is added up over stages.
TEST_P(PipelineTest, AWeightThatStagesShareHasOneGradient) {
  on_mesh(GetParam(), 1, [](const Mesh& mesh) {
    for (const PipelineOptions& options : ways(mesh.size("pipeline"), 8))
      for (const int m : {1, 4}) {
        const NetOptions tied{.tied = true};
        Trained one = whole(mesh, m, tied), run = pipelined(mesh, options, m, tied);
        one.backward(0);
        run.backward(0);
        const bool holds = run.net->embed.grad().defined();
        EXPECT_EQ(holds,
                  mesh.rank("pipeline") == 0 || mesh.rank("pipeline") == mesh.size("pipeline") - 1);
        // One rounding of each of eight terms and of their sums.
        if (holds) {
          EXPECT_TENSOR_NEAR(run.net->embed.grad(), one.net->embed.grad(), 1e-6);
        }
        if (holds && m == 1) {
          EXPECT_TENSOR_EQ(run.net->embed.grad(), one.net->embed.grad());
        }
        run.optimizer->step();
        one.optimizer->step();
        EXPECT_TENSOR_NEAR(run.weights(), one.weights(), 1e-4);
        run.parallelism->verify_parameters();
      }
  });
}

TEST_P(PipelineTest, ClipsAndSkipsByTheGradientsOfAllStages) {
  on_mesh(GetParam(), 1, [](const Mesh& mesh) {
    Trained one = whole(mesh, 4), run = pipelined(mesh, {}, 4);
    for (int step = 0; step < 4; ++step) {
      if (step == 2)  // in one stage's gradient, on its rank
        for (Trained* each : {&one, &run})
          each->net->look = [each](std::size_t block) {
            const torch::NoGradGuard no_grad;
            if (block == 7) each->net->bias.fill_(std::numeric_limits<float>::infinity());
          };
      const optim::StepOptions options{.max_grad_norm = 0.01, .skip_non_finite = true};
      const auto expected = one.step(step, options), got = run.step(step, options);
      EXPECT_EQ(expected.was_skipped(), step == 2);
      EXPECT_EQ(got.was_skipped(), step == 2);
      for (Trained* each : {&one, &run}) {
        each->net->look = nullptr;
        const torch::NoGradGuard no_grad;
        if (step == 2 && (each == &one || mesh.rank("pipeline") == mesh.size("pipeline") - 1))
          each->net->bias.zero_();
      }
      if (step != 2) {
        EXPECT_GT(expected.norm(), 0.01);
        EXPECT_NEAR(got.norm(), expected.norm(), 1e-6 * expected.norm());
      }
    }
    EXPECT_TENSOR_NEAR(run.weights(), one.weights(), 1e-4);
  });
}

// Ranks that compute no loss have the scale of the others.
TEST_P(PipelineTest, ScalesLossesAsOneProcess) {
  on_mesh(GetParam(), 1, [](const Mesh& mesh) {
    const optim::GradScalerOptions scaling{.init_scale = 1024, .growth_interval = 2};
    optim::GradScaler one_scaler({}, scaling), scaler(mesh.world(), scaling);
    Trained one = whole(mesh, 3), run = pipelined(mesh, {}, 3);
    one.scaler = &one_scaler;
    run.scaler = &scaler;
    for (int step = 0; step < 5; ++step) {
      const auto expected = one.step(step, {.max_grad_norm = 1, .scaler = &one_scaler});
      const auto got = run.step(step, {.max_grad_norm = 1, .scaler = &scaler});
      EXPECT_FALSE(got.was_skipped());
      EXPECT_EQ(scaler.get_scale(), one_scaler.get_scale()) << step;
      EXPECT_NEAR(got.norm(), expected.norm(), 1e-5 * expected.norm());
    }
    EXPECT_TENSOR_NEAR(run.weights(), one.weights(), 1e-3);
  });
}

// Muon takes whole matrices, AdamW elements; the second run has another number of stages.
TEST_P(PipelineTest, StateIsSavedWholeAndLoadedAnywhere) {
  for (const optim::Rule& rule :
       {optim::Rule(kAdamW), optim::Rule(optim::MuonOptions{.lr = 0.02})}) {
    const NetOptions tied{.blocks = 6, .tied = true};
    optim::TensorDict state;
    at::Tensor weights;
    on_mesh(GetParam(), 1, [&](const Mesh& mesh) {
      Trained run = pipelined(mesh, {}, 2, tied, rule);
      run.step(0);
      const at::Tensor now = run.weights();
      const optim::TensorDict dict =
          run.optimizer->state_dict({.wanted = mesh.world().is_leader()});
      EXPECT_EQ(dict.empty(), !mesh.world().is_leader());
      if (mesh.world().is_leader()) state = dict, weights = now;
    });
    Trained one = whole({}, 2, tied, rule);
    one.step(0);
    const optim::TensorDict expected = one.optimizer->state_dict();
    ASSERT_EQ(state.size(), expected.size());
    for (const auto& [name, tensor] : expected)
      EXPECT_TENSOR_NEAR(state.at(name).to(at::kDouble), tensor.to(at::kDouble), 1e-6) << name;
    at::Tensor after, after_again;
    for (const int stages : {1, GetParam() % 4 + 1})
      on_mesh(stages, 1, [&](const Mesh& mesh) {
        Trained run = pipelined(mesh, {}, 2, tied, rule);
        {
          const auto held = run.parallelism->gathered();
          const torch::NoGradGuard no_grad;
          std::int64_t offset = 0;
          for (at::Tensor& p : run.net->parameters()) {
            p.copy_(weights.narrow(0, offset, p.numel()).view(p.sizes()));
            offset += p.numel();
          }
          run.optimizer->sync_from_model();
        }
        run.optimizer->load_state_dict(state);
        run.step(1);
        const at::Tensor now = run.weights();
        if (mesh.world().is_leader()) (after.defined() ? after_again : after) = now;
      });
    EXPECT_TENSOR_NEAR(after, after_again, 1e-4);
  }
}

TEST(Pipeline, AveragesOverCopiesOfTheStages) {
  for (const auto& [stages, copies] : {std::pair(2, 2), std::pair(1, 2), std::pair(2, 3)})
    on_mesh(stages, copies, [&, copies = copies](const Mesh& mesh) {
      for (const PipelineOptions& options : ways(mesh.size("pipeline"), 8)) {
        Trained one = whole(mesh, 3), run = pipelined(mesh, options, 3);
        for (int step = 0; step < 3; ++step) {
          one.step(step);
          run.step(step);
          EXPECT_DOUBLE_EQ(run.loss, one.loss);
        }
        // Two terms have one sum.
        if (copies == 2)
          EXPECT_TENSOR_EQ(run.weights(), one.weights());
        else
          EXPECT_TENSOR_NEAR(run.weights(), one.weights(), 1e-4);
        run.parallelism->verify_parameters();
      }
    });
}

// What is frozen in front needs no gradients: none are computed or sent.
TEST(Pipeline, FrozenStagesAreNotWalkedBack) {
  on_mesh(3, 1, [](const Mesh& mesh) {
    const NetOptions frozen{.frozen_front = true};
    Trained one = whole(mesh, 4, frozen), run = pipelined(mesh, {}, 4, frozen);
    for (int step = 0; step < 2; ++step) one.step(step), run.step(step);
    EXPECT_TENSOR_EQ(run.weights(), one.weights());
  });
}

TEST(Pipeline, AMicroBatchWithoutTargetsAddsNothing) {
  on_mesh(2, 1, [](const Mesh& mesh) {
    Trained one = whole(mesh, 1), run = pipelined(mesh, {}, 2);
    one.step(0);
    const at::Tensor x = samples(0, 0, 0);
    const data::Window window({data::Batch{.data = x, .target = at::ones({1}), .tokens = 3},
                               data::Batch{.data = x, .target = at::full({1}, -100)}});
    const auto losses =
        run.parallelism->run_window(passes_of(window, [&](const data::Batch& batch) {
          const at::Tensor y = run.net->loss(batch.data);
          const at::Tensor mask = batch.target.ne(-100);  // by hand: 0 / 0 without targets
          return run.net->stage().last ? (y * mask).sum() / mask.sum() : y;
        }));
    run.optimizer->step();
    EXPECT_EQ(losses[0].item<double>(), one.loss);
    EXPECT_TENSOR_EQ(run.weights(), one.weights());
  });
}

TEST(Pipeline, ARankHoldsItsStagesAlone) {
  on_mesh(2, 1, [](const Mesh& mesh) {
    Trained run = pipelined(mesh, {}, 2, {.blocks = 4, .tied = true});
    const auto names = std::static_pointer_cast<Pipeline>(run.parallelism)->parameter_names();
    if (mesh.rank("pipeline") == 0)
      EXPECT_THAT(names, ElementsAre("embed", "block0", "block1"));
    else
      EXPECT_THAT(names, ElementsAre("embed", "block2", "block3", "bias"));
    const std::size_t foreign = mesh.rank("pipeline") == 0 ? 3 : 1;
    EXPECT_THAT(message_of<c10::Error>([&] { run.net->blocks[foreign].sum(); }),
                HasSubstr(fmt::format("parameter 'block{}' was used on a rank", foreign)));
    run.step(0);
    EXPECT_THAT(message_of<c10::Error>([&] { run.net->loss(samples(0, 0, 0)); }),
                HasSubstr("was used on a rank"));
    const auto held = run.parallelism->gathered();
    EXPECT_NO_THROW(run.net->loss(samples(0, 0, 0)));
    // A copy that somebody changed is found, also while the model is whole.
    run.parallelism->verify_parameters();
    const torch::NoGradGuard no_grad;
    if (mesh.rank("pipeline") == 1) run.net->embed.add_(1);
    EXPECT_THAT(message_of<CommError>([&] { run.parallelism->verify_parameters(); }),
                HasSubstr("the copies of 'embed', which stages share, differ"));
  });
}

// ---------------------------------------------------------------- language models

// GPT with a tied head, Llama without, and adapters on a frozen GPT. Linear in the gradients: one
// that is nearly zero is not blown up.
TEST(Pipeline, LanguageModelsAndAdaptersTrainAsInOneProcess) {
  const optim::Rule sgd = optim::SGDOptions{.lr = 0.3, .momentum = 0.9};
  const auto trained = [](const torch::nn::Module& module) {
    std::vector<at::Tensor> all;
    for (const at::Tensor& each : module.parameters())
      if (each.requires_grad()) all.push_back(each);
    return all;
  };
  const auto make = [](bool tied, bool adapters) {
    static std::mutex drawing;  // from the process's one generator
    const std::lock_guard lock(drawing);
    const auto model = testing::small_model(tied);
    if (adapters) models::add_lora(*model, {.r = 2, .target_modules = {"c_attn"}});
    return model;
  };
  on_mesh(2, 1, [&](const Mesh& mesh) {
    for (const auto& [tied, adapters] :
         {std::pair(true, false), std::pair(false, false), std::pair(true, true)})
      for (const PipelineSchedule schedule : kAll) {
        const auto one = make(tied, adapters), staged = make(tied, adapters);
        const auto pipeline = std::make_shared<Pipeline>(*staged, mesh, PipelineOptions{schedule});
        const auto train = [&](models::CausalLm& model, const std::shared_ptr<Parallelism>& way) {
          const auto optimizer = way->make_optimizer({{trained(model), sgd}});
          std::vector<double> losses;
          for (int step = 0; step < 2; ++step) {
            losses.push_back(testing::run_texts(*way, model, 4 * step, 4));
            optimizer->step({.max_grad_norm = 1});
            optimizer->zero_grad();
          }
          return losses;
        };
        const auto expected = train(*one, std::make_shared<DataParallel>(*one, Mesh())),
                   got = train(*staged, pipeline);
        for (std::size_t i = 0; i < 2; ++i) EXPECT_NEAR(got[i], expected[i], 1e-5);
        const auto held = pipeline->gathered();
        EXPECT_TENSOR_NEAR(flat(*staged), flat(*one), 1e-4);
      }
  });
}

// ---------------------------------------------------------------- mistakes and faults

TEST(PipelineFaults, RefusedBeforeAnythingIsSent) {
  on_mesh(2, 1, [](const Mesh& mesh) {
    const auto refused = [&](NetOptions net_options, PipelineOptions options) {
      Net net(0, net_options);
      return message_of<UsageError>([&] { Pipeline(net, mesh, options); });
    };
    EXPECT_THAT(refused({.blocks = 1}, {}),
                HasSubstr("2 stages (2 ranks x 1), and the model has 1 block. Every stage needs "
                          "one. Use fewer ranks along 'pipeline' (pipeline_parallel_degree)."));
    EXPECT_THAT(refused({.blocks = 3}, {PipelineSchedule::kInterleaved1F1B}),
                HasSubstr("fewer PipelineOptions::stages_per_rank, or the schedule 1F1B "
                          "(pipeline_parallel_schedule)."));
    EXPECT_THAT(refused({}, {PipelineSchedule::kGPipe, 2}), HasSubstr("stages_per_rank = 2"));
    EXPECT_THAT(refused({.blocks = 4 + mesh.rank("pipeline")}, {}), HasSubstr("rank 1 has"));
    torch::nn::LinearImpl linear(2, 2);
    EXPECT_THAT(message_of<UsageError>([&] { Pipeline(linear, mesh); }),
                HasSubstr("cannot be computed in stages. Derive it from nn::Staged"));
    Net forgetful(0);
    forgetful.register_parameter("extra", at::zeros({1}));
    EXPECT_THAT(message_of<UsageError>([&] { Pipeline(forgetful, mesh); }),
                HasSubstr("parameter 'extra' is in none of the module's parts()"));
  });
}

TEST(PipelineFaults, WhatLooksAtAllGradientsIsRefused) {
  on_mesh(2, 1, [](const Mesh& mesh) {
    Trained run = pipelined(mesh, {}, 2);
    run.backward(0);
    EXPECT_THAT(message_of<UsageError>([&] { optim::clip_grad_norm_(run.net->parameters(), 1.0); }),
                HasSubstr("step({.max_grad_norm"));
    EXPECT_THAT(message_of<UsageError>([&] { run.parallelism->backward(at::ones({}), true); }),
                HasSubstr("the passes of a step run together"));
    EXPECT_THAT(message_of<UsageError>([&] { run.parallelism->run_window({}); }),
                HasSubstr("a window without micro-batches"));
    EXPECT_THAT(
        message_of<UsageError>([&] { parallelize(*run.net, mesh, {.shard_optimizer = true}); }),
        HasSubstr("Leave shard_optimizer out"));
    run.optimizer->step({.max_grad_norm = 1});  // which may look
    const auto held = run.parallelism->gathered();
    EXPECT_THAT(message_of<UsageError>([&] { run.net->loss(samples(0, 0, 0)).backward(); }),
                AllOf(HasSubstr("a backward reached parameter '"), HasSubstr("past run_window()")));
  });
}

// Ranks whose own pipeline has equal lengths refuse them too, and nobody waits for a deadline.
TEST(PipelineFaults, WindowsOfDifferentLengthsAreRefused) {
  for (const int different : {3, 0})
    testing::run_on_mesh({{"pipeline", 2}, {"shard", 2}}, [&](const Mesh& mesh) {
      Trained run = pipelined(mesh, {}, 2);
      std::vector<Parallelism::Pass> passes(mesh.world().rank() == 3 ? different : 2);
      EXPECT_THAT(message_of<UsageError>([&] { run.parallelism->run_window(passes); }),
                  HasSubstr(different == 0 ? "a window without micro-batches"
                                           : "along 'pipeline', rank 1 has a window of 3 "
                                             "micro-batches and rank 0 one of 2"));
      run.step(0);
    });
}

TEST(PipelineFaults, AShapeThatChangesIsNamed) {
  const auto said = testing::run_threads_collecting(2, [](World& world) {
    const Mesh mesh(world, {{"pipeline", 2}});
    Trained run = pipelined(mesh, {}, 2);
    std::vector<Parallelism::Pass> passes;
    for (const std::int64_t rows : {3, 2})
      passes.push_back({.forward = [&run, rows] { return run.net->loss(at::ones({rows, kWidth})); },
                        .weigh = [](const at::Tensor& loss) { return loss; }});
    run.parallelism->run_window(passes);
  });
  EXPECT_THAT(said[0], AllOf(HasSubstr("stage 0 returned Float [2, 6] for micro-batch 1, and Float "
                                       "[3, 6] before"),
                             HasSubstr("Pass::sizes")));
  EXPECT_THAT(said[1], HasSubstr("rank 0"));
}

// The others learn of it at once, not at a deadline, and name the rank.
TEST(PipelineFaults, AStageThatThrowsEndsTheOthers) {
  const auto begin = std::chrono::steady_clock::now();
  const auto ranks = testing::run_processes(3, [](World& world) {
    const Mesh mesh(world, {{"pipeline", 3}});
    Trained run = pipelined(mesh, {}, 4);
    run.net->look = [&](std::size_t) {
      if (mesh.rank("pipeline") == 1) throw std::runtime_error("this stage is broken");
    };
    run.step(0);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
  for (const auto& rank : ranks) EXPECT_NE(rank.exit_code, 0) << rank.output;
  EXPECT_THAT(ranks[1].output, HasSubstr("this stage is broken"));
  for (const int other : {0, 2}) EXPECT_THAT(ranks[other].output, HasSubstr("rank 1"));
}

TEST(PipelineFaults, AStageThatIsKilledEndsTheOthers) {
  const auto begin = std::chrono::steady_clock::now();
  const auto ranks = testing::run_processes(2,
                                            [](World& world) {
                                              const Mesh mesh(world, {{"pipeline", 2}});
                                              Trained run = pipelined(mesh, {}, 4);
                                              run.step(0);
                                              std::cout << "trains" << std::endl;
                                              for (int step = 1;; ++step) run.step(step);
                                            },
                                            {.meanwhile = [](testing::RunningRanks& running) {
                                              ASSERT_TRUE(running.wait_for(1, "trains"));
                                              running.kill(1, SIGKILL);
                                            }});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
  EXPECT_EQ(ranks[1].signal, SIGKILL);
  EXPECT_NE(ranks[0].exit_code, 0);
  EXPECT_THAT(ranks[0].output, HasSubstr("rank 1"));
}

// ---------------------------------------------------------------- the bubble

struct Sleep : torch::autograd::Function<Sleep> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            double seconds) {
    context->saved_data["seconds"] = seconds;
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    return x + 0;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    std::this_thread::sleep_for(
        std::chrono::duration<double>(2 * context->saved_data["seconds"].toDouble()));
    return {gradients[0], at::Tensor()};
  }
};

// When all ranks have done their steps, by a clock that counts: forwards take 1, backwards 2,
// messages nothing.
double time_of(const std::vector<std::vector<PipelineStep>>& programs) {
  std::map<std::tuple<bool, int, int>, double> done;  // by backward, stage, micro-batch
  std::vector<std::size_t> at(programs.size());
  std::vector<double> now(programs.size());
  int stages = 0;
  for (const auto& steps : programs)
    for (const PipelineStep& step : steps) stages = std::max(stages, step.stage + 1);
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t rank = 0; rank < programs.size(); ++rank) {
      if (at[rank] == programs[rank].size()) continue;
      const PipelineStep& step = programs[rank][at[rank]];
      const bool backward = step.kind == Kind::kBackward;
      if (backward || step.kind == Kind::kForward) {
        const int k = step.micro_batch, before = step.stage + (backward ? 1 : -1);
        const bool begins = before < 0 || before == stages;
        const auto ready = done.find({backward, before, k});
        if (!begins && ready == done.end()) continue;
        now[rank] = std::max(now[rank], begins ? 0 : ready->second) + (backward ? 2 : 1);
        done[{backward, step.stage, k}] = now[rank];
      }
      ++at[rank], moved = true;
    }
  }
  return *std::ranges::max_element(now);
}

TEST(PipelineBubble, IsTheFormulas) {
  for (const int p : {1, 2, 3, 4, 8})
    for (const int rounds : {1, 2, 5})
      for (const PipelineSchedule schedule : kAll) {
        const int m = rounds * p, v = schedule == PipelineSchedule::kInterleaved1F1B ? 2 : 1;
        const double total = time_of(
            pipeline_programs(schedule, {.ranks = p, .stages_per_rank = v, .micro_batches = m}));
        EXPECT_NEAR(1 - 3.0 * v * m / total, (p - 1.0) / (v * m + p - 1), 1e-12)
            << parallel::name(schedule) << p << ' ' << m;
      }
}

// Blocks that sleep need no cores, so that a rank waits as long as the schedule says on any
// machine; docs/pipeline.md has what this prints. A busy machine can only lengthen a window: the
// schedule's own time is a lower bound, and an upper one would test the machine.
TEST(PipelineBubble, MeasuredOnSleepingStages) {
  constexpr double kBlock = 0.004;  // seconds of a block's forward; its backward has twice as much
  for (const int p : {2, 4})
    for (const PipelineOptions options :
         {PipelineOptions{PipelineSchedule::kGPipe}, PipelineOptions{PipelineSchedule::k1F1B},
          PipelineOptions{PipelineSchedule::kInterleaved1F1B, 2}}) {
      const int m = 2 * p, v = std::max(1, options.stages_per_rank);
      double fastest = 1e9;
      on_mesh(p, 1, [&](const Mesh& mesh) {
        Trained run = pipelined(mesh, options, m);
        World& world = mesh.world();
        for (int step = 0; step < 4; ++step) {
          world.barrier();
          const auto begin = std::chrono::steady_clock::now();
          const Parallelism::Pass pass{
              .forward =
                  [&] {
                    const auto& stage = run.net->stage();
                    const auto blocks = static_cast<double>(stage.end_of(8) - stage.begin);
                    return Sleep::apply(run.net->loss(at::ones({3, kWidth})), blocks * kBlock);
                  },
              .weigh = [](const at::Tensor& loss) { return loss; }};
          run.parallelism->run_window(std::vector(static_cast<std::size_t>(m), pass));
          world.barrier();
          const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
          if (world.is_leader() && step > 0) fastest = std::min(fastest, took.count());
          run.optimizer->zero_grad();
        }
      });
      const double work = m * 3 * kBlock * 8 / p;
      const double expected = (p - 1.0) / (v * m + p - 1.0), measured = 1 - work / fastest;
      std::cout << fmt::format("bubble: p {} m {} {:16} expected {:.3f} measured {:.3f}\n", p, m,
                               parallel::name(options.schedule), expected, measured);
      EXPECT_GT(measured, expected - 0.001);
    }
}

}  // namespace
}  // namespace lockstep
