#include "cli/plan_training.h"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/train/fsdp_keys.h"
#include "lockstep/train/rule_options.h"
#include "observe/plan/ranking.h"

namespace lockstep::cli {

plan::Training training_of(const TrainingArguments& arguments, const TaskConfig& task) {
  plan::Training training;
  plan::Model& model = training.model;
  if (task.model.hugging_face) {
    model.config = *task.model.hugging_face;
  } else if (task.model.name == "gpt") {
    model.config = models::CausalLmConfig{.model = gpt_config(task.model)};
  } else if (task.model.name == "mlp") {
    model.config = mlp_config(task);
  } else {
    model.config = resnet_config(task);
  }
  model.lora = task.lora;
  model.image_size = task.data.image_size;
  if (model.causal_lm() != nullptr) model.length = task.data.length;
  training.batch = arguments.per_device_train_batch_size;
  training.accumulation = arguments.gradient_accumulation_steps;
  training.global_batch = arguments.global_batch_size;
  if (arguments.tokens_per_update)
    training.global_batch = std::max<std::int64_t>(
        1, *arguments.tokens_per_update / arguments.max_seq_len.value_or(model.length));
  training.half = arguments.bf16 || arguments.fp16;
  training.bf16 = arguments.bf16;
  training.tf32 = arguments.tf32.value_or(false);
  training.checkpointing = train::checkpoints_activations(arguments);
  if (const train::FsdpPlan fsdp = train::fsdp_plan(arguments); fsdp.on) {
    training.fsdp = fsdp.hybrid                  ? plan::Strategy::kHybridShard
                    : fsdp.reshard_after_forward ? plan::Strategy::kFullShard
                                                 : plan::Strategy::kShardGradOp;
    training.fixed_checkpointing = fsdp.activation_checkpointing;
  }
  training.captured = arguments.compile_model != "false";
  training.sharded_optimizer = arguments.shard_optimizer == "true";
  training.may_shard = arguments.shard_optimizer != "false";
  training.adapts = arguments.elastic_gpu            ? "elastic_gpu"
                    : arguments.auto_find_batch_size ? "auto_find_batch_size"
                                                     : "";
  training.state_bytes = train::state_bytes(arguments, plan::trained_tensors(model));
  training.device_map = task.model.device_map.has_value();
  return training;
}

std::string apply_plan(TrainingArguments& arguments, const plan::Training& training,
                       const plan::Card& card, int ranks) {
  // A rank does not have the GPUs of a device map to itself.
  if (training.device_map || (training.global_batch && *training.global_batch % ranks != 0))
    return {};
  const plan::Choice choice = plan::fastest_batch(training, card, ranks);
  const bool split = choice.stages > 1;
  const bool sharded = choice.strategy == plan::Strategy::kShardedOptimizer;
  if (!split) {
    arguments.per_device_train_batch_size = choice.batch;
    // With global_batch_size or tokens_per_update the accumulation follows from the batch.
    if (!training.global_batch) arguments.gradient_accumulation_steps = choice.accumulation;
    const bool may_shard = arguments.shard_optimizer == "auto" && !training.fsdp;
    if (sharded && may_shard) arguments.shard_optimizer = "true";
    if (choice.strategy == plan::Strategy::kFullShard && may_shard)
      arguments.fsdp = fsdp_word(choice.strategy);
  }
  std::string text = fmt::format(
      "elastic_gpu: {} on {} {}: {} per device x {} accumulation x {} rank{} = global batch {}, "
      "about {:.1f} GiB each",
      strategy_text(choice.strategy, choice.gpus), ranks, card.cpu ? "CPU ranks" : card.name,
      choice.batch, choice.accumulation, choice.replicas(), choice.replicas() == 1 ? "" : "s",
      choice.global_batch, static_cast<double>(choice.memory.total()) / (1u << 30));
  if (!choice.fits)
    text += fmt::format(" of {:.1f}: it may not fit (`lockstep plan` says what to change)",
                        static_cast<double>(card.memory_bytes) / (1u << 30));
  if (split)
    text +=
        ". Ranks cannot split a model; training stays data parallel as it is written. Set "
        "model.device_map: balanced and start one rank";
  return text;
}

}  // namespace lockstep::cli
