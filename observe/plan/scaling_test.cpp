#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "observe/plan/machine.h"
#include "observe/plan/plan_for_test.h"

namespace lockstep::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Card h100() {
  return parse_devices("H100").card;
}

// ---------------------------------------------------------------- collectives

TEST(Collectives, OfOneNode) {
  const Cluster cluster = parse_link("nvlink", h100(), 8);
  const double bandwidth = 450e9 * 235 / 300;
  EXPECT_DOUBLE_EQ(cluster.inside.bandwidth, bandwidth);
  // A large message goes around the ring: 14 hops, 14/8 of the bytes.
  EXPECT_DOUBLE_EQ(all_reduce_s(cluster, 8, 1e9), 8.4e-6 + 14 * 3.4e-6 + 1.75 * 1e9 / bandwidth);
  // A small one goes up and down a tree of 8.
  EXPECT_DOUBLE_EQ(all_reduce_s(cluster, 8, 1e3),
                   4.4e-6 + 14 * 1.2e-6 + 2e3 / (0.9 * 0.92 * bandwidth));
  EXPECT_DOUBLE_EQ(all_gather_s(cluster, 8, 1e9), 8.4e-6 + 7 * 3.4e-6 + 0.875 * 1e9 / bandwidth);
  EXPECT_EQ(all_reduce_s(cluster, 1, 1e9), 0);
}

TEST(Collectives, OfSeveralNodesTakeTheSlowestLink) {
  // 8 ports of 100 Gbit/s: 90 GB/s of a node, less than NVLink.
  const Cluster cluster = parse_link("nvlink+ib100", h100(), 8);
  EXPECT_DOUBLE_EQ(cluster.between.bandwidth, 0.9 * 100e9);
  const double ring = 8.4e-6 + (126 - 14) * 3.4e-6 + 14 * 9.6e-6 + 126.0 / 64 * 1e9 / (0.9 * 100e9);
  EXPECT_DOUBLE_EQ(all_reduce_s(cluster, 64, 1e9), ring);
  const Cluster shared = parse_link("nvlink+ib800/node", h100(), 8);
  EXPECT_DOUBLE_EQ(shared.between.bandwidth, cluster.between.bandwidth);
  // Inside one node the network does not matter.
  EXPECT_DOUBLE_EQ(all_reduce_s(cluster, 8, 1e9),
                   all_reduce_s(parse_link("nvlink", h100(), 8), 8, 1e9));
  // With many nodes the ring's hops add up, and the tree wins for more and more bytes.
  const double tree = 4.4e-6 + 2 * (7 * 1.2e-6 + 9 * 8.5e-6) + 2e7 / (0.9 * 0.92 * 0.9 * 100e9);
  EXPECT_DOUBLE_EQ(all_reduce_s(cluster, 4096, 1e7), tree);
}

TEST(Collectives, OfGlooOverTheLoopbackDevice) {
  // 25 MB on a 16-core machine (docs/plan.md): within a sixth.
  const Cluster cluster = parse_link("loopback", {}, 16);
  const double bytes = 25 * 1048576.0;
  EXPECT_NEAR(all_reduce_s(cluster, 2, bytes), 10.2e-3, 10.2e-3 / 6);
  EXPECT_NEAR(all_reduce_s(cluster, 4, bytes), 14.8e-3, 14.8e-3 / 6);
  EXPECT_NEAR(all_reduce_s(cluster, 8, bytes), 21.1e-3, 21.1e-3 / 6);
  EXPECT_NEAR(all_reduce_s(cluster, 16, bytes), 38.3e-3, 38.3e-3 / 6);
}

TEST(Links, WithoutPeerAccessGoThroughTheHost) {
  const Card card = parse_devices("RTX4090").card;
  EXPECT_FALSE(card.peers);
  EXPECT_TRUE(parse_devices("L40S").card.peers);
  const Cluster peers = parse_link("pcie", card, 8);
  const Cluster host = parse_link("pcie-host", card, 8);
  EXPECT_DOUBLE_EQ(host.inside.bandwidth, peers.inside.bandwidth / 2);
  EXPECT_THAT(host.text, HasSubstr("no peer access"));
  // Eight of them share the host's memory.
  EXPECT_GT(all_reduce_s(host, 8, 1e9), 3 * all_reduce_s(peers, 8, 1e9));
}

TEST(Links, ThatWereMeasuredReplaceWhatWasAssumed) {
  Cluster cluster = parse_link("pcie+eth100/node", parse_devices("L40S").card, 4);
  use_measured(cluster, {.backend = "nccl", .ranks = 4, .bandwidth = 5e9});
  EXPECT_EQ(cluster.text,
            "nccl 5.0 GB/s a rank, measured by lockstep doctor with 4 ranks, eth100/node 11 GB/s a "
            "node of 4");
  // The bytes of a ring over what was measured on the bus.
  EXPECT_NEAR(all_reduce_s(cluster, 4, 1e9), 1.5 * 1e9 / 5e9, 1e-3);
  use_measured(cluster,
               {.backend = "shm", .ranks = 2, .bandwidth = 2e9, .disturbance = "it rained"});
  EXPECT_THAT(cluster.text, HasSubstr("measured by lockstep doctor with 2 ranks while it rained"));
}

TEST(Links, ThatAreNotKnownAreRefused) {
  for (const char* text : {"ib400", "nvlink+", "nvlink+ib", "nvlink+400", "nvlink+ib-4",
                           "nvlink+ibx", "pcie+eth25/rack", ""})
    EXPECT_THAT(message_of([&] { parse_link(text, h100(), 8); }), HasSubstr("is not a link"))
        << text;
  EXPECT_THAT(message_of([] { parse_link("nvlink", parse_devices("L40S").card, 8); }),
              HasSubstr("L40S has no NVLink"));
  // A port that does not exist; a node has as many as GPUs, and 8 at least.
  for (const char* text : {"nvlink+ib99999", "nvlink+ib801", "nvlink+eth0.5", "pcie+eth6401/node"})
    EXPECT_THAT(message_of([&] { parse_link(text, h100(), 4); }), HasSubstr(" Gbit/s, and a"))
        << text;
  EXPECT_EQ(parse_link("nvlink+ib800", h100(), 8).between.bandwidth, 0.9 * 800e9);
  EXPECT_EQ(parse_link("nvlink+ib6400/node", h100(), 4).between.bandwidth, 0.9 * 800e9);
  EXPECT_THAT(message_of([] { parse_link("nvlink", h100(), 0); }), HasSubstr("a node of 0 GPUs"));
}

// ---------------------------------------------------------------- steps

constexpr std::int64_t kBucket = 25 << 20;

TEST(Steps, BucketsHideBehindBackward) {
  const Cluster cluster = parse_link("nvlink", h100(), 8);
  Work work{.forward_s = 0.1, .backward_s = 0.2, .gradients = {kBucket, kBucket, kBucket, kBucket}};
  const double one = all_reduce_s(cluster, 8, kBucket);
  const StepTime step = step_time(work, cluster, 8);
  EXPECT_DOUBLE_EQ(step.communication_s, 4 * one);
  EXPECT_NEAR(step.exposed_s, one, 1e-12);  // the last bucket is ready when backward ends
  EXPECT_NEAR(step.total_s(), 0.3 + one, 1e-12);
  // With accumulation it is one synchronisation for more computation.
  work.accumulation = 4;
  EXPECT_NEAR(step_time(work, cluster, 8).total_s(), 1.2 + one, 1e-12);
  // Nothing hides behind a backward that takes no time.
  work.backward_s = 0;
  EXPECT_DOUBLE_EQ(step_time(work, cluster, 8).exposed_s, 4 * one);
  EXPECT_EQ(step_time(work, cluster, 1).exposed_s, 0);
}

TEST(Steps, WithoutPeerAccessBackwardHidesHalf) {
  const Card card = parse_devices("RTX4090").card;
  const Work work{.forward_s = 1, .backward_s = 2, .gradients = {8 * kBucket, kBucket}};
  const StepTime peers = step_time(work, parse_link("pcie", card, 8), 2);
  EXPECT_NEAR(peers.exposed_s, peers.communication_s / 9, 1e-4);  // the last bucket
  const StepTime host = step_time(work, parse_link("pcie-host", card, 8), 2);
  EXPECT_DOUBLE_EQ(host.exposed_s, 0.5 * host.communication_s);
  // Nothing is charged twice where all of it comes after backward.
  Work last = work;
  last.gradients = {1000, 8 * kBucket};
  const StepTime late = step_time(last, parse_link("pcie-host", card, 8), 2);
  EXPECT_NEAR(late.exposed_s, late.communication_s, 1e-12);
}

TEST(Steps, ASlowLinkBuildsAQueue) {
  const Cluster cluster = parse_link("pcie+eth10/node", h100(), 1);
  const Work work{.forward_s = 0.01, .backward_s = 0.02, .gradients = {kBucket, kBucket}};
  const double one = all_reduce_s(cluster, 2, kBucket);
  // The first leaves in the middle of backward, the second after the first.
  EXPECT_NEAR(step_time(work, cluster, 2).exposed_s, 0.01 + 2 * one - 0.02, 1e-12);
}

TEST(Steps, SmallGradientsShareABucket) {
  const Cluster cluster = parse_link("nvlink", h100(), 8);
  const std::int64_t mib = 1 << 20;
  const Work work{.backward_s = 0, .gradients = {mib, mib, mib, mib}};
  // The first bucket is full with one, the rest is one more.
  EXPECT_DOUBLE_EQ(step_time(work, cluster, 2).communication_s,
                   all_reduce_s(cluster, 2, 1.0 * mib) + all_reduce_s(cluster, 2, 3.0 * mib));
}

TEST(Steps, ShardedStateIsExposedAndDivided) {
  const Cluster cluster = parse_link("nvlink", h100(), 8);
  Work work{.forward_s = 1,
            .backward_s = 2,
            .accumulation = 2,
            .optimizer_s = 0.4,
            .gradients = {4'000'000},
            .parameter_bytes = 2'000'000,
            .sharding = Sharding::kOptimizer};
  StepTime step = step_time(work, cluster, 4);
  EXPECT_DOUBLE_EQ(step.optimizer_s, 0.1);
  EXPECT_DOUBLE_EQ(step.exposed_s, 2 * all_gather_s(cluster, 4, 4e6));
  work.sharding = Sharding::kFull;
  step = step_time(work, cluster, 4);
  EXPECT_DOUBLE_EQ(step.exposed_s,
                   2 * (2 * all_gather_s(cluster, 4, 2e6) + all_gather_s(cluster, 4, 4e6)));
  work.sharding = Sharding::kGradOp;
  EXPECT_DOUBLE_EQ(step_time(work, cluster, 4).exposed_s,
                   2 * (all_gather_s(cluster, 4, 2e6) + all_gather_s(cluster, 4, 4e6)));
  // Divided inside a node of 4 and copied between two: the ports of a node carry all gradients.
  work.sharding = Sharding::kFull;
  work.shard_ranks = 4;
  const Cluster nodes = parse_link("nvlink+ib100", h100(), 4);
  step = step_time(work, nodes, 8);
  EXPECT_DOUBLE_EQ(step.optimizer_s, 0.1);
  const double inside = 2 * all_gather_s(nodes, 4, 2e6) + all_gather_s(nodes, 4, 4e6);
  const double between = 8.4e-6 + 2 * 9.6e-6 + 4e6 / (0.9 * 50e9);
  EXPECT_NEAR(step.exposed_s, 2 * (inside + between), 1e-9);
}

// ---------------------------------------------------------------- published runs

// Tokens per second and GPU of MPT models: 2048 tokens a sequence, fully sharded. Facts of
// mosaicml/llm-foundry, scripts/train/benchmarking/README.md. The network of the H100s is not
// stated there and assumed to be ib400; that of the A100s is 1600 Gbit/s for a node.
// The first row of a group is the measured computation, the others are predicted.
struct Published {
  int gpus;
  std::int64_t micro_batch;
  double tokens_per_gpu;
};
struct Group {
  const char* model;
  double parameters;
  std::vector<Published> rows;
  std::int64_t accumulation = 1;
  const char* card = "H100";
  const char* link = "nvlink+ib400";
  int gradient_bytes = 4;  // 2 in the runs that are "PURE"
};

const std::vector<Group> kGroups{
    {"760m", 760'470'528, {{16, 24, 68551}, {32, 24, 67971}}},
    {"1b", 1'315'950'592, {{8, 14, 45455}, {16, 20, 46037}, {32, 20, 45130}, {64, 20, 44402}}},
    {"3b", 2'651'837'440, {{16, 10, 24142}, {32, 6, 23021}, {64, 6, 22525}}, 3},
};

Group a100(const char* model, double parameters, std::vector<Published> rows,
           const char* card = "A100-40GB") {
  return {model, parameters, std::move(rows), 1, card, "nvlink+ib1600/node", 2};
}

// Larger models, with activation checkpointing but for H100 13b. The accumulation of some rows
// differs; every micro-batch pays its collectives.
const std::vector<Group> kMoreGroups{
    {"13b", 12'853'954'560, {{8, 2, 4792}, {16, 2, 4767}, {32, 2, 4811}, {64, 2, 4800}}},
    {"30b", 29'975'214'080, {{8, 3, 2002}, {16, 10, 2263}, {32, 14, 2308}}},
    {"70b", 64'862'437'376, {{32, 2, 882}, {64, 8, 1039}}},
    a100("3b", 2'651'837'440, {{64, 6, 9736}, {128, 6, 9538}}),
    a100("7b", 6'658'859'008,
         {{8, 12, 3679}, {16, 16, 3645}, {32, 18, 3725}, {64, 18, 3665}, {128, 18, 3623}}),
    a100("13b", 12'853'954'560,
         {{8, 4, 1668}, {16, 10, 1993}, {32, 14, 1998}, {64, 16, 1976}, {128, 16, 1972}}),
    a100("30b", 29'975'214'080, {{32, 4, 857}, {128, 6, 865}}),
    a100("70b", 64'862'437'376, {{64, 2, 276}, {128, 4, 376}}),
    a100("70b, 80 GB", 64'862'437'376, {{32, 2, 373}, {64, 8, 410}}, "A100-80GB"),
};

// Gathers in bfloat16.
Work sharded_work(const Group& group, const Published& row, double seconds_per_sequence) {
  const double micro = seconds_per_sequence * static_cast<double>(row.micro_batch);
  return {.forward_s = micro / 3,
          .backward_s = 2 * micro / 3,
          .accumulation = static_cast<double>(group.accumulation),
          .gradients = {static_cast<std::int64_t>(group.gradient_bytes * group.parameters)},
          .parameter_bytes = static_cast<std::int64_t>(2 * group.parameters),
          .sharding = Sharding::kFull};
}

double report(const char* what, int ranks, double predicted, double published) {
  const double error = predicted / published - 1;
  std::printf("%-22s %4d ranks: predicted %9.1f, published %9.1f, error %+5.1f %%\n", what, ranks,
              predicted, published, 100 * error);
  return std::abs(error);
}

// The errors of a group's rows but the first.
std::vector<double> errors_of(const Group& group) {
  const Cluster cluster = parse_link(group.link, parse_devices(group.card).card, 8);
  const auto tokens = [&](const Published& row) {
    return 2048.0 * static_cast<double>(row.micro_batch * group.accumulation);
  };
  const Published& base = group.rows.front();
  const double measured = tokens(base) / base.tokens_per_gpu;
  const double exposed = step_time(sharded_work(group, base, 0), cluster, base.gpus).exposed_s;
  const double sequence =
      (measured - exposed) / static_cast<double>(base.micro_batch * group.accumulation);
  std::vector<double> errors;
  for (std::size_t i = 1; i < group.rows.size(); ++i) {
    const Published& row = group.rows[i];
    const double step = step_time(sharded_work(group, row, sequence), cluster, row.gpus).total_s();
    const std::string what = std::string(group.card) + " " + group.model;
    errors.push_back(report(what.c_str(), row.gpus, tokens(row) / step, row.tokens_per_gpu));
  }
  return errors;
}

double median_of(std::vector<double> errors) {
  std::ranges::sort(errors);
  const double median = (errors[errors.size() / 2] + errors[(errors.size() - 1) / 2]) / 2;
  std::printf("median error %.1f %% of %zu rows, largest %.1f %%\n", 100 * median, errors.size(),
              100 * errors.back());
  return median;
}

TEST(PublishedRuns, OfLargerModelsArePredicted) {
  std::vector<double> errors;
  for (const Group& group : kMoreGroups) {
    const std::vector<double> more = errors_of(group);
    errors.insert(errors.end(), more.begin(), more.end());
  }
  EXPECT_LE(median_of(errors), 0.1);
  EXPECT_LE(std::ranges::max(errors), 0.25);
}

TEST(PublishedRuns, ArePredictedWithinTenPercent) {
  std::vector<double> errors;
  for (const Group& group : kGroups) {
    const std::vector<double> more = errors_of(group);
    errors.insert(errors.end(), more.begin(), more.end());
    for (const double error : more) EXPECT_LT(error, 0.1);
  }
  // PyTorch's DDP over gloo, a GPT of 7.4 M parameters, 8 samples and one thread a rank, on a
  // machine of 16 CPUs, taken for 8 cores with two threads each. Rank 1 alone is the measurement.
  Cluster host = parse_link("loopback", {}, 16);
  host.cores = 8;
  const double alone = 8 / 18.0;
  const std::int64_t block = 4 * 789'760, embedding = 4 * 8192 * 256;
  const Work work{.forward_s = alone / 3,
                  .backward_s = 2 * alone / 3,
                  .gradients = {embedding, block, block, block, block, 4 * 128 * 256, embedding}};
  const std::vector<std::pair<int, double>> runs{{2, 35.4}, {4, 63.9}, {8, 123.8}, {16, 179}};
  for (const auto& [ranks, published] : runs)
    errors.push_back(
        report("gloo, 7.4M", ranks, 8 * ranks / step_time(work, host, ranks).total_s(), published));
  EXPECT_LE(median_of(errors), 0.1);
  EXPECT_LE(std::ranges::max(errors), 0.15);
}

// ---------------------------------------------------------------- ranks that divide layers

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
