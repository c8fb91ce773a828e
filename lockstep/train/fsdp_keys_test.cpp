// `fsdp` and `fsdp_config` of a training file: what they ask for, and every mistake with its place.
#include "lockstep/train/fsdp_keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/models/family.h"
#include "lockstep/train/config.h"
#include "lockstep/train/config_keys.h"

namespace lockstep::train {
namespace {

using ::testing::HasSubstr;

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
  EXPECT_TRUE(plan("full_shard").reshard_after_forward);
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
  try {
    read("", {{"FSDP_VERSION", "1"}});
    ADD_FAILURE();
  } catch (const UsageError& e) {
    EXPECT_THAT(e.what(), HasSubstr("FSDP_VERSION: 1 is not supported"));
  }
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
    std::string said = "(nothing thrown)";
    try {
      resolve_config({.file = parse_yaml(one.yaml, "t.yaml")});
    } catch (const UsageError& e) {
      said = e.what();
    }
    EXPECT_THAT(said, HasSubstr(one.text)) << one.yaml;
  }
}

}  // namespace
}  // namespace lockstep::train
