// The table itself; key_values.cpp reads and writes members through it.
#include "lockstep/train/config_keys.h"

#include <algorithm>
#include <cmath>

namespace lockstep::train {
namespace {

using A = TrainingArguments;

bool whole(double value) {
  return std::floor(value) == value;
}

// Every number has a range: a value far outside of what anybody trains with is a mistake, and
// converting it to an integer would be undefined. Products of the values stay far from overflow,
// with any number of ranks.
constexpr Check kCount{[](double v) { return v >= 1 && v <= 1e6; }, "from 1 to 1000000"};
constexpr Check kLength{[](double v) { return v >= 1 && v <= 1e7; }, "from 1 to 10000000"};
constexpr Check kWorkers{[](double v) { return v >= 0 && v <= 1024; }, "from 0 to 1024"};
constexpr Check kSeconds{[](double v) { return v >= 1 && v <= 31536000; },
                         "from 1 to 31536000 (a year)"};
constexpr Check kSeed{[](double v) { return v >= 0 && v <= 0x1p63; },
                      "from 0 to 9223372036854775807"};
constexpr Check kTokens{[](double v) { return v >= 1 && v <= kStepLimit; },
                        "from 1 to 1000000000000"};
constexpr Check kEpochs{[](double v) { return v > 0 && v <= 1e6; }, "above 0, up to 1000000"};
constexpr Check kRate{[](double v) { return v > 0 && v <= 1000; }, "above 0, up to 1000"};
constexpr Check kDecay{[](double v) { return v >= 0 && v <= 1000; }, "from 0 to 1000"};
constexpr Check kUpTo1{[](double v) { return v >= 0 && v <= 1; }, "from 0 to 1"};
constexpr Check kBelow1{[](double v) { return v >= 0 && v < 1; }, "from 0 to below 1"};
constexpr Check kMeasure{[](double v) { return v >= 0 && v <= 1e30; }, "from 0 to 1e30"};
constexpr Check kMebibytes{[](double v) { return v > 0 && v <= 1e6; }, "above 0, up to 1000000"};
constexpr Check kMaxSteps{[](double v) { return v == -1 || (v >= 1 && v <= kStepLimit); },
                          "-1 (off) or from 1 to 1000000000000"};
constexpr Check kSteps{
    [](double v) { return v >= 0 && v <= kStepLimit && (v < 1 || whole(v)); },
    "a whole number of steps up to 1000000000000, or below 1 as a share of all steps"};
constexpr Check kWaiting{[](double v) { return v >= 0 && v <= kStepLimit; },
                         "from 0 to 1000000000000 (steps or epochs, as eval_strategy counts)"};

constexpr std::string_view kSchedules =
    "linear|cosine|cosine_with_restarts|cosine_with_min_lr|polynomial|constant|"
    "constant_with_warmup|inverse_sqrt|warmup_stable_decay|step|multi_step|exponential";
constexpr std::string_view kOptimizers =
    "adamw|adamw_torch|adamw_torch_fused|adam|sgd|lion|lion_32bit|muon|adafactor|rmsprop";
constexpr std::string_view kLevels = "passive|debug|info|warning|error|critical";

constexpr KeySpec kKeys[] = {
    {.name = "model",
     .member = &A::model,
     .help = "what is trained: a name, or a map with `name` and the model's own keys, or with "
             "`path` or `config`",
     .unset = "the program decides",
     .ours = true},
    {.name = "data",
     .member = &A::data,
     .help = "what it is trained on: a name, or a map with `name` and the dataset's own keys",
     .unset = "the program decides",
     .ours = true},
    {.name = "lora",
     .member = &A::lora,
     .help = "train low-rank adapters of a frozen model: a map with r, lora_alpha, target_modules "
             "and other fields of PEFT's LoraConfig",
     .unset = "all parameters are trained",
     .ours = true},
    {.name = "dataset_dir",
     .member = &A::dataset_dir,
     .help = "folder of token shards; without `data` it means data: tokens",
     .unset = "none",
     .ours = true,
     .path = true},
    {.name = "max_seq_len",
     .member = &A::max_seq_len,
     .help = "tokens of a sample",
     .check = &kLength,
     .unset = "as many as the model has positions",
     .ours = true},
    {.name = "preset",
     .member = &A::preset,
     .help = "values of several keys at once, below those of the file",
     .choices = "standard|fast",
     .unset = "none",
     .ours = true},

    {.name = "per_device_train_batch_size",
     .member = &A::per_device_train_batch_size,
     .help = "samples of one rank in one forward pass",
     .check = &kCount},
    {.name = "per_device_eval_batch_size",
     .member = &A::per_device_eval_batch_size,
     .help = "the same in evaluation",
     .check = &kCount},
    {.name = "gradient_accumulation_steps",
     .member = &A::gradient_accumulation_steps,
     .help = "forward and backward passes before one optimizer step",
     .check = &kCount},
    {.name = "global_batch_size",
     .member = &A::global_batch_size,
     .help = "samples of one optimizer step over all ranks; decides the accumulation",
     .check = &kTokens,
     .unset = "gradient_accumulation_steps decides",
     .ours = true},
    {.name = "tokens_per_update",
     .member = &A::tokens_per_update,
     .help = "tokens of one optimizer step over all ranks; decides the accumulation",
     .check = &kTokens,
     .unset = "gradient_accumulation_steps decides",
     .ours = true},
    {.name = "num_train_epochs",
     .member = &A::num_train_epochs,
     .help = "passes over the data, also a part of one",
     .check = &kEpochs},
    {.name = "max_steps",
     .member = &A::max_steps,
     .help = "optimizer steps; wins over num_train_epochs",
     .check = &kMaxSteps},
    {.name = "auto_find_batch_size",
     .member = &A::auto_find_batch_size,
     .help = "halve the batch when memory runs out, agreed over the ranks"},
    {.name = "average_tokens_across_devices",
     .member = &A::average_tokens_across_devices,
     .help = "weigh losses by the tokens of all ranks, not of one"},

    {.name = "optim",
     .member = &A::optim,
     .help = "optimizer; adamw_torch and adamw_torch_fused mean adamw, which is fused, and "
             "lion_32bit means lion",
     .choices = kOptimizers},
    {.name = "optim_args",
     .member = &A::optim_args,
     .help = "further options of the optimizer: name=value,name=value, such as ns_steps=6",
     .unset = "none"},
    {.name = "learning_rate",
     .member = &A::learning_rate,
     .help = "peak learning rate",
     .check = &kRate},
    {.name = "learning_rate_batch_size",
     .member = &A::learning_rate_batch_size,
     .help = "samples per step that learning_rate was chosen for; another effective batch gets a "
             "line of advice, and nothing is changed",
     .check = &kTokens,
     .unset = "what one rank makes of the file, or the checkpoint's effective batch",
     .ours = true},
    {.name = "weight_decay",
     .member = &A::weight_decay,
     .help = "decay of weights, not of biases and norms",
     .check = &kDecay},
    {.name = "adam_beta1",
     .member = &A::adam_beta1,
     .help = "Adam's first decay rate",
     .check = &kBelow1},
    {.name = "adam_beta2",
     .member = &A::adam_beta2,
     .help = "Adam's second decay rate",
     .check = &kBelow1},
    {.name = "adam_epsilon",
     .member = &A::adam_epsilon,
     .help = "Adam's epsilon",
     .check = &kUpTo1},
    {.name = "momentum",
     .member = &A::momentum,
     .help = "momentum of sgd",
     .check = &kBelow1,
     .ours = true},
    {.name = "max_grad_norm",
     .member = &A::max_grad_norm,
     .help = "clip the gradients' global norm to this; 0: do not",
     .check = &kMeasure},
    {.name = "shard_optimizer",
     .member = &A::shard_optimizer,
     .help = "divide the optimizer's state over the ranks and average gradients in its step; auto: "
             "where ranks share memory (shm), and where the state would not fit otherwise",
     .choices = "auto|true|false",
     .ours = true},
    {.name = "lr_scheduler_type",
     .member = &A::lr_scheduler_type,
     .help = "how the learning rate falls after the warm-up",
     .choices = kSchedules},
    {.name = "lr_scheduler_kwargs",
     .member = &A::lr_scheduler_kwargs,
     .help = "the schedule's own numbers, as a map: num_cycles, power, lr_end, min_lr, step_size, "
             "milestones, gamma, ...",
     .unset = "the schedule's defaults"},
    {.name = "warmup_steps",
     .member = &A::warmup_steps,
     .help = "steps in which the learning rate rises from 0",
     .check = &kSteps},
    {.name = "label_smoothing_factor",
     .member = &A::label_smoothing_factor,
     .help = "share of the target spread over all classes",
     .check = &kBelow1},
    {.name = "gradient_checkpointing",
     .member = &A::gradient_checkpointing,
     .help = "compute activations again in backward: less memory, more time"},
    {.name = "compile_model",
     .member = &A::compile_model,
     .help = "capture the training step as one CUDA graph and replay it, on a GPU; auto: where the "
             "step can be captured",
     .choices = "auto|true|false",
     .ours = true},

    {.name = "bf16", .member = &A::bf16, .help = "bfloat16 autocast, without loss scaling"},
    {.name = "fp16", .member = &A::fp16, .help = "float16 autocast with loss scaling"},
    {.name = "mixed_precision",
     .member = &A::mixed_precision,
     .help = "Accelerate's word for both: no, fp16, bf16, or fp8 (bf16 with the linear layers of "
             "a language model's blocks in 8 bits, on Ada, Hopper and later GPUs)",
     .choices = "no|fp16|bf16|fp8",
     .unset = "bf16 and fp16 decide",
     .ours = true},
    {.name = "fp8",
     .member = &A::fp8,
     .help = "how fp8 scales: {recipe: tensorwise}, one scale for a tensor, or {recipe: rowwise}",
     .unset = "tensorwise",
     .ours = true},
    {.name = "residual_in_fp32",
     .member = &A::residual_in_fp32,
     .help = "under bf16 on a GPU, keep what the blocks of a language model add to in float32, as "
             "PyTorch's autocast does; fp16 always does",
     .ours = true},
    {.name = "tf32",
     .member = &A::tf32,
     .help = "TF32 matrix products for float32 on the GPU",
     .unset = "LibTorch's default"},
    {.name = "use_cpu",
     .member = &A::use_cpu,
     .help = "train on the CPU, also where there is a GPU"},
    {.name = "seed",
     .member = &A::seed,
     .help = "of weights and sample order on all ranks; dropout adds the rank",
     .check = &kSeed},
    {.name = "data_seed",
     .member = &A::data_seed,
     .help = "of the sample order alone",
     .check = &kSeed,
     .unset = "seed"},
    {.name = "full_determinism",
     .member = &A::full_determinism,
     .help = "deterministic kernels only: the same bits in every run"},
    {.name = "elastic_gpu",
     .member = &A::elastic_gpu,
     .help = "lockstep train plans batch, accumulation and sharding for the GPUs found "
             "(docs/plan.md); then as auto_find_batch_size",
     .ours = true},

    {.name = "logging_strategy",
     .member = &A::logging_strategy,
     .help = "when metrics are logged",
     .choices = "no|steps|epoch"},
    {.name = "logging_steps",
     .member = &A::logging_steps,
     .help = "steps between logs; the loss is read from the device only then",
     .check = &kSteps},
    {.name = "logging_first_step", .member = &A::logging_first_step, .help = "log step 1 as well"},
    {.name = "logging_nan_inf_filter",
     .member = &A::logging_nan_inf_filter,
     .help = "leave losses that are not finite out of the logged mean"},
    {.name = "log_level",
     .member = &A::log_level,
     .help = "of rank 0; passive: as LOCKSTEP_LOG has it",
     .choices = kLevels},
    {.name = "log_level_replica",
     .member = &A::log_level_replica,
     .help = "of the other ranks",
     .choices = kLevels},
    {.name = "log_on_each_node",
     .member = &A::log_on_each_node,
     .help = "the first rank of every host uses log_level"},
    {.name = "disable_tqdm", .member = &A::disable_tqdm, .help = "no progress bar"},
    {.name = "report_to",
     .member = &A::report_to,
     .help = "where metrics go besides metrics.jsonl; a name or a list",
     .choices = "none|tensorboard|all"},
    {.name = "run_name",
     .member = &A::run_name,
     .help = "name of the run in the log, metrics.jsonl and TensorBoard",
     .unset = "no name"},
    {.name = "record_run",
     .member = &A::record_run,
     .help = "record where every rank's time goes, into output_dir/monitor (docs/monitor.md)",
     .ours = true},

    {.name = "eval_strategy",
     .member = &A::eval_strategy,
     .help = "when the model is evaluated",
     .choices = "no|steps|epoch"},
    {.name = "eval_steps",
     .member = &A::eval_steps,
     .help = "steps between evaluations",
     .check = &kSteps,
     .unset = "logging_steps"},
    {.name = "eval_delay",
     .member = &A::eval_delay,
     .help = "wait before the first evaluation",
     .check = &kWaiting},
    {.name = "eval_on_start",
     .member = &A::eval_on_start,
     .help = "evaluate before the first step"},
    {.name = "load_best_model_at_end",
     .member = &A::load_best_model_at_end,
     .help = "end with the best checkpoint's weights, not the last ones"},
    {.name = "metric_for_best_model",
     .member = &A::metric_for_best_model,
     .help = "metric that says which is best"},
    {.name = "greater_is_better",
     .member = &A::greater_is_better,
     .help = "whether that metric should grow",
     .unset = "true, unless the metric's name ends in loss"},
    {.name = "early_stopping_patience",
     .member = &A::early_stopping_patience,
     .help = "stop after so many evaluations without a better metric",
     .check = &kCount,
     .unset = "never",
     .ours = true},
    {.name = "early_stopping_threshold",
     .member = &A::early_stopping_threshold,
     .help = "by how much a metric must improve to count as better",
     .check = &kMeasure,
     .ours = true},

    {.name = "output_dir",
     .member = &A::output_dir,
     .help = "folder of checkpoints and metrics",
     .path = true},
    {.name = "save_strategy",
     .member = &A::save_strategy,
     .help = "when a checkpoint is written",
     .choices = "no|steps|epoch|best"},
    {.name = "save_steps",
     .member = &A::save_steps,
     .help = "steps between checkpoints",
     .check = &kSteps},
    {.name = "save_total_limit",
     .member = &A::save_total_limit,
     .help = "checkpoints to retain; older ones are deleted once the new one is durable",
     .check = &kCount,
     .unset = "all"},
    {.name = "save_only_model",
     .member = &A::save_only_model,
     .help = "weights alone: smaller, and training cannot resume from it"},
    {.name = "save_on_each_node",
     .member = &A::save_on_each_node,
     .help = "every host writes, for hosts without a shared file system"},
    {.name = "enable_jit_checkpoint",
     .member = &A::enable_jit_checkpoint,
     .help = "save when a stop signal arrives (Hugging Face: false)"},
    {.name = "resume_from_checkpoint",
     .member = &A::resume_from_checkpoint,
     .help = "a checkpoint's folder, `auto` (or true): the newest valid one, `never` (or false)",
     .unset = "begin a new run",
     .path = true},
    {.name = "ignore_data_skip",
     .member = &A::ignore_data_skip,
     .help = "after resuming begin the epoch's data again"},

    {.name = "dataloader_num_workers",
     .member = &A::dataloader_num_workers,
     .help = "threads of a rank that load; 0: the training thread loads",
     .check = &kWorkers},
    {.name = "dataloader_pin_memory",
     .member = &A::dataloader_pin_memory,
     .help = "page-locked batches: faster copies to the GPU"},
    {.name = "dataloader_drop_last",
     .member = &A::dataloader_drop_last,
     .help = "leave out the last batch when it is short"},
    {.name = "dataloader_persistent_workers",
     .member = &A::dataloader_persistent_workers,
     .help = "keep the threads between epochs"},
    {.name = "dataloader_prefetch_factor",
     .member = &A::dataloader_prefetch_factor,
     .help = "batches that each thread loads ahead",
     .check = &kCount,
     .unset = "2 with workers"},

    {.name = "fsdp",
     .member = &A::fsdp,
     .help = "divide parameters, gradients and state over ranks: full_shard, shard_grad_op (blocks "
             "stay whole from forward to backward), hybrid_shard (divided inside a host, copied "
             "between hosts); offload and auto_wrap may stand beside it, also as a list",
     .unset = "every rank has the whole model"},
    {.name = "fsdp_config",
     .member = &A::fsdp_config,
     .help = "a map: version (2), reshard_after_forward, activation_checkpointing, "
             "transformer_layer_cls_to_wrap, mixed_precision_policy, cpu_offload",
     .unset = "as fsdp says"},
    {.name = "data_parallel_shard_degree",
     .member = &A::data_parallel_shard_degree,
     .help =
         "ranks over which fsdp divides the model; the others hold copies and see other samples",
     .check = &kCount,
     .unset = "all ranks that hold the same stage",
     .ours = true},
    {.name = "pipeline_parallel_degree",
     .member = &A::pipeline_parallel_degree,
     .help = "ranks that hold a stage of the model each; gradient_accumulation_steps are the "
             "micro-batches that flow through them",
     .check = &kCount,
     .ours = true},
    {.name = "pipeline_parallel_schedule",
     .member = &A::pipeline_parallel_schedule,
     .help = "the order of a pipeline's forwards and backwards; Interleaved1F1B has two stages on "
             "each rank",
     .choices = "GPipe|1F1B|Interleaved1F1B",
     .ours = true},
    {.name = "tensor_parallel_degree",
     .member = &A::tensor_parallel_degree,
     .help = "ranks that hold a slice of each layer and compute it together; it divides the "
             "attention heads, those of keys and values too",
     .check = &kCount,
     .ours = true},
    {.name = "sequence_parallel",
     .member = &A::sequence_parallel,
     .help = "between layers each tensor parallel rank has a part of the sequence: less memory for "
             "activations; nothing changes where tensor_parallel_degree is 1",
     .ours = true},
    {.name = "ddp_backend",
     .member = &A::ddp_backend,
     .help = "how ranks talk",
     .choices = "shm|gloo|nccl",
     .unset = "by the device"},
    {.name = "ddp_find_unused_parameters",
     .member = &A::ddp_find_unused_parameters,
     .help = "allow parts of the model to stay unused; walks the graph in every step",
     .unset = "false"},
    {.name = "ddp_bucket_cap_mb",
     .member = &A::ddp_bucket_cap_mb,
     .help = "MiB of gradients that are averaged at once",
     .check = &kMebibytes,
     .unset = "25, with a first bucket of 1"},
    {.name = "ddp_broadcast_buffers",
     .member = &A::ddp_broadcast_buffers,
     .help = "copy rank 0's buffers to all ranks",
     .unset = "true"},
    {.name = "ddp_static_graph",
     .member = &A::ddp_static_graph,
     .help = "promise that every step uses the same parameters equally often",
     .unset = "false"},
    {.name = "ddp_timeout",
     .member = &A::ddp_timeout,
     .help = "deadline of a collective, in seconds",
     .check = &kSeconds},
    {.name = "tune",
     .member = &A::tune,
     .help = "measure bucket sizes in the first steps, and keep the fastest for the rest",
     .choices = "bucket_cap_mb",
     .unset = "nothing",
     .ours = true},
};

constexpr OldKey kOldKeys[] = {
    {"warmup_ratio", "warmup_steps", "write warmup_steps, which below 1 is a share of all steps"},
    {"evaluation_strategy", "eval_strategy", "its name is eval_strategy now"},
    {"no_cuda", "use_cpu", "its name is use_cpu now"},
    {"torch_compile", "compile_model",
     "there is no Python compiler here; it sets compile_model, which captures the step as one "
     "CUDA graph"},
    {"logging_dir", "", "it has no effect: event files are in output_dir/runs"},
    {"save_safetensors", "", "it has no effect: checkpoints are always safetensors"},
    {"local_rank", "", "it has no effect: the launcher says which rank this is"},
};

constexpr ForeignKey kForeignKeys[] = {
    {"deepspeed", "ZeRO is DeepSpeed's; fsdp divides the model here"},
    {"accelerator_config", "the launcher's settings are in Accelerate's own file"},
    {"push_to_hub", "nothing is uploaded"},
    {"hub_model_id", "nothing is uploaded"},
    {"hub_strategy", "nothing is uploaded"},
    {"hub_token", "nothing is uploaded, and a secret does not belong in this file"},
    {"do_train", "`lockstep train` trains"},
    {"do_eval", "eval_strategy decides"},
    {"do_predict", "there is no prediction run"},
    {"overwrite_output_dir", "folders are never overwritten; resume_from_checkpoint decides"},
    {"remove_unused_columns", "datasets here have no columns"},
    {"length_column_name", "length grouping is the loader's: see `data`"},
    {"gradient_checkpointing_kwargs", "checkpointing here has no options"},
    {"optim_target_modules", "the optimizers here work on all parameters"},
    {"fp16_opt_level", "apex is Python's; fp16 is autocast"},
    {"fp16_backend", "there is one: autocast"},
    {"half_precision_backend", "there is one: autocast"},
    {"fp16_full_eval", "evaluation uses the same precision as training"},
    {"bf16_full_eval", "evaluation uses the same precision as training"},
    {"torch_compile_backend", "there is no Python compiler here; see compile_model"},
    {"torch_compile_mode", "there is no Python compiler here; see compile_model"},
    {"use_liger_kernel", "those kernels are Python's"},
    {"neftune_noise_alpha", "it is not supported"},
    {"eval_accumulation_steps", "metrics are reduced on the device as they come"},
    {"prediction_loss_only", "evaluation keeps metrics, not predictions"},
    {"tpu_num_cores", "there is no TPU support"},
    {"use_mps_device", "there is no MPS support"},
};

// The keys of `model` and `data` are the program's, here those of `lockstep train`
// (cli/task_config.cpp; a test compares), and what other programs call ours.
constexpr MisplacedKey kMisplacedKeys[] = {
    {"n_layer", "model", "name: gpt, n_layer: 4"},
    {"n_head", "model", "name: gpt, n_head: 4"},
    {"n_embd", "model", "name: gpt, n_embd: 128"},
    {"vocab_size", "model", "name: gpt, vocab_size: 257"},
    {"n_positions", "model", "name: gpt, n_positions: 128"},
    {"weights", "model", "name: gpt, weights: FOLDER"},
    {"config", "model", "config: FOLDER"},
    {"hidden", "model", "name: mlp, hidden: 64"},
    {"layers", "model", "name: mlp, layers: 1"},
    {"dropout", "model", "name: mlp, dropout: 0.1"},
    {"batch_norm", "model", "name: mlp, batch_norm: true"},
    {"hidden_size", "model", "name: gpt, n_embd: 128"},
    {"num_layers", "model", "name: gpt, n_layer: 4"},
    {"num_hidden_layers", "model", "name: gpt, n_layer: 4"},
    {"num_heads", "model", "name: gpt, n_head: 4"},
    {"num_attention_heads", "model", "name: gpt, n_head: 4"},
    {"lora_alpha", "lora", "r: 16, lora_alpha: 32, target_modules: [c_attn]"},
    {"lora_dropout", "lora", "r: 16, lora_dropout: 0.05, target_modules: [c_attn]"},
    {"target_modules", "lora", "r: 16, target_modules: [c_attn]"},
    {"path", "data", "name: bytes, path: FOLDER"},
    {"suffix", "data", "name: bytes, suffix: .txt"},
    {"max_bytes", "data", "name: bytes, max_bytes: 4000000"},
    {"eval_bytes", "data", "name: bytes, eval_bytes: 40000"},
    {"order", "data", "name: tokens, order: windows"},
    {"eval_path", "data", "name: instructions, path: FILE, eval_path: FILE"},
    {"tokenizer", "data", "name: instructions, path: FILE, tokenizer: FOLDER"},
    {"padding", "data", "name: instructions, path: FILE, padding: longest"},
    {"pad_to_multiple_of", "data", "name: instructions, path: FILE, pad_to_multiple_of: 8"},
    {"train_on_prompt", "data", "name: instructions, path: FILE, train_on_prompt: true"},
    {"prompt", "data", "name: instructions, path: FILE, prompt: TEXT"},
    {"prompt_without_input", "data", "name: instructions, path: FILE, prompt_without_input: TEXT"},
    {"response", "data", "name: instructions, path: FILE, response: TEXT"},
    {"samples", "data", "name: random, samples: 10000"},
    {"eval_samples", "data", "name: random, eval_samples: 1000"},
    {"features", "data", "name: random, features: 20"},
    {"classes", "data", "name: random, classes: 10"},
    {"image_size", "data", "name: images, image_size: 224"},
    {"group_by_length", "data", "name: instructions, path: FILE, group_by_length: true"},
    {"seq_len", "", "max_seq_len"},
    {"seq_length", "", "max_seq_len"},
    {"sequence_length", "", "max_seq_len"},
    {"max_length", "", "max_seq_len"},
    {"max_seq_length", "", "max_seq_len"},
    {"block_size", "", "max_seq_len"},
    {"batch_size", "", "per_device_train_batch_size"},
    {"train_batch_size", "", "per_device_train_batch_size"},
    {"eval_batch_size", "", "per_device_eval_batch_size"},
    {"lr", "", "learning_rate"},
    {"epochs", "", "num_train_epochs"},
    {"num_epochs", "", "num_train_epochs"},
    {"steps", "", "max_steps"},
    {"optimizer", "", "optim"},
    {"scheduler", "", "lr_scheduler_type"},
    {"num_workers", "", "dataloader_num_workers"},
    {"data_dir", "", "dataset_dir"},
    {"dataset", "", "data"},
    {"resume", "", "resume_from_checkpoint"},
};

}  // namespace

std::span<const MisplacedKey> misplaced_keys() {
  return kMisplacedKeys;
}

bool is_path_of_section(std::string_view name) {
  return name == "path" || name == "eval_path" || name == "weights" || name == "config";
}

std::span<const KeySpec> key_table() {
  return kKeys;
}

std::span<const OldKey> old_keys() {
  return kOldKeys;
}

std::span<const ForeignKey> foreign_keys() {
  return kForeignKeys;
}

const KeySpec* find_key(std::string_view name) {
  const auto found = std::find_if(std::begin(kKeys), std::end(kKeys),
                                  [&](const KeySpec& key) { return key.name == name; });
  return found == std::end(kKeys) ? nullptr : &*found;
}

std::vector<std::string> key_names() {
  std::vector<std::string> names;
  for (const KeySpec& key : kKeys) names.emplace_back(key.name);
  return names;
}

std::vector<std::string> training_keys() {
  std::vector<std::string> names = key_names();
  for (const OldKey& old : old_keys()) names.emplace_back(old.name);
  return names;
}

}  // namespace lockstep::train
