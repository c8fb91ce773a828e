#include "cli/plan_training.h"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/config_keys.h"
#include "lockstep/train/rule_options.h"
#include "observe/plan/ranking.h"

namespace lockstep::cli {

plan::Training training_of(const train::Config& config, const TaskConfig& task) {
  const TrainingArguments& arguments = config.arguments;
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
    training.offload = fsdp.cpu_offload;
    training.shares_memory = fsdp.param_dtype.empty();  // what travels in another type is copied
  }
  training.shard_degree = static_cast<int>(arguments.data_parallel_shard_degree.value_or(0));
  training.shares_memory &= arguments.ddp_backend.value_or("shm") == "shm";
  training.captured = arguments.compile_model != "false";
  training.sharded_optimizer = arguments.shard_optimizer == "true";
  training.may_shard = arguments.shard_optimizer != "false";
  training.adapts = arguments.elastic_gpu            ? "elastic_gpu"
                    : arguments.auto_find_batch_size ? "auto_find_batch_size"
                                                     : "";
  training.state_bytes = train::state_bytes(arguments, plan::trained_tensors(model));
  training.device_map = task.model.device_map.has_value();
  training.built_whole = arguments.auto_find_batch_size || model.causal_lm() == nullptr;
  training.fp8 = arguments.mixed_precision == "fp8";
  training.rowwise = train::fp8_recipe_name(arguments) == "rowwise";
  training.may_fp8 = true;
  training.pipeline = static_cast<int>(arguments.pipeline_parallel_degree);
  training.gpipe = arguments.pipeline_parallel_schedule == "GPipe";
  if (arguments.pipeline_parallel_schedule == "Interleaved1F1B") training.chunks = 2;
  training.tensor = static_cast<int>(arguments.tensor_parallel_degree);
  if (config.setting("sequence_parallel").origin != train::Origin::kDefault)
    training.sequence = arguments.sequence_parallel;
  // What `lockstep train` refuses beside them and no way changes. elastic_gpu follows slices that
  // were measured, and no stages.
  const bool plain = arguments.shard_optimizer != "true";
  training.may_pipeline = training.pipeline > 1 || (plain && training.adapts.empty());
  training.may_tensor = plain && arguments.optim != "muon" && arguments.optim != "adafactor";
  return training;
}

namespace {

// As fastest_batch() does, with what was measured in place of the estimate.
plan::Choice choose_for(const plan::Training& training, const plan::Card& card, int ranks,
                        const std::optional<plan::Measurement>& measured) {
  if (!measured) return plan::fastest_batch(training, card, ranks);
  plan::Training held = training;
  held.global_batch = measured->batch * measured->accumulation * measured->parts.replicas();
  held.checkpointing = measured->checkpointing;
  return plan::make_choice(held, card, measured->parts, measured->batch);
}

void set_arguments(TrainingArguments& arguments, const plan::Training& training,
                   const plan::Choice& choice, bool measured) {
  arguments.per_device_train_batch_size = choice.batch;
  // With global_batch_size or tokens_per_update the accumulation follows from the batch.
  if (!training.global_batch) arguments.gradient_accumulation_steps = choice.accumulation;
  if (choice.slices > 1) {
    arguments.tensor_parallel_degree = choice.slices;
    arguments.sequence_parallel = choice.sequence;
    arguments.elastic_gpu = false;  // no batch is tried on a model that no rank has whole
  }
  if (arguments.shard_optimizer != "auto" || training.fsdp) return;
  if (choice.strategy == plan::Strategy::kShardedOptimizer) arguments.shard_optimizer = "true";
  if (measured && choice.strategy == plan::Strategy::kDdp) arguments.shard_optimizer = "false";
  if (const std::string_view word = fsdp_word(choice.strategy); !word.empty())
    arguments.fsdp = std::string(word);
}

// "DDP on 4 GPUs", "1 CPU rank".
std::string place_text(const plan::Choice& choice, const plan::Card& card, int ranks) {
  const std::string places =
      fmt::format("{} {}{}", ranks, card.cpu ? "CPU rank" : "GPU", ranks == 1 ? "" : "s");
  return ranks == 1 ? places : fmt::format("{} on {}", parts_text(choice, card.cpu), places);
}

}  // namespace

TrainingArguments with_shared_batch(TrainingArguments arguments, int copies) {
  while (const auto size = train::update_size(arguments)) {
    const std::string uneven = train::uneven_text(*size, copies);
    if (uneven.empty()) break;
    if (arguments.per_device_train_batch_size == 1)
      throw UsageError("config", "elastic_gpu may choose any batch per device, and even so {}",
                       uneven);
    --arguments.per_device_train_batch_size;
  }
  return arguments;
}

std::string apply_plan(TrainingArguments& arguments, const plan::Training& training,
                       const plan::Card& card, int ranks,
                       std::optional<plan::Measurement> measured) {
  if (measured && measured->memory_bytes > plan::usable_bytes(card)) measured.reset();
  // A rank does not have the GPUs of a device map to itself.
  if (training.device_map) return {};
  with_shared_batch(arguments, ranks);  // or the refusal
  const plan::Choice choice = choose_for(training, card, ranks, measured);
  const bool split = choice.strategy == plan::Strategy::kSplit;
  if (!split) set_arguments(arguments, training, choice, measured.has_value());
  if (measured && !training.fixed_checkpointing)
    arguments.gradient_checkpointing = measured->checkpointing;
  std::string text = fmt::format(
      "elastic_gpu: {}: {} per device x {} accumulation x {} rank{} = global batch {}, "
      "about {:.1f} GiB each",
      place_text(choice, card, ranks), choice.batch, choice.accumulation, choice.replicas(),
      choice.replicas() == 1 ? "" : "s", choice.global_batch,
      static_cast<double>(choice.memory.total()) / (1u << 30));
  if (measured)
    text += fmt::format("; {:.1f} ms a step when `lockstep plan --probe` ran it{}",
                        1e3 * measured->step_s,
                        measured->disturbance.empty() ? "" : " while " + measured->disturbance);
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
