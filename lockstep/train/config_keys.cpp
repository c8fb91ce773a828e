// The table itself; key_values.cpp reads and writes members through it.
#include "lockstep/train/config_keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
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

constexpr KeySpec key(std::string_view name, Member member, std::string_view help,
                      KeyRules rules = {}) {
  return {rules, name, member, help};
}

constexpr KeySpec kKeys[] = {
    key("model", &A::model,
        "what is trained: a name, or a map with `name` and the model's own keys, or with "
        "`path` or `config`",
        {.unset = "the program decides", .ours = true}),
    key("data", &A::data,
        "what it is trained on: a name, or a map with `name` and the dataset's own keys",
        {.unset = "the program decides", .ours = true}),
    key("lora", &A::lora,
        "train low-rank adapters of a frozen model: a map with r, lora_alpha, target_modules "
        "and other fields of PEFT's LoraConfig",
        {.unset = "all parameters are trained", .ours = true}),
    key("dataset_dir", &A::dataset_dir,
        "folder of token shards; without `data` it means data: tokens",
        {.unset = "none", .ours = true, .path = true}),
    key("max_seq_len", &A::max_seq_len, "tokens of a sample",
        {.check = &kLength, .unset = "as many as the model has positions", .ours = true}),
    key("preset", &A::preset, "values of several keys at once, below those of the file",
        {.choices = "standard|fast", .unset = "none", .ours = true}),

    key("per_device_train_batch_size", &A::per_device_train_batch_size,
        "samples of one rank in one forward pass", {.check = &kCount}),
    key("per_device_eval_batch_size", &A::per_device_eval_batch_size, "the same in evaluation",
        {.check = &kCount}),
    key("gradient_accumulation_steps", &A::gradient_accumulation_steps,
        "forward and backward passes before one optimizer step", {.check = &kCount}),
    key("global_batch_size", &A::global_batch_size,
        "samples of one optimizer step over all ranks; decides the accumulation",
        {.check = &kTokens, .unset = "gradient_accumulation_steps decides", .ours = true}),
    key("tokens_per_update", &A::tokens_per_update,
        "tokens of one optimizer step over all ranks; decides the accumulation",
        {.check = &kTokens, .unset = "gradient_accumulation_steps decides", .ours = true}),
    key("num_train_epochs", &A::num_train_epochs, "passes over the data; may be a fraction",
        {.check = &kEpochs}),
    key("max_steps", &A::max_steps, "optimizer steps; wins over num_train_epochs",
        {.check = &kMaxSteps}),
    key("auto_find_batch_size", &A::auto_find_batch_size,
        "halve the batch when memory runs out, agreed over the ranks"),
    key("average_tokens_across_devices", &A::average_tokens_across_devices,
        "weigh losses by the tokens of all ranks, not of one"),

    key("optim", &A::optim,
        "optimizer; adamw_torch and adamw_torch_fused mean adamw, which is fused, and "
        "lion_32bit means lion",
        {.choices = kOptimizers}),
    key("optim_args", &A::optim_args,
        "further options of the optimizer: name=value,name=value, such as ns_steps=6",
        {.unset = "none"}),
    key("optim_state_dtype", &A::optim_state_dtype,
        "type of adamw's exp_avg and exp_avg_sq; bfloat16 is rounded stochastically and takes 4 "
        "bytes a parameter instead of 8",
        {.choices = "float32|bfloat16", .ours = true}),
    key("learning_rate", &A::learning_rate, "peak learning rate", {.check = &kRate}),
    key("learning_rate_batch_size", &A::learning_rate_batch_size,
        "samples per step that learning_rate was chosen for; another effective batch gets a "
        "line of advice, and nothing is changed",
        {.check = &kTokens,
         .unset = "what one rank makes of the file, or the checkpoint's effective batch",
         .ours = true}),
    key("weight_decay", &A::weight_decay, "decay of weights, not of biases and norms",
        {.check = &kDecay}),
    key("adam_beta1", &A::adam_beta1, "Adam's first decay rate", {.check = &kBelow1}),
    key("adam_beta2", &A::adam_beta2, "Adam's second decay rate", {.check = &kBelow1}),
    key("adam_epsilon", &A::adam_epsilon, "Adam's epsilon", {.check = &kUpTo1}),
    key("momentum", &A::momentum, "momentum of sgd", {.check = &kBelow1, .ours = true}),
    key("max_grad_norm", &A::max_grad_norm, "clip the gradients' global norm to this; 0: do not",
        {.check = &kMeasure}),
    key("shard_optimizer", &A::shard_optimizer,
        "divide the optimizer's state over the ranks and average gradients in its step; auto: "
        "where ranks share memory (shm), and where the state would not fit otherwise",
        {.choices = "auto|true|false", .ours = true}),
    key("lr_scheduler_type", &A::lr_scheduler_type, "how the learning rate falls after the warm-up",
        {.choices = kSchedules}),
    key("lr_scheduler_kwargs", &A::lr_scheduler_kwargs,
        "the schedule's own numbers, as a map: num_cycles, power, lr_end, min_lr, step_size, "
        "milestones, gamma, ...",
        {.unset = "the schedule's defaults"}),
    key("warmup_steps", &A::warmup_steps, "steps in which the learning rate rises from 0",
        {.check = &kSteps}),
    key("label_smoothing_factor", &A::label_smoothing_factor,
        "share of the target spread over all classes", {.check = &kBelow1}),
    key("gradient_checkpointing", &A::gradient_checkpointing,
        "compute activations again in backward: less memory, more time; true: of whole blocks",
        {.choices = "swiglu|norm|mlp|attention"}),
    key("compile_model", &A::compile_model,
        "capture the training step as one CUDA graph and replay it, on a GPU; auto: where the "
        "step can be captured",
        {.choices = "auto|true|false", .ours = true}),

    key("bf16", &A::bf16, "bfloat16 autocast, without loss scaling"),
    key("fp16", &A::fp16, "float16 autocast with loss scaling"),
    key("mixed_precision", &A::mixed_precision,
        "Accelerate's word for both: no, fp16, bf16, or fp8 (bf16 with the linear layers of "
        "a language model's blocks in 8 bits, on Ada, Hopper and later GPUs)",
        {.choices = "no|fp16|bf16|fp8", .unset = "bf16 and fp16 decide", .ours = true}),
    key("fp8", &A::fp8,
        "how fp8 scales: {recipe: tensorwise}, one scale for a tensor, or {recipe: rowwise}",
        {.unset = "tensorwise", .ours = true}),
    key("residual_in_fp32", &A::residual_in_fp32,
        "under bf16 on a GPU, keep a language model's residual stream in float32, as PyTorch's "
        "autocast does; fp16 always does",
        {.ours = true}),
    key("tf32", &A::tf32, "TF32 matrix products for float32 on the GPU",
        {.unset = "LibTorch's default"}),
    key("use_cpu", &A::use_cpu, "train on the CPU, also where there is a GPU"),
    key("seed", &A::seed, "of weights and sample order on all ranks; dropout adds the rank",
        {.check = &kSeed}),
    key("data_seed", &A::data_seed, "of the sample order alone",
        {.check = &kSeed, .unset = "seed"}),
    key("full_determinism", &A::full_determinism,
        "deterministic kernels only: the same bits in every run"),
    key("elastic_gpu", &A::elastic_gpu,
        "lockstep train plans batch, accumulation and sharding for the GPUs found "
        "(docs/plan.md); then as auto_find_batch_size",
        {.ours = true}),

    key("logging_strategy", &A::logging_strategy, "when metrics are logged",
        {.choices = "no|steps|epoch"}),
    key("logging_steps", &A::logging_steps,
        "steps between logs; the loss is read from the device only then", {.check = &kSteps}),
    key("logging_first_step", &A::logging_first_step, "log step 1 as well"),
    key("logging_nan_inf_filter", &A::logging_nan_inf_filter,
        "leave losses that are not finite out of the logged mean"),
    key("log_level", &A::log_level, "of rank 0; passive: as LOCKSTEP_LOG has it",
        {.choices = kLevels}),
    key("log_level_replica", &A::log_level_replica, "of the other ranks", {.choices = kLevels}),
    key("log_on_each_node", &A::log_on_each_node, "the first rank of every host uses log_level"),
    key("disable_tqdm", &A::disable_tqdm, "no progress bar"),
    key("report_to", &A::report_to, "where metrics go besides metrics.jsonl; a name or a list",
        {.choices = "none|tensorboard|all"}),
    key("run_name", &A::run_name, "name of the run in the log, metrics.jsonl and TensorBoard",
        {.unset = "no name"}),
    key("record_run", &A::record_run,
        "record where every rank's time goes, into output_dir/monitor (docs/doctor.md)",
        {.ours = true}),

    key("eval_strategy", &A::eval_strategy, "when the model is evaluated",
        {.choices = "no|steps|epoch"}),
    key("eval_steps", &A::eval_steps, "steps between evaluations",
        {.check = &kSteps, .unset = "logging_steps"}),
    key("eval_delay", &A::eval_delay, "wait before the first evaluation", {.check = &kWaiting}),
    key("eval_on_start", &A::eval_on_start, "evaluate before the first step"),
    key("load_best_model_at_end", &A::load_best_model_at_end,
        "end with the best checkpoint's weights, not the last ones"),
    key("metric_for_best_model", &A::metric_for_best_model,
        "metric by which the best checkpoint is chosen"),
    key("greater_is_better", &A::greater_is_better, "whether that metric should grow",
        {.unset = "true, unless the metric's name ends in loss"}),
    key("early_stopping_patience", &A::early_stopping_patience,
        "stop after so many evaluations without a better metric",
        {.check = &kCount, .unset = "never", .ours = true}),
    key("early_stopping_threshold", &A::early_stopping_threshold,
        "by how much a metric must improve to count as better", {.check = &kMeasure, .ours = true}),

    key("output_dir", &A::output_dir, "folder of checkpoints and metrics", {.path = true}),
    key("overwrite_output_dir", &A::overwrite_output_dir,
        "where the run does not resume, delete the checkpoints that are in output_dir; false: "
        "refuse to start"),
    key("save_strategy", &A::save_strategy, "when a checkpoint is written",
        {.choices = "no|steps|epoch|best"}),
    key("save_steps", &A::save_steps, "steps between checkpoints", {.check = &kSteps}),
    key("save_total_limit", &A::save_total_limit,
        "checkpoints to retain; older ones are deleted once the new one is durable",
        {.check = &kCount, .unset = "all"}),
    key("save_only_model", &A::save_only_model,
        "weights alone: smaller, and training cannot resume from it"),
    key("save_on_each_node", &A::save_on_each_node,
        "every host writes, for hosts without a shared file system"),
    key("enable_jit_checkpoint", &A::enable_jit_checkpoint,
        "save when a stop signal arrives (Hugging Face: false)"),
    key("resume_from_checkpoint", &A::resume_from_checkpoint,
        "a checkpoint's folder, `auto` (or true): the newest valid one, `never` (or false)",
        {.unset = "begin a new run", .path = true}),
    key("ignore_data_skip", &A::ignore_data_skip, "after resuming begin the epoch's data again"),

    key("dataloader_num_workers", &A::dataloader_num_workers,
        "threads of a rank that load; 0: the training thread loads", {.check = &kWorkers}),
    key("dataloader_pin_memory", &A::dataloader_pin_memory,
        "page-locked batches: faster copies to the GPU"),
    key("dataloader_drop_last", &A::dataloader_drop_last,
        "leave out the last batch when it is short"),
    key("dataloader_persistent_workers", &A::dataloader_persistent_workers,
        "keep the threads between epochs"),
    key("dataloader_prefetch_factor", &A::dataloader_prefetch_factor,
        "batches that each thread loads ahead",
        {.check = &kCount, .unset = "2 with workers, more where a step takes more"}),

    key("fsdp", &A::fsdp,
        "divide parameters, gradients and state over ranks: full_shard, shard_grad_op (blocks "
        "stay whole from forward to backward), hybrid_shard (divided inside a host, copied "
        "between hosts); offload and auto_wrap may stand beside it, also as a list",
        {.unset = "every rank has the whole model"}),
    key("fsdp_config", &A::fsdp_config,
        "a map: version (2), reshard_after_forward, activation_checkpointing, "
        "transformer_layer_cls_to_wrap, mixed_precision_policy, cpu_offload",
        {.unset = "as fsdp says"}),
    key("data_parallel_shard_degree", &A::data_parallel_shard_degree,
        "ranks over which fsdp divides the model; the others hold copies and see other samples",
        {.check = &kCount, .unset = "all ranks that hold the same stage", .ours = true}),
    key("pipeline_parallel_degree", &A::pipeline_parallel_degree,
        "ranks that hold a stage of the model each; gradient_accumulation_steps are the "
        "micro-batches that flow through them",
        {.check = &kCount, .ours = true}),
    key("pipeline_parallel_schedule", &A::pipeline_parallel_schedule,
        "the order of a pipeline's forwards and backwards; Interleaved1F1B has two stages on "
        "each rank",
        {.choices = "GPipe|1F1B|Interleaved1F1B", .ours = true}),
    key("tensor_parallel_degree", &A::tensor_parallel_degree,
        "ranks that hold a slice of each layer and compute it together; it divides the "
        "attention heads, those of keys and values too",
        {.check = &kCount, .ours = true}),
    key("sequence_parallel", &A::sequence_parallel,
        "between layers each tensor parallel rank has a part of the sequence: less memory for "
        "activations; nothing changes where tensor_parallel_degree is 1",
        {.ours = true}),
    key("ddp_backend", &A::ddp_backend, "communication backend of the ranks",
        {.choices = "shm|gloo|nccl", .unset = "by the device"}),
    key("ddp_find_unused_parameters", &A::ddp_find_unused_parameters,
        "allow parts of the model to stay unused; walks the graph in every step",
        {.unset = "false"}),
    key("ddp_bucket_cap_mb", &A::ddp_bucket_cap_mb, "MiB of gradients that are averaged at once",
        {.check = &kMebibytes, .unset = "25, with a first bucket of 1"}),
    key("ddp_broadcast_buffers", &A::ddp_broadcast_buffers, "copy rank 0's buffers to all ranks",
        {.unset = "true"}),
    key("ddp_static_graph", &A::ddp_static_graph,
        "promise that every step uses the same parameters equally often", {.unset = "false"}),
    key("ddp_timeout", &A::ddp_timeout, "deadline of a collective, in seconds",
        {.check = &kSeconds}),
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

// The keys of the maps `model` and `data`. cli/task_config.cpp reads them; a test compares.
constexpr SectionKey kSectionKeys[] = {
    {"model", "", "name", "gpt, mlp, resnet18 or resnet50", "gpt; mlp for data: random",
     "a bundled model; `model: gpt` is short for it"},
    {"model", "", "path", "folder", "", "a Hugging Face folder: its config.json and its weights"},
    {"model", "", "config", "folder or file", "",
     "a config.json: random weights in the shape that it describes", "config: FOLDER"},
    {"model", "", "load_in_4bit", "boolean", "false",
     "with path or config and `lora`: the frozen base in NF4 with double quantisation",
     "path: FOLDER, load_in_4bit: true"},
    {"model", "gpt, mlp, resnet", "weights", "folder", "",
     "begins with the weights in a folder's model.safetensors", "name: gpt, weights: FOLDER"},
    {"model", "language models", "device_map", "auto, balanced or {name: device}", "one device",
     "splits the model over devices, in a process of one rank (docs/models.md)"},
    {"model", "gpt", "n_layer", "integer, from 1", "4", "blocks", "name: gpt, n_layer: 4"},
    {"model", "gpt", "n_head", "integer, from 1", "4", "attention heads of a block",
     "name: gpt, n_head: 4"},
    {"model", "gpt", "n_embd", "integer, a multiple of n_head", "128", "width",
     "name: gpt, n_embd: 128"},
    {"model", "gpt", "vocab_size", "integer, from 1",
     "257 for bytes, 50257 for tokens; the tokenizer's", "tokens that the model knows",
     "name: gpt, vocab_size: 257"},
    {"model", "gpt", "n_positions", "integer, from 1", "max_seq_len, or 128",
     "the longest sequence", "name: gpt, n_positions: 128"},
    {"model", "mlp", "hidden", "integer, from 1", "64", "width of a hidden layer",
     "name: mlp, hidden: 64"},
    {"model", "mlp", "layers", "integer, from 0", "1", "hidden layers", "name: mlp, layers: 1"},
    {"model", "mlp", "dropout", "number, from 0 to 0.999", "0", "probability of dropping a value",
     "name: mlp, dropout: 0.1"},
    {"model", "mlp", "batch_norm", "boolean", "false", "BatchNorm after each hidden layer",
     "name: mlp, batch_norm: true"},
    {"data", "", "name", "bytes, tokens, instructions, random or images",
     "bytes; tokens with dataset_dir", "a kind of data; `data: bytes` is short for it"},
    {"data", "bytes", "path", "file or folder", "torch-headers",
     "text files; torch-headers are LibTorch's own headers", "name: bytes, path: FOLDER"},
    {"data", "bytes", "suffix", "text", "none; .h for torch-headers",
     "only files whose names end so", "name: bytes, suffix: .txt"},
    {"data", "bytes", "max_bytes", "integer, from 1000", "4000000", "reads no more than this",
     "name: bytes, max_bytes: 4000000"},
    {"data", "bytes", "eval_bytes", "integer, from 0", "0", "the last bytes, for evaluations",
     "name: bytes, eval_bytes: 40000"},
    {"data", "tokens", "order", "shards or windows", "shards",
     "shuffles inside shards, or over all windows as PyTorch's DistributedSampler",
     "name: tokens, order: windows"},
    {"data", "instructions", "path", "file", "needed", "a .json or .jsonl file of records"},
    {"data", "instructions", "eval_path", "file", "", "records for evaluations",
     "name: instructions, path: FILE, eval_path: FILE"},
    {"data", "instructions", "tokenizer", "folder or file", "bytes",
     "a Hugging Face tokenizer.json; model.vocab_size must reach its last id",
     "name: instructions, path: FILE, tokenizer: FOLDER"},
    {"data", "instructions", "padding", "longest, max_length or packed", "longest",
     "rows as long as the batch's longest, as max_seq_len, or several samples in a row",
     "name: instructions, path: FILE, padding: longest"},
    {"data", "instructions", "pad_to_multiple_of", "integer, from 1",
     "1; on a GPU 64, up to max_seq_len",
     "rounds the length of padded rows up; for padding: longest",
     "name: instructions, path: FILE, pad_to_multiple_of: 8"},
    {"data", "instructions", "train_on_prompt", "boolean", "false",
     "learns prompts too, not responses alone",
     "name: instructions, path: FILE, train_on_prompt: true"},
    {"data", "instructions", "prompt", "text with {instruction} and {input}",
     "### Instruction: ... ### Input: ... ### Response:", "the prompt of a record with an input",
     "name: instructions, path: FILE, prompt: TEXT"},
    {"data", "instructions", "prompt_without_input", "text with {instruction}",
     "### Instruction: ... ### Response:", "the prompt of a record without one",
     "name: instructions, path: FILE, prompt_without_input: TEXT"},
    {"data", "instructions", "response", "text with {output} or {answer}", "{output}",
     "what is to be answered", "name: instructions, path: FILE, response: TEXT"},
    {"data", "instructions", "group_by_length", "boolean", "false",
     "batches of samples of similar length",
     "name: instructions, path: FILE, group_by_length: true"},
    {"data", "random, images", "samples", "integer, from 1", "10000", "training samples",
     "name: random, samples: 10000"},
    {"data", "random, images", "eval_samples", "integer, from 0", "0", "samples for evaluations",
     "name: random, eval_samples: 1000"},
    {"data", "random", "features", "integer, from 1", "20", "numbers of a sample",
     "name: random, features: 20"},
    {"data", "images", "image_size", "integer, from 32", "224", "height and width",
     "name: images, image_size: 224"},
    {"data", "random, images", "classes", "integer, from 2", "10; 1000 for images",
     "classes of the samples", "name: random, classes: 10"},
};

constexpr KeyHint not_here(std::string_view name, std::string_view why,
                           std::string_view of = "Hugging Face's") {
  return {.name = name, .why = why, .of = of};
}
// Without `use`, as the example of kSectionKeys for `now`.
constexpr KeyHint inside(std::string_view section, std::string_view name, std::string_view now,
                         std::string_view use = {}) {
  return {.name = name, .section = section, .use = use, .now = now};
}
constexpr KeyHint means(std::string_view name, std::string_view key) {
  return {.name = name, .use = key};
}

constexpr std::string_view kLora = "r: 16, lora_alpha: 32, target_modules: [c_attn]";

constexpr KeyHint kHints[] = {
    not_here("deepspeed", "ZeRO is DeepSpeed's; fsdp divides the model here"),
    not_here("accelerator_config", "the launcher's settings are in Accelerate's own file"),
    not_here("push_to_hub", "nothing is uploaded"),
    not_here("hub_model_id", "nothing is uploaded"),
    not_here("hub_strategy", "nothing is uploaded"),
    not_here("hub_token", "nothing is uploaded, and a secret does not belong in this file"),
    not_here("do_train", "`lockstep train` trains"),
    not_here("do_eval", "eval_strategy decides"),
    not_here("do_predict", "there is no prediction run"),
    not_here("remove_unused_columns", "datasets here have no columns"),
    not_here("length_column_name", "length grouping is the loader's: see `data`"),
    not_here("gradient_checkpointing_kwargs", "checkpointing here has no options"),
    not_here("optim_target_modules", "the optimizers here work on all parameters"),
    not_here("fp16_opt_level", "apex is Python's; fp16 is autocast"),
    not_here("fp16_backend", "there is one: autocast"),
    not_here("half_precision_backend", "there is one: autocast"),
    not_here("fp16_full_eval", "evaluation uses the same precision as training"),
    not_here("bf16_full_eval", "evaluation uses the same precision as training"),
    not_here("torch_compile_backend", "there is no Python compiler here; see compile_model"),
    not_here("torch_compile_mode", "there is no Python compiler here; see compile_model"),
    not_here("use_liger_kernel", "those kernels are Python's"),
    not_here("neftune_noise_alpha", "it is not supported"),
    not_here("eval_accumulation_steps", "metrics are reduced on the device as they come"),
    not_here("prediction_loss_only", "evaluation keeps metrics, not predictions"),
    not_here("tpu_num_cores", "there is no TPU support"),
    not_here("use_mps_device", "there is no MPS support"),
    not_here("context_parallel_degree", "context parallelism is not supported", "torchtitan's"),
    not_here("expert_parallel_degree", "expert parallelism is not supported", "torchtitan's"),
    not_here("data_parallel_replicate_degree",
             "it follows from the number of ranks and the other degrees", "torchtitan's"),
    not_here("dp_replicate", "it follows from the number of ranks and the other degrees",
             "torchtitan's"),
    not_here("zero_optimization", "fsdp divides the model here", "DeepSpeed's"),
    not_here("zero_stage", "fsdp divides the model here", "DeepSpeed's"),
    not_here("offload_optimizer", "fsdp_config has cpu_offload", "DeepSpeed's"),
    not_here("bnb_4bit_quant_type", "load_in_4bit in `model` means nf4", "TRL's"),
    not_here("use_bnb_nested_quant", "load_in_4bit in `model` means double quantisation", "TRL's"),
    not_here("load_in_8bit", "mixed_precision fp8 has 8 bits", "TRL's"),
    not_here("use_peft", "a section `lora` alone trains adapters", "TRL's"),
    not_here("attn_implementation", "the kernel is chosen by the device", "TRL's"),
    not_here("trust_remote_code", "no code is loaded with a model", "TRL's"),
    not_here("dataset_text_field", "data.prompt and data.response say how a record becomes a text",
             "TRL's"),
    not_here("nproc_per_node", "it is a flag, `lockstep train FILE --nproc-per-node=2`",
             "torchrun's"),
    not_here("nnodes", "it is a flag, `lockstep train FILE --nnodes=2`", "torchrun's"),
    not_here("node_rank", "it is a flag of `lockstep train`", "torchrun's"),
    not_here("master_addr", "it is a flag of `lockstep train`", "torchrun's"),
    not_here("master_port", "it is a flag of `lockstep train`", "torchrun's"),
    inside("model", "hidden_size", "n_embd"),
    inside("model", "num_layers", "n_layer"),
    inside("model", "num_hidden_layers", "n_layer"),
    inside("model", "num_heads", "n_head"),
    inside("model", "num_attention_heads", "n_head"),
    inside("model", "model_name", "path", "path: FOLDER"),
    inside("model", "model_name_or_path", "path", "path: FOLDER"),
    inside("model", "model_path", "path", "path: FOLDER"),
    inside("lora", "lora_alpha", "", kLora),
    inside("lora", "lora_dropout", "", "r: 16, lora_dropout: 0.05, target_modules: [c_attn]"),
    inside("lora", "target_modules", "", kLora),
    inside("lora", "lora_r", "r", kLora),
    inside("lora", "lora_rank", "r", kLora),
    inside("lora", "lora_target_modules", "target_modules", kLora),
    inside("data", "data_path", "path"),
    inside("data", "file", "path"),
    inside("data", "dataset_path", "path"),
    inside("data", "packing", "padding", "name: instructions, path: FILE, padding: packed"),
    inside("data", "dataset_name", "path", "name: instructions, path: FILE"),
    inside("data", "train_file", "path", "name: instructions, path: FILE"),
    inside("data", "validation_file", "eval_path"),
    means("seq_len", "max_seq_len"),
    means("seq_length", "max_seq_len"),
    means("sequence_length", "max_seq_len"),
    means("max_length", "max_seq_len"),
    means("max_seq_length", "max_seq_len"),
    means("block_size", "max_seq_len"),
    means("batch_size", "per_device_train_batch_size"),
    means("micro_batch_size", "per_device_train_batch_size"),
    means("local_batch_size", "per_device_train_batch_size"),
    means("train_batch_size", "global_batch_size"),
    means("eval_batch_size", "per_device_eval_batch_size"),
    means("lr", "learning_rate"),
    means("epochs", "num_train_epochs"),
    means("num_epochs", "num_train_epochs"),
    means("steps", "max_steps"),
    means("optimizer", "optim"),
    means("scheduler", "lr_scheduler_type"),
    means("num_workers", "dataloader_num_workers"),
    means("data_dir", "dataset_dir"),
    means("dataset", "data"),
    means("resume", "resume_from_checkpoint"),
    means("gradient_clipping", "max_grad_norm"),
    means("max_norm", "max_grad_norm"),
    means("pp", "pipeline_parallel_degree"),
    means("tp", "tensor_parallel_degree"),
    means("dp_shard", "data_parallel_shard_degree"),
    means("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
    means("per_gpu_train_batch_size", "per_device_train_batch_size"),
    means("per_gpu_eval_batch_size", "per_device_eval_batch_size"),
    means("torch_dtype", "mixed_precision"),
    means("dtype", "mixed_precision"),
    means("activation_checkpointing", "gradient_checkpointing"),
    means("recompute_modules", "gradient_checkpointing"),
    means("optimizer_state_dtype", "optim_state_dtype"),
    means("bf16_optimizer_states", "optim_state_dtype"),
    means("exp_avg_dtype", "optim_state_dtype"),
    means("exp_avg_sq_dtype", "optim_state_dtype"),
    means("opt_m_dtype", "optim_state_dtype"),
    means("opt_v_dtype", "optim_state_dtype"),
};

}  // namespace

std::span<const KeyHint> key_hints() {
  return kHints;
}

std::span<const SectionKey> section_keys() {
  return kSectionKeys;
}

std::string hint_for_key(std::string_view key) {
  // `now`: the key's name in the map, where that is another one.
  const auto in_map = [&](std::string_view map, std::string_view use, std::string_view now) {
    const std::string what =
        now.empty() ? fmt::format("{} is a key of the {}, not of the top level.", key, map)
                    : fmt::format("there is no key '{}'. Did you mean {}.{}?", key, map, now);
    const bool texts = map == "data" && (now.empty() ? key : now) == "path";
    return fmt::format("{} Write {}: {{{}}}.{}", what, map, use,
                       texts ? " A folder of token shards is dataset_dir." : "");
  };
  const auto example = [](std::string_view name, std::string_view map) {
    return std::ranges::find_if(kSectionKeys, [&](const SectionKey& one) {
      return one.name == name && !one.example.empty() && (map.empty() || one.map == map);
    });
  };
  if (const auto* one = example(key, ""); one != std::end(kSectionKeys))
    return in_map(one->map, one->example, "");
  for (const KeyHint& hint : kHints) {
    if (hint.name != key) continue;
    if (!hint.why.empty())
      return fmt::format("{} is a key of {} that is not read here: {}. Delete it.", key, hint.of,
                         hint.why);
    if (!hint.section.empty())
      return in_map(hint.section,
                    hint.use.empty() ? example(hint.now, hint.section)->example : hint.use,
                    hint.now);
    return fmt::format("there is no key '{}'. Did you mean {}?", key, hint.use);
  }
  return "";
}

void add_words_of_others(MapReader& keys, const Node& map, std::string_view name,
                         std::string_view kind, Problems& problems) {
  const bool in_config = map.find("path") != nullptr || map.find("config") != nullptr;
  for (const Entry& entry : map.entries)
    for (const KeyHint& hint : kHints) {
      if (hint.name != entry.key || hint.section != name || hint.now.empty()) continue;
      const bool shape = hint.now.starts_with("n_");  // of a gpt, or of what config.json describes
      if (shape && !in_config && kind != "gpt") continue;
      keys.has(entry.key);  // MapReader::finish() says nothing more of it
      problems.add(fmt::format("{}: {} has no key '{}'. {}", entry.location.text(), name, hint.name,
                               shape && in_config
                                   ? "config.json says what the model is: change it there."
                                   : fmt::format("Did you mean {}?", hint.now)));
    }
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
    word = lower(word);                 // Accelerate writes FULL_SHARD
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
  if (const std::string way = written("sharding_strategy"); keys.has(way))
    problems.add(
        fmt::format("fsdp_config.{} is the key fsdp here. Write fsdp: full_shard, shard_grad_op "
                    "or hybrid_shard.",
                    way));
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
