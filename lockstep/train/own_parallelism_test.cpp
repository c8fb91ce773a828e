// The seam between training and parallelism: a Parallelism that the Trainer has never heard of,
// whose ranks each own a part of the model, trains, evaluates, saves and resumes as data
// parallelism does. FullyShard takes the same cases.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/nn/divided.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/testing/naive_shard.h"
#include "lockstep/testing/worlds.h"
#include "lockstep/train/checkpoint.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/trainer_for_test.h"

namespace lockstep::train {
namespace {

struct Trained {
  at::Tensor weights;
  std::vector<LogEntry> log;
  std::int64_t tokens = 0;
  std::vector<at::Tensor> seen;  // batches, in training and evaluation
};

std::shared_ptr<Parallelism> naive_shard(const std::shared_ptr<torch::nn::Module>& module,
                                         Mesh mesh) {
  return std::make_shared<testing::NaiveShard>(*module, std::move(mesh));
}

// Also on a mesh with other axes, whose ranks then all compute the whole model.
std::shared_ptr<Parallelism> replicas(const std::shared_ptr<torch::nn::Module>& module, Mesh mesh) {
  return std::make_shared<DataParallel>(*module, std::move(mesh));
}

enum class Way { kReplicated, kNaive, kFully };

std::shared_ptr<Parallelism> fully_shard(const std::shared_ptr<torch::nn::Module>& module,
                                         Mesh mesh) {
  return std::make_shared<FullyShard>(*module, std::move(mesh));
}

// 45 samples and 5 to evaluate on: short windows, batches that are not full, ranks without one.
Trained run_trainer(const Mesh& mesh, const TrainingArguments& a, Way way,
                    std::int64_t samples = 45) {
  torch::nn::Sequential net = network();
  TrainerTask task = task_for(net, dataset(samples, 1), dataset(5, 2));
  task.make_parallelism = way == Way::kReplicated ? replicas
                          : way == Way::kNaive    ? naive_shard
                                                  : fully_shard;
  Trained trained;
  task.loss = [&, loss = task.loss](const data::Batch& batch) {
    trained.seen.push_back(batch.data.clone());
    return loss(batch);
  };
  Trainer trainer(mesh, task, a);
  trainer.train();
  trained.weights = flat(*net);
  trained.log = trainer.state().log_history;
  trained.tokens = trainer.state().num_input_tokens_seen;
  return trained;
}

Trained run_trainer(World& world, const TrainingArguments& a, Way way) {
  return run_trainer(way == Way::kReplicated ? Mesh(world) : Mesh(world, {{"shard", -1}}), a, way);
}

TrainingArguments arguments_in(const std::string& folder) {
  TrainingArguments a = arguments(folder);
  a.logging_steps = 1;
  a.gradient_accumulation_steps = 2;
  a.max_steps = 8;
  a.max_grad_norm = 0;
  a.shard_optimizer = "false";
  a.eval_strategy = a.save_strategy = Interval::kSteps;
  a.eval_steps = 3;
  a.save_steps = 4;
  return a;
}

void expect_same_log(const Trained& one, const Trained& other, double tolerance) {
  ASSERT_EQ(one.log.size(), other.log.size());
  for (std::size_t i = 0; i < one.log.size(); ++i)
    for (const char* name : {"loss", "grad_norm", "eval_loss", "eval_accuracy"}) {
      const double* a = find_metric(one.log[i].values, name);
      const double* b = find_metric(other.log[i].values, name);
      ASSERT_EQ(a == nullptr, b == nullptr) << name << " in entry " << i;
      if (a == nullptr) continue;
      EXPECT_NEAR(*a, *b, tolerance) << name << " in entry " << i;
    }
}

class OwnParallelism : public ::testing::TestWithParam<std::tuple<int, const char*, Way>> {
 protected:
  static void on_ranks(const std::function<void(World&)>& body) {
    testing::ThreadOptions options;
    options.world.backend = std::get<1>(GetParam());
    testing::run_threads(std::get<0>(GetParam()), body, options);
  }
  static Way own() { return std::get<2>(GetParam()); }
  // With two ranks there is one order of adding gradients. FullyShard averages in every pass, and
  // kernels round the last elements of a tensor otherwise, which are others in a part of it.
  static void expect_equal(const at::Tensor& one, const at::Tensor& other) {
    if (std::get<0>(GetParam()) <= 2 && own() != Way::kFully) {
      EXPECT_TENSOR_EQ(one, other);
    } else {
      EXPECT_TRUE(at::allclose(one, other, 1e-5, 1e-6));
    }
  }
};

TEST_P(OwnParallelism, TrainsAndEvaluatesAsDataParallelism) {
  for (const char* rule : {"adamw", "sgd", "muon"}) {
    const io::TemporaryDirectory folder;
    on_ranks([&](World& world) {
      TrainingArguments a = arguments_in(folder / "replicated");
      a.optim = rule;
      const Trained expected = run_trainer(world, a, Way::kReplicated);
      a.output_dir = folder / "sharded";
      const Trained got = run_trainer(world, a, own());
      expect_equal(got.weights, expected.weights);
      expect_same_log(got, expected, 1e-5);
      world.barrier();
    });
  }
}

TEST_P(OwnParallelism, ClipsByTheNormOfAllRanks) {
  const io::TemporaryDirectory folder;
  on_ranks([&](World& world) {
    TrainingArguments a = arguments_in(folder / "replicated");
    a.max_grad_norm = 0.1;
    const Trained expected = run_trainer(world, a, Way::kReplicated);
    a.output_dir = folder / "sharded";
    const Trained got = run_trainer(world, a, own());
    EXPECT_TRUE(at::allclose(got.weights, expected.weights, 1e-5, 1e-6));
    expect_same_log(got, expected, 1e-5);
    world.barrier();
  });
}

// A checkpoint holds the whole model and the whole state, whoever wrote it.
TEST_P(OwnParallelism, ResumesWhatEitherSaved) {
  const io::TemporaryDirectory folder;
  on_ranks([&](World& world) {
    TrainingArguments a = arguments_in(folder / "whole");
    const Trained expected = run_trainer(world, a, Way::kReplicated);
    for (const Way saver : {Way::kReplicated, own()}) {
      const bool by_shards = saver != Way::kReplicated;
      a.output_dir = folder / (by_shards ? "by_shards" : "by_replicas");
      run_trainer(world, a, saver);
      world.barrier();
      a.resume_from_checkpoint = a.output_dir + "/checkpoint-4";
      for (const Way way : {Way::kReplicated, own()}) {
        a.output_dir =
            folder / (std::string(by_shards ? "s" : "r") + (way != Way::kReplicated ? "s" : "r"));
        expect_equal(run_trainer(world, a, way).weights, expected.weights);
      }
      a.resume_from_checkpoint.reset();
      world.barrier();
    }
  });
}

// Ranks along "tensor" and "pipeline" see the same samples, which count once.
class OwnMesh
    : public ::testing::TestWithParam<std::tuple<std::vector<MeshAxis>, const char*, Way>> {
 protected:
  static void on_ranks(const std::function<void(const Mesh&)>& body) {
    int ranks = 1;
    for (const MeshAxis& axis : std::get<0>(GetParam())) ranks *= axis.size;
    testing::ThreadOptions options;
    options.world.backend = std::get<1>(GetParam());
    testing::run_threads(
        ranks, [&](World& world) { body(Mesh(world, std::get<0>(GetParam()))); }, options);
  }
  static Way own() { return std::get<2>(GetParam()); }
  // A folder for each world of ranks that see different samples.
  static std::string apart(const io::TemporaryDirectory& folder, const Mesh& mesh) {
    return folder / std::to_string(mesh.rank("pipeline") + 2 * mesh.rank("tensor"));
  }
};

TEST_P(OwnMesh, TrainsAndLogsAsItsBatchAxisAlone) {
  for (const bool across : {true, false})
    for (const Way way : {own(), Way::kReplicated}) {
      const io::TemporaryDirectory folder;
      on_ranks([&](const Mesh& mesh) {
        TrainingArguments a = arguments_in(apart(folder, mesh));
        a.average_tokens_across_devices = across;
        a.max_grad_norm = 0.1;
        const Trained expected = run_trainer(mesh.batch(), a, Way::kReplicated);
        a.output_dir = folder / "mesh";
        const Trained got = run_trainer(mesh, a, way);
        EXPECT_TRUE(at::allclose(got.weights, expected.weights, 1e-5, 1e-6));
        expect_same_log(got, expected, 1e-5);
        EXPECT_EQ(got.tokens, expected.tokens);
        ASSERT_EQ(got.seen.size(), expected.seen.size());
        for (std::size_t i = 0; i < got.seen.size(); ++i)
          EXPECT_TENSOR_EQ(got.seen[i], expected.seen[i]);
        mesh.world().barrier();
      });
    }
}

// As many updates of the wanted size as the batch axis gives.
TEST_P(OwnMesh, CountsTheGlobalBatchOverTheBatchAxis) {
  const io::TemporaryDirectory folder;
  on_ranks([&](const Mesh& mesh) {
    TrainingArguments a = arguments_in(folder.path());
    a.gradient_accumulation_steps = 1;
    a.global_batch_size = 32;
    run_trainer(mesh, a, own());
    mesh.world().barrier();
    const DataPosition saved = Checkpoint(folder / "checkpoint-4").position();
    EXPECT_EQ(saved.world_size, mesh.batch().size());
    EXPECT_EQ(saved.world_size * saved.batch_size * saved.accumulation, 32);
    mesh.world().barrier();
  });
}

// Another mesh goes on where this one was, and so does this one after another. Every window is
// full: how a shorter one is filled depends on the number of ranks that share it.
TEST_P(OwnMesh, ResumesUnderAnotherMesh) {
  const io::TemporaryDirectory folder;
  constexpr std::int64_t kSamples = 64;
  on_ranks([&](const Mesh& mesh) {
    TrainingArguments a = arguments_in(folder / "mesh");
    a.gradient_accumulation_steps = 1;
    a.global_batch_size = 32;
    a.per_device_train_batch_size = 2;
    const Trained expected = run_trainer(mesh, a, own(), kSamples);
    mesh.world().barrier();
    a.resume_from_checkpoint = a.output_dir + "/checkpoint-4";
    a.output_dir = folder / "as_data";
    const Trained got = run_trainer(mesh.world(), a, Way::kReplicated, kSamples);
    EXPECT_TRUE(at::allclose(got.weights, expected.weights, 1e-4, 1e-5));
    mesh.world().barrier();
    a.resume_from_checkpoint = a.output_dir + "/checkpoint-8";
    a.max_steps = 9;
    a.output_dir = folder / "back";
    run_trainer(mesh, a, own(), kSamples);
    mesh.world().barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, OwnMesh,
    ::testing::Values(
        std::tuple(std::vector<MeshAxis>{{"tensor", 2}}, "shm", Way::kNaive),
        std::tuple(std::vector<MeshAxis>{{"data", 2}, {"tensor", 2}}, "shm", Way::kNaive),
        std::tuple(std::vector<MeshAxis>{{"data", 2}, {"tensor", 2}}, "gloo", Way::kNaive),
        std::tuple(std::vector<MeshAxis>{{"pipeline", 2}, {"shard", 2}}, "gloo", Way::kNaive),
        std::tuple(std::vector<MeshAxis>{{"data", 2}, {"shard", 2}}, "shm", Way::kNaive),
        std::tuple(std::vector<MeshAxis>{{"data", 2}, {"shard", 2}}, "shm", Way::kFully),
        std::tuple(std::vector<MeshAxis>{{"data", 2}, {"shard", 2}}, "gloo", Way::kFully)),
    [](const auto& mesh) {
      std::string name = std::get<1>(mesh.param);
      if (std::get<2>(mesh.param) == Way::kFully) name += "_fully";
      for (const MeshAxis& axis : std::get<0>(mesh.param))
        name += "_" + axis.name + std::to_string(axis.size);
      return name;
    });

// Generators are the process's, so ranks are processes here.
TEST(OwnMeshProcesses, RanksThatSeeTheSameSamplesDrawTheSameNumbers) {
  const io::TemporaryDirectory folder;
  const auto ranks = testing::run_processes(4, [&](World& world) {
    const Mesh mesh(world, {{"data", 2}, {"tensor", 2}});
    torch::nn::Sequential net = network();
    net->push_back(torch::nn::Dropout(0.5));
    const auto train = [&](const std::string& name, const std::string& resumed) {
      TrainerTask task = task_for(net, dataset(45, 1), dataset(5, 2));
      task.make_parallelism = replicas;
      TrainingArguments a = arguments_in(folder / name);
      a.max_grad_norm = 1;
      if (!resumed.empty()) a.resume_from_checkpoint = folder / resumed;
      Trainer(mesh, task, a).train();
      world.barrier();
      return flat(*net);
    };
    const at::Tensor whole = train("whole", "");
    for (const at::Tensor& other : mesh.world().all_gather(whole)) EXPECT_TENSOR_EQ(other, whole);
    EXPECT_TENSOR_EQ(train("rest", "whole/checkpoint-4"), whole);
    const auto drawn = mesh["data"].all_gather(at::rand({4}));
    EXPECT_FALSE(drawn[0].equal(drawn[1]));
  });
  for (const auto& rank : ranks) EXPECT_EQ(rank.exit_code, 0) << rank.output;
}

TEST(OwnMeshRefusals, AParallelismOfAnotherMesh) {
  const io::TemporaryDirectory folder;
  testing::run_threads(2, [&](World& world) {
    TrainerTask task = task_for(network(), dataset(45, 1), dataset(5, 2));
    task.make_parallelism = [](const std::shared_ptr<torch::nn::Module>& module, Mesh mesh) {
      return naive_shard(module, Mesh(mesh.world(), {{"tensor", 2}}));
    };
    Trainer trainer(world, task, arguments_in(folder.path()));
    EXPECT_THAT(io::message_of<UsageError>([&] { trainer.train(); }),
                ::testing::HasSubstr("has a mesh of tensor 2, and the Trainer one of data 2"));
  });
}

TEST(OwnMeshRefusals, KeysThatDivideBesideAParallelismOfTheTask) {
  const io::TemporaryDirectory folder;
  testing::run_threads(2, [&](World& world) {
    TrainerTask task = task_for(network(), dataset(45, 1), dataset(5, 2));
    task.make_parallelism = naive_shard;
    for (const bool fsdp : {true, false}) {
      TrainingArguments a = arguments_in(folder.path());
      if (fsdp) a.fsdp = "full_shard";
      a.shard_optimizer = fsdp ? "auto" : "true";
      Trainer trainer(world, task, a);
      EXPECT_THAT(io::message_of<UsageError>([&] { trainer.train(); }),
                  ::testing::HasSubstr(std::string(fsdp ? "fsdp" : "shard_optimizer: true") +
                                       " is set, and TrainerTask::make_parallelism"));
    }
  });
}

// ---------------------------------------------------------------- a mesh that the Trainer is given

TEST(GivenMesh, AnAxisShardDividesTheModelWithoutTheKeyFsdp) {
  // After every step each rank holds a part of the model, and the ranks together hold all of it.
  struct Held : Observer {
    Held(World& the_world, std::shared_ptr<torch::nn::Module> the_module)
        : world(the_world), module(std::move(the_module)) {}
    void on_step_end(Event&) override {
      ++steps;
      std::int64_t mine = 0, whole = 0;
      for (const at::Tensor& parameter : module->parameters()) {
        const nn::Rows* const rows = nn::rows_of(parameter);
        mine += rows != nullptr ? rows->values.numel() : parameter.numel();
        whole += parameter.numel();
      }
      EXPECT_LT(mine, whole);
      EXPECT_EQ(all_reduce(world, static_cast<double>(mine)), static_cast<double>(whole));
    }
    World& world;
    std::shared_ptr<torch::nn::Module> module;
    int steps = 0;
  };
  const io::TemporaryDirectory folder;
  testing::run_threads(2, [&](World& world) {
    TrainingArguments a = arguments_in(folder / "replicated");
    const Trained expected = run_trainer(world, a, Way::kReplicated);
    a.output_dir = folder / "divided";
    torch::nn::Sequential net = network();
    Trainer trainer(Mesh(world, {{"shard", 2}}), task_for(net, dataset(45, 1), dataset(5, 2)), a);
    const auto held = std::make_shared<Held>(world, net.ptr());
    trainer.add(held);
    trainer.train();
    EXPECT_EQ(held->steps, a.max_steps);
    EXPECT_TRUE(at::allclose(flat(*net), expected.weights, 1e-5, 1e-6));
    world.barrier();
  });
}

TEST(GivenMesh, FsdpNeedsItsAxisShard) {
  const io::TemporaryDirectory folder;
  testing::run_threads(2, [&](World& world) {
    TrainingArguments a = arguments_in(folder.path());
    a.fsdp = "full_shard";
    a.shard_optimizer = "auto";
    Trainer trainer(Mesh(world, {{"tensor", 2}}),
                    task_for(network(), dataset(45, 1), dataset(5, 2)), a);
    EXPECT_THAT(io::message_of<UsageError>([&] { trainer.train(); }),
                ::testing::HasSubstr("fsdp is set, and the mesh (tensor 2) has no axis "
                                     "'shard'. Add it, or give the Trainer the world."));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, OwnParallelism,
    ::testing::Values(std::tuple(1, "auto", Way::kNaive), std::tuple(2, "shm", Way::kNaive),
                      std::tuple(2, "gloo", Way::kNaive), std::tuple(3, "gloo", Way::kNaive),
                      std::tuple(1, "auto", Way::kFully), std::tuple(2, "shm", Way::kFully),
                      std::tuple(2, "gloo", Way::kFully), std::tuple(3, "gloo", Way::kFully),
                      std::tuple(4, "shm", Way::kFully)),
    [](const auto& world) {
      return std::string(std::get<1>(world.param)) + std::to_string(std::get<0>(world.param)) +
             (std::get<2>(world.param) == Way::kFully ? "_fully" : "");
    });

}  // namespace
}  // namespace lockstep::train
