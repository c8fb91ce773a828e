// Keys of a training file that are read together: fsdp, degrees of parallelism, precision. And
// TrainingArguments as a program sets them.
#include "lockstep/train/config_keys.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/models/family.h"
#include "lockstep/train/arguments.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/config.h"
#include "lockstep/train/effective_batch.h"

namespace lockstep::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// ---------------------------------------------------------------- the tables

bool has_example(std::string_view map, std::string_view name) {
  return std::ranges::any_of(section_keys(), [&](const SectionKey& key) {
    return key.map == map && key.name == name && !key.example.empty();
  });
}

TEST(ConfigKeys, NoNameIsInTwoTables) {
  std::set<std::string_view> table;
  for (const KeySpec& key : key_table()) EXPECT_TRUE(table.insert(key.name).second) << key.name;
  for (const OldKey& old : old_keys()) EXPECT_TRUE(table.insert(old.name).second) << old.name;
  const auto keys = training_keys();
  EXPECT_EQ(table, std::set<std::string_view>(keys.begin(), keys.end()));
  for (const SectionKey& key : section_keys())
    EXPECT_TRUE(key.example.empty() || table.insert(key.name).second) << key.name;
  for (const KeyHint& hint : key_hints()) {
    EXPECT_TRUE(table.insert(hint.name).second) << hint.name;
    EXPECT_TRUE(!hint.why.empty() || !hint.section.empty() || find_key(hint.use) != nullptr)
        << hint.name;
    if (hint.section.empty()) continue;
    ASSERT_TRUE(!hint.use.empty() || has_example(hint.section, hint.now)) << hint.name;
    EXPECT_THAT(hint_for_key(hint.name), HasSubstr(std::string(hint.now) + ": ")) << hint.name;
  }
  for (const OldKey& old : old_keys())
    EXPECT_TRUE(old.now.empty() || find_key(old.now) != nullptr) << old.name;
}

TEST(KeyHints, KnowTheWordsOfPeers) {
  const auto hint = [](const std::string& key) {
    return message_of([&] { resolve_config({.file = parse_yaml(key + ": 2", "t.yaml")}); });
  };
  EXPECT_THAT(hint("zero_optimization"),
              HasSubstr("is a key of DeepSpeed's that is not read here"));
  for (const auto& [peer, key] : std::map<std::string, std::string>{
           {"train_micro_batch_size_per_gpu", "per_device_train_batch_size"},
           {"micro_batch_size", "per_device_train_batch_size"},
           {"local_batch_size", "per_device_train_batch_size"},
           {"train_batch_size", "global_batch_size"},
           {"max_norm", "max_grad_norm"},
           {"gradient_clipping", "max_grad_norm"},
           {"pp", "pipeline_parallel_degree"},
           {"tp", "tensor_parallel_degree"},
           {"dp_shard", "data_parallel_shard_degree"}})
    EXPECT_THAT(hint(peer), HasSubstr("Did you mean " + key + "?"));
  EXPECT_THAT(hint("dp_replicate"), HasSubstr("it follows from the number of ranks"));
  EXPECT_THAT(hint("lora_r"), HasSubstr("Did you mean lora.r? Write lora: {r: 16, lora_alpha"));
  EXPECT_THAT(hint("load_in_4bit"), HasSubstr("Write model: {path: FOLDER, load_in_4bit: true}"));
  EXPECT_THAT(hint("bnb_4bit_quant_type"), HasSubstr("is a key of TRL's"));
  EXPECT_THAT(hint("nproc_per_node"), HasSubstr("`lockstep train FILE --nproc-per-node=2`"));
}

// ---------------------------------------------------------------- fsdp, fsdp_config

FsdpPlan plan(const std::string& words, const std::string& config = "") {
  TrainingArguments a;
  a.fsdp = words;
  if (!config.empty()) a.fsdp_config = std::make_shared<Node>(parse_json(config, "test"));
  return fsdp_plan(a);
}

TEST(Fsdp, IsReadAsHuggingFaceWritesIt) {
  EXPECT_FALSE(fsdp_plan({}).on);
  EXPECT_FALSE(plan("").on);
  EXPECT_TRUE(plan("full_shard auto_wrap").on);
  EXPECT_TRUE(plan("FULL_SHARD").reshard_after_forward);  // as Accelerate writes it
  EXPECT_FALSE(plan("auto_wrap shard_grad_op").reshard_after_forward);
  EXPECT_FALSE(plan("full_shard", R"({"reshard_after_forward": false})").reshard_after_forward);
  EXPECT_EQ(plan("full_shard").param_dtype, "");
  const FsdpPlan types = plan("full_shard", R"({"fsdp_mixed_precision_policy":
      {"param_dtype": "torch.bfloat16", "reduce_dtype": "fp32"}})");
  EXPECT_EQ(types.param_dtype, "bfloat16");
  EXPECT_EQ(types.reduce_dtype, "float32");
  EXPECT_FALSE(plan("full_shard").hybrid);
  EXPECT_TRUE(plan("hybrid_shard").hybrid);
  EXPECT_TRUE(plan("hybrid_shard").reshard_after_forward);
  EXPECT_FALSE(plan("hybrid_shard_zero2").reshard_after_forward);
  // Accelerate's spelling, with a list.
  EXPECT_TRUE(plan("full_shard", R"({"fsdp_version": 2, "fsdp_activation_checkpointing": true,
                                     "transformer_layer_cls_to_wrap": ["GPT2Block"]})")
                  .activation_checkpointing);
  EXPECT_FALSE(plan("", R"({"activation_checkpointing": true})").activation_checkpointing);
  EXPECT_FALSE(plan("full_shard").cpu_offload);
  EXPECT_TRUE(plan("offload full_shard").cpu_offload);
  EXPECT_TRUE(plan("full_shard", R"({"cpu_offload": true})").cpu_offload);
  EXPECT_TRUE(plan("full_shard", R"({"fsdp_offload_params": true})").cpu_offload);
  EXPECT_FALSE(plan("full_shard", R"({"fsdp_offload_params": false})").cpu_offload);
  EXPECT_FALSE(plan("", R"({"cpu_offload": true})").cpu_offload);
}

TEST(Fsdp, KnowsTheBlocksOfEveryFamilyByTransformersNames) {
  for (const models::Family* family : models::known_families()) {
    std::string name(family->classes.back());  // "LlamaModel"
    ASSERT_TRUE(name.ends_with("Model")) << name;
    name.erase(name.size() - 5);
    name += family->type == "gpt2" ? "Block" : "DecoderLayer";
    EXPECT_TRUE(plan("full_shard", R"({"transformer_layer_cls_to_wrap": ")" + name + R"("})").on);
  }
}

TEST(Fsdp, IsATextOrAList) {
  TrainingArguments a;
  assign(a, *find_key("fsdp"), texts_node({"full_shard", "auto_wrap"}));
  EXPECT_EQ(a.fsdp, "full_shard auto_wrap");
  assign(a, *find_key("fsdp"), text_node("shard_grad_op"));
  EXPECT_EQ(a.fsdp, "shard_grad_op");
  assign(a, *find_key("fsdp"), text_node(""));
  EXPECT_FALSE(fsdp_plan(a).on);
  assign(a, *find_key("fsdp"), Node{});
  EXPECT_FALSE(a.fsdp.has_value());
}

TEST(Fsdp, CheckpointsActivationsByEitherKey) {
  TrainingArguments a;
  EXPECT_FALSE(checkpoints_activations(a));
  a.fsdp = "full_shard";
  a.fsdp_config =
      std::make_shared<Node>(parse_json(R"({"activation_checkpointing": true})", "test"));
  EXPECT_TRUE(checkpoints_activations(a));
  a = {};
  a.gradient_checkpointing = true;
  EXPECT_TRUE(checkpoints_activations(a));
}

// What `accelerate launch` sets, and `lockstep run` from Accelerate's file.
TEST(Fsdp, TheLauncherSaysItWhereTheTrainingFileDoesNot) {
  const auto read = [](const std::string& yaml, Environment environment) {
    environment.emplace("ACCELERATE_USE_FSDP", "true");
    return fsdp_plan(
        resolve_config({.file = parse_yaml(yaml, "t.yaml"), .environment = environment}).arguments);
  };
  EXPECT_TRUE(read("", {}).on);
  EXPECT_TRUE(read("", {}).reshard_after_forward);
  const FsdpPlan plan = read("", {{"FSDP_VERSION", "2"},
                                  {"FSDP_RESHARD_AFTER_FORWARD", "False"},
                                  {"FSDP_ACTIVATION_CHECKPOINTING", "true"},
                                  {"FSDP_OFFLOAD_PARAMS", "true"},
                                  {"FSDP_TRANSFORMER_CLS_TO_WRAP", "GPT2Block"}});
  EXPECT_FALSE(plan.reshard_after_forward);
  EXPECT_TRUE(plan.cpu_offload);
  EXPECT_TRUE(plan.activation_checkpointing);
  EXPECT_TRUE(read("fsdp: hybrid_shard\n", {{"FSDP_ACTIVATION_CHECKPOINTING", "true"}}).hybrid);
  EXPECT_FALSE(read("fsdp: full_shard\n", {{"FSDP_ACTIVATION_CHECKPOINTING", "true"}})
                   .activation_checkpointing);
  EXPECT_THAT(message_of([&] { read("", {{"FSDP_VERSION", "1"}}); }),
              HasSubstr("FSDP_VERSION: 1 is not supported"));
}

// As files for PyTorch's first FSDP have them.
TEST(Fsdp, KeysOfTheFirstFsdpHaveNoEffect) {
  const Config config = resolve_config(
      {.file = parse_yaml("fsdp: full_shard\n"
                          "fsdp_config: {fsdp_backward_prefetch: BACKWARD_PRE, "
                          "use_orig_params: true, state_dict_type: SHARDED_STATE_DICT}\n",
                          "t.yaml")});
  EXPECT_TRUE(fsdp_plan(config.arguments).on);
  EXPECT_THAT(
      config.notes,
      ::testing::ElementsAre(
          HasSubstr(": fsdp_config.fsdp_backward_prefetch has no effect: the next block is always "
                    "gathered while one computes"),
          HasSubstr("fsdp_config.use_orig_params has no effect: parameters always keep their"),
          HasSubstr("fsdp_config.state_dict_type has no effect: ranks write their parts")));
}

struct FsdpMistake {
  std::string yaml, text;
};

TEST(Fsdp, EveryMistakeIsNamed) {
  for (const FsdpMistake& one : std::vector<FsdpMistake>{
           {"fsdp: full_shrd\n",
            "t.yaml:1:1: fsdp: 'full_shrd' is none of full_shard, shard_grad_op, hybrid_shard, "
            "hybrid_shard_zero2, offload and auto_wrap. Did you mean full_shard?"},
           {"fsdp: offload\n", "t.yaml:1:1: fsdp: 'offload' does not say how to divide the model."},
           {"fsdp: auto_wrap\n",
            "t.yaml:1:1: fsdp: 'auto_wrap' does not say how to divide the model."},
           {"fsdp: full_shard hybrid_shard\n",
            "t.yaml:1:1: fsdp: 'full_shard hybrid_shard' names two ways to divide the model."},
           {"fsdp: 3\n", "t.yaml:1:1: fsdp: '3' is none of"},
           {"fsdp: full_shard\nfsdp_config: folder/fsdp.json\n",
            "t.yaml:2:14: fsdp_config must be a map"},
           {"fsdp: full_shard\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\n",
            "t.yaml:2:1: fsdp_config.fsdp_sharding_strategy is the key fsdp here. Write fsdp: "},
           {"fsdp: full_shard\nfsdp_config: {xla: true}\n",
            "t.yaml:2:15: fsdp_config has no key 'xla'."},
           {"fsdp: full_shard\nfsdp_config: {version: 1}\n",
            "t.yaml:2:1: fsdp_config.version must be 2"},
           {"fsdp: full_shard\nfsdp_config: {fsdp_version: 1}\n",
            "t.yaml:2:1: fsdp_config.fsdp_version must be 2"},
           {"fsdp: full_shard\nfsdp_config: {fsdp_versio: 2, xla: true}\n",
            "[config] 2 mistakes:\n"
            "  t.yaml:2:15: fsdp_config has no key 'fsdp_versio'. Did you mean fsdp_version?\n"
            "  t.yaml:2:31: fsdp_config has no key 'xla'."},
           {"fsdp: full_shrd\nfsdp_config: {versio: 2}\n",
            "t.yaml:2:15: fsdp_config has no key 'versio'. Did you mean version?"},
           {"fsdp: hybrid_shard\ndata_parallel_shard_degree: 2\n",
            "t.yaml:1:1: hybrid_shard divides the model over the ranks of a host, and "
            "data_parallel_shard_degree says another number."},
           {"fsdp: shard_grad_op\nfsdp_config: {reshard_after_forward: true}\n",
            "t.yaml:2:1: fsdp_config.reshard_after_forward: true contradicts shard_grad_op"},
           {"fsdp: full_shard\nfsdp_config: {transformer_layer_cls_to_wrap: BertLayer}\n",
            "t.yaml:2:1: fsdp_config.transformer_layer_cls_to_wrap: there is no 'BertLayer' here."},
           {"fsdp: full_shard\nfsdp_config: {mixed_precision_policy: {param_dtype: int8}}\n",
            "t.yaml:2:1: fsdp_config.mixed_precision_policy.param_dtype: 'int8' is none of"},
           {"fsdp: full_shard\nshard_optimizer: true\n",
            "t.yaml:1:1: fsdp divides the optimizer's state with the parameters."},
           {"gradient_checkpointing: true\nfsdp: full_shard\n"
            "fsdp_config: {activation_checkpointing: true}\n",
            "t.yaml:1:1: gradient_checkpointing and fsdp_config.activation_checkpointing are the "
            "same."},
           {"tensor_parallel_degree: 2\nshard_optimizer: true\n", "Delete shard_optimizer."},
           {"tensor_parallel_degree: 2\nauto_find_batch_size: true\n",
            "batches are tried on the whole model, of which tensor parallel ranks hold slices."},
           {"tensor_parallel_degree: 2\nelastic_gpu: true\n", "batches are tried on the whole"},
           {"tensor_parallel_degree: 2\nmixed_precision: fp8\nlora: {r: 4}\n",
            "a frozen base is stored in fp8 with its transpose"},
           {"tensor_parallel_degree: 2\noptim: muon\n",
            "muon and adafactor step whole matrices, and tensor parallel ranks have slices of "
            "them. Use adamw, adam, lion, rmsprop or sgd."},
           {"tensor_parallel_degree: 0\n", "tensor_parallel_degree"}}) {
    const std::string said =
        message_of([&] { resolve_config({.file = parse_yaml(one.yaml, "t.yaml")}); });
    EXPECT_THAT(said, HasSubstr(one.text)) << one.yaml;
  }
}

// ---------------------------------------------------------------- pipeline, tensor degree

// Ranks that hold one copy of the model see the same samples and count once.
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

TEST(Degrees, ElasticGpuLowersTheBatchUntilItDivides) {
  TrainingArguments a = degrees(1, 1);
  a.global_batch_size = 15;
  EXPECT_THAT(message_of([&] { check_arguments(a); }), HasSubstr("not a multiple of 4"));
  a.elastic_gpu = true;
  EXPECT_NO_THROW(check_arguments(a));
  a.global_batch_size.reset();
  a.tokens_per_update = 100;
  a.max_seq_len = 64;
  EXPECT_EQ(message_of([&] { check_arguments(a); }),
            "[config] tokens_per_update 100 is not a multiple of 64 (batch 1 x 64 tokens). The "
            "nearest that are: 64 and 128.");
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

// ---------------------------------------------------------------- mixed_precision, fp8

Config with_precision(const std::string& file, const std::vector<std::string>& flags = {}) {
  return resolve_config({.file = parse_yaml(file, "t.yaml"), .flags = flags});
}

TEST(PrecisionKeys, MixedPrecisionSetsWhatItStandsFor) {
  const Config fp8 = with_precision("mixed_precision: fp8\nfp8: {recipe: rowwise}\n");
  EXPECT_TRUE(fp8.arguments.bf16);
  EXPECT_EQ(fp8.setting("bf16").where, "mixed_precision");
  EXPECT_EQ(fp8_recipe_name(fp8.arguments), "rowwise");
  EXPECT_EQ(fp8_recipe_name(with_precision("mixed_precision: fp8\n").arguments), "tensorwise");
  const Config bf16 = with_precision("mixed_precision: bf16\n");
  EXPECT_TRUE(bf16.arguments.bf16);
  EXPECT_EQ(fp8_recipe_name(bf16.arguments), "");
  EXPECT_TRUE(with_precision("", {"--mixed_precision=fp16"}).arguments.fp16);
  EXPECT_FALSE(with_precision("mixed_precision: no\n").arguments.bf16);
  EXPECT_EQ(with_precision("bf16: true\n", {"--mixed_precision=fp8"}).setting("bf16").where,
            "t.yaml:1:1");
}

TEST(PrecisionKeys, MistakesAreNamedWithPlaceAndRemedy) {
  const std::pair<const char*, const char*> mistakes[] = {
      {"mixed_precision: int8\n", "t.yaml:1:18: mixed_precision must be no, fp16, bf16 or fp8"},
      {"mixed_precision: fp8\nbf16: false\n",
       "t.yaml:1:1: mixed_precision is fp8, and bf16 is false. Keep one."},
      {"mixed_precision: fp16\nbf16: true\n",
       "t.yaml:1:1: mixed_precision is fp16, and bf16 is true. Keep one."},
      {"mixed_precision: fp8\nfp16: true\n",
       "t.yaml:1:1: mixed_precision is fp8, and fp16 is true. Keep one."},
      {"mixed_precision: no\nbf16: true\n",
       "t.yaml:1:1: mixed_precision is no, and bf16 or fp16 is true. Keep one."},
      {"fp8: {recipe: rowwise}\n",
       "t.yaml:1:1: fp8 says how to scale, and mixed_precision is not fp8. Write mixed_precision: "
       "fp8, or delete it."},
      {"mixed_precision: fp8\nfp8: {recipe: delayed}\n",
       "t.yaml:2:15: fp8.recipe must be tensorwise or rowwise"},
      {"mixed_precision: fp8\nfp8: rowwise\n",
       "t.yaml:2:6: fp8 must be a map, and 'rowwise' is a string. Write {recipe: rowwise}"},
      {"mixed_precision: fp8\nfp8: {backend: TE}\n", "t.yaml:2:7: fp8 has no key 'backend'"}};
  for (const auto& [yaml, text] : mistakes) {
    const std::string& file = yaml;
    EXPECT_THAT(message_of([&] { with_precision(file); }), HasSubstr(text)) << file;
  }
}

}  // namespace

}  // namespace lockstep::train

// ---------------------------------------------------------------- TrainingArguments in a program

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
