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

#include "lockstep/io/safetensors_set.h"
#include "lockstep/train/arguments.h"

namespace lockstep::train {

// An evaluation that is silently skipped would take early stopping and the best model with it.
void check_evaluation(const TrainingArguments& arguments, bool has_eval_data);

// metric_for_best_model among what an evaluation gives ("eval_loss", ...), where it is needed.
void check_metric(const TrainingArguments& arguments, const std::vector<std::string>& given);
// "loss" means "eval_loss", as with Hugging Face.
std::string full_metric_name(const std::string& metric);

// As Hugging Face's (Accelerate's): fp16 is a GPU's. The commands ask; a program of its own may
// scale on the CPU too, and so may LOCKSTEP_HALF_ON_CPU=1, for tests.
void check_precision(const TrainingArguments& arguments, bool on_cpu);

// That resume_from_checkpoint is auto, never or a folder that is there; not what is in it.
void check_resume(const std::string& flag);

// That the weights of `folder` are those of a model with these tensors: every one is there, in its
// shape, and nothing else. Looks at names and shapes alone.
void check_weights(const std::string& folder, const io::SafetensorsSet& weights,
                   const std::vector<io::TensorShape>& model);

// Headers, texts and the generators' states of a checkpoint.
inline constexpr std::uint64_t kSmallFiles = 64u << 10;

// How many tensors of a parameter's size the optimizer keeps for each.
int state_copies(const TrainingArguments& arguments);

// That output_dir is a folder, or can become one.
void check_output_dir(const std::string& output_dir);

// That output_dir's disk has room for what is to be saved of a model of so many bytes: found now
// and not after hours. `two`: the older checkpoint is deleted after the new one is durable. What
// only a stop signal would save is not a reason to refuse, and warned of.
void check_room(const TrainingArguments& arguments, std::uint64_t model_bytes, bool two);

}  // namespace lockstep::train
