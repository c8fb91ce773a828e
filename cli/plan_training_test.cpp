#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/plan.h"
#include "lockstep/core/helpers_for_test.h"

namespace lockstep::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Planned {
  TrainingArguments arguments;
  std::string said;

  std::int64_t global_batch(int ranks) const {
    return arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * ranks;
  }
};

plan::Model small_gpt() {
  const models::GptConfig sizes{.n_layer = 2, .n_head = 2, .n_embd = 32, .n_positions = 64};
  return {.config = models::CausalLmConfig{.model = sizes}, .length = 64};
}

// A GPT of 1.3 billion parameters in bf16, 8 sequences of 1024 tokens for each rank.
Planned plan_on(std::uint64_t gib, int ranks, const std::string& shard_optimizer = "auto",
                const std::optional<plan::Measurement>& measured = {}) {
  plan::Training training;
  const models::GptConfig sizes{.n_layer = 24, .n_head = 16, .n_embd = 2048, .n_positions = 2048};
  training.model = {.config = models::CausalLmConfig{.model = sizes}, .length = 1024};
  training.half = true;
  Planned planned;
  planned.arguments.per_device_train_batch_size = training.batch = 8;
  planned.arguments.shard_optimizer = shard_optimizer;
  const plan::Card card{.memory_bytes = gib << 30};
  planned.said = apply_plan(planned.arguments, training, card, ranks, measured);
  return planned;
}

TEST(Measurements, TravelBetweenRanksWhole) {
  const plan::Measurement strategy{.parts = {4, plan::Distribution::kFullShard, 2, 1, false},
                                   .batch = 3,
                                   .accumulation = 5,
                                   .checkpointing = true,
                                   .half = true,
                                   .fp8 = true,
                                   .step_s = 0.1,
                                   .memory_bytes = 123};
  EXPECT_EQ(parse_measurement(measurement_text(strategy)), strategy);
  plan::Measurement slices = strategy;
  slices.parts = {8, plan::Distribution::kDdp, 2, 2, true};
  EXPECT_EQ(parse_measurement(measurement_text(slices)), slices);
  EXPECT_EQ(parse_measurement(""), std::nullopt);
}

TEST(ElasticGpu, TakesTheFileAsItIsWhereItFits) {
  const Planned planned = plan_on(80, 4);
  EXPECT_EQ(planned.arguments.per_device_train_batch_size, 8);
  EXPECT_EQ(planned.arguments.gradient_accumulation_steps, 1);
  EXPECT_EQ(planned.arguments.shard_optimizer, "auto");
  EXPECT_THAT(planned.said, AllOf(HasSubstr("DDP on 4 GPUs"), HasSubstr("global batch 32"),
                                  Not(HasSubstr("may not fit"))));
}

TEST(ElasticGpu, LessMemoryIsASmallerBatchAndTheSameGlobalBatch) {
  const Planned planned = plan_on(32, 4);
  EXPECT_LT(planned.arguments.per_device_train_batch_size, 8);
  EXPECT_EQ(planned.global_batch(4), 32);
  EXPECT_EQ(planned.arguments.shard_optimizer, "auto");
}

TEST(ElasticGpu, StillLessShardsTheOptimizerWhereTheFileLeavesItOpen) {
  const Planned planned = plan_on(24, 4);
  EXPECT_EQ(planned.arguments.shard_optimizer, "true");
  EXPECT_EQ(planned.global_batch(4), 32);
  EXPECT_THAT(planned.said, HasSubstr("DDP, sharded optimizer on 4 GPUs"));
  EXPECT_EQ(plan_on(24, 4, "false").arguments.shard_optimizer, "false");
}

TEST(ElasticGpu, AndStillLessDividesTheWholeModel) {
  const Planned planned = plan_on(16, 4);
  EXPECT_EQ(planned.arguments.fsdp, "full_shard");
  EXPECT_EQ(planned.arguments.shard_optimizer, "auto");
  EXPECT_EQ(planned.global_batch(4), 32);
  EXPECT_THAT(planned.said, HasSubstr("fsdp: full_shard on 4 GPUs"));
  EXPECT_FALSE(plan_on(16, 4, "false").arguments.fsdp.has_value());
}

TEST(ElasticGpu, WhatWasMeasuredTakesThePlaceOfTheEstimate) {
  const plan::Measurement measured{.parts = {4, plan::Distribution::kShardGradOp},
                                   .batch = 2,
                                   .accumulation = 4,
                                   .checkpointing = true,
                                   .half = true,
                                   .step_s = 0.25,
                                   .memory_bytes = std::uint64_t{30} << 30};
  const Planned planned = plan_on(80, 4, "auto", measured);
  EXPECT_EQ(planned.arguments.fsdp, "shard_grad_op");
  EXPECT_EQ(planned.arguments.per_device_train_batch_size, 2);
  EXPECT_EQ(planned.global_batch(4), 32);
  EXPECT_TRUE(planned.arguments.gradient_checkpointing);
  EXPECT_THAT(planned.said, HasSubstr("250.0 ms a step when `lockstep plan --probe` ran it"));
  // Not where it has no room.
  const Planned small = plan_on(24, 4, "auto", measured);
  EXPECT_FALSE(small.arguments.gradient_checkpointing);
  EXPECT_FALSE(small.arguments.fsdp.has_value());
  EXPECT_THAT(small.said, Not(HasSubstr("--probe")));
}

TEST(ElasticGpu, FollowsSlicesThatWereMeasured) {
  const plan::Measurement measured{.parts = {4, plan::Distribution::kDdp, 1, 2},
                                   .batch = 4,
                                   .accumulation = 4,
                                   .half = true,
                                   .step_s = 0.25,
                                   .memory_bytes = std::uint64_t{30} << 30};
  const Planned planned = plan_on(80, 4, "auto", measured);
  EXPECT_EQ(planned.arguments.tensor_parallel_degree, 2);
  EXPECT_EQ(planned.arguments.per_device_train_batch_size, 4);
  EXPECT_EQ(planned.global_batch(2), 32);
  EXPECT_FALSE(planned.arguments.elastic_gpu);  // which is refused beside it
  EXPECT_THAT(planned.said, AllOf(HasSubstr("tensor parallel over 2 on 4 GPUs: 4 per device x 4 "
                                            "accumulation x 2 ranks = global batch 32"),
                                  HasSubstr("--probe")));
  plan::Training training{.half = true, .may_tensor = true};
  EXPECT_EQ(fastest_strategy({measured}, training, 4), measured);
  EXPECT_EQ(fastest_strategy({measured}, training, 2), std::nullopt);
  training.may_tensor = false;
  EXPECT_EQ(fastest_strategy({measured}, training, 4), std::nullopt);
  // With parts of the sequence where the file does not refuse them.
  plan::Measurement sequence = measured;
  sequence.parts.sequence = true;
  EXPECT_FALSE(planned.arguments.sequence_parallel);
  EXPECT_TRUE(plan_on(80, 4, "auto", sequence).arguments.sequence_parallel);
  training.may_tensor = true;
  EXPECT_EQ(fastest_strategy({sequence}, training, 4), sequence);
  training.sequence = false;
  EXPECT_EQ(fastest_strategy({sequence}, training, 4), std::nullopt);
  // Stages are not followed.
  sequence.parts = {4, plan::Distribution::kDdp, 2};
  EXPECT_EQ(fastest_strategy({sequence}, training, 4), std::nullopt);
}

TEST(ElasticGpu, AModelThatRanksWouldHaveToSplitStaysAsItIs) {
  const Planned planned = plan_on(14, 2);
  EXPECT_EQ(planned.arguments.per_device_train_batch_size, 8);
  EXPECT_EQ(planned.arguments.gradient_accumulation_steps, 1);
  EXPECT_EQ(planned.arguments.shard_optimizer, "auto");
  EXPECT_THAT(planned.said, HasSubstr("Ranks cannot split a model"));
}

TEST(ElasticGpu, SharesAnyMultipleOfTheRanksWhateverTheBatchOfTheFile) {
  const auto on_three = [](std::int64_t global_batch) {
    TrainingArguments arguments{
        .per_device_train_batch_size = 4, .global_batch_size = global_batch, .elastic_gpu = true};
    plan::Training training{.model = small_gpt()};
    training.batch = 4;
    training.global_batch = global_batch;
    apply_plan(arguments, training, {.cpu = true}, 3);
    return arguments.per_device_train_batch_size;
  };
  EXPECT_EQ(on_three(24), 4);
  EXPECT_EQ(on_three(18), 3);
  EXPECT_EQ(on_three(15), 1);
  EXPECT_EQ(message_of([&] { on_three(16); }),
            "[config] elastic_gpu may choose any batch per device, and even so global_batch_size "
            "16 is not a multiple of 3 (batch 1 x 3 ranks). The nearest that are: 15 and 18.");
}

TEST(ElasticGpu, OneRankIsNamedAlone) {
  EXPECT_THAT(plan_on(80, 1).said, HasSubstr("elastic_gpu: 1 GPU: 8 per device x 1 accumulation"));
  TrainingArguments arguments;
  plan::Training training{.model = small_gpt()};
  EXPECT_THAT(apply_plan(arguments, training, {.cpu = true}, 1),
              HasSubstr("elastic_gpu: 1 CPU rank: "));
}

TEST(ElasticGpu, WhatFitsNowhereIsSaidWithBothSizes) {
  const Planned planned = plan_on(24, 1);
  EXPECT_EQ(planned.arguments.per_device_train_batch_size, 1);
  EXPECT_EQ(planned.global_batch(1), 8);
  EXPECT_THAT(planned.said, HasSubstr("of 24.0: it may not fit"));
}

}  // namespace
}  // namespace lockstep::cli
