// Checks of a whole run that involve several keys, or more than the arguments: contradictory
// values, missing data for evaluation, a metric that is not measured, a device without the
// precision, a missing folder to continue from, a full disk.
//
//   for (auto& text : contradictions(arguments, where)) problems.add(text);
//   check_evaluation(arguments, task.eval_data != nullptr);      // throws UsageError
//   check_metric(arguments, {"eval_loss", "eval_accuracy"});
//
// The Trainer runs the check_ functions when it begins, `lockstep config check` before that and
// without torch: what passes there is not refused later with another message. No state; call from
// any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/io/safetensors.h"
#include "lockstep/train/arguments.h"

namespace lockstep::train {

// Where a key's value comes from: "train.yaml:3:1"; "default"; "" when the arguments were set in a
// program.
using Where = std::function<std::string(std::string_view key)>;

std::vector<std::string> contradictions(const TrainingArguments& arguments, const Where& where);

// The size of an optimizer step over all ranks, when it determines the accumulation instead of
// gradient_accumulation_steps: samples (global_batch_size) or tokens (tokens_per_update).
struct UpdateSize {
  std::string_view key;
  std::int64_t wanted = 0;
  std::int64_t per_pass = 0;       // in one rank's forward pass
  std::string pass_text{};         // "batch 4 x 1024 tokens"
  std::int64_t ranks_of_copy = 1;  // as below
};
std::optional<UpdateSize> update_size(const TrainingArguments& arguments);
// Why the passes of this many copies of the model do not add up to the size, with the nearest
// values that do; empty: they do.
std::string uneven_text(const UpdateSize& size, int copies);

// The number of ranks that hold one copy of the model together and see the same samples: stages of
// a pipeline x slices of a layer.
std::int64_t ranks_of_copy(const TrainingArguments& arguments);
// "2 ranks", or "1 data parallel group of 2 ranks" where one rank has only a part of the model.
std::string copies_text(std::int64_t copies, std::int64_t ranks_of_copy);

// "tensorwise" or "rowwise" where mixed_precision is fp8, otherwise empty. UsageError for another
// `fp8` than {recipe: one of them}.
std::string fp8_recipe_name(const TrainingArguments& arguments);

// A number of steps, where below 1 stands for a share of all: rounded up.
std::int64_t in_steps(double value, std::int64_t max_steps);

// A warning that training ends during its warm-up, and at which learning rate; else empty.
std::string short_warmup_text(const TrainingArguments& arguments, std::int64_t max_steps);

// Expands `~` at the start of every path, for arguments that were set in a program. UsageError when
// the home directory is unknown.
void expand_paths(TrainingArguments& arguments);

// Warnings about settings that are valid but probably not intended.
std::vector<std::string> advice(const TrainingArguments& arguments, const Where& where);

// A silently skipped evaluation would also disable early stopping and the best model.
void check_evaluation(const TrainingArguments& arguments, bool has_eval_data);

// Requires metric_for_best_model to be among an evaluation's metrics ("eval_loss", ...), if needed.
void check_metric(const TrainingArguments& arguments, const std::vector<std::string>& given);
// "loss" means "eval_loss", as with Hugging Face.
std::string full_metric_name(const std::string& metric);

// As in Hugging Face (Accelerate), fp16 needs a GPU. The commands check this; a user's program may
// scale on the CPU too, and so may LOCKSTEP_HALF_ON_CPU=1, for tests.
void check_precision(const TrainingArguments& arguments, bool on_cpu);

// Requires resume_from_checkpoint to be auto, never or an existing folder; its contents are not
// read.
void check_resume(const std::string& flag);

// Requires the weights of `folder` to be those of a model with these tensors: every one is there,
// in its shape, and nothing else. Looks only at names and shapes.
void check_weights(const std::string& folder, const io::SafetensorsSet& weights,
                   const std::vector<io::TensorShape>& model);

// An upper bound for headers, texts and the generators' states of a checkpoint.
inline constexpr std::uint64_t kSmallFiles = 64u << 10;

struct CheckpointSize {
  std::uint64_t model = 0;      // bytes of the tensors that are saved
  std::uint64_t optimizer = 0;  // of its state; see rule_options.h
};

// Requires output_dir to be a folder, or a path where one can be created.
void check_output_dir(const std::string& output_dir);

// Requires output_dir's disk to have room for the saves: better to fail now than after hours.
// `two`: the older checkpoint is deleted only after the new one is durable. If only a stop signal
// would save, this is a warning instead of an error.
void check_room(const TrainingArguments& arguments, const CheckpointSize& size, bool two);

}  // namespace lockstep::train
