// What `fsdp` and `fsdp_config` of a training file ask for, with Hugging Face's words.
//
//   fsdp: full_shard auto_wrap                 # or [full_shard, auto_wrap]
//   fsdp_config:
//     reshard_after_forward: true
//     mixed_precision_policy: {param_dtype: bfloat16, reduce_dtype: float32}
//
// Pure functions.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/document.h"
#include "lockstep/train/arguments.h"

namespace lockstep::train {

struct FsdpPlan {
  bool on = false;
  bool hybrid = false;  // divided inside a host, copied between hosts
  bool reshard_after_forward = true;
  bool activation_checkpointing = false;
  bool cpu_offload = false;  // rows, their gradients and the state in the host's memory
  std::string param_dtype{}, reduce_dtype{};  // "bfloat16", "float16", "float32"; empty: their own
  // Keys of PyTorch's first FSDP that were given, each with why it has no effect.
  std::vector<std::pair<std::string, std::string_view>> idle{};
};

// Throws UsageError with every key, or the word, that has no meaning here.
FsdpPlan fsdp_plan(const TrainingArguments& arguments);
// The same, but adds the mistakes to `problems`.
FsdpPlan fsdp_plan(const TrainingArguments& arguments, Problems& problems);

// `fsdp` as one text, from a text or a list of words.
std::string fsdp_words(const Node& node);

// gradient_checkpointing, or fsdp_config's activation_checkpointing.
bool checkpoints_activations(const TrainingArguments& arguments);

}  // namespace lockstep::train
