// Checkpoints of a model that is divided over ranks: the files of one process, written and read in
// parts. tests/train/fsdp_test.py does the same with `lockstep train`, fsdp_memory_test.py under a
// memory limit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/manifest.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/nn/block.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/counting_allocator_for_test.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/testing/worlds.h"
#include "lockstep/train/async_saver.h"
#include "lockstep/train/disk_for_test.h"
#include "lockstep/train/save_resume.h"

namespace lockstep::train {
namespace {

using ::testing::AllOf;
using testing::Count;
using testing::CountingAllocator;
using ::testing::HasSubstr;
using testing::this_rank;

constexpr std::int64_t kWidth = 66, kLayers = 12;  // rows that no number of ranks here divides

using Layer = nn::BlockOf<torch::nn::LinearImpl>;

struct Net : torch::nn::Module {
  explicit Net(double value) {
    for (std::int64_t i = 0; i < kLayers; ++i)
      layers.push_back(
          register_module("layer" + std::to_string(i), std::make_shared<Layer>(kWidth, kWidth)));
    head = register_module("head", torch::nn::Linear(kWidth, 3));
    register_buffer("seen", torch::full({2}, value));
    const torch::NoGradGuard no_grad;
    double begin = value;
    for (at::Tensor& p : parameters())
      p.copy_(at::arange(p.numel(), at::kFloat).view(p.sizes()).add(begin++).sin() * 0.1);
  }
  at::Tensor loss() {
    at::Tensor x = at::arange(kWidth, at::kFloat).cos().view({1, kWidth});
    for (const auto& layer : layers) x = x + layer->forward(x).tanh();
    return head->forward(x).square().mean();
  }
  std::vector<std::shared_ptr<Layer>> layers;
  torch::nn::Linear head{nullptr};
};

struct Rank {
  Rank(const Mesh& mesh, const optim::Rule& rule, double value = 1, FullyShardOptions options = {})
      : net(value),
        model(net, mesh, options),
        optimizer(model.make_optimizer({{net.parameters(), rule}})),
        parts{.module = &net, .optimizer = optimizer.get(), .rng = false} {}
  void step() {
    model.before_forward();
    model.backward(net.loss());
    optimizer->step();
    optimizer->zero_grad();
  }
  at::Tensor weights() {
    const auto whole = model.gathered();
    std::vector<at::Tensor> all;
    for (const at::Tensor& p : net.parameters()) all.push_back(p.detach().flatten());
    return at::cat(all);
  }
  Net net;
  FullyShard model;
  std::unique_ptr<optim::Optimizer> optimizer;
  CheckpointParts parts;
};

struct Case {
  std::vector<MeshAxis> axes;
  const char* backend;
};

class DividedSave : public ::testing::TestWithParam<Case> {
 protected:
  static void on_ranks(const std::function<void(const Mesh&)>& body) {
    int ranks = 1;
    for (const MeshAxis& axis : GetParam().axes) ranks *= axis.size;
    testing::ThreadOptions options;
    options.world.backend = GetParam().backend;
    testing::run_threads(ranks, [&](World& world) { body(Mesh(world, GetParam().axes)); }, options);
  }
};

const optim::Rule kAdamW = optim::AdamWOptions{.lr = 0.01};

TEST_P(DividedSave, TheFilesAreThoseOfAWholeModel) {
  for (const optim::Rule& rule : {kAdamW, optim::Rule(optim::AdafactorOptions{.lr = 0.01})}) {
    const io::TemporaryDirectory folder;
    on_ranks([&](const Mesh& mesh) {
      // What travels is rounded, and files are not.
      const bool rounds = rule->name() == kAdamW->name();
      Rank run(mesh, rule, 1,
               rounds ? FullyShardOptions{.param_dtype = at::kBFloat16} : FullyShardOptions{});
      run.step();
      run.model.before_forward();  // the root is whole, the blocks are not
      const std::string parts = save_checkpoint(folder / "parts", mesh, run.parts, {.step = 1});
      const auto gathered = run.model.gathered();
      const std::string whole = save_checkpoint(folder / "whole", mesh, run.parts, {.step = 1});
      EXPECT_TRUE(io::verify(parts).empty());
      for (const char* file : {"model.safetensors", "optimizer.safetensors"})
        EXPECT_EQ(read_file(parts + "/" + file, 1u << 30), read_file(whole + "/" + file, 1u << 30));
      EXPECT_EQ(io::manifest_digest(parts), io::manifest_digest(whole));
      mesh.world().barrier();
    });
  }
}

// By another run, which has other values: in parts, then as one process.
TEST_P(DividedSave, IsResumedInParts) {
  for (const optim::Rule& rule : {kAdamW, optim::Rule(optim::AdafactorOptions{.lr = 0.01})}) {
    const io::TemporaryDirectory folder;
    on_ranks([&](const Mesh& mesh) {
      Rank run(mesh, rule);
      run.step();
      save_checkpoint(folder.path(), mesh, run.parts, {.step = 1});
      run.step();
      const at::Tensor expected = run.weights();
      Rank other(mesh, rule, /*value=*/3);
      ASSERT_TRUE(resume(folder.path(), mesh, other.parts).has_value());
      EXPECT_TENSOR_EQ(other.net.named_buffers()["seen"], torch::ones({2}));
      other.step();
      EXPECT_TENSOR_EQ(other.weights(), expected);
      mesh.world().barrier();
      // All ranks see the same sample, so one rank takes the same step but for the order of sums.
      if (mesh.world().is_leader()) {
        Rank one(World(), rule, /*value=*/5);
        ASSERT_TRUE(
            resume(folder.path(), World(), one.parts, {.checkpoint = folder / "checkpoint-1"}));
        one.step();
        EXPECT_TRUE(at::allclose(one.weights(), expected, 1e-4, 1e-6));
      }
      mesh.world().barrier();
    });
  }
}

// Tensors of the model and of the state are written from, and read into, the memory that they have.
TEST_P(DividedSave, NothingIsGathered) {
  const io::TemporaryDirectory folder;
  CountingAllocator allocator;
  on_ranks([&](const Mesh& mesh) {
    this_rank = std::make_shared<Count>();
    const std::shared_ptr<Count> count = this_rank;
    constexpr std::int64_t kBlock = kWidth * (kWidth + 1) * sizeof(float);
    {
      Rank run(mesh, kAdamW);
      run.step();
      mesh.world().barrier();
      count->peak = count->live.load();
      const std::int64_t before = count->live;
      save_checkpoint(folder.path(), mesh, run.parts, {.step = 1});
      if (mesh.size("shard") > 1) {
        EXPECT_LE(count->peak, before + kBlock);
      }
      count->peak = count->live.load();
      resume(folder.path(), mesh, run.parts);
      if (mesh.size("shard") > 1) {
        EXPECT_LE(count->peak, before + kBlock);
      }
      mesh.world().barrier();
    }
    this_rank.reset();
  });
}

// ---------------------------------------------------------------- slices of tensor parallelism

struct SlicedRank {
  SlicedRank(const Mesh& mesh, double value)
      : net(models::make_causal_lm({.model = models::LlamaConfig{.vocab_size = 37,
                                                                 .hidden_size = 16,
                                                                 .intermediate_size = 27,
                                                                 .num_hidden_layers = 2,
                                                                 .num_attention_heads = 4,
                                                                 .num_key_value_heads = 2}},
                                   {.draw = false})) {
    {
      const torch::NoGradGuard no_grad;
      for (at::Tensor& p : net->parameters())
        p.copy_(at::arange(p.numel(), at::kFloat).view(p.sizes()).add(value++).sin() * 0.1);
    }
    model = parallelize(*net, mesh);
    const optim::AdamWOptions adamw{.lr = 0.01};
    optimizer = model->make_optimizer({{net->parameters(), adamw}});
    parts = {.module = net.get(), .optimizer = optimizer.get(), .rng = false};
  }
  void pass() {
    const at::Tensor ids = at::arange(9, at::kLong).mul(5).remainder(37).view({1, 9});
    model->run_window(
        {{.forward = [&] { return net->loss(ids.narrow(1, 0, 8), ids.narrow(1, 1, 8)); },
          .weigh = [](const at::Tensor& loss) { return loss; }}});
  }
  void step() {
    pass();
    optimizer->step();
    optimizer->zero_grad();
  }
  at::Tensor weights() {
    const auto whole = model->gathered();
    std::vector<at::Tensor> all;
    for (const at::Tensor& p : net->parameters()) all.push_back(p.detach().flatten());
    return at::cat(all);
  }
  models::CausalLmPtr net;
  std::shared_ptr<Parallelism> model;
  std::unique_ptr<optim::Optimizer> optimizer;
  CheckpointParts parts;
};

// A slice of the second dimension has a run of elements in every row of the file.
TEST(DividedSaveSlices, TheFilesAreThoseOfAWholeModelAndAreResumed) {
  using Axes = std::vector<MeshAxis>;
  for (const Axes& axes :
       {Axes{{"tensor", 2}}, Axes{{"data", 2}, {"tensor", 2}}, Axes{{"shard", 2}, {"tensor", 2}},
        Axes{{"shard", 1}, {"tensor", 2}}, Axes{{"pipeline", 2}, {"tensor", 2}},
        Axes{{"pipeline", 2}, {"shard", 2}, {"tensor", 2}}}) {
    int ranks = 1;
    for (const MeshAxis& axis : axes) ranks *= axis.size;
    const io::TemporaryDirectory folder;
    testing::run_threads(ranks, [&](World& world) {
      const Mesh mesh(world, axes);
      SlicedRank run(mesh, 1);
      run.step();
      {
        const torch::NoGradGuard no_grad;
        run.pass();  // leaves the root whole where it is divided by rows
      }
      const std::string parts = save_checkpoint(folder / "parts", mesh, run.parts, {.step = 1});
      {
        const auto gathered = run.model->gathered();
        const std::string whole = save_checkpoint(folder / "whole", mesh, run.parts, {.step = 1});
        for (const char* file : {"model.safetensors", "optimizer.safetensors"})
          EXPECT_EQ(read_file(parts + "/" + file, 1u << 30),
                    read_file(whole + "/" + file, 1u << 30));
        EXPECT_EQ(io::manifest_digest(parts), io::manifest_digest(whole));
      }
      SlicedRank other(mesh, 3);
      ASSERT_TRUE(resume(folder / "parts", mesh, other.parts).has_value());
      EXPECT_TENSOR_EQ(other.weights(), run.weights());
      run.step();
      other.step();
      EXPECT_TENSOR_EQ(other.weights(), run.weights());
      world.barrier();
    });
  }
}

// ---------------------------------------------------------------- faults

// Every rank says so, an older checkpoint stays, and the next save works.
TEST_P(DividedSave, AFullOrBrokenDiskIsSaidOnEveryRank) {
  for (const int error : {ENOSPC, EIO}) {
    const io::TemporaryDirectory folder;
    on_ranks([&](const Mesh& mesh) {
      if (mesh.size("shard") == 1) return;
      Rank run(mesh, kAdamW);
      save_checkpoint(folder.path(), mesh, run.parts, {.step = 1});
      mesh.world().barrier();
      disk().error = error;
      disk().fails_for = "/checkpoint-2.";
      EXPECT_THAT(io::message_of<Error>(
                      [&] { save_checkpoint(folder.path(), mesh, run.parts, {.step = 2}); }),
                  HasSubstr(error == ENOSPC ? "checkpoint-2 was not saved"
                                            : "could not save " + folder / "checkpoint-2"));
      mesh.world().barrier();
      disk().fails_for = nullptr;
      disk().error = ENOSPC;
      mesh.world().barrier();
      EXPECT_TRUE(io::verify(folder / "checkpoint-1").empty());
      save_checkpoint(folder.path(), mesh, run.parts, {.step = 3});
      EXPECT_TRUE(io::verify(folder / "checkpoint-3").empty());
      mesh.world().barrier();
    });
  }
}

// ---------------------------------------------------------------- faults of one rank

// Ranks as processes, each with a disk of its own; the folder is one.
constexpr const char* kFolder = "LOCKSTEP_TEST_FOLDER";

std::vector<testing::RankResult> on_processes(
    const io::TemporaryDirectory& folder,
    const std::function<void(const Mesh&, const std::string& folder)>& body,
    const std::function<void(testing::RunningRanks&)>& meanwhile = {}) {
  return testing::run_processes(
      3, [&](World& world) { body(Mesh(world, {{"shard", 3}}), std::getenv(kFolder)); },
      {.env = {{kFolder, folder.path()}}, .meanwhile = meanwhile});
}

TEST(DividedSaveFaults, AFullOrBrokenDiskOfOneRankIsSaidOnEveryRank) {
  for (const int error : {ENOSPC, EIO}) {
    const io::TemporaryDirectory place;
    const auto ranks = on_processes(place, [&](const Mesh& mesh, const std::string& folder) {
      Rank run(mesh, kAdamW);
      save_checkpoint(folder, mesh, run.parts, {.step = 1});
      disk().error = error;
      if (mesh.world().rank() == 2) disk().fails_for = "/checkpoint-2.";
      EXPECT_THAT(
          io::message_of<Error>([&] { save_checkpoint(folder, mesh, run.parts, {.step = 2}); }),
          AllOf(HasSubstr("rank 2"), HasSubstr("checkpoint-2"), HasSubstr(std::strerror(error))));
      disk().fails_for = nullptr;
      mesh.world().barrier();
      EXPECT_EQ(io::newest_valid(folder, "checkpoint-").step, 1);
      mesh.world().barrier();
      save_checkpoint(folder, mesh, run.parts, {.step = 3});
      EXPECT_EQ(io::newest_valid(folder, "checkpoint-").step, 3);
    });
    for (const auto& rank : ranks) EXPECT_EQ(rank.exit_code, 0) << rank.output;
  }
}

// A rank that is killed while the others write, or wait for it to have written.
TEST(DividedSaveFaults, ARankThatIsKilledInASaveLeavesTheOlderCheckpoint) {
  const io::TemporaryDirectory place;
  const auto ranks = on_processes(
      place,
      [](const Mesh& mesh, const std::string& folder) {
        Rank run(mesh, kAdamW);
        run.step();
        save_checkpoint(folder, mesh, run.parts, {.step = 1});
        disk().slow_ms = 600'000;
        if (mesh.world().rank() == 1) {
          disk().slow_for = "/checkpoint-2.";
          std::thread([] {  // the disk clears it when the file is there and its fsync has begun
            while (disk().slow_for != nullptr) std::this_thread::yield();
            std::cout << "writes" << std::endl;
          })
              .detach();
        }
        save_checkpoint(folder, mesh, run.parts, {.step = 2});
      },
      [](testing::RunningRanks& running) {
        ASSERT_TRUE(running.wait_for(1, "writes"));
        running.kill(1, SIGKILL);
      });
  EXPECT_EQ(ranks[1].signal, SIGKILL);
  for (const int other : {0, 2}) {
    EXPECT_EQ(ranks[other].exit_code, 1) << ranks[other].output;
    EXPECT_THAT(ranks[other].output, HasSubstr("rank 1"));
  }
  EXPECT_EQ(io::newest_valid(place.path(), "checkpoint-").step, 1);
  const auto again = on_processes(place, [](const Mesh& mesh, const std::string& folder) {
    Rank run(mesh, kAdamW, /*value=*/3);
    const auto resumed = resume(folder, mesh, run.parts);
    ASSERT_TRUE(resumed.has_value());
    EXPECT_EQ(resumed->step, 1);
    save_checkpoint(folder, mesh, run.parts, {.step = 2});
    EXPECT_TRUE(io::verify(folder + "/checkpoint-2").empty());
  });
  for (const auto& rank : again) EXPECT_EQ(rank.exit_code, 0) << rank.output;
}

INSTANTIATE_TEST_SUITE_P(Meshes, DividedSave,
                         ::testing::Values(Case{{{"shard", 1}}, "auto"},
                                           Case{{{"shard", 2}}, "shm"},
                                           Case{{{"shard", 3}}, "gloo"},
                                           Case{{{"shard", 4}}, "shm"},
                                           Case{{{"data", 2}, {"shard", 2}}, "gloo"}),
                         [](const auto& mesh) {
                           std::string name = mesh.param.backend;
                           for (const MeshAxis& axis : mesh.param.axes)
                             name += "_" + axis.name + std::to_string(axis.size);
                           return name;
                         });

}  // namespace
}  // namespace lockstep::train
