#include "observe/plan/ranking.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "observe/plan/plan_for_test.h"

namespace lockstep::plan {
namespace {

TEST(RankedStrategies, AMicroBatchIsRaisedToo) {
  Training t{.model = gpt_1b3(), .batch = 2, .half = true, .bf16 = true, .captured = true};
  t.global_batch = 256;
  const auto strategies = rank_strategies(t, machine_of(80), 2);
  ASSERT_FALSE(strategies.empty());
  const Strategy& best = strategies.front();
  EXPECT_EQ(best.choice.distribution, Distribution::kDdp);
  EXPECT_GT(best.choice.batch, 2);
  EXPECT_EQ(best.choice.batch * best.choice.accumulation * 2, 256);
  ASSERT_EQ(best.settings.size(), 1u);
  EXPECT_EQ(best.settings[0],
            (Setting{"per_device_train_batch_size", std::to_string(best.choice.batch)}));
  for (std::size_t i = 0; i < strategies.size(); ++i) {
    EXPECT_TRUE(strategies[i].choice.fits);
    EXPECT_EQ(strategies[i].choice.global_batch, 256);
    EXPECT_GE(1.01 * strategies[i].step->total_s(), strategies[i == 0 ? 0 : i - 1].step->total_s());
  }
  t.batch = 2 * best.choice.batch;  // as fast as an estimate can tell: the file's stays
  EXPECT_TRUE(rank_strategies(t, machine_of(80), 2).front().settings.empty());
}

// Batch norms of fewer samples are another training.
TEST(RankedStrategies, TheBatchOfAResNetIsNotLowered) {
  Training t{.model = {.config = models::ResNetConfig{}, .image_size = 224}, .batch = 64};
  t.global_batch = 512;
  const auto strategies = rank_strategies(t, machine_of(80), 4);
  ASSERT_FALSE(strategies.empty());
  for (const Strategy& s : strategies) EXPECT_GE(s.choice.batch, 64);
}

TEST(RankedStrategies, AFullyShardedModelIsRankedAndWritten) {
  Training t{.model = gpt_1b3(), .batch = 1, .half = true, .bf16 = true};
  t.global_batch = 64;
  const auto find = [&](const std::vector<Strategy>& strategies, Distribution distribution) {
    return std::ranges::find_if(strategies, [&](const Strategy& s) {
      return s.choice.distribution == distribution && s.choice.gpus == 4 && !s.checkpointing;
    });
  };
  const auto strategies = rank_strategies(t, machine_of(80), 4);
  const auto ddp = find(strategies, Distribution::kDdp);
  const auto full = find(strategies, Distribution::kFullShard);
  const auto grad = find(strategies, Distribution::kShardGradOp);
  ASSERT_TRUE(ddp != strategies.end() && full != strategies.end() && grad != strategies.end());
  // Where the model fits, whoever communicates less comes first.
  EXPECT_LT(ddp->step->total_s(), grad->step->total_s());
  EXPECT_LT(grad->step->communication_s / static_cast<double>(grad->choice.accumulation),
            full->step->communication_s / static_cast<double>(full->choice.accumulation));
  EXPECT_EQ(std::ranges::count(full->settings, Setting{"fsdp", "full_shard"}), 1);
  EXPECT_EQ(std::ranges::count(full->settings, "shard_optimizer", &Setting::key), 0);
  // Where it does not fit otherwise, it leads.
  EXPECT_TRUE(rank_strategies(t, machine_of(13), 4).front().choice.distribution ==
              Distribution::kFullShard);
  // A file's own word is not exchanged for another, as its fsdp_config belongs to it.
  t.fsdp = Distribution::kShardGradOp;
  const auto own = rank_strategies(t, machine_of(80), 4);
  EXPECT_TRUE(find(own, Distribution::kFullShard) == own.end());
  EXPECT_EQ(std::ranges::count(find(own, Distribution::kDdp)->settings, Setting{"fsdp", "\"\""}),
            1);
  EXPECT_EQ(
      std::ranges::count(find(own, Distribution::kShardGradOp)->settings, "fsdp", &Setting::key),
      0);
  // Its checkpointing ends with fsdp, which a single GPU keeps.
  t.checkpointing = t.fixed_checkpointing = true;
  for (const Strategy& s : rank_strategies(t, machine_of(80), 4)) {
    const auto has = [&](const char* key) {
      return std::ranges::count(s.settings, key, &Setting::key) == 1;
    };
    EXPECT_EQ(has("gradient_checkpointing"), has("fsdp"));
    EXPECT_EQ(has("fsdp"), s.choice.distribution == Distribution::kDdp ||
                               s.choice.distribution == Distribution::kShardedOptimizer ||
                               s.choice.distribution == Distribution::kSplit);
  }
}

TEST(RankedStrategies, EightBitsPayForWideLayersAlone) {
  const auto best = [](Model model, std::int64_t batch, bool eight) {
    Training t{.model = std::move(model), .batch = batch, .half = true, .bf16 = true};
    t.captured = t.may_fp8 = true;
    double least = 1e9;
    for (const Strategy& s :
         rank_strategies(t, {.card = parse_devices("H200").card, .cluster = {}}, 1)) {
      const bool set = std::ranges::count(s.settings, Setting{"mixed_precision", "fp8"}) == 1;
      EXPECT_EQ(set, s.fp8);
      if (s.fp8 == eight) least = std::min(least, s.step->total_s());
    }
    return least;
  };
  EXPECT_GT(best(gpt2(), 8, true), best(gpt2(), 8, false));
  EXPECT_GT(best(gpt2(), 64, true), best(gpt2(), 64, false));
  Model wide{.config = models::parse_config(R"({"model_type": "mistral"})", "c"), .length = 2048};
  wide.lora = lora(16, models::ModuleNames(models::kAllLinear));
  EXPECT_LT(best(wide, 8, true), 0.85 * best(wide, 8, false));
  // Neither where training cannot do it nor where the card cannot.
  Training t{.model = gpt2(), .batch = 8, .half = true, .bf16 = true};
  for (const Strategy& s : rank_strategies(t, machine_of(80), 1)) EXPECT_FALSE(s.fp8);
  t.may_fp8 = true;
  const Machine a100{.card = parse_devices("A100-80GB").card, .cluster = {}, .speed = {}};
  for (const Strategy& s : rank_strategies(t, a100, 1)) EXPECT_FALSE(s.fp8);
  t.fp8 = true;  // the file's: strategies there end it
  const auto strategies = rank_strategies(t, a100, 1);
  EXPECT_FALSE(strategies.empty());
  for (const Strategy& s : strategies) {
    EXPECT_FALSE(s.fp8);
    EXPECT_EQ(std::ranges::count(s.settings, Setting{"mixed_precision", "bf16"}), 1);
  }
}

TEST(RankedStrategies, APipelineHasABubbleAndPartsOfTheLayers) {
  Training t{.model = gpt_1b3(), .batch = 1, .half = true, .bf16 = true, .may_pipeline = true};
  t.global_batch = 64;
  const Card card = card_of(80);
  const Parts parts{4, Distribution::kSingle, 4};
  const Choice c = make_choice(t, card, parts, 4);
  EXPECT_EQ(c.replicas(), 1);
  EXPECT_EQ(c.accumulation, 16);
  const Choice one = make_choice(t, card, {1, Distribution::kSingle}, 4);
  const auto piped = work_of(t, c, card, {.utilisation = 0.5});
  const auto alone = work_of(t, one, card, {.utilisation = 0.5});
  // 16 micro-batches through four stages, 3 of 19 steps are bubble; all wait for the last stage,
  // which has a quarter of the blocks and the head.
  const double block = (2 * 12 + 4) * 2048.0 * 2048;
  const double head = 2 * 50257.0 * 2048;
  EXPECT_NEAR(piped->compute_s() / alone->compute_s(),
              19.0 / 16 * (6 * block + head) / (24 * block + head), 1e-3);
  // The first stage has the embeddings, and holds its part of four micro-batches.
  const std::uint64_t embeddings = (50257u + 2048 + 2) * 2048;
  EXPECT_EQ(c.memory.parameters, 4 * (6 * (12u * 2048 * 2048 + 13u * 2048) + embeddings));
  EXPECT_NEAR(static_cast<double>(c.memory.activations),
              static_cast<double>(one.memory.activations), 0.02 * one.memory.activations);
  const auto strategies = rank_strategies(t, machine_of(80), 4);
  const auto found =
      std::ranges::find_if(strategies, [](const Strategy& s) { return s.choice.stages > 1; });
  ASSERT_TRUE(found != strategies.end());
  EXPECT_EQ(std::ranges::count(found->settings, "pipeline_parallel_degree", &Setting::key), 1);
  EXPECT_GT(found->step->total_s(),
            strategies.front().step->total_s());  // DDP fits, and waits for none
  t.pipeline = 4;  // a file that has stages: other strategies end them
  for (const Strategy& s : rank_strategies(t, machine_of(80), 4)) {
    EXPECT_EQ(std::ranges::count(s.settings, "pipeline_parallel_degree", &Setting::key),
              s.choice.stages != 4);
  }
  EXPECT_FALSE(can_train(t, card, {6, Distribution::kSingle, 4}));
  t.pipeline = 3;  // no power of two, and the file's
  const auto thirds = rank_strategies(t, machine_of(80), 3);
  EXPECT_TRUE(std::ranges::any_of(thirds, [](const Strategy& s) {
    return s.choice.stages == 3 &&
           std::ranges::count(s.settings, "pipeline_parallel_degree", &Setting::key) == 0;
  }));
  t.may_pipeline = false;
  EXPECT_FALSE(can_train(t, card, parts));
}

TEST(RankedStrategies, SlicesOfLayersAreSummedUpInEveryBlock) {
  Training t{.model = gpt_1b3(), .batch = 1, .half = true, .bf16 = true, .may_tensor = true};
  t.global_batch = 64;
  const Machine machine = machine_of(80);
  const Choice c = make_choice(t, machine.card, {4, Distribution::kDdp, 1, 2}, 4);
  EXPECT_EQ(c.replicas(), 2);
  EXPECT_EQ(c.accumulation, 8);
  // Matrices of a block, all biases but two, and the embedding (of 50257 tokens: 25129) are cut.
  const std::uint64_t w = 2048, block = (12 * w * w + 7 * w) / 2 + 6 * w;
  EXPECT_EQ(c.memory.parameters, 4 * (24 * block + (25129 + 2048 + 2) * w));
  EXPECT_EQ(c.memory.optimizer, 2 * c.memory.parameters);
  t.state_bytes = 4000;
  EXPECT_NEAR(
      static_cast<double>(
          make_choice(t, machine.card, {2, Distribution::kSingle, 1, 2}, 4).memory.optimizer),
      2000, 50);
  t.state_bytes.reset();
  // Half of the products; one sum after the embedding, two in each block, and as many in backward.
  const auto both = work_of(t, c, machine.card, {.utilisation = 0.5});
  const auto alone = work_of(t, make_choice(t, machine.card, {1, Distribution::kSingle}, 4),
                             machine.card, {.utilisation = 0.5});
  EXPECT_NEAR(both->forward_s / alone->forward_s, 0.5, 1e-3);
  EXPECT_EQ(std::ranges::count(both->tensor_sums, 4.0 * 2048 * 2048 * 2), 1 + 4 * 24);
  EXPECT_EQ(std::ranges::count(both->tensor_sums, 4.0 * 2048 * 2048 * 4), 1);  // float weights
  Work sums{.accumulation = 8, .tensor_ranks = 2, .tensor_sums = both->tensor_sums};
  double expected = 0;
  for (const double bytes : both->tensor_sums)
    expected += 8 * all_reduce_s(machine.cluster, 2, bytes);
  EXPECT_DOUBLE_EQ(step_time(sums, machine.cluster, 1).exposed_s, expected);
  Cluster cpus = machine.cluster;
  cpus.cores = 2;  // whose ranks wait for each other 100 times in each of 8 micro-batches
  EXPECT_NEAR(step_time(sums, cpus, 1).exposed_s - expected, 8 * 100 * 1.2e-3, 1e-9);
  // Eight ranks of a copy fill a node, so that gradients of two copies pass between nodes, where
  // eight rings share the ports; four ranks of a copy leave two copies to a node.
  const Cluster nodes = parse_link("nvlink+ib400", machine.card, 8);
  Cluster ports = nodes;
  ports.per_node = 1;
  ports.between.bandwidth /= 8;
  const Work apart{.gradients = {1 << 20}, .tensor_ranks = 8};
  EXPECT_DOUBLE_EQ(step_time(apart, nodes, 2).communication_s, all_reduce_s(ports, 2, 1 << 20));
  const Work beside{.gradients = {1 << 20}, .tensor_ranks = 4};
  EXPECT_LT(step_time(beside, nodes, 2).communication_s, all_reduce_s(ports, 2, 1 << 20));
  t.checkpointing = true;  // blocks run again
  t.half = false;
  const auto again = work_of(t, c, machine.card, {.utilisation = 0.5});
  EXPECT_EQ(std::ranges::count(again->tensor_sums, 4.0 * 2048 * 2048 * 4), 2 + 6 * 24);
  t.checkpointing = false;
  t.half = t.unfused = true;  // norms of plain modules are in float, and so are their gradients
  const auto plain = work_of(t, c, machine.card, {.utilisation = 0.5});
  EXPECT_EQ(std::ranges::count(plain->tensor_sums, 4.0 * 2048 * 2048 * 4), 2 + 2 * 24);
}

// Each sum is a reduce-scatter and a gather, and what layers have read is gathered again.
TEST(RankedStrategies, SequenceParallelismTakesLessMemory) {
  Training t{.model = gpt_1b3(), .batch = 4, .half = true, .bf16 = true, .may_tensor = true};
  t.global_batch = 8;
  const Machine machine = machine_of(80);
  const Choice tensor = make_choice(t, machine.card, {2, Distribution::kSingle, 1, 2}, 4);
  const Choice sequence = make_choice(t, machine.card, {2, Distribution::kSingle, 1, 2, true}, 4);
  const double saved = 8192.0 * (24 * (2 * (4 * 2048 + 8)) + 4 * 2048) / 2;
  EXPECT_NEAR(static_cast<double>(tensor.memory.activations - sequence.memory.activations), saved,
              0.01 * saved);
  const auto work = work_of(t, sequence, machine.card, {});
  const double stream = 8192.0 * 2048;
  EXPECT_EQ(std::ranges::count(work->tensor_gathers, 2 * stream), 5 * 2 * 24 + 3);
  EXPECT_EQ(std::ranges::count(work->tensor_gathers, 4 * stream), 2);  // embedding
  EXPECT_EQ(work->tensor_sums.size(), 2u);                             // the loss's
  // Two norms and two biases of a block, the last norm; positions.
  EXPECT_EQ(work->tensor_once, 4.0 * 2048 * (6 * 24 + 2 + 2048));
  EXPECT_LT(work->forward_s, work_of(t, tensor, machine.card, {})->forward_s);  // norms of a part
  std::vector<Strategy> strategies = rank_strategies(t, machine, 2);
  const auto settings = [&](bool divided) {
    std::vector<Setting> found;
    for (const Strategy& s : strategies)
      if (s.choice.slices > 1 && s.choice.sequence == divided)
        for (const Setting& one : s.settings)
          if (one.key == "sequence_parallel") found.push_back(one);
    return found;
  };
  EXPECT_THAT(settings(true), ::testing::Each(Setting{"sequence_parallel", "true"}));
  EXPECT_FALSE(settings(true).empty());
  EXPECT_TRUE(settings(false).empty());
  t.tensor = 2;
  t.sequence = true;  // the file's
  strategies = rank_strategies(t, machine, 2);
  EXPECT_TRUE(as_written(t, machine.card, 2).as_written);
  EXPECT_TRUE(as_written(t, machine.card, 2).sequence);
  EXPECT_TRUE(settings(true).empty());
  EXPECT_THAT(settings(false), ::testing::Contains(Setting{"sequence_parallel", "false"}));
  t.sequence = false;
  EXPECT_FALSE(can_train(t, machine.card, {2, Distribution::kSingle, 1, 2, true}));
  EXPECT_FALSE(as_written(t, machine.card, 2).sequence);
}

TEST(RankedStrategies, AdaptersOfSlicesAreAddedUp) {
  Training t{.model = phi3(), .batch = 2, .half = true, .bf16 = true, .may_tensor = true};
  t.model.lora = lora(16, {"qkv_proj", "o_proj"});
  t.global_batch = 8;
  const Card card = card_of(80);
  const Choice c = make_choice(t, card, {4, Distribution::kDdp, 1, 2}, 2);
  const auto work = work_of(t, c, card, {});
  // lora_A of queries, keys and values, and lora_B after attention are on every rank.
  EXPECT_EQ(work->tensor_once, 4.0 * 16 * 3072 * 2 * 32);
  EXPECT_EQ(work->tensor_sums.size(), 2 + 2 + 4 * 32u);
  std::int64_t gradients = 0;
  for (const std::int64_t bytes : work->gradients) gradients += bytes;
  EXPECT_EQ(gradients, 4 * 32 * 16 * (3072 + 3 * 3072 / 2 + 3072 / 2 + 3072));
  const auto strategies = rank_strategies(t, machine_of(80), 2);
  EXPECT_TRUE(
      std::ranges::any_of(strategies, [](const Strategy& s) { return s.choice.slices > 1; }));
}

TEST(RankedStrategies, ReplicasOfStagesAndSlicesAreCopiedOrFullySharded) {
  Training t{
      .model = gpt_1b3(), .batch = 1, .half = true, .may_pipeline = true, .may_tensor = true};
  t.global_batch = 8;
  const Machine machine = machine_of(80);
  const auto has = [&](const Parts& parts, const std::vector<Setting>& settings) {
    return std::ranges::any_of(rank_strategies(t, machine, 8), [&](const Strategy& s) {
      return static_cast<const Parts&>(s.choice) == parts && !s.checkpointing &&
             std::ranges::all_of(settings, [&](const Setting& one) {
               return std::ranges::count(s.settings, one) == 1;
             });
    });
  };
  const Setting stages{"pipeline_parallel_degree", "2"}, slices{"tensor_parallel_degree", "2"};
  EXPECT_TRUE(has({8, Distribution::kDdp, 2, 2}, {stages, slices}));
  EXPECT_TRUE(has({8, Distribution::kFullShard, 2, 2, true},
                  {stages, slices, {"sequence_parallel", "true"}, {"fsdp", "full_shard"}}));
  EXPECT_TRUE(has({8, Distribution::kSingle, 4, 2}, {{"pipeline_parallel_degree", "4"}, slices}));
  EXPECT_FALSE(has({8, Distribution::kShardGradOp, 2, 1}, {}));
  t.fsdp = Distribution::kShardGradOp;  // the file's word
  EXPECT_TRUE(has({8, Distribution::kShardGradOp, 2, 1}, {stages}));
  EXPECT_FALSE(has({8, Distribution::kFullShard, 2, 1}, {}));
  EXPECT_TRUE(has({8, Distribution::kDdp, 2, 1}, {stages, {"fsdp", "\"\""}}));
}

TEST(RankedStrategies, SchedulesDifferInWhatAStageHoldsAndHowLongItWaits) {
  Training t{.model = gpt_1b3(), .batch = 1, .half = true, .bf16 = true, .may_pipeline = true};
  t.pipeline = 4;
  t.global_batch = 16;
  const Machine machine = machine_of(80);
  const auto of = [&] { return as_written(t, machine.card, 4); };
  const auto steps = [&] { return work_of(t, of(), machine.card, {})->accumulation; };
  const Choice usual = of();
  EXPECT_EQ(steps(), 16 + 3);
  t.gpipe = true;  // the first stage holds all 16 micro-batches, not those of the four stages
  EXPECT_NEAR(static_cast<double>(of().memory.activations),
              4 * static_cast<double>(usual.memory.activations), 0.1 * of().memory.activations);
  EXPECT_EQ(steps(), 16 + 3);
  t.gpipe = false;
  t.chunks = 2;  // interleaved: (2 x 3 + 4 + 1) / 2 micro-batches instead of 4, and half the bubble
  EXPECT_NEAR(static_cast<double>(of().memory.activations),
              5.5 / 4 * static_cast<double>(usual.memory.activations),
              0.1 * of().memory.activations);
  EXPECT_EQ(steps(), 16 + 1.5);
}

// Experts are computed in 16 bits, and adapters are not attached to them.
TEST(RankedStrategies, ExpertsAreNotInEightBits) {
  const Model model{.config = models::parse_config(R"({"model_type": "mixtral"})", "c"),
                    .length = 4096};
  Training t{.model = model, .batch = 1, .half = true, .bf16 = true};
  const Machine machine{.card = parse_devices("H200").card, .cluster = {}};
  const auto seconds = [&] {
    return work_of(t, as_written(t, machine.card, 1), machine.card, {})->compute_s();
  };
  const double half = seconds();
  t.fp8 = true;
  EXPECT_GT(seconds(), 0.9 * half);
  t.fp8 = false;
  // Of the experts that a token goes to a slice has its part
  EXPECT_NEAR(forward_flops_per_token({.config = model.config, .length = 0, .slices = 2}) /
                  forward_flops_per_token({.config = model.config, .length = 0}),
              0.5, 0.01);
  EXPECT_TRUE(std::ranges::any_of(changes(t, machine.card, 1), [](const Change& change) {
    return change.text == "lora: {r: 16, target_modules: [q_proj, k_proj, v_proj, o_proj]}";
  }));
}

TEST(RankedStrategies, ADeviceMapStaysInANode) {
  const Training t{.model = gpt_1b3(), .batch = 1};
  EXPECT_TRUE(can_train(t, card_of(80), {8, Distribution::kSplit}));
  EXPECT_FALSE(can_train(t, card_of(80), {16, Distribution::kSplit}));
}

TEST(RankedStrategies, AStageOfSlicesHasPartsOfBoth) {
  Training t{.model = gpt_1b3(), .batch = 1, .half = true, .bf16 = true, .may_pipeline = true};
  t.pipeline = t.tensor = 2;
  t.global_batch = 64;
  const Machine machine = machine_of(80);
  const Choice c = as_written(t, machine.card, 8);
  EXPECT_EQ(c.replicas(), 2);
  EXPECT_EQ(c.accumulation, 32);
  EXPECT_TRUE(c.as_written);
  EXPECT_EQ(parts_text(c), "pipeline of 2, tensor over 2");
  // The first stage: half of the blocks and the embeddings, of which slices have what they have
  // without stages.
  const std::uint64_t w = 2048, block = (12 * w * w + 7 * w) / 2 + 6 * w;
  EXPECT_EQ(c.memory.parameters, 4 * (12 * block + (25129 + 2048 + 2) * w));
  EXPECT_EQ(c.memory.optimizer, 2 * c.memory.parameters);
  t.state_bytes = 8 * parameters_of(t.model).total();
  EXPECT_NEAR(static_cast<double>(as_written(t, machine.card, 8).memory.optimizer),
              2.0 * static_cast<double>(c.memory.parameters), 1e6);
  t.state_bytes.reset();
  const auto whole = work_of(t, make_choice(t, machine.card, {4, Distribution::kDdp, 1, 2}, 1),
                             machine.card, {.utilisation = 0.5});
  const auto part = work_of(t, c, machine.card, {.utilisation = 0.5});
  EXPECT_NEAR(part->forward_s / whole->forward_s, 0.53, 0.02);  // and the head
  EXPECT_EQ(whole->tensor_sums.size() - part->tensor_sums.size(), 4 * 12u);
  EXPECT_EQ(part->accumulation, 33);  // one step of the bubble
  t.fsdp = Distribution::kFullShard;
  const Choice rows = as_written(t, machine.card, 8);
  EXPECT_EQ(parts_text(rows), "pipeline of 2, tensor over 2, full_shard");
  EXPECT_EQ(rows.memory.optimizer, c.memory.optimizer / 2);
  EXPECT_THAT(refusals(t, machine.card, choose(t, machine.card, 6)),
              ::testing::Contains("pipeline_parallel_degree 2 x tensor_parallel_degree 2 trains on "
                                  "multiples of 4 GPUs: use such a number, or smaller degrees"));
}

// Rows that have a scale each, or lie in the host's memory, travel as they are held.
TEST(RankedStrategies, WeightsTravelInTheTypeOfTheirProducts) {
  Training t{.model = gpt_1b3(), .batch = 1, .half = true, .bf16 = true};
  t.fsdp = Distribution::kFullShard;
  const Card card = parse_devices("H200").card;
  const auto bytes = [&] { return work_of(t, as_written(t, card, 2), card, {})->parameter_bytes; };
  const std::int64_t all = 4 * parameters_of(t.model).total(), products = 24 * 12 * 2048 * 2048;
  EXPECT_EQ(bytes(), all - 2 * products);
  t.fp8 = true;
  EXPECT_EQ(bytes(), all - 3 * products);
  t.rowwise = true;
  EXPECT_EQ(bytes(), all);
  t.rowwise = false;
  t.offload = true;
  EXPECT_EQ(bytes(), all);
}

TEST(RankedStrategies, TensorParallelDegreesDivideHeadsAndStayInANode) {
  const models::LlamaConfig sizes{.num_attention_heads = 32, .num_key_value_heads = 4};
  const Model llama{.config = models::CausalLmConfig{.model = sizes}, .length = 64};
  Training t{.model = llama, .batch = 1, .half = true, .bf16 = true, .may_tensor = true};
  t.global_batch = 64;
  const Card card = card_of(80);
  EXPECT_TRUE(can_train(t, card, {8, Distribution::kDdp, 1, 4}));
  EXPECT_FALSE(can_train(t, card, {8, Distribution::kDdp, 1, 8}));
  EXPECT_FALSE(can_train(t, card, {6, Distribution::kDdp, 1, 4}));
  t.node_gpus = 2;
  EXPECT_FALSE(can_train(t, card, {8, Distribution::kDdp, 1, 4}));
  const auto strategies = rank_strategies(t, machine_of(80), 2);
  const auto found =
      std::ranges::find_if(strategies, [](const Strategy& s) { return s.choice.slices > 1; });
  ASSERT_TRUE(found != strategies.end());
  EXPECT_EQ(std::ranges::count(found->settings, Setting{"tensor_parallel_degree", "2"}), 1);
  t.adapts = "elastic_gpu";
  for (const Strategy& s : rank_strategies(t, machine_of(80), 2))
    EXPECT_EQ(std::ranges::count(s.settings, Setting{"elastic_gpu", "false"}), s.choice.slices > 1);
  t.adapts = "";
  t.tensor = 2;  // a file that has slices: other strategies end them
  for (const Strategy& s : rank_strategies(t, machine_of(80), 2)) {
    EXPECT_EQ(std::ranges::count(s.settings, Setting{"tensor_parallel_degree", "1"}),
              s.choice.slices == 1);
  }
  t.tensor = 1;
  t.may_tensor = false;
  EXPECT_FALSE(can_train(t, card, {2, Distribution::kSingle, 1, 2}));
}

TEST(RankedStrategies, StagesOnACpuShareItsCores) {
  const models::GptConfig sizes{
      .n_layer = 4, .n_head = 4, .n_embd = 256, .vocab_size = 256, .n_positions = 64};
  Training t{.model = {.config = models::CausalLmConfig{.model = sizes}, .length = 64},
             .batch = 4,
             .may_pipeline = true};
  t.global_batch = 8;
  Machine machine{.card = assumed_cpu(parse_devices("2xcpu").card, 2), .cluster = {}, .speed = {}};
  machine.cluster = parse_link("loopback", machine.card, 2);
  machine.cluster.cores = 2;
  const auto seconds = [&](const Parts& parts) {
    return timed(t, machine, make_choice(t, machine.card, parts, 1)).step->compute_s;
  };
  // A stage has one of the two cores, as a replica has, and waits while the pipeline fills. The
  // last one has the head, too: a fiftieth of the operations.
  EXPECT_NEAR(seconds({2, Distribution::kSingle, 2}) / seconds({2, Distribution::kDdp}), 9.0 / 8,
              0.03);
}

TEST(RankedStrategies, StagesOfUnequalSizesCountAsTheLargest) {
  const models::GptConfig sizes{
      .n_layer = 3, .n_head = 4, .n_embd = 256, .vocab_size = 256, .n_positions = 64};
  const Model model{.config = models::CausalLmConfig{.model = sizes}, .length = 64};
  const std::vector<Stage> stages = stages_of(model, 2);
  EXPECT_EQ(stages[0].blocks, 2);
  EXPECT_EQ(stages[1].blocks, 1);
  const Memory m =
      memory_of(model, {.accumulation = 4, .stages = 2, .pipeline = true, .cpu = true});
  EXPECT_EQ(m.parameters, 4 * (2 * (12u * 256 * 256 + 13u * 256) + (256u + 64 + 2) * 256));
}

TEST(RankedStrategies, HybridShardIsForSeveralNodes) {
  Training t{.model = gpt_1b3(), .batch = 1, .half = true, .bf16 = true, .node_gpus = 4};
  t.global_batch = 64;
  Machine machine = machine_of(24);
  machine.cluster = parse_link("nvlink+eth25/node", machine.card, 4);
  const auto time = [&](Distribution distribution) {
    double least = 1e9;
    for (const Strategy& s : rank_strategies(t, machine, 8))
      if (s.choice.distribution == distribution && s.choice.gpus == 8)
        least = std::min(least, s.step->total_s());
    return least;
  };
  // Gathers stay inside a node.
  EXPECT_LT(time(Distribution::kHybridShard), time(Distribution::kFullShard));
  EXPECT_FALSE(can_train(t, machine.card, {4, Distribution::kHybridShard}));
  EXPECT_FALSE(can_train(t, machine.card, {6, Distribution::kHybridShard}));
}

TEST(RankedStrategies, LeaveAGpuIdleThatCannotShareTheBatch) {
  Training t{.model = gpt2(), .batch = 2, .half = true, .bf16 = true};
  t.global_batch = 256;
  const auto strategies = rank_strategies(t, machine_of(80), 3);
  ASSERT_FALSE(strategies.empty());
  EXPECT_EQ(strategies.front().choice.gpus, 2);
  EXPECT_EQ(strategies.front().choice.global_batch, 256);
  for (const Strategy& s : strategies)
    EXPECT_TRUE(s.choice.gpus != 3 || s.choice.distribution == Distribution::kSplit);
}

TEST(RankedStrategies, WithoutAGlobalBatchTheFilesOwnIsHeld) {
  const Training t{.model = gpt2(), .batch = 4, .accumulation = 8, .half = true, .bf16 = true};
  for (const Strategy& s : rank_strategies(t, machine_of(80), 4)) {
    const Choice& c = s.choice;
    EXPECT_EQ(c.batch * c.accumulation * c.replicas(), 128);
    const bool same = c.batch == 4 && c.accumulation == 8;
    EXPECT_EQ(std::ranges::count(s.settings, "gradient_accumulation_steps", &Setting::key),
              same && c.replicas() == 4 ? 0 : 1);
  }
}

TEST(RankedStrategies, CheckpointingAndHalfPrecisionAreOffered) {
  Training t{.model = gpt_1b3(), .batch = 8};
  t.global_batch = 8;
  const auto all = rank_strategies(t, machine_of(80), 1);
  const auto is_half = [](const Strategy& s) { return s.half; };
  ASSERT_TRUE(std::ranges::any_of(all, is_half));
  EXPECT_TRUE(all.front().half);
  EXPECT_EQ(std::ranges::count(all.front().settings, Setting{"bf16", "true"}), 1);
  // What no strategy fits without is in every strategy.
  t.half = t.bf16 = true;
  for (const Strategy& s : rank_strategies(t, machine_of(27), 1)) EXPECT_TRUE(s.checkpointing);
  // A measurement is of what the file says, and of nothing else.
  Machine measured = machine_of(80);
  measured.speed.tokens_per_second = 1e4;
  for (const Strategy& s : rank_strategies(t, measured, 1)) {
    EXPECT_FALSE(s.checkpointing);
    EXPECT_TRUE(s.half);
  }
}

TEST(RankedStrategies, ThatDoNotFitOrHaveNoSpeedAreNone) {
  Training t{.model = gpt_1b3(), .batch = 1};
  EXPECT_TRUE(rank_strategies(t, machine_of(4), 1).empty());
  Machine unknown = machine_of(80);
  unknown.card.flops = unknown.card.float_flops = 0;
  EXPECT_TRUE(rank_strategies(t, unknown, 1).empty());
}

TEST(RankedStrategies, ElasticGpuRaisesAMicroBatch) {
  Training t{.model = gpt_1b3(), .batch = 2, .half = true, .bf16 = true, .captured = true};
  t.global_batch = 256;
  Card card = card_of(80);
  const Choice known = fastest_batch(t, card, 2);
  EXPECT_EQ(known.batch, rank_strategies(t, machine_of(80), 2).front().choice.batch);
  card.flops = card.float_flops = card.memory_bandwidth = 0;  // one that nobody has heard of
  EXPECT_GT(fastest_batch(t, card, 2).batch, 2);
  card = card_of(28);
  EXPECT_TRUE(fastest_batch(t, card, 2).fits);
  card.cpu = true;
  EXPECT_EQ(fastest_batch(t, card, 2).batch, choose(t, card, 2).batch);
}

TEST(RankedStrategies, WhatWasMeasuredReplacesEstimates) {
  Training t{.model = gpt2(), .batch = 8, .half = true, .bf16 = true};
  t.global_batch = 64;
  auto strategies = rank_strategies(t, machine_of(80), 2);
  ASSERT_GT(strategies.size(), 3u);
  const Strategy first = strategies[0], last = strategies.back(), other = strategies[1];
  // The first takes twice as long as was thought, so the others are thought to take twice as long;
  // the last is measured to be the fastest.
  use_measurements(strategies, t,
                   {measurement_of(first, 2 * first.estimate.total_s(), 7),
                    measurement_of(last, first.estimate.total_s() / 2, 8)});
  EXPECT_TRUE(strategies.front().measured);
  EXPECT_EQ(strategies.front().settings, last.settings);
  EXPECT_EQ(strategies.front().memory_bytes(), 8u);
  const auto scaled =
      std::ranges::find(strategies, other.settings, [](const Strategy& s) { return s.settings; });
  EXPECT_FALSE(scaled->measured);
  EXPECT_EQ(scaled->memory_bytes(), other.choice.memory.total());
  EXPECT_NEAR(scaled->step->total_s(), 2 * other.estimate.total_s(), 1e-9);
  EXPECT_NEAR(scaled->tokens_per_second, other.tokens_per_second / 2, 1e-3);
  // Samples that were shorter than planned, of every strategy.
  auto shorter = rank_strategies(t, machine_of(80), 2);
  Measurement padded = measurement_of(first, 2 * first.estimate.total_s(), 7);
  padded.tokens = static_cast<double>(t.model.length) / 4;
  padded.disturbance = "it rained";
  use_measurements(shorter, t, {padded});
  EXPECT_EQ(std::ranges::count(shorter, padded.disturbance, &Strategy::disturbance), 1);
  for (const Strategy& s : shorter)
    EXPECT_NEAR(s.tokens_per_second, 64 * padded.tokens / s.step->total_s(), 1e-3);
  // What belongs to no strategy changes nothing.
  auto same = rank_strategies(t, machine_of(80), 2);
  Measurement stranger = measurement_of(first, 1, 1);
  stranger.parts.gpus = 7;
  use_measurements(same, t, {stranger});
  EXPECT_NEAR(same.front().step->total_s(), first.estimate.total_s(), 1e-12);
}

}  // namespace
}  // namespace lockstep::plan
