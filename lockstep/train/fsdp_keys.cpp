#include "lockstep/train/fsdp_keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/problems.h"
#include "lockstep/core/text.h"

namespace lockstep::train {
namespace {

// The blocks of the bundled families, by the names that transformers has for them.
constexpr std::array<std::string_view, 9> kLayers{
    "GPT2Block",          "LlamaDecoderLayer",   "Phi3DecoderLayer",
    "Qwen2DecoderLayer",  "Qwen3DecoderLayer",   "MistralDecoderLayer",
    "Gemma2DecoderLayer", "MixtralDecoderLayer", "Starcoder2DecoderLayer"};

// Keys of PyTorch's first FSDP, and of Hugging Face's files for it.
constexpr const char* kOwnBlocks = "the units are a model's own blocks";
constexpr const char* kAhead = "the next block is always gathered while one computes, and no more";
constexpr std::pair<const char*, const char*> kFirstFsdp[] = {
    {"auto_wrap_policy", kOwnBlocks},
    {"min_num_params", kOwnBlocks},
    {"backward_prefetch", kAhead},
    {"forward_prefetch", kAhead},
    {"limit_all_gathers", kAhead},
    {"use_orig_params", "parameters always keep their names and shapes"},
    {"sync_module_states", "all ranks begin with rank 0's weights"},
    {"cpu_ram_efficient_loading", "every rank reads the part of the weights that it holds"},
    {"state_dict_type", "ranks write their parts of one folder, which any number of ranks reads"}};

void check_layer(const Node& node, const std::string& key) {
  const std::string name = as_string(node, key);
  if (std::ranges::find(kLayers, name) == kLayers.end())
    throw UsageError("config",
                     "{}: there is no '{}' here. The units are a model's own blocks, so the key is "
                     "not needed.",
                     key, name);
}

void read_words(const std::string& text, FsdpPlan& plan) {
  std::istringstream words(text);
  bool whole_between = false, divides = false;
  for (std::string word; words >> word;) {
    if (word == "auto_wrap") continue;  // the units are always a model's blocks
    if (word == "offload") {
      plan.cpu_offload = true;
      continue;
    }
    static const std::vector<std::string> ways{"full_shard", "shard_grad_op", "hybrid_shard",
                                               "hybrid_shard_zero2"};
    if (std::ranges::find(ways, word) == ways.end())
      throw UsageError("config",
                       "fsdp: '{}' is none of full_shard, shard_grad_op, hybrid_shard, "
                       "hybrid_shard_zero2, offload and auto_wrap.{}",
                       word, did_you_mean(word, ways));
    if (std::exchange(divides, true))
      throw UsageError("config", "fsdp: '{}' names two ways to divide the model. Keep one.", text);
    plan.hybrid = word.starts_with("hybrid");
    whole_between = word == "shard_grad_op" || word == "hybrid_shard_zero2";
  }
  if (!divides && !text.empty())
    throw UsageError("config",
                     "fsdp: '{}' does not say how to divide the model. Add full_shard, "
                     "shard_grad_op or hybrid_shard.",
                     text);
  plan.on = divides;
  plan.reshard_after_forward = !whole_between;
}

// Accelerate's plugin has the map under this name, with PyTorch's fields.
void read_types(const Node& policy, const std::string& what, FsdpPlan& plan, Problems& problems) {
  MapReader keys(policy, what, &problems);
  const auto type = [&](const char* key) {
    std::string name = keys.text(key, "");
    if (name.starts_with("torch.")) name = name.substr(6);
    for (const auto& [brief, whole] : {std::pair("bf16", "bfloat16"), std::pair("fp16", "float16"),
                                       std::pair("fp32", "float32")})
      if (name == brief) name = whole;
    if (!name.empty() && name != "bfloat16" && name != "float16" && name != "float32")
      problems.add(
          fmt::format("{}.{}: '{}' is none of bfloat16, float16 and float32.", what, key, name));
    return name;
  };
  plan.param_dtype = type("param_dtype");
  plan.reduce_dtype = type("reduce_dtype");
  keys.finish();
}

void read_config(const Node& config, FsdpPlan& plan, Problems& problems) {
  MapReader keys(config, "fsdp_config", &problems);
  // Accelerate's names begin with fsdp_, and Hugging Face's Trainer takes both. Messages have the
  // one that was written.
  const auto written = [&](const std::string& key) {
    const bool plain = keys.has(key), prefixed = keys.has("fsdp_" + key);
    return prefixed && !plain ? "fsdp_" + key : key;
  };
  const std::string version = written("version");
  if (keys.integer(version, 2) != 2)
    problems.add(
        fmt::format("fsdp_config.{} must be 2: parameters are divided one by one, as PyTorch's "
                    "fully_shard does.",
                    version));
  const std::string after = written("reshard_after_forward");
  const bool reshard = keys.boolean(after, plan.reshard_after_forward);
  if (reshard && !plan.reshard_after_forward)
    problems.add(
        fmt::format("fsdp_config.{}: true contradicts shard_grad_op, which keeps blocks whole "
                    "until backward. Write fsdp: full_shard.",
                    after));
  plan.reshard_after_forward = reshard;
  plan.activation_checkpointing = keys.boolean(written("activation_checkpointing"), false);
  // Accelerate's name for it is the second.
  for (const char* key : {"cpu_offload", "offload_params"})
    plan.cpu_offload |= keys.boolean(written(key), false);
  const std::string to_wrap = written("transformer_layer_cls_to_wrap");
  if (const Node* layers = keys.node(to_wrap)) {
    const std::vector<Node> one{*layers};
    for (const Node& layer : layers->is(NodeKind::kList) ? layers->items : one)
      problems.attempt([&] { check_layer(layer, "fsdp_config." + to_wrap); });
  }
  const std::string types = written("mixed_precision_policy");
  if (const Node* policy = keys.node(types))
    problems.attempt([&] { read_types(*policy, "fsdp_config." + types, plan, problems); });
  for (const auto& [key, why] : kFirstFsdp)
    if (const std::string name = written(key); keys.has(name)) plan.idle.emplace_back(name, why);
  keys.finish();
}

}  // namespace

std::string fsdp_words(const Node& node) {
  if (!node.is(NodeKind::kList)) return as_string(node, "fsdp");
  std::string text;
  for (const Node& item : node.items) text += (text.empty() ? "" : " ") + as_string(item, "fsdp");
  return text;
}

FsdpPlan fsdp_plan(const TrainingArguments& arguments) {
  Problems problems;
  const FsdpPlan plan = fsdp_plan(arguments, problems);
  problems.raise();
  return plan;
}

FsdpPlan fsdp_plan(const TrainingArguments& arguments, Problems& problems) {
  FsdpPlan plan;
  if (arguments.fsdp) problems.attempt([&] { read_words(*arguments.fsdp, plan); });
  if (arguments.fsdp_config)
    problems.attempt([&] { read_config(*arguments.fsdp_config, plan, problems); });
  if (!plan.on) plan.activation_checkpointing = plan.cpu_offload = false;
  return plan;
}

bool checkpoints_activations(const TrainingArguments& arguments) {
  return arguments.gradient_checkpointing || fsdp_plan(arguments).activation_checkpointing;
}

}  // namespace lockstep::train
