// What a run needs beyond arguments that agree with each other: data to evaluate on, a metric that
// is measured, a device for its precision, a folder to continue from, weights that are the model's,
// room for a checkpoint.
//
// The Trainer runs these checks when it begins, `lockstep config check` before that and without
// torch; both share one function, so that what passes the check is not refused later with another
// message.
//
//   check_evaluation(arguments, task.eval_data != nullptr);
//   check_metric(arguments, {"eval_loss", "eval_accuracy"});
//
// Functions without state that throw UsageError; call from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/io/safetensors.h"
#include "lockstep/train/arguments.h"

namespace lockstep::train {

// An evaluation that is silently skipped would take early stopping and the best model with it.
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

// Headers, texts and the generators' states of a checkpoint.
inline constexpr std::uint64_t kSmallFiles = 64u << 10;

struct CheckpointSize {
  std::uint64_t model = 0;      // bytes of the tensors that are saved
  std::uint64_t optimizer = 0;  // of its state; see rule_options.h
};

// Requires output_dir to be a folder, or a place where one can be made.
void check_output_dir(const std::string& output_dir);

// Requires output_dir's disk to have room for what is saved: better found now than after hours.
// `two`: the older checkpoint is deleted after the new one is durable. What only a stop signal
// would save is not refused but warned about.
void check_room(const TrainingArguments& arguments, const CheckpointSize& size, bool two);

}  // namespace lockstep::train
