// pipeline_parallel_degree and tensor_parallel_degree of a training file: ranks that hold one copy
// of the model see the same samples and count once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/thrown_for_test.h"
#include "lockstep/train/arguments.h"
#include "lockstep/train/effective_batch.h"

namespace lockstep::train {
namespace {

using ::testing::HasSubstr;

TrainingArguments degrees(std::int64_t stages, std::int64_t slices) {
  TrainingArguments a;
  a.per_device_train_batch_size = 4;
  a.pipeline_parallel_degree = stages;
  a.tensor_parallel_degree = slices;
  return a;
}

TEST(Degrees, GlobalBatchesAreMultiplesOfWhatCopiesSee) {
  TrainingArguments a = degrees(2, 1);
  a.global_batch_size = 15;
  const std::string one =
      "global_batch_size 15 is not a multiple of 4 (batch 4 x 1 copy of the model on 2 ranks). The "
      "nearest that are: 12 and 16.";
  // Without a launcher, and with one that starts fewer ranks than a copy needs, it is one copy.
  for (const char* ranks : {"", "1", "2", "3"}) {
    if (*ranks != 0) ::setenv("WORLD_SIZE", ranks, 1);
    EXPECT_THAT(message_of([&] { check_arguments(a); }), HasSubstr(one)) << ranks;
  }
  ::setenv("WORLD_SIZE", "4", 1);
  EXPECT_THAT(message_of([&] { check_arguments(a); }),
              HasSubstr("is not a multiple of 8 (batch 4 x 2 copies of the model on 4 ranks). The "
                        "nearest that are: 8 and 16."));
  ::unsetenv("WORLD_SIZE");
  EXPECT_EQ(message_of([&] { accumulation_steps(a, batch_ranks(a, 2)); }), "[config] " + one);
  a.global_batch_size = 12;
  EXPECT_EQ(accumulation_steps(a, batch_ranks(a, 2)), 3);
  a = degrees(1, 2);
  a.tokens_per_update = 50;
  a.max_seq_len = 8;
  EXPECT_THAT(message_of([&] { accumulation_steps(a, batch_ranks(a, 4)); }),
              HasSubstr("64 (batch 4 x 8 tokens x 2 copies of the model on 4 ranks)"));
}

TEST(Degrees, TheEffectiveBatchIsOfCopies) {
  const auto text = [](const TrainingArguments& a, int ranks) {
    return effective_batch_text(a, batch_ranks(a, ranks));
  };
  TrainingArguments a = degrees(1, 2);
  a.gradient_accumulation_steps = 2;
  EXPECT_EQ(text(a, 2),
            "effective batch 8 = 4 per device x 2 accumulation x 1 copy of the model on 2 ranks");
  a.pipeline_parallel_degree = 2;
  EXPECT_EQ(
      text(a, 8),
      "effective batch 16 = 4 per device x 2 accumulation x 2 copies of the model on 8 ranks");
  EXPECT_THAT(learning_rate_advice(a, batch_ranks(a, 8)),
              HasSubstr("a step has 16 samples on 2 copies of the model, 8 on one."));
  a = degrees(1, 1);
  EXPECT_EQ(text(a, 1), "effective batch 4 = 4 per device x 1 accumulation x 1 rank");
}

}  // namespace
}  // namespace lockstep::train
