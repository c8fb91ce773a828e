// pipeline_parallel_degree and tensor_parallel_degree of a training file: ranks that hold one copy
// of the model see the same samples and count once.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/train/arguments.h"
#include "lockstep/train/config.h"
#include "lockstep/train/effective_batch.h"

namespace lockstep::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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
      "global_batch_size 15 is not a multiple of 4 (batch 4 x 1 data parallel group of 2 ranks). "
      "The nearest that are: 12 and 16.";
  // Without a launcher, and with one that starts fewer ranks than a copy needs, it is one copy.
  for (const char* ranks : {"", "1", "2", "3"}) {
    if (*ranks != 0) ::setenv("WORLD_SIZE", ranks, 1);
    EXPECT_THAT(message_of([&] { check_arguments(a); }), HasSubstr(one)) << ranks;
  }
  ::setenv("WORLD_SIZE", "4", 1);
  EXPECT_THAT(message_of([&] { check_arguments(a); }),
              HasSubstr("is not a multiple of 8 (batch 4 x 2 data parallel groups of 2 ranks). The "
                        "nearest that are: 8 and 16."));
  ::unsetenv("WORLD_SIZE");
  EXPECT_EQ(message_of([&] { accumulation_steps(a, batch_ranks(a, 2)); }), "[config] " + one);
  a.global_batch_size = 12;
  EXPECT_EQ(accumulation_steps(a, batch_ranks(a, 2)), 3);
  a = degrees(1, 2);
  a.tokens_per_update = 50;
  a.max_seq_len = 8;
  EXPECT_THAT(message_of([&] { accumulation_steps(a, batch_ranks(a, 4)); }),
              HasSubstr("64 (batch 4 x 8 tokens x 2 data parallel groups of 2 ranks)"));
}

TEST(Degrees, TheEffectiveBatchIsOfCopies) {
  const auto text = [](const TrainingArguments& a, int ranks) {
    return effective_batch_text(a, batch_ranks(a, ranks));
  };
  TrainingArguments a = degrees(1, 2);
  a.gradient_accumulation_steps = 2;
  EXPECT_EQ(text(a, 2),
            "effective batch 8 = 4 per device x 2 accumulation x 1 data parallel group of 2 ranks");
  a.pipeline_parallel_degree = 2;
  EXPECT_EQ(
      text(a, 8),
      "effective batch 16 = 4 per device x 2 accumulation x 2 data parallel groups of 4 ranks");
  EXPECT_THAT(learning_rate_advice(a, batch_ranks(a, 8)),
              HasSubstr("a step has 16 samples on 2 data parallel groups, 8 on one."));
  a = degrees(1, 1);
  EXPECT_EQ(text(a, 1), "effective batch 4 = 4 per device x 1 accumulation x 1 rank");
}

Config read(const std::string& yaml) {
  return resolve_config({.file = parse_yaml(yaml, "t.yaml")});
}

TEST(Degrees, KeysOfAveragingHaveNoEffectWhereNoRankHasACopy) {
  for (const std::string key : {"ddp_bucket_cap_mb: 10\n", "ddp_find_unused_parameters: true\n",
                                "ddp_broadcast_buffers: false\n", "ddp_static_graph: true\n"}) {
    EXPECT_THAT(read(key + "fsdp: full_shard\n").notes, ElementsAre(HasSubstr("fsdp is set")));
    EXPECT_THAT(read(key + "pipeline_parallel_degree: 2\n").notes,
                ElementsAre(HasSubstr("has no effect: a pipeline averages")));
    const std::string slices = key + "tensor_parallel_degree: 2\n";
    EXPECT_THAT(read(slices).notes, IsEmpty());
    ::setenv("WORLD_SIZE", "2", 1);
    EXPECT_THAT(read(slices).notes,
                ElementsAre(HasSubstr("has no effect: all ranks hold slices of one model")));
    ::setenv("WORLD_SIZE", "4", 1);
    EXPECT_THAT(read(slices).notes, IsEmpty());
    ::unsetenv("WORLD_SIZE");
  }
}

TEST(Degrees, ThatDoNotExistHereAreAnsweredByWhatThereIs) {
  const auto said = [](const char* key) {
    return message_of([&] { read(fmt::format("{}: 2\n", key)); });
  };
  EXPECT_EQ(
      said("context_parallel_degree"),
      "[config] t.yaml:1:1: context_parallel_degree is a key of torchtitan's that is not read "
      "here: context parallelism is not supported. Delete it.");
  EXPECT_THAT(said("expert_parallel_degree"), HasSubstr("expert parallelism is not supported."));
  EXPECT_THAT(said("data_parallel_replicate_degree"),
              HasSubstr("it follows from the number of ranks and the other degrees. Delete it."));
}

TEST(Degrees, ACheckpointNamesTheRanksThatSawSamplesOfTheirOwn) {
  EXPECT_THAT(other_batch_text({1, 4, 2}, {2, 4, 1}),
              HasSubstr("was made with 1 data parallel rank x batch 4 x accumulation 2, now 2 x"));
}

}  // namespace
}  // namespace lockstep::train
