// The Trainer on worlds of threads: what it computes, what it agrees on, what it says.
#include "lockstep/train/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/manifest.h"
#include "lockstep/testing/worlds.h"
#include "lockstep/train/async_saver.h"
#include "lockstep/train/checkpoint.h"
#include "lockstep/train/disk_for_test.h"
#include "lockstep/train/trainer_for_test.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using train::arguments;
using train::dataset;
using train::disk;
using train::flat;
using train::generator;
using train::kClasses;
using train::kFeatures;
using train::network;
using train::task_for;

MATCHER_P(HasStep, step, "") {
  return arg.step == step;
}

// Rank 0 asks for an end and a checkpoint; both come one step later.
struct StopAt : Observer {
  explicit StopAt(std::int64_t at) : step(at) {}
  void on_step_end(Event& event) override {
    if (event.state.global_step == step && event.rank == 0) event.stop = event.save = true;
  }
  std::int64_t step;
};

struct Recorder : Observer {
  std::string calls;
  std::vector<double> losses;
  void on_train_begin(Event&) override { calls += "B"; }
  void on_epoch_begin(Event&) override { calls += "("; }
  void on_step_begin(Event&) override { calls += "b"; }
  void on_substep_end(Event&) override { calls += "."; }
  void on_optimizer_step(Event&) override { calls += "o"; }
  void on_step_end(Event&) override { calls += "e"; }
  void on_log(Event& event) override {
    calls += "l";
    if (const double* loss = train::find_metric(event.entry->values, "loss"))
      losses.push_back(*loss);
  }
  void on_evaluate(Event&) override { calls += "E"; }
  void on_save(Event&) override { calls += "S"; }
  void on_epoch_end(Event&) override { calls += ")"; }
  void on_train_end(Event&) override { calls += "T"; }
};

TEST(Trainer, ObserversSeeEveryEventInOrder) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.num_train_epochs = 1;
  a.gradient_accumulation_steps = 2;
  a.logging_steps = 2;
  a.eval_strategy = Interval::kEpoch;
  a.save_strategy = Interval::kEpoch;
  Trainer trainer(World{}, task_for(network(), dataset(18, 1), dataset(5, 2)), a);
  const auto recorder = std::make_shared<Recorder>();
  trainer.add(recorder);
  const TrainResult result = trainer.train();
  // 18 samples are 5 batches of at most 4: windows of 2, 2 and 1.
  EXPECT_EQ(recorder->calls, "B(b.oeb.oelboe)lESlT");
  EXPECT_EQ(result.global_step, 3);
  EXPECT_EQ(result.exit_code(), 0);
  EXPECT_EQ(result.checkpoint, dir / "checkpoint-3");
  EXPECT_TRUE(io::verify(result.checkpoint).empty());
}

// As in Hugging Face: what is due after an epoch is also due after one that max_steps cuts short.
TEST(Trainer, AnEpochThatIsCutShortHasAnEndAndIsResumed) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.max_steps = 5;
  a.eval_strategy = Interval::kEpoch;
  a.save_strategy = Interval::kEpoch;
  const auto recorder = std::make_shared<Recorder>();
  {
    Trainer trainer(World{}, task_for(network(), dataset(64, 1), dataset(5, 2)), a);
    trainer.add(recorder);
    EXPECT_EQ(trainer.train().checkpoint, dir / "checkpoint-5");
    EXPECT_THAT(io::message_of<UsageError>([&] { trainer.train(); }),
                HasSubstr("train() was called a second time"));
  }
  EXPECT_THAT(recorder->calls, EndsWith("oel)lESlT"));
  a.max_steps = 18;
  a.resume_from_checkpoint = "auto";
  Trainer again(World{}, task_for(network(), dataset(64, 1), dataset(5, 2)), a);
  EXPECT_EQ(again.train().checkpoint, dir / "checkpoint-18");
  // 16 steps per epoch: its other 11, and two of the next.
  EXPECT_THAT(io::list_numbered(dir.path(), train::kCheckpointPrefix),
              ElementsAre(HasStep(18), HasStep(16), HasStep(5)));
}

// The same batches on more ranks are the same steps: gradients are those of the whole window.
TEST(Trainer, TwoRanksComputeWhatOneDoesWithTheirBatch) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.max_steps = 12;
  a.per_device_train_batch_size = 8;
  const auto samples = dataset(96, 1);
  auto alone = network();
  Trainer(World{}, task_for(alone, samples), a).train();
  a.per_device_train_batch_size = 2;
  a.gradient_accumulation_steps = 2;
  std::mutex mutex;
  testing::run_threads(2, [&](World& world) {
    auto mine = a;
    mine.output_dir = dir / std::to_string(world.rank());
    auto net = network();
    Trainer(world, task_for(net, samples), mine).train();
    const std::lock_guard lock(mutex);
    // Sums in another order: 12 steps of Adam, each with relative rounding of some 1e-7.
    EXPECT_TRUE(torch::allclose(flat(*net), flat(*alone), 1e-4, 1e-5)) << "rank " << world.rank();
  });
}

TEST(Trainer, EvaluationIsTheSameAtAnyNumberOfRanks) {
  io::TemporaryDirectory dir;
  const auto samples = dataset(37, 3);
  std::set<double> accuracies;
  std::vector<double> losses;
  std::mutex mutex;
  for (const int ranks : {1, 2, 3, 7}) {
    testing::run_threads(ranks, [&](World& world) {
      Trainer trainer(world, task_for(network(), nullptr, samples), arguments(dir.path()));
      const train::Metrics metrics = trainer.evaluate();
      const std::lock_guard lock(mutex);
      accuracies.insert(*train::find_metric(metrics, "eval_accuracy"));
      losses.push_back(*train::find_metric(metrics, "eval_loss"));
    });
  }
  EXPECT_EQ(accuracies.size(), 1u);
  // Means of batches in float, added in double: other batches round differently.
  for (const double loss : losses) EXPECT_NEAR(loss, losses[0], 1e-6);
}

// A mean over targets, written by hand: without one it is 0 / 0, forward and backward.
TEST(Trainer, BatchesWithoutTargetsAddNothing) {
  io::TemporaryDirectory dir;
  auto random = generator(4);
  const at::Tensor x = torch::randn({12, kFeatures}, random);
  const at::Tensor y = at::arange(12).remainder(kClasses).unsqueeze(1).repeat({1, 2});
  y.narrow(0, 8, 4).fill_(data::kIgnoredTarget);
  const auto samples = std::make_shared<data::TensorDataset>(x, y);
  auto net = network();
  TrainerTask task = task_for(net, samples, samples);
  task.totals = nullptr;
  task.loss = [net](const data::Batch& batch) mutable {
    const auto target = batch.target.narrow(1, 1, 1);  // as in losses that shift their targets
    const auto mask = target.ne(data::kIgnoredTarget);
    const auto scores = torch::log_softmax(net->forward(batch.data), 1);
    return -(scores.gather(1, target.clamp_min(0)) * mask).sum() / mask.sum();
  };
  auto a = arguments(dir.path());
  a.max_steps = 12;
  a.logging_steps = 12;
  a.per_device_train_batch_size = 1;
  a.per_device_eval_batch_size = 4;
  const auto first = net->forward(x.narrow(0, 0, 8));
  const auto wanted = torch::cross_entropy_loss(first, y.narrow(0, 0, 8).select(1, 1));
  Trainer trainer(World{}, task, a);
  const train::Metrics metrics = trainer.evaluate();
  // The sum of 8 losses of about 1, in another order.
  EXPECT_NEAR(*train::find_metric(metrics, "eval_loss"), wanted.item<double>(), 1e-6);
  trainer.train();
  const train::Metrics& logged = trainer.state().log_history.at(0).values;
  EXPECT_EQ(train::find_metric(logged, "skipped_steps"), nullptr);
  EXPECT_TRUE(std::isfinite(*train::find_metric(logged, "loss")));
}

// 2, 1, 4 and 3 ranks in turn, each stopped by an observer in the middle of an epoch.
TEST(Trainer, EverySampleOnceAnEpochOverChangingRanks) {
  io::TemporaryDirectory dir;
  constexpr std::int64_t kSamples = 120;
  const auto samples = dataset(kSamples, 1);
  std::map<std::int64_t, std::vector<std::int64_t>> seen;  // by epoch
  std::mutex mutex;
  std::vector<std::int64_t> ended;
  // StepFlags after these steps. A batch of 4 each: 32, 16 and 48 samples, so that 24 of the first
  // epoch are left for three ranks.
  const std::map<int, std::int64_t> stop_after{{2, 3}, {1, 7}, {4, 10}};
  for (const int ranks : {2, 1, 4, 3}) {
    testing::run_threads(ranks, [&](World& world) {
      auto a = arguments(dir.path());
      a.num_train_epochs = 2;
      a.resume_from_checkpoint = "auto";
      TrainerTask task = task_for(network(), samples);
      const auto loss = task.loss;
      Trainer* self = nullptr;
      task.loss = [&, loss](const data::Batch& batch) {
        {
          const std::lock_guard lock(mutex);
          auto& epoch = seen[static_cast<std::int64_t>(self->state().epoch)];
          epoch.insert(epoch.end(), batch.indices.begin(), batch.indices.end());
        }
        return loss(batch);
      };
      Trainer trainer(world, task, a);
      self = &trainer;
      if (ranks != 3) trainer.add(std::make_shared<StopAt>(stop_after.at(ranks)));
      const TrainResult result = trainer.train();
      world.barrier();
      if (world.is_leader()) ended.push_back(result.global_step);
    });
  }
  // A flag is agreed in the next step's exchange, so each run ends one step after it was made.
  EXPECT_THAT(std::vector(ended.begin(), ended.end() - 1), ElementsAre(4, 8, 11));
  ASSERT_EQ(seen.size(), 2u);
  for (auto& [epoch, indices] : seen) {
    std::sort(indices.begin(), indices.end());
    std::vector<std::int64_t> all(kSamples);
    for (std::int64_t i = 0; i < kSamples; ++i) all[static_cast<std::size_t>(i)] = i;
    EXPECT_EQ(indices, all) << "epoch " << epoch;
  }
}

// The second run was begun with other ranks, so its checkpoint's steps are of two kinds: a third at
// the same number must end where the second would have ended.
TEST(Trainer, ResumedTwiceItEndsWhereItWouldHave) {
  const auto samples = dataset(120, 1);
  for (const auto& [first, second] : {std::pair(2, 1), std::pair(1, 2)}) {
    io::TemporaryDirectory dir;
    const auto run = [&](int ranks, std::int64_t stop_after) {
      std::pair<std::int64_t, double> end;
      testing::run_threads(ranks, [&](World& world) {
        auto a = arguments(dir.path());  // saves by flag alone
        a.num_train_epochs = 2;
        a.resume_from_checkpoint = "auto";
        Trainer trainer(world, task_for(network(), samples), a);
        if (stop_after > 0) trainer.add(std::make_shared<StopAt>(stop_after));
        trainer.train();
        if (world.is_leader()) end = {trainer.state().global_step, trainer.state().epoch};
      });
      return end;
    };
    EXPECT_EQ(run(first, 3).first, 4);
    const auto [step, epoch] = run(second, 0);
    EXPECT_EQ(epoch, 2.0);
    EXPECT_EQ(run(second, 9).first, 10);
    EXPECT_EQ(run(second, 0), std::pair(step, epoch)) << first << " ranks, then " << second;
  }
}

TEST(Trainer, ACheckpointCountsTokensAndKnowsItsDataset) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());  // logs every 5 steps
  a.max_steps = 3;
  a.save_strategy = Interval::kSteps;
  Trainer(World{}, task_for(network(), dataset(64, 1)), a).train();
  EXPECT_EQ(train::Checkpoint(dir / "checkpoint-3").state().num_input_tokens_seen, 3 * 4);
  a.max_steps = 10;
  a.resume_from_checkpoint = "auto";
  Trainer other(World{}, task_for(network(), dataset(63, 1)), a);
  EXPECT_THAT(io::message_of<UsageError>([&] { other.train(); }),
              HasSubstr("the state was saved with 64 samples per epoch, and now there are 63."));
  Trainer again(World{}, task_for(network(), dataset(64, 1)), a);
  again.train();
  EXPECT_EQ(again.state().num_input_tokens_seen, 10 * 4);
}

TEST(Trainer, AParameterOfTwoNamesIsResumed) {
  struct Tied : torch::nn::Module {
    Tied() {
      weight = register_parameter("first", torch::ones({kFeatures, kClasses}));
      register_parameter("second", weight);
    }
    at::Tensor weight;
  };
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.save_strategy = Interval::kSteps;
  a.resume_from_checkpoint = "auto";
  for (const std::int64_t steps : {2, 4}) {
    a.max_steps = steps;
    const auto net = std::make_shared<Tied>();
    TrainerTask task;
    task.module = net;
    task.loss = [net](const data::Batch& batch) {
      return torch::cross_entropy_loss(batch.data.matmul(net->weight), batch.target);
    };
    task.train_data = dataset(64, 1);
    EXPECT_EQ(Trainer(World{}, task, a).train().global_step, steps);
  }
}

// The flag is granted at the epoch's last step, before the evaluation that finds it the best.
TEST(Trainer, AStepThatIsSavedAlreadyMayTurnOutTheBest) {
  struct SaveAt : Observer {
    void on_step_end(Event& event) override { event.save = event.state.global_step == 3; }
  };
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.num_train_epochs = 1;
  a.eval_strategy = Interval::kEpoch;
  a.save_strategy = Interval::kEpoch;
  Trainer trainer(World{}, task_for(network(), dataset(16, 1), dataset(5, 2)), a);
  trainer.add(std::make_shared<SaveAt>());
  trainer.train();
  EXPECT_EQ(trainer.state().best_model_checkpoint, dir / "checkpoint-4");
  EXPECT_EQ(train::Checkpoint(dir / "checkpoint-4").state().best_model_checkpoint,
            dir / "checkpoint-4");
}

// The metrics come from the forward that gave the loss.
TEST(Trainer, EvaluationRunsTheModelOncePerBatch) {
  io::TemporaryDirectory dir;
  auto net = network();
  TrainerTask task = task_for(net, dataset(64, 1), dataset(10, 2));
  int forwards = 0;
  task.loss = [&, loss = task.loss](const data::Batch& batch) {
    ++forwards;
    return loss(batch);
  };
  std::vector<at::Tensor> outputs;
  task.totals = [&, totals = task.totals](const data::Batch& batch, const at::Tensor& output) {
    outputs.push_back(output);
    return totals(batch, output);
  };
  auto a = arguments(dir.path());
  a.per_device_eval_batch_size = 4;
  Trainer trainer(World{}, task, a);
  const train::Metrics metrics = trainer.evaluate();
  EXPECT_EQ(forwards, 3);
  ASSERT_EQ(outputs.size(), 3u);
  EXPECT_EQ(outputs.back().sizes(), (std::vector<std::int64_t>{2, kClasses}));
  EXPECT_NE(train::find_metric(metrics, "eval_accuracy"), nullptr);
}

TEST(Trainer, ABadGradientIsSkippedOnAllRanks) {
  io::TemporaryDirectory dir;
  std::vector<at::Tensor> ends(2);
  testing::run_threads(2, [&](World& world) {
    auto a = arguments(dir / std::to_string(world.rank()));
    a.max_steps = 4;
    a.logging_steps = 4;
    auto net = network();
    TrainerTask task = task_for(net, dataset(64, 1));
    int calls = 0;
    const auto loss = task.loss;
    task.loss = [&, loss](const data::Batch& batch) {
      const at::Tensor value = loss(batch).loss;
      return ++calls == 2 && world.rank() == 1 ? value * NAN : value;
    };
    Trainer trainer(world, task, a);
    const auto recorder = std::make_shared<Recorder>();
    trainer.add(recorder);
    trainer.train();
    ASSERT_EQ(recorder->losses.size(), 1u);
    EXPECT_TRUE(std::isfinite(recorder->losses[0]));
    ends[static_cast<std::size_t>(world.rank())] = flat(*net);
    const train::LogEntry& entry = trainer.state().log_history[0];
    EXPECT_EQ(*train::find_metric(entry.values, "skipped_steps"), 1);
  });
  EXPECT_TRUE(at::isfinite(ends[0]).all().item<bool>());
  EXPECT_TRUE(torch::equal(ends[0], ends[1]));
}

[[noreturn]] void run_out_of_memory() {
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate 2.00 GiB.");
  std::abort();
}

TEST(Trainer, OutOfMemorySaysWhatToTry) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  TrainerTask task = task_for(network(), dataset(64, 1));
  task.loss = [](const data::Batch&) -> at::Tensor { run_out_of_memory(); };
  Trainer trainer(World{}, task, a);
  EXPECT_THAT(io::message_of<Error>([&] { trainer.train(); }),
              ::testing::AllOf(
                  HasSubstr("[trainer] rank 0: out of memory in step 1 (CUDA out of memory."),
                  HasSubstr("effective batch 4 = 4 per device x 1 accumulation x 1 rank. Try "
                            "per_device_train_batch_size: 3"),
                  HasSubstr("per_device_train_batch_size: 2 with gradient_accumulation_steps: 2 "
                            "(effective batch stays 4).")));
}

class TrainerBatch : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Trainer, TrainerBatch,
                         ::testing::Values("auto_find_batch_size", "elastic_gpu"),
                         [](const auto& one) { return std::string(one.param); });

TEST_P(TrainerBatch, ThatDoesNotFitOneRankIsHalvedOnAll) {
  const bool elastic = GetParam() == std::string("elastic_gpu");
  io::TemporaryDirectory dir;
  std::mutex mutex;
  std::set<std::int64_t> sizes;
  testing::run_threads(2, [&](World& world) {
    auto a = arguments(dir / std::to_string(world.rank()));
    (elastic ? a.elastic_gpu : a.auto_find_batch_size) = true;
    a.per_device_train_batch_size = 16;
    a.max_steps = 3;
    TrainerTask task = task_for(network(), dataset(64, 1));
    const auto loss = task.loss;
    bool training = false;
    task.loss = [&, loss](const data::Batch& batch) {
      if (world.rank() == 1 && batch.samples() > 4) run_out_of_memory();
      if (training) {
        const std::lock_guard lock(mutex);
        sizes.insert(batch.samples());
      }
      return loss(batch);
    };
    Trainer trainer(world, task, a);
    struct Begin : Observer {
      explicit Begin(bool& on) : flag(on) {}
      void on_train_begin(Event&) override { flag = true; }
      bool& flag;
    };
    trainer.add(std::make_shared<Begin>(training));
    trainer.train();
    EXPECT_EQ(trainer.state().train_batch_size, 4);
  });
  EXPECT_THAT(sizes, ElementsAre(4));
}

TEST(Trainer, MemoryThatWasMisusedIsNoReasonForASmallerBatch) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.auto_find_batch_size = true;
  TrainerTask task = task_for(network(), dataset(64, 1));
  task.loss = [](const data::Batch&) -> at::Tensor {
    TORCH_CHECK(false, "CUDA error: an illegal memory access was encountered");
    return {};
  };
  Trainer trainer(World{}, task, a);
  EXPECT_THAT(io::message_of<c10::Error>([&] { trainer.train(); }),
              HasSubstr("an illegal memory access"));
}

// cuBLAS takes its memory past the allocator, and has its own message when there is none.
TEST(Trainer, ALibraryWithoutMemoryIsOutOfMemoryToo) {
  io::TemporaryDirectory dir;
  TrainerTask task = task_for(network(), dataset(64, 1));
  task.loss = [](const data::Batch&) -> at::Tensor {
    TORCH_CHECK(false,
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`");
    return {};
  };
  Trainer trainer(World{}, task, arguments(dir.path()));
  EXPECT_THAT(io::message_of<Error>([&] { trainer.train(); }),
              HasSubstr("[trainer] rank 0: out of memory in step 1 (CUDA error: CUBLAS_STATUS"));
}

// There is nobody to agree with: however long the step takes, it is waited for.
TEST(Trainer, AloneALongStepHearsTheSignalAtItsEnd) {
  const char* soak = std::getenv("LOCKSTEP_SOAK");
  if (soak == nullptr || std::string(soak) != "1") GTEST_SKIP() << "with LOCKSTEP_SOAK=1";
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.enable_jit_checkpoint = true;
  TrainerTask task = task_for(network(), dataset(64, 1));
  task.loss = [plain = task.loss, calls = 0](const data::Batch& batch) mutable {
    if (++calls == 2) {
      std::raise(SIGTERM);
      std::this_thread::sleep_for(std::chrono::seconds(12));
    }
    return plain(batch);
  };
  const TrainResult result = Trainer(World{}, task, a).train();
  EXPECT_EQ(result.exit_code(), 143);
  EXPECT_EQ(result.checkpoint, dir / "checkpoint-2");
}

TEST(Trainer, RefusesATaskThatCannotBeTrained) {
  io::TemporaryDirectory dir;
  EXPECT_THAT(io::message_of<UsageError>([&] { Trainer(World{}, {}, arguments(dir.path())); }),
              HasSubstr("[trainer] the task has no module. Set it"));
  TrainerTask none = task_for(network(), nullptr, dataset(8, 1));
  Trainer trainer(World{}, none, arguments(dir.path()));
  EXPECT_THAT(io::message_of<UsageError>([&] { trainer.train(); }),
              HasSubstr("the task has no train_data"));
  Trainer empty(World{}, task_for(network(), dataset(0, 1)), arguments(dir.path()));
  EXPECT_THAT(io::message_of<UsageError>([&] { empty.train(); }),
              HasSubstr("[loader] there is nothing to load: the dataset has no samples"));
  TrainingArguments drops = arguments(dir.path());
  drops.dataloader_drop_last = true;
  Trainer few(World{}, task_for(network(), dataset(3, 1)), drops);
  EXPECT_THAT(io::message_of<UsageError>([&] { few.train(); }),
              HasSubstr("3 samples over 1 rank are 3 per rank, fewer than batch_size 4, and "
                        "drop_last skips incomplete batches"));
  TrainerTask blind = task_for(network(), dataset(8, 1));
  Trainer other(World{}, blind, arguments(dir.path()));
  EXPECT_THAT(io::message_of<UsageError>([&] { other.evaluate(); }),
              HasSubstr("the task has no eval_data"));
}

// ---------------------------------------------------------------- checkpoints

train::CheckpointContents contents_of(torch::nn::Sequential& net) {
  train::CheckpointContents contents;
  contents.model = train::model_tensors(*net, true);
  contents.optimizer["0.weight.exp_avg"] = at::ones({2, 3});
  contents.rng = {{{"cpu", at::arange(5, at::kByte)}}, {{"cpu", at::arange(7, at::kByte)}}};
  contents.state.global_step = 5;
  contents.position.cursor = 40;
  return contents;
}

TEST(Checkpoint, GivesBackWhatWasWritten) {
  io::TemporaryDirectory dir;
  auto net = network();
  train::write_checkpoint(dir / "checkpoint-5", contents_of(net), {.max_shard_bytes = 200});
  EXPECT_TRUE(io::verify(dir / "checkpoint-5").empty());
  EXPECT_TRUE(std::filesystem::exists(dir / "checkpoint-5/model.safetensors.index.json"));
  const train::Checkpoint read(dir / "checkpoint-5");
  auto other = network();
  for (auto& p : other->parameters()) at::Tensor(p.detach()).zero_();
  read.load_model(*other);
  EXPECT_TRUE(torch::equal(flat(*other), flat(*net)));
  EXPECT_TRUE(torch::equal(read.rng(1).at("cpu"), at::arange(7, at::kByte)));
  // A rank that was not there has states of its own, defined by the checkpoint.
  const at::Tensor third = read.rng(2).at("cpu"), fourth = read.rng(3).at("cpu");
  EXPECT_TRUE(torch::equal(third, read.rng(2).at("cpu")));
  EXPECT_FALSE(torch::equal(third, fourth));
  EXPECT_FALSE(torch::equal(third, read.rng(4).at("cpu")));
  at::Generator usable = generator(1);
  usable.set_state(third);
  EXPECT_EQ(read.position().cursor, 40);
  EXPECT_TRUE(torch::equal(read.optimizer().at("0.weight.exp_avg"), at::ones({2, 3})));
}

TEST(Checkpoint, RefusesAnotherModelAndWeightsAlone) {
  io::TemporaryDirectory dir;
  auto net = network();
  auto contents = contents_of(net);
  contents.only_model = true;
  train::write_checkpoint(dir / "checkpoint-5", contents);
  const train::Checkpoint read(dir / "checkpoint-5");
  EXPECT_THAT(io::message_of<UsageError>([&] { read.optimizer(); }),
              HasSubstr("holds weights only (save_only_model)"));
  torch::nn::Sequential wider(torch::nn::Linear(kFeatures, 9), torch::nn::ReLU(),
                              torch::nn::Linear(9, kClasses));
  EXPECT_THAT(io::message_of<UsageError>([&] { read.load_model(*wider); }),
              HasSubstr("'0.weight' is [8, 6] and the model's is [9, 6]."));
  torch::nn::Sequential deeper(torch::nn::Linear(kFeatures, 8));
  EXPECT_THAT(io::message_of<UsageError>([&] { read.load_model(*deeper); }),
              HasSubstr("0 of its tensors are missing (), 2 are not the model's (2.bias, "
                        "2.weight)"));
}

TEST(Checkpoint, GeneratorsOfRanksThatARunCannotHaveAreRefused) {
  io::TemporaryDirectory dir;
  auto net = network();
  train::write_checkpoint(dir / "checkpoint-5", contents_of(net));
  const train::Checkpoint read(dir / "checkpoint-5");
  for (const std::string name :
       {"-1.cpu", "abc", "0", "1cpu", "99999999999.cpu", "+1.cpu", "2147483647.cpu", "1.cpu"}) {
    const std::string header =
        "{\"" + name + "\":{\"dtype\":\"U8\",\"shape\":[1]," + "\"data_offsets\":[0,1]}}";
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(header.size());
    std::filesystem::remove(dir / "checkpoint-5/rng_state.safetensors");
    io::put(dir / "checkpoint-5/rng_state.safetensors", bytes + header + "x");
    EXPECT_THAT(io::message_of<UsageError>([&] { read.rng(0); }),
                HasSubstr("rng_state.safetensors has a tensor '" + name + "'"));
  }
}

TEST(Checkpoint, TheNewestThatVerifiesWins) {
  io::TemporaryDirectory dir;
  auto net = network();
  auto contents = contents_of(net);
  train::write_checkpoint(dir / "checkpoint-5", contents);
  contents.state.global_step = 6;
  train::write_checkpoint(dir / "checkpoint-6", contents);
  io::put(dir / "checkpoint-6/sampler.json", "{}");
  const io::Newest found = train::find_checkpoint(dir.path(), "auto");
  EXPECT_EQ(found.step, 5);
  ASSERT_EQ(found.passed_over.size(), 1u);
  EXPECT_THAT(found.passed_over[0].reason, HasSubstr("sampler.json"));
  EXPECT_THAT(io::message_of<UsageError>([&] { train::find_checkpoint("", dir / "checkpoint-6"); }),
              HasSubstr("cannot be used: "));
  EXPECT_THAT(io::message_of<UsageError>([&] { train::find_checkpoint("", dir.path()); }),
              HasSubstr(dir.path() +
                        " is an output_dir and not a checkpoint. Its newest checkpoint "
                        "is " +
                        (dir / "checkpoint-6")));
}

// ---------------------------------------------------------------- the saver

TEST(AsyncSaver, SavesWhatWasThereWhenItBegan) {
  io::TemporaryDirectory dir;
  auto net = network();
  const at::Tensor before = flat(*net).clone();
  train::AsyncSaver saver({.output_dir = dir.path(), .limit = 1});
  for (std::int64_t step : {5, 6}) {
    auto contents = contents_of(net);
    contents.state.global_step = step;
    saver.begin(std::move(contents));
    EXPECT_TRUE(saver.busy());
    saver.wait_copied();
    const torch::NoGradGuard no_grad;
    for (auto& p : net->parameters()) p.add_(1);
  }
  // The second one waited for the first.
  std::vector<std::int64_t> ended;
  while (const auto outcome = saver.wait()) {
    EXPECT_TRUE(outcome->committed);
    EXPECT_EQ(outcome->alert, "");
    ended.push_back(outcome->step);
  }
  EXPECT_THAT(ended, ElementsAre(5, 6));
  EXPECT_FALSE(std::filesystem::exists(dir / "checkpoint-5"));
  train::Checkpoint(dir / "checkpoint-6").load_model(*net);
  EXPECT_TRUE(torch::equal(flat(*net), before + 1));
}

TEST(AsyncSaver, AnOldOneThatCannotBeDeletedIsAnAlert) {
  io::TemporaryDirectory dir;
  // Its name leaves no room for the temporary one under which folders are deleted.
  const std::string stubborn = dir / ("checkpoint-" + std::string(235, '0') + "3");
  auto net = network();
  train::write_checkpoint(dir / "checkpoint-3", contents_of(net));
  std::filesystem::rename(dir / "checkpoint-3", stubborn);
  train::AsyncSaver saver({.output_dir = dir.path(), .limit = 1});
  saver.begin(contents_of(net));
  const auto outcome = saver.wait();
  ASSERT_TRUE(outcome && outcome->committed);
  EXPECT_THAT(outcome->alert, HasSubstr("checkpoint-5 is durable, but older ones were not deleted: "
                                        "[io] cannot remove"));
  EXPECT_TRUE(io::verify(dir / "checkpoint-5").empty());
}

// Written from the tensors themselves: nothing is copied, and what counts is what they hold at the
// end.
TEST(AsyncSaver, WithoutACopyAStuckSaveEndsTheWaitForIt) {
  io::TemporaryDirectory dir;
  auto net = network();
  {
    train::AsyncSaver saver(
        {.output_dir = dir.path(), .copy = false, .stall_limit = std::chrono::seconds(3)});
    saver.begin(contents_of(net));
    saver.wait_copied();  // until it is written
    ASSERT_TRUE(saver.wait()->committed);
    EXPECT_TRUE(io::verify(dir / "checkpoint-5").empty());
    disk().slow_ms = 600'000;
    disk().slow_for = "/model.safetensors";
    saver.begin(contents_of(net));
    EXPECT_THAT(io::message_of<Error>([&] { saver.wait_copied(); }),
                HasSubstr("was not saved: its writer has made no progress for "));
    EXPECT_FALSE(saver.busy());
  }
  disk().slow_for = nullptr;
  disk().slow_ms = 0;
  while (disk().slow_now > 0) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::seconds(1));  // its thread ends by itself
}

// A disk call that does not return, where 3 s without progress count as stuck.
TEST(AsyncSaver, ASaveThatMakesNoProgressIsAbandoned) {
  io::TemporaryDirectory dir;
  auto net = network();
  disk().slow_ms = 600'000;
  disk().slow_for = "/model.safetensors";
  const auto start = std::chrono::steady_clock::now();
  {
    train::AsyncSaver saver({.output_dir = dir.path(), .stall_limit = std::chrono::seconds(3)});
    saver.begin(contents_of(net));
    EXPECT_THAT(io::message_of<Error>([&] { saver.wait(); }),
                AllOf(HasSubstr("[checkpoint] " + (dir / "checkpoint-5") +
                                " was not saved: its "
                                "writer has made no progress for "),
                      HasSubstr("file system is probably stuck.")));
    EXPECT_FALSE(saver.busy());
    saver.begin(contents_of(net));  // this save is not slow
    ASSERT_TRUE(saver.wait()->committed);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(300));
  disk().slow_for = nullptr;
  disk().slow_ms = 0;
  while (disk().slow_now > 0) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::seconds(1));  // its thread ends by itself
}

TEST(AsyncSaver, AnErrorSurfacesAtTheNextCall) {
  io::TemporaryDirectory dir;
  io::put(dir / "file", "not a folder");
  auto net = network();
  train::AsyncSaver saver({.output_dir = dir / "file"});
  saver.begin(contents_of(net));
  EXPECT_THAT(io::message_of<SystemError>([&] { saver.wait(); }), HasSubstr("[io] cannot"));
  EXPECT_FALSE(saver.busy());
}

// 100 M parameters with Adam's state. A forward and backward of such a model takes longer than the
// copy of 1.2 GB; they are a sleep here.
TEST(AsyncSaver, HoldsTrainingUpForLessThanATwentiethOfABlockingSave) {
  const char* soak = std::getenv("LOCKSTEP_SOAK");
  if (soak == nullptr || std::string(soak) != "1") GTEST_SKIP() << "with LOCKSTEP_SOAK=1";
  io::TemporaryDirectory dir;
  constexpr std::int64_t kParts = 10, kPart = 10'000'000;
  train::CheckpointContents contents;
  for (std::int64_t i = 0; i < kParts; ++i) {
    const std::string name = std::to_string(i);
    contents.model.emplace_back(name, at::full({kPart}, 1.0f));
    contents.optimizer[name + ".exp_avg"] = at::full({kPart}, 2.0f);
    contents.optimizer[name + ".exp_avg_sq"] = at::full({kPart}, 3.0f);
  }
  auto seconds = [start = std::chrono::steady_clock::now()]() mutable {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(now - std::exchange(start, now)).count();
  };
  seconds();
  train::write_checkpoint(dir / "blocking", contents);
  const double blocking = seconds();
  train::AsyncSaver saver({.output_dir = dir.path(), .limit = 1});
  saver.begin(contents);  // the memory it copies into is made here, once
  saver.wait();
  contents.state.global_step = 1;
  seconds();
  saver.begin(contents);
  double stall = seconds();
  std::this_thread::sleep_for(std::chrono::seconds(2));
  seconds();
  saver.wait_copied();
  stall += seconds();
  saver.wait();
  std::printf("blocking %.2f s, stall %.4f s (%.2f %%)\n", blocking, stall, 100 * stall / blocking);
  EXPECT_LT(stall, 0.05 * blocking);
}

}  // namespace
}  // namespace lockstep
