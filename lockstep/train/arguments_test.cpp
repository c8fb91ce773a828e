// TrainingArguments as a program sets them: words and integers, and what check_arguments() refuses.
#include "lockstep/train/arguments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/core/helpers_for_test.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;

TEST(Arguments, AreCheckedWithoutAFileToo) {
  EXPECT_NO_THROW(check_arguments({}));
  EXPECT_EQ(message_of([] { check_arguments({.bf16 = true, .fp16 = true}); }),
            "[config] bf16 and fp16 cannot both be true. Keep one.");
  EXPECT_EQ(message_of([] { check_arguments({.learning_rate = -1}); }),
            "[config] learning_rate must be above 0, up to 1000, and -1.0 is not.");
  EXPECT_THAT(message_of([] { check_arguments({.optim = "sofia"}); }),
              HasSubstr("'sofia' is none"));
  // The words are those of the file, and so is what is said of another.
  check_arguments({.eval_strategy = "epoch", .save_strategy = Interval::kBest});
  EXPECT_EQ(message_of([] { check_arguments({.eval_strategy = "epochs"}); }),
            "[config] eval_strategy must be no, steps or epoch, and 'epochs' is none of them. Did "
            "you mean epoch?");
  EXPECT_THAT(message_of([] { check_arguments({.eval_strategy = Interval::kBest}); }),
              HasSubstr("eval_strategy must be no, steps or epoch, and 'best' is none"));
  EXPECT_EQ(message_of([] { check_arguments({.mixed_precision = "bf17"}); }),
            "[config] mixed_precision must be no, fp16, bf16 or fp8, and 'bf17' is none of them. "
            "Did you mean bf16?");
  // Products of out-of-range values are not computed.
  EXPECT_THAT(message_of([] {
                check_arguments({.max_seq_len = INT64_MAX,
                                 .per_device_train_batch_size = INT64_MAX,
                                 .tokens_per_update = 8192});
              }),
              HasSubstr("max_seq_len must be from 1 to 10000000"));
}

TEST(Arguments, NumbersOfStepsMayBeIntegersOfAnyType) {
  const int n = 3;
  const std::size_t steps = 40;
  const TrainingArguments a{.num_train_epochs = n, .logging_steps = steps, .eval_steps = n};
  EXPECT_EQ(a.num_train_epochs + a.logging_steps + *a.eval_steps, 46);
}

}  // namespace
}  // namespace lockstep
