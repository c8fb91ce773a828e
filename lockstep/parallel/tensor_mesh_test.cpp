// Slices of tensor parallelism that are divided by rows (FullyShard), are those of a stage
// (Pipeline), or both: the losses, norms, gradients and states of one process, and what each rank
// says that it holds; and what it holds while the model is made. Slices alone are in
// tensor_parallel_test.cpp; `lockstep train` with every combination of axes is in
// tests/train/combinations_test.py.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/world_impl.h"
#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/models/lora.h"
#include "lockstep/nn/divided.h"
#include "lockstep/nn/fp8.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/amp.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/ema.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/counting_allocator_for_test.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/language_model_for_test.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/parallel/pipeline.h"
#include "lockstep/parallel/tensor_parallel.h"
#include "lockstep/testing/worlds.h"

namespace lockstep::tensor_mesh {
namespace {

using ::testing::AllOf;
using testing::flat;
using ::testing::HasSubstr;
using testing::kLayers;
using testing::kVocabulary;
using testing::message_of;
using testing::small_model;
using testing::text;
using testing::text_batch;

struct Trained {
  Trained(models::CausalLmPtr model, std::shared_ptr<Parallelism> how, const optim::Rule& rule)
      : net(std::move(model)),
        way(std::move(how)),
        optimizer(way->make_optimizer({{net->parameters(), rule}})) {}

  Parallelism::Pass pass(int k) {
    const data::Batch batch = text_batch(k, way->mesh().batch().rank());
    return {.forward = [this, batch] { return net->loss(batch.data, batch.target); },
            .weigh = [](const at::Tensor& loss) { return loss; }};
  }
  // Losses and norms of steps of `m` micro-batches. `empty`: one of the first rank has no targets.
  std::vector<double> train(int steps, int m, double max_grad_norm, bool empty = false) {
    std::vector<double> figures;
    for (int step = 0; step < steps; ++step) {
      figures.push_back(testing::run_texts(*way, *net, step * m, m, empty));
      const optim::StepResult result =
          optimizer->step({.max_grad_norm = max_grad_norm, .want_grad_norm = true});
      optimizer->zero_grad();
      figures.push_back(result.norm());
    }
    return figures;
  }
  // A forward without gradients, through stages or blocks, on all ranks.
  double evaluate() {
    const torch::NoGradGuard no_grad;
    return way->run_window({pass(0)})[0].item<double>();
  }
  at::Tensor weights() {
    const auto held = way->gathered();
    return flat(*net).clone();
  }

  models::CausalLmPtr net;
  std::shared_ptr<Parallelism> way;
  std::unique_ptr<optim::Optimizer> optimizer;
};

const optim::Rule kAdamW = optim::AdamWOptions{.lr = 3e-3};
const optim::Rule kGradients = optim::SGDOptions{.lr = 1};  // what a step subtracts

bool has_rows(const Mesh& mesh) {
  return std::ranges::any_of(mesh.axes(),
                             [](const MeshAxis& axis) { return axis.name == "shard"; });
}

// TensorParallel, or FullyShard or Pipeline where the mesh has such an axis.
Trained divided(const Mesh& mesh, bool tied, const optim::Rule& rule = kAdamW,
                FullyShardOptions options = {}, bool sequence = false) {
  const auto net =
      small_model(tied, 7 + static_cast<std::uint64_t>(mesh.world().rank()));  // rank 0's count
  net->use_sequence_parallel(sequence);
  if (mesh.size("pipeline") == 1) {
    if (!has_rows(mesh)) return {net, std::make_shared<TensorParallel>(*net, mesh), rule};
    return {net, std::make_shared<FullyShard>(*net, mesh, options), rule};
  }
  const PipelineOptions stages{
      .schedule = tied ? PipelineSchedule::k1F1B : PipelineSchedule::kInterleaved1F1B,
      .shard = options};
  return {net, std::make_shared<Pipeline>(*net, mesh, stages), rule};
}

Trained whole(const Mesh& mesh, bool tied, const optim::Rule& rule = kAdamW) {
  const auto net = small_model(tied);
  return {net, std::make_shared<DataParallel>(*net, Mesh(mesh.batch())), rule};
}

using Axes = std::vector<MeshAxis>;
const std::vector<Axes> kMeshes{{{"shard", 2}, {"tensor", 2}},
                                {{"shard", 1}, {"tensor", 2}},
                                {{"data", 2}, {"shard", 1}, {"tensor", 2}},
                                {{"data", 2}, {"shard", 2}, {"tensor", 2}},
                                {{"pipeline", 2}, {"tensor", 2}},
                                {{"pipeline", 2}, {"data", 2}, {"tensor", 2}},
                                {{"pipeline", 2}, {"shard", 2}, {"tensor", 2}}};
// And slices alone, also of two copies.
const std::vector<Axes> kAllMeshes = [] {
  std::vector<Axes> all = kMeshes;
  all.push_back({{"tensor", 2}});
  all.push_back({{"data", 2}, {"tensor", 2}});
  return all;
}();

void on_meshes(const std::vector<Axes>& meshes, const std::function<void(const Mesh&)>& body) {
  for (const Axes& axes : meshes)
    testing::run_on_mesh(axes, [&](const Mesh& mesh) {
      SCOPED_TRACE(mesh.text());
      body(mesh);
      mesh.world().barrier();
    });
}

// Sums of at most 64 products, each term below 8, in another order; four layers and the loss are
// such sums one after the other (tensor_parallel_test.cpp).
constexpr double kSums = 8 * 64 * 8 / 16777216.0;
// AdamW divides by a gradient's size, so that it adds up errors that are relative to it.
constexpr double kFigures = 1e-4;

// Tied or not, sequence parallel or not.
constexpr std::pair<bool, bool> kModels[] = {
    {false, false}, {false, true}, {true, false}, {true, true}};

TEST(TensorMesh, HasTheGradientsOfOneProcess) {
  on_meshes(kAllMeshes, [](const Mesh& mesh) {
    for (const bool tied : {false, true}) {
      Trained one = whole(mesh, tied, kGradients);
      const at::Tensor before = one.weights();
      one.train(1, 1, 0);
      EXPECT_GT((one.weights() - before).abs().max().item<double>(), 100 * kSums);
      for (const bool sequence : {false, true}) {
        Trained run = divided(mesh, tied, kGradients, {}, sequence);
        run.train(1, 1, 0);
        EXPECT_TENSOR_NEAR(run.weights(), one.weights(), kSums);
        run.way->verify_parameters();
        run.way->verify_buffers();
      }
    }
  });
}

TEST(TensorMesh, HasTheLossesAndNormsOfOneProcess) {
  on_meshes(kAllMeshes, [](const Mesh& mesh) {
    for (const bool tied : {false, true}) {
      Trained one = whole(mesh, tied);
      const auto expected = one.train(2, 3, 0.5, /*empty=*/true);
      const double evaluated = one.evaluate();  // what the last update has made
      for (const bool sequence : {false, true}) {
        Trained run = divided(mesh, tied, kAdamW, {.reshard_after_forward = tied}, sequence);
        EXPECT_THAT(run.way->text(), HasSubstr("in slices on 2 tensor parallel ranks"));
        const auto got = run.train(2, 3, 0.5, /*empty=*/true);
        ASSERT_EQ(got.size(), expected.size());
        for (std::size_t i = 0; i < got.size(); ++i)
          EXPECT_NEAR(got[i], expected[i], kFigures * expected[i]) << i;
        EXPECT_NEAR(run.evaluate(), evaluated, kFigures * 4);
        run.way->verify_parameters();
      }
    }
  });
}

// ---------------------------------------------------------------- states

TEST(TensorMesh, TheStateIsThatOfTheWholeModel) {
  on_meshes(kAllMeshes, [](const Mesh& mesh) {
    Trained run = divided(mesh, /*tied=*/false), one = whole(mesh, false);
    run.train(2, 1, 0);
    one.train(2, 1, 0);
    const auto got = run.optimizer->state_dict(), expected = one.optimizer->state_dict();
    ASSERT_EQ(got.size(), expected.size());
    for (const auto& [key, value] : expected) EXPECT_TENSOR_NEAR(got.at(key), value, kSums) << key;
    EXPECT_TRUE(run.optimizer->state_dict({.wanted = false}).empty());
    Trained other = divided(mesh, /*tied=*/false);
    {
      // Written and loaded while parameters are whole, in the shapes of the whole.
      const auto held = other.way->gathered();
      const torch::NoGradGuard no_grad;
      const auto from = one.net->parameters(), to = other.net->parameters();
      for (std::size_t i = 0; i < to.size(); ++i) at::Tensor(to[i]).copy_(from[i]);
      other.optimizer->sync_from_model();
      other.optimizer->load_state_dict(expected);
      EXPECT_TENSOR_EQ(flat(*other.net), flat(*one.net));
      EXPECT_TENSOR_EQ(other.optimizer->state_dict().at("lm_head.weight.exp_avg"),
                       expected.at("lm_head.weight.exp_avg"));
    }
    EXPECT_TENSOR_EQ(other.weights(), flat(*one.net));
    for (const auto& [key, value] : other.optimizer->state_dict())
      EXPECT_TENSOR_EQ(value, expected.at(key)) << key;
    EXPECT_NEAR(other.train(1, 1, 0)[0], one.train(1, 1, 0)[0], kFigures * 4);
    optim::TensorDict wrong = expected;
    wrong["lm_head.weight.exp_avg"] = at::zeros({36, 16});
    EXPECT_THAT(message_of<UsageError>([&] { other.optimizer->load_state_dict(wrong); }),
                HasSubstr("lm_head.weight.exp_avg"));
  });
}

// What the ranks say that they hold covers the model, and is where they say, also after a forward
// that leaves something gathered.
TEST(TensorMesh, EveryElementIsHeldAndMarked) {
  on_meshes(kMeshes, [](const Mesh& mesh) {
    Trained run = divided(mesh, /*tied=*/false);
    EXPECT_TRUE(run.way->divided());
    run.train(1, 1, 0);
    for (const bool after_evaluation : {false, true}) {
      if (after_evaluation) run.evaluate();
      std::vector<at::Tensor> parts;
      for (const at::Tensor& p : run.net->parameters()) {
        const nn::Rows* const rows = nn::rows_of(p);
        const auto sizes = nn::whole_sizes(p);
        parts.push_back(at::zeros({c10::multiply_integers(sizes)}));
        // Every rank along "tensor" has what is not cut.
        if (rows == nullptr || (!rows->slice && mesh.rank("tensor") > 0)) continue;
        for (const nn::Run& each : nn::runs_of(*rows))
          parts.back()
              .narrow(0, each.in_whole, each.length)
              .copy_(rows->values.narrow(0, each.in_values, each.length));
      }
      const at::Tensor all = at::cat(parts);
      for (const char* axis : {"pipeline", "shard", "tensor"})
        if (mesh.size(axis) > 1) mesh[axis].all_reduce(all).wait();
      if (!after_evaluation) {
        EXPECT_TENSOR_EQ(all, run.weights());
      } else {
        // Of the root the first rank has what is not cut whole, and nobody marks it.
        const at::Tensor differs = all.ne(run.weights());
        EXPECT_LE(differs.sum().item<std::int64_t>(), 16);
      }
      const auto held = run.way->gathered();
      for (const at::Tensor& p : run.net->parameters()) EXPECT_EQ(nn::rows_of(p), nullptr);
    }
  });
}

TEST(TensorMesh, WholeValuesAreAssignedToSlices) {
  on_meshes(kMeshes, [](const Mesh& mesh) {
    Trained run = divided(mesh, /*tied=*/true);
    const auto other = small_model(/*tied=*/true, 99);
    const auto to = run.net->parameters(), from = other->parameters();
    for (std::size_t i = 0; i < to.size(); ++i) {
      EXPECT_EQ(nn::whole_sizes(to[i]), from[i].sizes().vec());
      nn::assign(to[i], from[i].detach());
    }
    EXPECT_TENSOR_EQ(run.weights(), flat(*other));
  });
}

// An evaluation leaves what is outside of blocks gathered: what is assigned after it counts, also
// where rows are copied (an own type that travels) and not pointed at.
TEST(TensorMesh, WhatWasGatheredDoesNotOutliveAnAssignment) {
  on_meshes({{{"shard", 2}, {"tensor", 2}}}, [](const Mesh& mesh) {
    Trained run = divided(mesh, /*tied=*/true, kAdamW, {.param_dtype = at::kFloat});
    const auto other = small_model(/*tied=*/true, 99);
    run.evaluate();
    const auto to = run.net->parameters(), from = other->parameters();
    for (std::size_t i = 0; i < to.size(); ++i) nn::assign(to[i], from[i].detach());
    run.optimizer->sync_from_model();
    EXPECT_TENSOR_EQ(run.weights(), flat(*other));
  });
}

// As after Trainer::train(), which leaves the model whole and holds nothing.
TEST(TensorMesh, AModelThatWasLeftWholeCanBeCalled) {
  on_meshes({{{"shard", 2}, {"tensor", 2}}}, [](const Mesh& mesh) {
    Trained run = divided(mesh, /*tied=*/true), one = whole(mesh, /*tied=*/true);
    run.way->gathered();
    const torch::NoGradGuard no_grad;
    const at::Tensor ids = text(0, 0);
    EXPECT_TENSOR_NEAR(run.net->forward(ids), one.net->forward(ids), kSums);
    EXPECT_TENSOR_EQ(run.weights(), one.weights());
  });
}

// ---------------------------------------------------------------- slices and the whole

// As the Trainer does where it saves beside the next forward.
TEST(TensorMesh, AForwardThatTrainsEndsTheWhole) {
  on_meshes(kAllMeshes, [](const Mesh& mesh) {
    Trained run = divided(mesh, /*tied=*/true, kGradients);
    Trained one = whole(mesh, /*tied=*/true, kGradients);
    const std::shared_ptr<void> held = run.way->gathered();
    const at::Tensor before = flat(*run.net).clone();
    EXPECT_NEAR(run.evaluate(), one.evaluate(), kSums);  // while it is held: whole
    EXPECT_TENSOR_EQ(flat(*run.net), before);
    const at::Tensor taken = run.net->parameters()[0].detach();  // by somebody who writes a file
    EXPECT_NEAR(run.train(1, 1, 0)[0], one.train(1, 1, 0)[0], kSums);
    EXPECT_TENSOR_EQ(taken.flatten(), before.narrow(0, 0, taken.numel()));
    EXPECT_TENSOR_NEAR(run.weights(), one.weights(), kSums);
  });
}

// ---------------------------------------------------------------- cut while it is made

const std::vector<Axes> kMade{{{"tensor", 2}},
                              {{"data", 2}, {"tensor", 2}},
                              {{"shard", 1}, {"tensor", 2}},
                              {{"shard", 2}, {"tensor", 2}},
                              {{"data", 2}, {"shard", 2}, {"tensor", 2}},
                              {{"pipeline", 2}, {"tensor", 2}},
                              {{"pipeline", 2}, {"shard", 2}, {"tensor", 2}}};

// What `make` makes with the mesh's construction, and then its parallelism.
models::CausalLmPtr made_cut(const Mesh& mesh, const std::function<models::CausalLmPtr()>& make) {
  if (mesh.size("pipeline") > 1) {
    const PipelinedConstruction split(mesh, kLayers);
    return make();
  }
  const ShardedConstruction cut(mesh);
  return make();
}

// Three micro-batches send three times what one does, but for the average of small weights and a
// pipeline's comparison of the windows' lengths.
TEST(TensorMesh, SmallGradientsAreSentOnceInAnUpdate) {
  std::vector<Axes> meshes = kMeshes;
  meshes.push_back({{"tensor", 2}});
  on_meshes(meshes, [](const Mesh& mesh) {
    for (const auto& [tied, sequence] : kModels) {
      const auto net = small_model(tied);
      net->use_sequence_parallel(sequence);
      Trained run(net, parallelize(*net, mesh), kGradients);
      const auto& sent = detail::Access::impl(mesh["tensor"])->sequence;
      const auto in_update = [&](int micro_batches) {
        std::vector<Parallelism::Pass> passes;
        for (int k = 0; k < micro_batches; ++k) passes.push_back(run.pass(k));
        const std::uint64_t before = sent;
        run.way->run_window(passes);
        run.optimizer->zero_grad();
        return static_cast<int>(sent - before);
      };
      const int one = in_update(1);
      const int once = (sequence ? 1 : 0) + (run.way->takes_windows() ? 1 : 0);
      EXPECT_EQ(3 * one - in_update(3), 2 * once) << tied;
    }
  });
}

// A step averages them where no backward was said to be the last.
TEST(TensorMesh, AStepAveragesWhatNoLastBackwardHas) {
  on_meshes({{{"shard", 1}, {"tensor", 2}}, {{"shard", 2}, {"tensor", 2}}}, [](const Mesh& mesh) {
    for (const bool tied : {false, true}) {
      const auto net = small_model(tied);
      net->use_sequence_parallel(true);
      Trained run(net, parallelize(*net, mesh), kGradients);
      Trained one = whole(mesh, tied, kGradients);
      for (int k = 0; k < 2; ++k) {
        run.way->before_forward();
        run.way->backward(run.pass(k).forward(), /*last=*/false);
        one.way->backward(one.pass(k).forward(), /*last=*/k == 1);
      }
      run.optimizer->step();
      one.optimizer->step();
      EXPECT_TENSOR_NEAR(run.weights(), one.weights(), 2 * kSums);
      run.way->verify_parameters();
    }
  });
}

// What torch's optimizers step is averaged after any backward. What torch's function clips is a
// part of the gradient, which is refused where this code runs next.
TEST(TensorMesh, OptimizersOfTorchStepWholeGradientsAndClipNone) {
  for (const bool plain : {false, true})
    on_meshes({{{"tensor", 2}}, {{"data", 2}, {"tensor", 2}}}, [plain](const Mesh& mesh) {
      const auto net = small_model(true);
      net->use_sequence_parallel(true);
      Trained run(net, parallelize(*net, mesh), kGradients);
      Trained one = whole(mesh, true, kGradients);
      torch::optim::SGD other(net->parameters(), 0.1), its(one.net->parameters(), 0.1);
      const auto backward = [&](int k) {
        const at::Tensor loss = run.pass(k).forward();
        plain ? loss.backward() : run.way->backward(loss, /*last=*/true);
      };
      for (int k = 0; k < 2; ++k) {
        run.way->before_forward();
        backward(k);
        one.way->backward(one.pass(k).forward(), /*last=*/true);
        for (torch::optim::SGD* const each : {&other, &its}) each->step(), each->zero_grad();
      }
      run.way->verify_parameters();
      EXPECT_TENSOR_NEAR(run.weights(), one.weights(), 2 * kSums);
      run.way->before_forward();
      backward(2);
      torch::nn::utils::clip_grad_norm_(net->parameters(), 0.01);
      other.step();
      other.zero_grad();
      for (const std::function<void()>& next :
           std::vector<std::function<void()>>{[&] { run.way->before_forward(); },
                                              [&] { backward(3); }, [&] { run.optimizer->step(); }})
        EXPECT_THAT(message_of<UsageError>(next), HasSubstr("torch::nn::utils::clip_grad_norm_"));
      run.optimizer->zero_grad();
      run.way->before_forward();
      backward(4);
      run.optimizer->step();
    });
}

// In fp8 rows travel in 8 bits, with a scale of their own in each forward. Slices of 47 and 48
// hidden units, of which fp8 would cover one rank's, are computed in bf16 and travel as they are.
// Copies send no weights: their losses and, since a rate of 1 rounds the difference alone, their
// weights have the same bits.
TEST(TensorMesh, RowsHaveTheBitsOfCopiesInFp8) {
  testing::ThreadOptions gloo;  // ranks share no rows
  gloo.world.backend = "gloo";
  const models::CausalLmConfig config{.model = models::LlamaConfig{.vocab_size = kVocabulary,
                                                                   .hidden_size = 64,
                                                                   .intermediate_size = 95,
                                                                   .num_hidden_layers = 2,
                                                                   .num_attention_heads = 4,
                                                                   .num_key_value_heads = 2}};
  const auto first = models::make_causal_lm(config);
  const auto train = [&](const Mesh& mesh, std::optional<nn::Fp8Recipe> recipe) {
    const auto net = models::make_causal_lm(config, {.draw = false});
    const auto from = first->parameters(), to = net->parameters();
    for (std::size_t i = 0; i < to.size(); ++i) nn::assign(to[i], from[i].detach());
    Trained run(net, parallelize(*net, mesh), kGradients);
    std::vector<double> losses;
    for (int k = 0; k < 2; ++k) {
      Parallelism::Pass pass = run.pass(k);
      pass.forward = [recipe, forward = pass.forward] {
        const optim::Autocast autocast(at::kCPU, at::kBFloat16, /*cache_enabled=*/false);
        const nn::Fp8Autocast fp8(recipe);
        return forward();
      };
      losses.push_back(run.way->run_window({pass})[0].item<double>());
      run.optimizer->step();
      run.optimizer->zero_grad();
    }
    return std::pair(losses, run.weights());
  };
  const auto compare = [&](World& world) {
    for (const bool stages : {false, true}) {
      const auto with = [&](const char* axis) {
        return stages ? Mesh(world, {{"pipeline", 2}, {axis, 2}})
                      : Mesh(world, {{axis, 2}, {"tensor", 2}});
      };
      const auto got = train(with("shard"), nn::Fp8Recipe::kTensorwise);
      const auto expected = train(with("data"), nn::Fp8Recipe::kTensorwise);
      EXPECT_EQ(got.first, expected.first) << stages;
      EXPECT_TENSOR_EQ(got.second, expected.second) << stages;
      EXPECT_NE(got.first, train(with("shard"), std::nullopt).first);  // fp8 was there
    }
    world.barrier();
  };
  testing::run_threads(4, compare, gloo);
}

models::CausalLmPtr llama_of_width(std::int64_t width) {
  return models::make_causal_lm({.model = models::LlamaConfig{.vocab_size = kVocabulary,
                                                              .hidden_size = 64,
                                                              .intermediate_size = width,
                                                              .num_hidden_layers = 1,
                                                              .num_attention_heads = 4,
                                                              .num_key_value_heads = 4}});
}

TEST(TensorMesh, SaysWhichSlicesAreNotComputedInFp8) {
  ::testing::internal::CaptureStderr();
  testing::run_threads(2, [&](World& world) {
    const auto net = llama_of_width(93);
    const TensorParallel model(*net, Mesh(world, {{"tensor", 2}}));
    const nn::Fp8Autocast fp8(nn::Fp8Recipe::kTensorwise);
    for (int pass = 0; pass < 2; ++pass) net->forward(at::zeros({2, 5}, at::kLong));
  });
  const std::string said = ::testing::internal::GetCapturedStderr();
  const std::string line =
      "a linear layer of 93 inputs and 64 outputs is not computed in fp8, because tensor parallel "
      "ranks have slices of unequal width of it";
  EXPECT_THAT(said, HasSubstr(line));
  EXPECT_EQ(said.find(line), said.rfind(line));  // once for a process
}

// Of 6 hidden units 4 ranks have 1, 2, 1 and 2: each divides 6.
TEST(TensorMesh, UnequalSlicesAreNotAmongTheProductsOfABlock) {
  for (const std::int64_t width : {6, 128})
    testing::run_threads(4, [&](World& world) {
      const auto net = llama_of_width(width);
      const TensorParallel model(*net, Mesh(world, {{"tensor", 4}}));
      const at::Tensor down = net->named_parameters()["model.layers.0.mlp.down_proj.weight"];
      int found = 0;
      for (const auto& module : net->modules())
        if (const auto* const block = dynamic_cast<const nn::Block*>(module.get()))
          for (const auto& list : block->products())
            for (const at::Tensor& weight : list) found += weight.is_same(down) ? 1 : 0;
      EXPECT_EQ(found, width == 128 ? 1 : 0) << width;
    });
}

TEST(TensorMesh, AModelThatIsCutWhileItIsMadeIsTheSame) {
  on_meshes(kMade, [](const Mesh& mesh) {
    for (const bool tied : {false, true}) {
      const auto net = made_cut(mesh, [&] { return small_model(tied); });
      const auto later = small_model(tied);
      Trained run(net, parallelize(*net, mesh), kAdamW),
          cut(later, parallelize(*later, mesh), kAdamW);
      EXPECT_TRUE(run.way->divided());
      EXPECT_TENSOR_EQ(run.weights(), flat(*small_model(tied)));
      EXPECT_EQ(run.train(2, 2, 0.5), cut.train(2, 2, 0.5));
      EXPECT_EQ(run.evaluate(), cut.evaluate());
      EXPECT_TENSOR_EQ(run.weights(), cut.weights());
    }
  });
}

// Bytes of a whole model; `cut` of it is what two ranks along "tensor" divide.
struct Bytes {
  explicit Bytes(const models::CausalLm& whole) {
    std::set<at::TensorImpl*> sliced;
    for (const auto& cut : whole.cuts(2)) sliced.insert(cut.parameter.unsafeGetTensorImpl());
    for (const auto& item : whole.named_parameters()) {
      const auto bytes = static_cast<std::int64_t>(item.value().nbytes());
      const bool is_cut = sliced.contains(item.value().unsafeGetTensorImpl());
      if (item.key().find(".h.") == std::string::npos)
        root += bytes;
      else
        (is_cut ? cut : same) += bytes;
      largest = std::max(largest, bytes);
    }
  }
  std::int64_t block() const { return (cut + same) / kLayers; }
  // What a rank has of the blocks.
  std::int64_t share(const Mesh& mesh) const {
    return (cut / 2 + same) / (mesh.size("shard") * mesh.size("pipeline"));
  }
  std::int64_t root = 0, cut = 0, same = 0, largest = 0;
};

// One block stands whole at a time, beside one slice that is copied from it, or from a file.
TEST(TensorMesh, AModelThatIsCutWhileItIsMadeIsNeverWhole) {
  const models::CausalLmConfig config{.model = models::GptConfig{.n_layer = kLayers,
                                                                 .n_head = 2,
                                                                 .n_embd = 64,
                                                                 .vocab_size = kVocabulary,
                                                                 .n_positions = 12}};
  const io::TemporaryDirectory folder;
  testing::CountingAllocator allocator;
  const auto whole = models::make_causal_lm(config);
  models::save_pretrained(*whole, folder / "model");
  const Bytes bytes(*whole);
  on_meshes(kMade, [&](const Mesh& mesh) {
    for (const bool reads : {false, true}) {
      static std::mutex drawing;
      const auto count = testing::this_rank = std::make_shared<testing::Count>();
      const auto net = made_cut(mesh, [&] {
        if (reads) return models::load_pretrained(folder / "model");
        const std::lock_guard lock(drawing);
        return models::make_causal_lm(config);
      });
      // Rows of a parameter are divided up to a whole row, and some of its bytes are no tensor's.
      constexpr std::int64_t kRest = 8 << 10;
      const std::int64_t own = bytes.share(mesh) + bytes.root + kRest;
      EXPECT_LE(count->live, own);
      EXPECT_LE(count->peak, own + bytes.root + bytes.block() + bytes.largest / 2);
      EXPECT_LT(count->peak, bytes.cut + bytes.same);
      if (reads) {
        const auto way = parallelize(*net, mesh);
        const auto held = way->gathered();
        EXPECT_TENSOR_EQ(flat(*net), flat(*whole));
      }
      testing::this_rank.reset();
    }
  });
}

// A block that does not say how it is cut stays whole until the model says it.
struct Pair : torch::nn::Module, nn::Block {
  Pair() {
    first = register_parameter("first", at::arange(24.0).view({6, 4}));
    second = register_parameter("second", at::arange(24.0).view({4, 6}));
  }
  at::Tensor first, second;
};

struct SlicedPair : Pair, nn::Sliced {
  explicit SlicedPair(std::vector<std::int64_t> its_parts) : parts(std::move(its_parts)) {}
  std::vector<Cut> cuts(int) const override { return {{first, 0, parts}, {second, 1, {6}}}; }
  std::vector<std::int64_t> parts;
};

template <typename Layer>
struct OfPair : torch::nn::Module, nn::Sliced {
  explicit OfPair(std::shared_ptr<Layer> its_layer)
      : layer(register_module("layer", nn::made(std::move(its_layer)))) {}
  std::vector<Cut> cuts(int) const override {
    return {{layer->first, 0, {6}}, {layer->second, 1, {6}}};
  }
  std::shared_ptr<Layer> layer;
};

TEST(TensorMesh, ABlockSaysHowItIsCut) {
  const at::Tensor expected = at::arange(24.0).repeat({2});
  on_meshes({{{"tensor", 2}}, {{"shard", 2}, {"tensor", 2}}}, [&](const Mesh& mesh) {
    std::optional<ShardedConstruction> cut(mesh);
    const auto plain = std::make_shared<OfPair<Pair>>(std::make_shared<Pair>());
    const auto sliced_as = [](std::vector<std::int64_t> parts) {
      return std::make_shared<OfPair<SlicedPair>>(std::make_shared<SlicedPair>(std::move(parts)));
    };
    const auto sliced = sliced_as({6}), wrong = sliced_as({2, 4});
    cut.reset();
    EXPECT_EQ(plain->layer->first.sizes(), (std::vector<std::int64_t>{6, 4}));
    EXPECT_EQ(sliced->layer->first.size(0), 3);
    EXPECT_EQ(nn::whole_sizes(sliced->layer->second), (std::vector<std::int64_t>{4, 6}));
    for (const std::shared_ptr<torch::nn::Module>& module :
         {std::shared_ptr<torch::nn::Module>(plain), std::shared_ptr<torch::nn::Module>(sliced)}) {
      const auto way = parallelize(*module, mesh);
      const auto held = way->gathered();
      EXPECT_TENSOR_EQ(flat(*module), expected);
    }
    EXPECT_THAT(message_of<UsageError>([&] { parallelize(*wrong, mesh); }),
                HasSubstr("the cuts() of a block and of the module differ in parameter "
                          "'layer.first'"));
  });
}

TEST(TensorMesh, WhatRanksHaveDrawnIsCompared) {
  on_meshes({{{"tensor", 2}}, {{"shard", 2}, {"tensor", 2}}}, [](const Mesh& mesh) {
    const auto net = made_cut(
        mesh, [&] { return small_model(true, static_cast<std::uint64_t>(mesh.world().rank())); });
    EXPECT_THAT(message_of<UsageError>([&] { net->loss(text(0, 0), text(0, 0)); }),
                HasSubstr("Make a FullyShard, a Pipeline or a TensorParallel of the model first"));
    EXPECT_THAT(message_of<UsageError>([&] { parallelize(*net, mesh); }),
                AllOf(HasSubstr("fingerprint"), HasSubstr("from the same seed")));
  });
}

// Two hosts read folders that should be the same.
TEST(TensorMesh, WhatRanksHaveReadIsComparedWhereItIsNotCut) {
  const io::TemporaryDirectory folder;
  for (const std::uint64_t seed : {1, 2})
    models::save_pretrained(*small_model(/*tied=*/true, seed), folder / std::to_string(seed));
  on_meshes({{{"data", 2}, {"tensor", 2}}}, [&](const Mesh& mesh) {
    const std::string host = std::to_string(1 + mesh["data"].rank());
    const auto net = made_cut(mesh, [&] { return models::load_pretrained(folder / host); });
    EXPECT_THAT(message_of<CommError>([&] { parallelize(*net, mesh); }), HasSubstr("parameter"));
  });
}

TEST(TensorMesh, OneRankAlongTheAxisDividesNothing) {
  on_meshes({{{"data", 2}, {"tensor", 1}}}, [](const Mesh& mesh) {
    const auto net = made_cut(mesh, [] { return small_model(/*tied=*/true); });
    EXPECT_TENSOR_EQ(flat(*net), flat(*small_model(/*tied=*/true)));
  });
}

TEST(TensorMesh, CopiesThatDifferAreFound) {
  on_meshes(
      {{{"shard", 2}, {"tensor", 2}}, {{"pipeline", 2}, {"tensor", 2}}}, [](const Mesh& mesh) {
        Trained run = divided(mesh, /*tied=*/false);
        const torch::NoGradGuard no_grad;
        const nn::Rows* const rows = nn::rows_of(run.net->named_parameters()["model.norm.weight"]);
        if (mesh.rank("tensor") == 1 && rows->values.numel() > 0) at::Tensor(rows->values).add_(1);
        const std::string said = message_of<CommError>([&] { run.way->verify_parameters(); });
        const bool holds = mesh.size("shard") > 1 || mesh.rank("pipeline") == 1;
        EXPECT_THAT(said, HasSubstr(holds ? "'model.norm.weight' on rank 1 along 'tensor'"
                                          : "nothing thrown"));
      });
}

// ---------------------------------------------------------------- what is refused

TEST(TensorMesh, RanksAgreeOnSequenceParallelism) {
  on_meshes({{{"tensor", 2}}, {{"shard", 2}, {"tensor", 2}}, {{"pipeline", 2}, {"tensor", 2}}},
            [](const Mesh& mesh) {
              const auto net = small_model(/*tied=*/true);
              net->use_sequence_parallel(mesh.world().rank() == 1);
              EXPECT_THAT(message_of<UsageError>([&] { parallelize(*net, mesh); }),
                          HasSubstr("rank 1 has 'sequence_parallel: true', but rank 0 has "
                                    "'sequence_parallel: false'."));
            });
}

TEST(TensorMesh, SequenceParallelismIsChosenBeforeTheModelIsCut) {
  on_meshes({{{"tensor", 2}}, {{"shard", 2}, {"tensor", 2}}, {{"pipeline", 2}, {"tensor", 2}}},
            [](const Mesh& mesh) {
              const auto net = made_cut(mesh, [] { return small_model(/*tied=*/true); });
              net->use_sequence_parallel(true);  // nobody has compared it yet
              const auto way = parallelize(*net, mesh);
              const auto refused = HasSubstr(
                  "use_sequence_parallel(false) was called after the model was cut, when ranks "
                  "compared it");
              const auto change = [&] { net->use_sequence_parallel(false); };
              EXPECT_THAT(message_of<UsageError>(change), refused);
              const auto held = way->gathered();
              EXPECT_THAT(message_of<UsageError>(change), refused);
              net->use_sequence_parallel(true);  // no change
            });
}

// A slice has memory, so that it could be written under the name of the whole.
TEST(TensorMesh, WhatReadsParametersWholeRefusesParts) {
  const models::LoraConfig lora{.target_modules = {"q_proj", "o_proj"}};
  const io::TemporaryDirectory folder;
  on_meshes(
      {{{"tensor", 2}}, {{"shard", 2}}, {{"pipeline", 2}}, {{"shard", 2}, {"tensor", 2}}},
      [&](const Mesh& mesh) {
        const auto net = small_model(/*tied=*/false);
        models::add_lora(*net, lora);
        const auto way = parallelize(*net, mesh);
        const std::string place = folder / fmt::format("{}-{}", mesh.text(), mesh.world().rank());
        const auto refused =
            HasSubstr("is divided over ranks, and the whole of it is wanted here. Hold gathered()");
        for (const std::function<void()>& reader : std::vector<std::function<void()>>{
                 [&] { models::save_pretrained(*net, place); },
                 [&] { models::save_adapter(*net, lora, place); }, [&] { optim::Ema{*net}; }})
          EXPECT_THAT(message_of<UsageError>(reader), refused);
        mesh.world().barrier();
        const auto held = way->gathered();
        const optim::Ema average(*net);
        models::save_adapter(*net, lora, place + "-adapter");
        models::save_pretrained(*net, place);
        const auto read = models::load_pretrained(place);
        models::load_adapter(*read, place + "-adapter");
        EXPECT_TENSOR_EQ(flat(*read), flat(*net));
      });
}

struct Plain : torch::nn::Module, nn::Staged {
  Plain() : weight(register_parameter("weight", at::ones({4, 4}))) {}
  Parts parts() const override { return {.blocks = {{weight}, {}}}; }
  at::Tensor weight;
};

TEST(TensorMesh, AMeshOfSlicesAloneIsForTensorParallel) {
  on_meshes({{{"tensor", 2}}}, [](const Mesh& mesh) {
    const auto net = small_model(/*tied=*/true);
    EXPECT_THAT(message_of<UsageError>([&] { FullyShard(*net, mesh); }),
                HasSubstr("(tensor 2) has no axis 'shard', so that ranks would divide no rows. Add "
                          "the axis, {\"shard\", -1}, or use TensorParallel."));
  });
}

TEST(TensorMesh, RefusesWhatIsNotForSlices) {
  on_meshes({{{"tensor", 2}}, {{"shard", 2}, {"tensor", 2}}, {{"pipeline", 2}, {"tensor", 2}}},
            [](const Mesh& mesh) {
              Plain plain;
              EXPECT_THAT(message_of<UsageError>([&] { parallelize(plain, mesh); }),
                          HasSubstr("cannot be divided into slices. Derive it from nn::Sliced"));
              Trained run = divided(mesh, /*tied=*/false);
              EXPECT_THAT(
                  message_of<UsageError>([&] {
                    run.way->make_optimizer({{run.net->parameters(), optim::MuonOptions{}}});
                  }),
                  HasSubstr("Muon steps whole matrices"));
              EXPECT_THAT(
                  message_of<UsageError>([&] { optim::clip_grad_norm_(run.net->parameters(), 1); }),
                  HasSubstr("clip_grad_norm_"));
              if (mesh.size("pipeline") == 1) {
                const auto held = run.way->gathered();
                const at::Tensor loss = run.pass(0).forward();
                EXPECT_THAT(message_of<UsageError>([&] { run.way->backward(loss, true); }),
                            HasSubstr("Call before_forward() before each forward that trains."));
              }
            });
  testing::run_threads(4, [](World& world) {
    const auto net = small_model(/*tied=*/false);
    const auto uneven = HasSubstr(
        "4 attention heads and 2 heads of keys and values are not divided by a degree of 4");
    const Mesh shards(world, {{"shard", 1}, {"tensor", 4}}), stages(world, {{"tensor", 4}});
    EXPECT_THAT(message_of<UsageError>([&] { FullyShard(*net, shards); }), uneven);
    EXPECT_THAT(message_of<UsageError>([&] { Pipeline(*net, stages); }), uneven);
    world.barrier();
  });
}

}  // namespace
}  // namespace lockstep::tensor_mesh
