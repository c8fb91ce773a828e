#include "lockstep/core/config_owner.h"

#include <algorithm>

namespace lockstep {
namespace {

constexpr std::string_view kTraining[] = {
    "model",
    "data",
    "dataset_dir",
    "max_seq_len",
    "preset",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "tokens_per_update",
    "num_train_epochs",
    "max_steps",
    "auto_find_batch_size",
    "average_tokens_across_devices",
    "optim",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "momentum",
    "max_grad_norm",
    "shard_optimizer",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "label_smoothing_factor",
    "gradient_checkpointing",
    "compile_model",
    "bf16",
    "fp16",
    "tf32",
    "use_cpu",
    "seed",
    "data_seed",
    "full_determinism",
    "elastic_gpu",
    "logging_strategy",
    "logging_steps",
    "logging_first_step",
    "logging_nan_inf_filter",
    "log_level",
    "log_level_replica",
    "log_on_each_node",
    "disable_tqdm",
    "report_to",
    "run_name",
    "eval_strategy",
    "eval_steps",
    "early_stopping_patience",
    "early_stopping_threshold",
    "eval_delay",
    "eval_on_start",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "output_dir",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "save_only_model",
    "save_on_each_node",
    "enable_jit_checkpoint",
    "resume_from_checkpoint",
    "ignore_data_skip",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_drop_last",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "ddp_backend",
    "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers",
    "ddp_static_graph",
    "ddp_timeout",
    // Older spellings.
    "warmup_ratio",
    "evaluation_strategy",
    "no_cuda",
    "logging_dir",
    "save_safetensors",
    "local_rank",
    "torch_compile",
};

constexpr std::string_view kLauncher[] = {
    "compute_environment",
    "distributed_type",
    "mixed_precision",
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "gpu_ids",
    "rdzv_backend",
    "same_network",
    "use_cpu",
    "debug",
    "enable_cpu_affinity",
    "downcast_bf16",
    "main_training_function",
    "tpu_env",
    "tpu_use_cluster",
    "tpu_use_sudo",
};

bool has(std::span<const std::string_view> keys, std::string_view key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

}  // namespace

std::span<const std::string_view> training_keys() {
  return kTraining;
}

std::span<const std::string_view> launcher_keys() {
  return kLauncher;
}

bool is_training_key(std::string_view key) {
  return has(kTraining, key);
}

bool is_launcher_key(std::string_view key) {
  return has(kLauncher, key);
}

}  // namespace lockstep
