// TrainingArguments: the settings of a run, with Hugging Face's names and defaults.
//
// This struct is plain and says nothing about files. One table (config_keys.h) names each member;
// reading files, flags and variables, checking, help, the JSON record and the page
// docs/configuration.md all come from that table, so they cannot disagree. Where a value comes from
// is decided in config.h.
//
//   TrainingArguments arguments{.learning_rate = 3e-4, .bf16 = true};
//   check_arguments(arguments);                                   // throws UsageError
//   Config config = load_config("train.yaml", {"--max_steps", "100"});   // or from a file
//
// A value without locks: copy it, and read it from any thread.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

struct Node;

// When something happens during training, in the words of the training file. kBest applies to
// saving only. check_arguments() refuses any other word.
struct Interval {
  static constexpr const char *kNo = "no", *kSteps = "steps", *kEpoch = "epoch", *kBest = "best";
};

// A number that may also be given as an integer of any type, such as a count of steps.
class Number {
 public:
  constexpr Number(double value = 0) : value_(value) {}
  constexpr Number(std::integral auto value) : value_(static_cast<double>(value)) {}
  constexpr operator double() const { return value_; }

 private:
  double value_;
};

// Which activations backward computes again: none, those of whole blocks, or of parts of them.
struct GradientCheckpointing {
  constexpr GradientCheckpointing(bool wanted = false) : on(wanted) {}
  constexpr explicit operator bool() const { return on; }
  bool whole_blocks() const { return on && parts.empty(); }

  bool on;
  std::vector<std::string> parts{};  // swiglu, norm, mlp, attention
};

// The settings of a run. A number of steps below 1 is a share of all steps.
struct TrainingArguments {
  // What is trained, as written in the file. The command that trains interprets the maps; a plain
  // string is a name.
  std::shared_ptr<const Node> model{};
  std::shared_ptr<const Node> data{};
  std::shared_ptr<const Node> lora{};
  std::optional<std::string> dataset_dir{};
  std::optional<std::int64_t> max_seq_len{};
  std::optional<std::string> preset{};

  // Batch sizes and duration.
  std::int64_t per_device_train_batch_size = 8;
  std::int64_t per_device_eval_batch_size = 8;
  std::int64_t gradient_accumulation_steps = 1;
  // One of these two decides the accumulation; see effective_batch.h.
  std::optional<std::int64_t> global_batch_size{};
  std::optional<std::int64_t> tokens_per_update{};
  Number num_train_epochs = 3;
  std::int64_t max_steps = -1;  // wins over epochs when above 0
  bool auto_find_batch_size = false;
  bool average_tokens_across_devices = true;

  // Optimizer and schedule.
  std::string optim = "adamw";
  std::optional<std::string> optim_args{};  // options of the optimizer without a key of their own
  std::string optim_state_dtype = "float32";
  double learning_rate = 5e-5;
  std::optional<std::int64_t> learning_rate_batch_size{};  // samples per step it was chosen for
  double weight_decay = 0;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_epsilon = 1e-8;
  double momentum = 0;         // for sgd
  double max_grad_norm = 1.0;  // 0: no clipping
  std::string shard_optimizer = "auto";
  std::string lr_scheduler_type = "linear";
  std::shared_ptr<const Node> lr_scheduler_kwargs{};  // optim::schedule_kwargs() reads it
  Number warmup_steps = 0;
  double label_smoothing_factor = 0;
  GradientCheckpointing gradient_checkpointing{};
  std::string compile_model = "auto";

  // Precision, device and repeatability.
  bool bf16 = false;
  bool fp16 = false;
  std::optional<std::string> mixed_precision{};  // no, fp16, bf16, or fp8: bf16 with layers in fp8
  std::shared_ptr<const Node> fp8{};             // fp8_recipe_name() reads it
  bool residual_in_fp32 = false;
  std::optional<bool> tf32{};
  bool use_cpu = false;
  std::int64_t seed = 42;
  std::optional<std::int64_t> data_seed{};
  bool full_determinism = false;
  bool elastic_gpu = false;

  // What is logged.
  std::string logging_strategy = Interval::kSteps;
  Number logging_steps = 500;
  bool logging_first_step = false;
  bool logging_nan_inf_filter = true;
  std::string log_level = "passive";
  std::string log_level_replica = "warning";
  bool log_on_each_node = true;
  bool disable_tqdm = false;
  std::vector<std::string> report_to{"none"};
  std::optional<std::string> run_name{};
  bool record_run = true;

  // Evaluation.
  std::string eval_strategy = Interval::kNo;
  std::optional<Number> eval_steps{};  // unset: logging_steps
  Number eval_delay = 0;
  bool eval_on_start = false;
  bool load_best_model_at_end = false;
  std::string metric_for_best_model = "loss";
  std::optional<bool> greater_is_better{};  // unset: unless the metric's name ends in "loss"
  std::optional<std::int64_t> early_stopping_patience{};  // evaluations without a better metric
  double early_stopping_threshold = 0;

  // Checkpoints.
  std::string output_dir = "trainer_output";
  bool overwrite_output_dir = false;  // delete the checkpoints of a run that is not continued
  std::string save_strategy = Interval::kSteps;
  Number save_steps = 500;
  std::optional<std::int64_t> save_total_limit{};
  bool save_only_model = false;
  bool save_on_each_node = false;
  bool enable_jit_checkpoint = true;
  std::optional<std::string> resume_from_checkpoint{};  // a folder, "auto" or "never"
  bool ignore_data_skip = false;

  // Loading.
  std::int64_t dataloader_num_workers = 0;
  bool dataloader_pin_memory = true;
  bool dataloader_drop_last = false;
  bool dataloader_persistent_workers = false;
  std::optional<std::int64_t> dataloader_prefetch_factor{};

  // FullyShard (config_keys.h), instead of DistributedDataParallel.
  std::optional<std::string> fsdp{};  // "full_shard", "shard_grad_op", "hybrid_shard"
  std::shared_ptr<const Node> fsdp_config{};
  // With torchtitan's name: ranks that divide a model; unset: all of a stage, or of a host.
  std::optional<std::int64_t> data_parallel_shard_degree{};

  // Pipeline (lockstep/parallel/pipeline.h), with torchtitan's names; 1: the model is not split.
  std::int64_t pipeline_parallel_degree = 1;
  std::string pipeline_parallel_schedule = "1F1B";
  // TensorParallel (lockstep/parallel/tensor_parallel.h), with torchtitan's name; 1: layers are not
  // divided.
  std::int64_t tensor_parallel_degree = 1;
  bool sequence_parallel = false;  // with Megatron-LM's name

  // DistributedDataParallel.
  std::optional<std::string> ddp_backend{};
  std::optional<bool> ddp_find_unused_parameters{};
  std::optional<double> ddp_bucket_cap_mb{};
  std::optional<bool> ddp_broadcast_buffers{};
  std::optional<bool> ddp_static_graph{};
  std::int64_t ddp_timeout = 1800;
};

// Checks ranges, choices and contradictions between keys, for arguments set in a program. Throws
// UsageError naming every mistake. config.h has already checked its arguments.
void check_arguments(const TrainingArguments& arguments);

}  // namespace lockstep
