// What a Trainer refuses, and what it does when there is not enough of something.
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/io/directory.h"
#include "lockstep/testing/worlds.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/trainer_for_test.h"

namespace lockstep::train {
namespace {

using ::testing::AllOf;
using ::testing::DoubleEq;
using ::testing::HasSubstr;

TEST(TrainerLimits, AnotherOrderOfSamplesIsNotResumed) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.save_strategy = Interval::kSteps;
  a.resume_from_checkpoint = "auto";
  const auto run = [&](std::uint64_t seed, std::int64_t steps) {
    a.max_steps = steps;
    TrainerTask task = task_for(network(), dataset(64, 1));
    task.sampler = std::make_shared<data::WeightedSampler>(
        std::vector<double>(64, 1.0), data::WeightedSamplerOptions{.seed = seed});
    return Trainer(World{}, task, a).train().global_step;
  };
  EXPECT_EQ(run(5, 3), 3);
  EXPECT_THAT(io::message_of<UsageError>([&] { run(6, 6); }),
              HasSubstr("the state was saved in another order of epoch 0's samples"));
  EXPECT_EQ(run(5, 6), 6);
}

// ---------------------------------------------------------------- what is refused, and what is
// said

TEST(TrainerLimits, ASecondRunInTheSamePlaceIsRefusedOnAllRanks) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.max_steps = 1;
  io::FolderLock other(dir.path(), "another run", std::chrono::milliseconds(0));
  const auto train = [&](World& world) {
    Trainer(world, task_for(network(), dataset(64, 1)), a).train();
  };
  const auto said = testing::run_threads_collecting(2, train);
  for (const std::string& text : said)
    EXPECT_THAT(text, AllOf(HasSubstr("[trainer] another run trains in output_dir " + dir.path()),
                            HasSubstr(": pid " + std::to_string(::getpid()) + " on "),
                            HasSubstr("or choose another output_dir.")));
  other = io::FolderLock();
  testing::run_threads(2, train);  // and again, one after the other
  testing::run_threads(2, train);
}

TEST(TrainerLimits, AnotherNumberOfStepsAndACompleteRunAreReported) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.save_strategy = Interval::kSteps;
  a.resume_from_checkpoint = "auto";
  const auto run = [&](std::int64_t steps, const char* schedule) {
    a.max_steps = steps;
    a.lr_scheduler_type = schedule;
    ::testing::internal::CaptureStderr();
    const TrainResult result = Trainer(World{}, task_for(network(), dataset(64, 1)), a).train();
    EXPECT_EQ(result.global_step, steps);
    return std::pair(result.first_step, ::testing::internal::GetCapturedStderr());
  };
  EXPECT_EQ(run(3, "linear").first, 0);
  const auto [first, said] = run(5, "linear");
  EXPECT_EQ(first, 3);
  EXPECT_THAT(said,
              HasSubstr("max_steps is 5 and was 3 when the checkpoint was made: from step 3 "
                        "on the learning rate is that of a schedule over 5 steps, not over 3."));
  const auto [complete, nothing] = run(5, "linear");
  EXPECT_EQ(complete, 5) << "nothing was left to train";
  EXPECT_THAT(nothing, ::testing::Not(HasSubstr("when the checkpoint was made")));
  a.learning_rate = 0.25;
  const std::string changed = run(6, "constant").second;
  EXPECT_THAT(changed, ::testing::ContainsRegex(
                           "lr_scheduler_type is constant and was linear, learning_rate is 0.25 "
                           "and was [^ ]+ when the checkpoint was made\\."));
  EXPECT_THAT(changed, ::testing::Not(HasSubstr("the learning rate is that of")));
  a.optim = "sgd";
  EXPECT_THAT(io::message_of<UsageError>([&] { run(7, "constant"); }),
              AllOf(HasSubstr("/checkpoint-6 was saved with optim: adamw, and optim is sgd now. "
                              "Set it back, or begin a new run"),
                    HasSubstr("which this optimizer has no place for")));
  ::testing::internal::GetCapturedStderr();  // of the run that was refused
}

// ---------------------------------------------------------------- speed

// 3 tokens per sample, of which one is learned; 10 samples on each rank in windows of 4 + 4 and 2:
// the speeds of samples and of tokens are for the same time, so that their ratio is known in every
// step.
TEST(TrainerLimits, SpeedCountsTheSamplesOfAShortWindow) {
  for (const int ranks : {1, 2}) {
    testing::run_threads(ranks, [&](World& world) {
      io::TemporaryDirectory dir;
      auto a = arguments(dir.path());
      a.num_train_epochs = 2;
      a.gradient_accumulation_steps = 2;
      a.logging_steps = 1;
      auto net = network();
      TrainerTask task;
      task.module = net.ptr();
      const at::Tensor targets = at::ones({10 * ranks, 3}, at::kLong);
      targets.narrow(1, 0, 2).fill_(data::kIgnoredTarget);
      task.train_data =
          std::make_shared<data::TensorDataset>(at::ones({10 * ranks, kFeatures}), targets);
      task.loss = [net](const data::Batch& batch) mutable {
        return net->forward(batch.data).square().mean();
      };
      Trainer trainer(world, task, a);
      trainer.train();
      std::vector<double> ratios;
      for (const LogEntry& entry : trainer.state().log_history) {
        const double* samples = find_metric(entry.values, "samples_per_second");
        const double* tokens = find_metric(entry.values, "tokens_per_second");
        if (samples != nullptr && tokens != nullptr) ratios.push_back(*tokens / *samples);
      }
      EXPECT_THAT(ratios,
                  ::testing::ElementsAre(DoubleEq(3), DoubleEq(3), DoubleEq(3), DoubleEq(3)));
    });
  }
}

// Of a device that is said to do 1000 operations a second.
TEST(Figures, MfuIsTheShareOfAllDevicesAndOnlyWhereTheirPeakIsKnown) {
  for (const double peak : {0.0, 1000.0}) {
    testing::run_threads(2, [&](World& world) {
      io::TemporaryDirectory dir;
      auto a = arguments(dir.path());
      a.max_steps = 2;
      a.logging_steps = 1;
      TrainerTask task = task_for(network(), dataset(64, 1));
      task.flops_per_token = 30;
      task.device_peak_flops = peak;
      Trainer trainer(world, task, a);
      trainer.train();
      int logged = 0;
      for (const LogEntry& entry : trainer.state().log_history) {
        EXPECT_EQ(find_metric(entry.values, "gpu_memory_gib"), nullptr) << "on a CPU";
        const double* samples = find_metric(entry.values, "samples_per_second");
        const double* mfu = find_metric(entry.values, "mfu");
        if (samples == nullptr || peak == 0) {
          EXPECT_EQ(mfu, nullptr);
          continue;
        }
        ASSERT_NE(mfu, nullptr);
        EXPECT_DOUBLE_EQ(*mfu, *samples * 30 / (2 * peak));
        ++logged;
      }
      EXPECT_EQ(logged, peak > 0 ? 2 : 0);
    });
  }
}

// ---------------------------------------------------------------- memory

[[noreturn]] void run_out_of_memory() {
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate 2.00 GiB.");
  std::abort();
}

TEST(TrainerLimits, MemoryThatIsFullInAnEvaluationNamesItsBatch) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.max_steps = 4;
  a.eval_strategy = Interval::kSteps;
  a.eval_steps = 2;
  a.per_device_eval_batch_size = 16;
  TrainerTask task = task_for(network(), dataset(64, 1), dataset(20, 2));
  const auto loss = task.loss;
  task.loss = [loss](const data::Batch& batch) {
    if (batch.samples() == 16) throw std::bad_alloc();
    return loss(batch);
  };
  Trainer trainer(World{}, task, a);
  EXPECT_THAT(io::message_of<Error>([&] { trainer.train(); }),
              AllOf(HasSubstr("[trainer] rank 0: out of memory in the evaluation at step 2 ("),
                    HasSubstr("per_device_eval_batch_size is 16. Try 8:")));
  Trainer alone(World{}, task, a);
  EXPECT_THAT(io::message_of<Error>([&] { alone.evaluate(); }),
              HasSubstr("out of memory in the evaluation at step 0"));
}

// Memory that is full the first time that so much of it is asked for.
struct Scarce : c10::Allocator {
  explicit Scarce(std::size_t bytes) : refused(bytes), before(c10::GetAllocator(c10::kCPU)) {
    c10::SetAllocator(c10::kCPU, this, 255);
  }
  ~Scarce() override { c10::SetAllocator(c10::kCPU, before, 255); }
  c10::DataPtr allocate(std::size_t bytes) override {
    if (armed && bytes == refused) run_out_of_memory();
    return before->allocate(bytes);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    before->copy_data(to, from, bytes);
  }
  std::size_t refused;
  c10::Allocator* before;
  bool armed = false;
};

TEST(TrainerLimits, MemoryThatIsFullInTheOptimizersStepSaysWhatToTry) {
  io::TemporaryDirectory dir;
  constexpr std::int64_t kWide = 12'347;
  torch::nn::Sequential net(torch::nn::Linear(kFeatures, kWide),
                            torch::nn::Linear(kWide, kClasses));
  Trainer trainer(World{}, task_for(net, dataset(64, 1)), arguments(dir.path()));
  Scarce memory(kFeatures * kWide * sizeof(float));
  struct Arm : Observer {
    explicit Arm(bool& on) : armed(on) {}
    void on_optimizer_step(Event&) override { armed = true; }
    bool& armed;
  };
  trainer.add(std::make_shared<Arm>(memory.armed));
  EXPECT_THAT(io::message_of<Error>([&] { trainer.train(); }),
              AllOf(HasSubstr("[trainer] rank 0: out of memory in step 1 (CUDA out of memory."),
                    HasSubstr("Try per_device_train_batch_size: 3")));
}

// 7 and 5 cannot be halved; and tokens_per_update works only with divisors of the window.
TEST(TrainerLimits, AnOddBatchThatDoesNotFitKeepsTheEffectiveBatch) {
  struct Case {
    std::int64_t batch, accumulation, tokens, most, found;
  };
  const Case cases[] = {
      {7, 1, 0, 3, 1}, {5, 1, 0, 2, 1}, {7, 2, 0, 3, 2}, {6, 1, 6, 4, 3}, {10, 1, 10, 4, 2}};
  for (const Case& c : cases) {
    io::TemporaryDirectory dir;
    auto a = arguments(dir.path());
    a.auto_find_batch_size = true;
    a.per_device_train_batch_size = c.batch;
    a.gradient_accumulation_steps = c.accumulation;
    a.max_steps = 2;
    if (c.tokens > 0) {
      a.tokens_per_update = c.tokens;
      a.max_seq_len = 1;
    }
    TrainerTask task = task_for(network(), dataset(280, 1));
    const auto loss = task.loss;
    std::int64_t used = 0;
    task.loss = [&, loss](const data::Batch& batch) {
      if (batch.samples() > c.most) run_out_of_memory();
      used += batch.samples();
      return loss(batch);
    };
    Trainer trainer(World{}, task, a);
    struct Begin : Observer {
      explicit Begin(std::int64_t& count) : used(count) {}
      void on_train_begin(Event&) override { used = 0; }
      std::int64_t& used;
    };
    trainer.add(std::make_shared<Begin>(used));
    trainer.train();
    EXPECT_EQ(trainer.state().train_batch_size, c.found) << c.batch;
    EXPECT_EQ(used, 2 * c.batch * c.accumulation) << c.batch << " x " << c.accumulation;
  }
}

// LibTorch reports to it how much memory is in use.
struct Meter : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t, c10::Device) override {
    live += size;
  }
  bool memoryProfilingEnabled() const override { return true; }
  std::int64_t live = 0;
};

TEST(TrainerLimits, ABatchIsTriedBesideTheMemoryThatTrainingHolds) {
  for (const auto& [optim, copies] : {std::pair("adamw", 2), std::pair("sgd", 0)}) {
    io::TemporaryDirectory dir;
    auto a = arguments(dir.path());
    a.auto_find_batch_size = true;
    a.optim = optim;
    a.max_steps = 1;
    torch::nn::Sequential net(torch::nn::Linear(kFeatures, 100'000),
                              torch::nn::Linear(100'000, kClasses));
    std::int64_t weights = 0;
    for (const at::Tensor& p : net->parameters()) weights += static_cast<std::int64_t>(p.nbytes());
    TrainerTask task = task_for(net, dataset(64, 1));
    const auto loss = task.loss;
    std::int64_t tried = -1;
    const auto meter = std::make_shared<Meter>();
    task.loss = [&, loss](const data::Batch& batch) {
      if (tried < 0) tried = meter->live;
      return loss(batch);
    };
    Trainer trainer(World{}, task, a);
    const c10::DebugInfoGuard listening(c10::DebugInfoKind::PROFILER_STATE, meter);
    trainer.train();
    EXPECT_GE(tried, copies * weights) << optim;
    EXPECT_LT(tried, (copies + 1) * weights) << optim;
  }
}

}  // namespace
}  // namespace lockstep::train
