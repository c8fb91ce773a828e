// Tensor and sequence parallel ranks, and fsdp beside them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "observe/plan/plan_for_test.h"

namespace lockstep::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Norms' inputs, outputs and factors are of a rank's part of the sequence: tensor_parallel_test
// counts 4 (2 L + 1) (2 width + f) tokens (1 - 1/n) bytes less in float, of which the plan does not
// count the last norm's factors.
TEST(Slices, BetweenLayersAreDividedBySequenceParallelism) {
  const models::GptConfig sizes{
      .n_layer = 2, .n_head = 4, .n_embd = 32, .vocab_size = 64, .n_positions = 12};
  Model slice{.config = models::CausalLmConfig{.model = sizes}, .length = 12};
  for (const int ranks : {2, 4}) {
    slice.slices = ranks;
    const auto saved = [&](bool sequence, bool checkpointing) {
      slice.sequence_parallel = sequence;
      return activations_of(slice, {.batch = 2, .checkpointing = checkpointing, .fused = true})
          .saved;
    };
    const std::uint64_t between = 4 * 24 * (4 * (2 * 32 + 2) + 2 * 32);
    EXPECT_EQ(saved(false, false) - saved(true, false), between - between / ranks);
    // Inputs of two blocks and of the last norm, and its output.
    EXPECT_EQ(saved(false, true), 4u * 24 * 4 * 32);
    EXPECT_EQ(saved(true, true), 4u * 24 * 4 * 32 / ranks);
  }
}

// What two NCCL ranks of one H200 allocated: bf16, 4 x 2048 tokens.
TEST(Slices, OfTwoRanksAreThoseMeasured) {
  Model slice = gpt_1b3();
  slice.slices = 2;
  const auto gib = [&] {
    const MemoryOptions options{.batch = 4, .half = true, .fused = true, .built_whole = false};
    return static_cast<double>(memory_of(slice, options).allocated()) / kGiB;
  };
  EXPECT_NEAR(gib(), 18.92, 0.03 * 18.92);
  slice.sequence_parallel = true;
  EXPECT_NEAR(gib(), 17.39, 0.03 * 17.39);
}

// One factor of an adapter is cut with its layer, and the other is on every rank.
TEST(Slices, HaveOneFactorOfAnAdapterWhole) {
  Model slice = phi3();
  slice.lora = lora(16, {"qkv_proj", "o_proj"});
  const std::uint64_t whole = memory_of(slice, {.batch = 1, .half = true}).parameters;
  slice.slices = 2;
  const MemoryOptions options{.batch = 8, .half = true, .built_whole = false};
  const Memory m = memory_of(slice, options);
  const std::uint64_t c = 3072, adapters = 32 * 16 * ((c + 3 * c / 2) + (c / 2 + c));
  const std::uint64_t matrices = (3'821'079'552ull - 32064 * c - 65 * c) / 2;
  EXPECT_EQ(m.parameters, 2 * matrices + 4 * (32064 * c / 2 + 65 * c + adapters));
  EXPECT_EQ(m.optimizer, 8 * adapters);
  // In half precision the base is converted before it is cut.
  const Memory made = memory_of(slice, {.batch = 1, .half = true});
  EXPECT_EQ(made.moment, "the division of the model");
  EXPECT_EQ(made.parameters, whole);
}

// Stages and slices are divided over the ranks that hold the same one.
TEST(Slices, AndStagesAreDividedByFsdp) {
  Training t{.model = gpt_1b3(), .batch = 1, .may_pipeline = true, .tensor = 2};
  const Card card = card_of(80);
  const auto state = [&](int gpus) { return as_written(t, card, gpus).memory.optimizer; };
  for (const bool slices : {true, false}) {
    t.fsdp.reset();
    t.tensor = slices ? 2 : 1;
    t.pipeline = slices ? 1 : 2;
    const Choice copies = as_written(t, card, 8);
    ASSERT_EQ(copies.slices, t.tensor);
    ASSERT_EQ(copies.stages, t.pipeline);
    t.fsdp = Distribution::kFullShard;
    const Choice rows = as_written(t, card, 8);
    EXPECT_EQ(rows.sharding, Sharding::kFull);
    EXPECT_EQ(rows.memory.optimizer, copies.memory.optimizer / 4);
    EXPECT_LT(rows.memory.total(), copies.memory.total() / 4 * 3);
    EXPECT_TRUE(rows.as_written);
    EXPECT_EQ(state(2), copies.memory.optimizer);  // one rank of each has nothing to divide
    // What they gather takes time.
    EXPECT_GT(timed(t, plan::machine_of(80), rows).step->communication_s,
              timed(t, plan::machine_of(80), copies).step->communication_s);
    t.fsdp = Distribution::kShardGradOp;  // a slice, or a stage, stays whole in a step
    EXPECT_GT(as_written(t, card, 8).memory.parameters, rows.memory.parameters);
    t.fsdp = Distribution::kHybridShard;
    t.node_gpus = 4;  // two slices of two rows, or four rows of a stage
    EXPECT_EQ(state(8), copies.memory.optimizer / (slices ? 2 : 4));
    t.node_gpus = 8;
    t.fsdp = Distribution::kFullShard;
    t.shard_degree = 2;
    EXPECT_EQ(state(8), copies.memory.optimizer / 2);
    t.shard_degree = 3;
    EXPECT_THAT(refusals(t, card, as_written(t, card, 8)),
                ElementsAre("data_parallel_shard_degree 3 does not divide the 4 GPUs that hold the "
                            "same part of the model: use a multiple, or delete it"));
    t.shard_degree = 0;
    t.offload = true;
    EXPECT_EQ(state(8), 0u);
    t.offload = false;
  }
}

// 70 billion parameters times the bytes of their state are more than 64 bits hold.
TEST(Slices, OfLargeModelsHaveTheirPartOfTheState) {
  const models::LlamaConfig sizes{.vocab_size = 128'256,
                                  .hidden_size = 8192,
                                  .intermediate_size = 28'672,
                                  .num_hidden_layers = 80,
                                  .num_attention_heads = 64,
                                  .num_key_value_heads = 8};
  Training t{.model = {.config = models::CausalLmConfig{.model = sizes}, .length = 64}, .batch = 1};
  t.may_pipeline = true;
  t.pipeline = 4;
  t.tensor = 8;
  const Choice counted = as_written(t, card_of(80), 32);
  ASSERT_EQ(counted.replicas(), 1);
  t.state_bytes = 8 * static_cast<std::uint64_t>(parameters_of(t.model).trainable);
  const auto given = static_cast<double>(as_written(t, card_of(80), 32).memory.optimizer);
  EXPECT_NEAR(given, static_cast<double>(counted.memory.optimizer), 1e-3 * given);
}

TEST(Slices, MayDivideTheSequenceToFit) {
  Training t{.model = gpt_1b3(), .batch = 4, .half = true, .bf16 = true, .tensor = 2};
  t.global_batch = 4;
  const std::vector<Change> all = changes(t, card_of(20.5), 2);
  ASSERT_FALSE(all.empty());
  EXPECT_THAT(all[0].text, HasSubstr("per_device_train_batch_size: 2"));
  t.global_batch.reset();
  t.batch = 1;
  t.model.length = 8192;
  const auto first = changes(t, card_of(20.5), 2).at(0);
  EXPECT_EQ(first.text, "sequence_parallel: true");
  EXPECT_TRUE(first.alone_fits);
}

}  // namespace
}  // namespace lockstep::plan
