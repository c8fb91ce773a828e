// Pipeline with ranks along "shard", its windows without gradients, and models that are split while
// they are made. Orders, bits and faults of stages alone are in pipeline_test.cpp; `lockstep train`
// with every combination of axes is in tests/train/combinations_test.py.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/loader.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/nn/block.h"
#include "lockstep/nn/divided.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/counting_allocator_for_test.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/language_model_for_test.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/parallel/pipeline.h"
#include "lockstep/testing/worlds.h"

namespace lockstep::pipeline_shard {
namespace {

using ::testing::AllOf;
using testing::Count;
using testing::CountingAllocator;
using ::testing::HasSubstr;
using testing::kLayers;
using testing::kVocabulary;
using testing::message_of;
using testing::small_model;
using testing::text;
using testing::this_rank;

const optim::Rule kAdamW = optim::AdamWOptions{.lr = 0.01};

struct Trained {
  Trained(models::CausalLmPtr model, std::shared_ptr<Parallelism> parallelism,
          const optim::Rule& rule = kAdamW)
      : net(std::move(model)),
        way(std::move(parallelism)),
        optimizer(way->make_optimizer({{net->parameters(), rule}})) {}

  // Two steps of `m` micro-batches. `empty`: on the first rank one of them has no targets.
  std::vector<double> train(int m, double max_grad_norm = 0, bool empty = false) {
    std::vector<double> losses;
    for (int step = 0; step < 2; ++step) {
      losses.push_back(testing::run_texts(*way, *net, step * m, m, empty));
      optimizer->step({.max_grad_norm = max_grad_norm});
      optimizer->zero_grad();
    }
    return losses;
  }
  at::Tensor weights() {
    const auto held = way->gathered();
    return testing::flat(*net);
  }

  models::CausalLmPtr net;
  std::shared_ptr<Parallelism> way;
  std::unique_ptr<optim::Optimizer> optimizer;
};

Trained piped(const Mesh& mesh, const PipelineOptions& options, bool tied,
              const optim::Rule& rule = kAdamW) {
  // Rank 0's values count.
  const auto net = small_model(tied, 7 + static_cast<std::uint64_t>(mesh.world().rank()));
  return {net, std::make_shared<Pipeline>(*net, mesh, options), rule};
}

// The same samples without stages. The ranks of a stage are a world, which is divided alike.
Trained unpiped(const Mesh& mesh, const FullyShardOptions& options, bool tied,
                const optim::Rule& rule = kAdamW) {
  const auto net = small_model(tied);
  const Mesh ranks(mesh.batch(), {{"data", mesh.size("data")}, {"shard", mesh.size("shard")}});
  return {net, std::make_shared<FullyShard>(*net, ranks, options), rule};
}

Trained replicated(const Mesh& mesh, bool tied) {
  const auto net = small_model(tied);
  return {net, std::make_shared<DataParallel>(*net, Mesh(mesh.batch()))};
}

using Axes = std::vector<MeshAxis>;
const std::vector<Axes> kMeshes{{{"pipeline", 2}, {"shard", 2}},
                                {{"pipeline", 3}, {"shard", 2}},
                                {{"pipeline", 1}, {"shard", 3}},
                                {{"pipeline", 2}, {"data", 2}, {"shard", 2}}};

void on_meshes(const std::vector<Axes>& meshes, const std::function<void(const Mesh&)>& body) {
  for (const Axes& axes : meshes) testing::run_on_mesh(axes, body);
}

// Every rank along "shard" adds what FullyShard adds, micro-batch by micro-batch.
TEST(PipelineShard, HasTheBitsOfFullyShard) {
  on_meshes(kMeshes, [](const Mesh& mesh) {
    for (const PipelineSchedule schedule :
         {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B, PipelineSchedule::kInterleaved1F1B})
      for (const bool reshard : {true, false})
        for (const bool every : {true, false}) {
          const bool usual = schedule == PipelineSchedule::k1F1B;
          if (schedule == PipelineSchedule::kInterleaved1F1B && mesh.size("pipeline") > 2) continue;
          if ((!reshard || !every) && (!usual || reshard == every)) continue;  // one at a time
          const FullyShardOptions sharding{.reshard_after_forward = reshard,
                                           .reduce_every_backward = every};
          Trained run = piped(mesh, {.schedule = schedule, .shard = sharding}, /*tied=*/false);
          Trained one = unpiped(mesh, sharding, /*tied=*/false);
          EXPECT_THAT(run.way->text(),
                      HasSubstr(fmt::format("fully sharded over {} ranks", mesh.size("shard"))));
          ASSERT_EQ(run.train(3), one.train(3)) << parallel::name(schedule) << reshard << every;
          ASSERT_TRUE(testing::tensors_equal(run.weights(), one.weights()));
          run.way->verify_parameters();
          mesh.world().barrier();
        }
  });
}

// The shared weight's gradient and the norm are added up in another order. Two steps of AdamW move
// a weight by 0.02, and what is lost in a sum of 16 terms is less than 1e-5 of it.
TEST(PipelineShard, SharedWeightsClippingAndMicroBatchesWithoutTargets) {
  on_meshes(kMeshes, [](const Mesh& mesh) {
    Trained run = piped(mesh, {}, /*tied=*/true), one = replicated(mesh, /*tied=*/true);
    const auto got = run.train(3, 0.5, /*empty=*/true);
    const auto expected = one.train(3, 0.5, /*empty=*/true);
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-4);
    EXPECT_TENSOR_NEAR(run.weights(), one.weights(), 1e-3);
    run.way->verify_parameters();
    mesh.world().barrier();
  });
}

TEST(PipelineShard, TheStateIsThatOfTheWholeModel) {
  for (const optim::Rule& rule : {kAdamW, optim::Rule(optim::AdafactorOptions{.lr = 0.01})})
    on_meshes(kMeshes, [&](const Mesh& mesh) {
      Trained run = piped(mesh, {}, /*tied=*/false, rule), one = unpiped(mesh, {}, false, rule);
      run.train(2);
      one.train(2);
      const auto got = run.optimizer->state_dict(), expected = one.optimizer->state_dict();
      ASSERT_EQ(got.size(), expected.size());
      for (const auto& [key, value] : expected) EXPECT_TENSOR_EQ(got.at(key), value) << key;
      Trained other = piped(mesh, {}, /*tied=*/false, rule);
      other.optimizer->load_state_dict(got);
      for (const auto& [key, value] : other.optimizer->state_dict())
        EXPECT_TENSOR_EQ(value, expected.at(key)) << key;
      mesh.world().barrier();
    });
}

// What the ranks say that they hold covers the model, and no rank has another one's rows.
TEST(PipelineShard, EveryRowIsHeldAndMarked) {
  on_meshes(kMeshes, [](const Mesh& mesh) {
    Trained run = piped(mesh, {}, /*tied=*/false);
    run.train(1);
    EXPECT_EQ(run.way->divided(), true);
    double mine = 0, all = 0;
    for (const at::Tensor& p : run.net->parameters()) {
      const nn::Rows* const rows = nn::rows_of(p);
      ASSERT_NE(rows, nullptr);
      mine += static_cast<double>(rows->values.numel());
      all += static_cast<double>(p.numel());
    }
    EXPECT_EQ(all_reduce(mesh.world(), mine), all * mesh.size("data"));
    if (mesh.size("pipeline") > 1) {
      EXPECT_LT(mine, 0.7 * all / mesh.size("shard"));
    }
    const auto held = run.way->gathered();
    for (const at::Tensor& p : run.net->parameters()) EXPECT_EQ(nn::rows_of(p), nullptr);
    mesh.world().barrier();
  });
}

TEST(Parallelize, TheAxesOfTheMeshSayHow) {
  const auto made = [](int ranks, const Axes& axes) {
    std::string said;
    testing::run_threads(ranks, [&](World& world) {
      const Mesh mesh(world, axes);
      const auto net = small_model(false);
      const auto way = parallelize(*net, mesh, {.schedule = PipelineSchedule::kGPipe});
      EXPECT_EQ(way->mesh().axes(), mesh.axes());
      // Only what copies whole models computes a step that a CUDA graph may repeat.
      EXPECT_EQ(way->unavailable_for_capture().empty(), way->text() == "replicated");
      Trained run(net, way);
      EXPECT_EQ(run.train(2).size(), 2u);
      if (world.is_leader()) said = way->text();
    });
    return said;
  };
  EXPECT_EQ(made(2, {{"data", 2}}), "replicated");
  EXPECT_EQ(made(2, {{"shard", 2}}), "fully sharded over 2 ranks");
  EXPECT_EQ(made(1, {{"shard", 1}}), "fully sharded over 1 rank");
  EXPECT_EQ(made(4, {{"data", 2}, {"tensor", 2}}), "in slices on 2 tensor parallel ranks");
  EXPECT_EQ(made(4, {{"shard", 2}, {"tensor", 2}}),
            "fully sharded over 2 ranks, in slices on 2 tensor parallel ranks");
  const std::string stages = made(4, {{"pipeline", 2}, {"shard", 2}});
  EXPECT_THAT(stages, AllOf(HasSubstr("GPipe"), HasSubstr("2 ranks")));
}

// ---------------------------------------------------------------- evaluation

// Nothing is gathered and no graph is kept; the function sees the last stage's output.
TEST(PipelineEvaluation, RunsThroughTheStages) {
  const std::vector<Axes> meshes{
      {{"pipeline", 2}}, {{"pipeline", 4}}, {{"pipeline", 2}, {"shard", 2}}};
  on_meshes(meshes, [](const Mesh& mesh) {
    for (const PipelineSchedule schedule :
         {PipelineSchedule::k1F1B, PipelineSchedule::kInterleaved1F1B}) {
      if (schedule == PipelineSchedule::kInterleaved1F1B && mesh.size("pipeline") > 2) continue;
      Trained run = piped(mesh, {.schedule = schedule}, /*tied=*/true);
      run.train(2);
      std::vector<Parallelism::Pass> passes;
      std::vector<double> seen;
      for (int k = 0; k < 5; ++k)
        passes.push_back({.forward =
                              [&run, &seen, k] {
                                const at::Tensor ids = text(k, 0);
                                const at::Tensor y =
                                    run.net->loss(ids.narrow(1, 0, 8), ids.narrow(1, 1, 8));
                                if (run.net->stage().last) seen.push_back(y.item<double>());
                                return y;
                              },
                          .weigh = {}});
      const auto losses = [&] {
        const torch::NoGradGuard no_grad;
        return run.way->run_window(passes);
      }();
      const bool last = mesh.rank("pipeline") == mesh.size("pipeline") - 1;
      ASSERT_EQ(seen.size(), last ? 5u : 0u);
      for (std::size_t k = 0; last && k < 5; ++k) EXPECT_EQ(seen[k], losses[k].item<double>());
      EXPECT_EQ(run.train(2).size(), 2u);  // with the borders of training
      // As one process after the same steps; the shared weight's gradient has another order.
      Trained same = replicated(mesh, /*tied=*/true);
      same.train(2);
      const at::Tensor ids = text(0, 0);
      const at::Tensor expected = same.net->loss(ids.narrow(1, 0, 8), ids.narrow(1, 1, 8));
      EXPECT_NEAR(losses[0].item<double>(), expected.item<double>(), 1e-4);
      mesh.world().barrier();
    }
  });
}

// ---------------------------------------------------------------- buffers

struct Counting : torch::nn::Module, nn::Staged {
  Counting() {
    for (int i = 0; i < kLayers; ++i) {
      weights.push_back(register_parameter(fmt::format("w{}", i), at::ones({2, 2}) * 0.1));
      means.push_back(register_buffer(fmt::format("mean{}", i), at::zeros({2})));
    }
    shared = register_buffer("shared", at::zeros({1}));
  }
  at::Tensor loss(const at::Tensor& samples) {
    at::Tensor x = stage().first ? samples : stage().input;
    for (std::size_t i = stage().begin; i < stage().end_of(weights.size()); ++i) {
      x = x + x.matmul(weights[i]);
      const torch::NoGradGuard no_grad;
      means[i].mul_(0.5).add_(x.mean(0));
      if (both_change) shared.add_(static_cast<double>(i + 1));
    }
    return stage().last ? x.square().mean() : x;
  }
  Parts parts() const override {
    Parts parts;
    for (const at::Tensor& weight : weights) parts.blocks.push_back({weight});
    return parts;
  }
  std::vector<at::Tensor> weights, means;
  at::Tensor shared;
  bool both_change = false;
};

TEST(PipelineBuffers, ComeFromTheStageThatChangesThem) {
  testing::run_threads(4, [](World& world) {
    const Mesh mesh(world, {{"pipeline", 2}, {"data", 2}});
    Counting staged, whole;
    const auto way = std::make_shared<Pipeline>(staged, mesh);
    // Of the copies along "data" the first one's count.
    const auto sample = [](int step, int rank) { return at::full({3, 2}, 0.1 + step + 5 * rank); };
    for (int step = 0; step < 2; ++step) {
      for (Counting* const each : {&staged, &whole}) {
        const bool is_staged = each == &staged;
        const at::Tensor x = sample(step, is_staged ? mesh.rank("data") : 0);
        const Parallelism::Pass pass{.forward = [each, x] { return each->loss(x); },
                                     .weigh = [](const at::Tensor& loss) { return loss; }};
        if (is_staged)
          way->run_window({pass});
        else
          pass.forward();
      }
      for (std::size_t i = 0; i < kLayers; ++i)
        EXPECT_TENSOR_EQ(staged.means[i], whole.means[i]) << i;
      way->verify_buffers();
    }
    staged.both_change = true;
    EXPECT_THAT(message_of<UsageError>([&] {
                  const at::Tensor x = sample(0, 0);
                  way->run_window({{.forward = [&staged, x] { return staged.loss(x); },
                                    .weigh = [](const at::Tensor& loss) { return loss; }}});
                }),
                HasSubstr("buffer 'shared' was changed by the stages of ranks 0, 1 to different"));
    world.barrier();
  });
}

// ---------------------------------------------------------------- samples of the wrong ranks

TEST(Samples, ALoaderOverAllRanksIsRefusedWhereSomeOfThemSeeTheSameSamples) {
  const std::vector<Axes> meshes{
      {{"pipeline", 2}, {"data", 2}}, {{"data", 2}, {"tensor", 2}}, {{"shard", 2}, {"tensor", 2}}};
  on_meshes(meshes, [](const Mesh& mesh) {
    const auto dataset = std::make_shared<data::TensorDataset>(
        text(0, 0).narrow(1, 0, 8).repeat({8, 1}), text(0, 0).narrow(1, 1, 8).repeat({8, 1}));
    const auto step = [&](World& ranks) {
      const auto net = small_model(/*tied=*/false);
      const auto way = parallelize(*net, mesh);
      auto loader = data::loader(dataset, ranks, {.batch_size = 2});
      for (auto& window : loader.windows(0)) {
        way->run_window(passes_of(
            window, [&](const data::Batch& batch) { return net->loss(batch.data, batch.target); }));
        break;
      }
    };
    EXPECT_THAT(
        message_of<UsageError>([&] { step(mesh.world()); }),
        AllOf(HasSubstr("the loader divides its samples over 4 ranks, and the model over 2"),
              HasSubstr("Make the loader with mesh.batch().")));
    mesh.world().barrier();
    step(mesh.batch());
    mesh.world().barrier();
  });
}

// ---------------------------------------------------------------- a model that is never whole

TEST(PipelinedConstructionTest, HasTheValuesOfAWholeModelAndAPartOfItsMemory) {
  CountingAllocator allocator;
  static std::mutex drawing;
  const auto drawn = [](const std::function<models::CausalLmPtr()>& body) {
    const std::lock_guard lock(drawing);
    torch::manual_seed(5);
    return body();
  };
  const models::CausalLmConfig config{
      .model = models::GptConfig{
          .n_layer = 8, .n_head = 2, .n_embd = 64, .vocab_size = kVocabulary, .n_positions = 12}};
  const auto whole = drawn([&] { return models::make_causal_lm(config); });
  std::int64_t blocks = 0, root = 0;
  for (const auto& item : whole->named_parameters())
    (item.key().find(".h.") != std::string::npos ? blocks : root) +=
        static_cast<std::int64_t>(item.value().nbytes());
  const std::vector<Axes> meshes{
      {{"pipeline", 2}}, {{"pipeline", 4}}, {{"pipeline", 2}, {"shard", 2}}};
  on_meshes(meshes, [&](const Mesh& mesh) {
    this_rank = std::make_shared<Count>();
    const std::shared_ptr<Count> count = this_rank;
    {
      const auto net = drawn([&] {
        const PipelinedConstruction split(mesh, 8);
        return models::make_causal_lm(config);
      });
      const int parts = mesh.world().size();
      constexpr std::int64_t kPadding = 32 << 10;
      EXPECT_LE(count->live, blocks / parts + root + kPadding);
      EXPECT_LE(count->peak, blocks / parts + 2 * root + blocks / 8 + kPadding);
      Pipeline model(*net, mesh);
      const auto gathered = model.gathered();
      const auto expected = whole->parameters(), got = net->parameters();
      for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TENSOR_EQ(got[i], expected[i]);
    }
    this_rank.reset();
    mesh.world().barrier();
  });
}

TEST(PipelinedConstructionTest, RefusesOtherNumbersAndOtherValues) {
  testing::run_threads(2, [](World& world) {
    const Mesh mesh(world, {{"pipeline", 2}});
    const auto seeded = [&](int blocks, std::uint64_t seed) {
      const PipelinedConstruction split(mesh, blocks);
      return small_model(/*tied=*/true, seed);
    };
    EXPECT_THAT(message_of<UsageError>([&] { seeded(3, 1); }),
                HasSubstr("the model has more blocks than the 3"));
    const auto net = seeded(kLayers, static_cast<std::uint64_t>(world.rank()));
    EXPECT_THAT(message_of<UsageError>([&] { net->loss(text(0, 0), text(0, 0)); }),
                HasSubstr("Make a FullyShard, a Pipeline or a TensorParallel of the model first"));
    EXPECT_THAT(message_of<UsageError>([&] { Pipeline(*net, mesh); }), HasSubstr("fingerprint"));
    world.barrier();
  });
}

}  // namespace
}  // namespace lockstep::pipeline_shard
