// What a Trainer refuses, and what it does when there is not enough of something.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/io/files_for_test.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/trainer_for_test.h"

namespace lockstep::train {
namespace {

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

}  // namespace
}  // namespace lockstep::train
