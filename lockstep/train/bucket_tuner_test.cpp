// Which bucket sizes are measured, which one is chosen, and that results do not depend on it. Real
// ranks are in tests/train/tune_test.py.
#include "lockstep/train/bucket_tuner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/io/files_for_test.h"
#include "lockstep/testing/matchers.h"
#include "lockstep/testing/worlds.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/trainer_for_test.h"

namespace lockstep::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::int64_t kMebibyte = 1 << 20;

TEST(BucketTuner, SizesGoUpToTheFirstThatHoldsAllGradients) {
  EXPECT_THAT(bucket_candidates(kMebibyte, {}), IsEmpty());
  EXPECT_THAT(bucket_candidates(kMebibyte + 1, {}), ElementsAre(BucketCap(), 1, 5));
  EXPECT_THAT(bucket_candidates(30 * kMebibyte, {}), ElementsAre(BucketCap(), 1, 5, 10, 25, 50));
  EXPECT_THAT(bucket_candidates(30 * kMebibyte, 10), ElementsAre(10, 1, 5, 25, 50));
  EXPECT_THAT(bucket_candidates(6 * kMebibyte, 40), ElementsAre(40, 1, 5, 10));
  EXPECT_EQ(bucket_candidates(99'000 * kMebibyte, {}).back(), 400);
}

TEST(BucketTuner, TheSizeThatIsSetStaysUnlessAnotherIsFaster) {
  std::vector<BucketTrial> trials = {{{}, 3, 20.0}, {1, 9, 22.0}, {25, 2, 19.9}};
  EXPECT_EQ(best_trial(trials), 0u) << "half a percent is noise";
  EXPECT_THAT(tuning_text(trials, 0),
              HasSubstr("unset        3     20.000    0.000  as set  chosen\n"));
  EXPECT_THAT(tuning_text(trials, 0), HasSubstr("the file may stay as it is"));
  trials[2].step_ms = 16;
  EXPECT_EQ(best_trial(trials), 2u);
  EXPECT_THAT(tuning_text(trials, 2), HasSubstr("25        2     16.000    0.000  chosen\n"));
  EXPECT_THAT(tuning_text(trials, 2),
              HasSubstr("continues with 25 (25.0 % faster). For the next one write "
                        "ddp_bucket_cap_mb: 25"));
  for (const std::size_t noisy : {0, 2}) {
    auto spread = trials;
    spread[noisy].spread_ms = 3.9;
    EXPECT_EQ(best_trial(spread), 2u);
    spread[noisy].spread_ms = 4.1;
    EXPECT_EQ(best_trial(spread), 0u) << "steps of one size differ by more than the gain";
  }
  trials = {{1, 9, 22.0}, {{}, 3, 20.0}};
  EXPECT_THAT(tuning_text(trials, best_trial(trials)), HasSubstr("ddp_bucket_cap_mb: null"));
}

// 2.2 MB of gradients in four tensors.
torch::nn::Sequential wide_network() {
  torch::nn::Sequential net(torch::nn::Linear(kFeatures, 700), torch::nn::ReLU(),
                            torch::nn::Linear(700, 780), torch::nn::ReLU(),
                            torch::nn::Linear(780, kClasses));
  const torch::NoGradGuard no_grad;
  auto random = generator(7);
  for (at::Tensor& p : net->parameters()) p.copy_(torch::randn(p.sizes(), random) * 0.05);
  return net;
}

at::Tensor weights_of(World& world, TrainingArguments a) {
  torch::nn::Sequential net = wide_network();
  Trainer trainer(world, task_for(net, dataset(64, 1)), std::move(a));
  trainer.train();
  return flat(*net);
}

TEST(BucketTuner, ATunedRunHasTheWeightsOfAnother) {
  for (const int ranks : {2, 3}) {
    const io::TemporaryDirectory folder;
    testing::ThreadOptions options;
    options.world.backend = "shm";
    testing::run_threads(
        ranks,
        [&](World& world) {
          auto a = arguments(folder / "out");
          a.max_steps = 16;  // one round: 3 + 3 sizes x 4
          a.shard_optimizer = "false";
          const at::Tensor plain = weights_of(world, a);
          a.tune = "bucket_cap_mb";
          EXPECT_TENSOR_EQ(weights_of(world, a), plain);
        },
        options);
  }
}

TEST(BucketTuner, SaysWhatWasMeasured) {
  const io::TemporaryDirectory folder;
  ::testing::internal::CaptureStderr();
  testing::run_threads(2, [&](World& world) {
    auto a = arguments(folder / "out");
    a.max_steps = 30;  // two rounds
    a.shard_optimizer = "false";
    a.log_level = "info";
    a.tune = "bucket_cap_mb";
    weights_of(world, a);
    a.max_steps = 4;
    weights_of(world, a);
  });
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("medians of 6 steps each on 2 ranks"));
  EXPECT_THAT(said, HasSubstr("3 sizes need 15 steps and 4 are left"));
}

TEST(BucketTuner, AShardedOptimizerIsRefusedOnAllRanks) {
  const io::TemporaryDirectory folder;
  testing::run_threads(2, [&](World& world) {
    auto a = arguments(folder / "out");
    a.max_steps = 2;
    a.save_strategy = Interval::kSteps;
    a.save_steps = 2;
    a.shard_optimizer = "true";
    weights_of(world, a);
    a.max_steps = 40;
    a.tune = "bucket_cap_mb";
    a.overwrite_output_dir = true;
    EXPECT_THAT(testing::message_of<UsageError>([&] { weights_of(world, a); }),
                HasSubstr("shard_optimizer: false"));
  });
  EXPECT_TRUE(std::filesystem::exists(folder / "out/checkpoint-2")) << "the earlier run stays";
}

}  // namespace
}  // namespace lockstep::train
