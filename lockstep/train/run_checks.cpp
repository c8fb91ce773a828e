#include "lockstep/train/run_checks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>

#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/core/text.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/file.h"
#include "lockstep/io/manifest.h"
#include "lockstep/train/trainer_state.h"

namespace lockstep::train {

void check_evaluation(const TrainingArguments& arguments, bool has_eval_data) {
  const bool by_strategy = arguments.eval_strategy != Interval::kNo;
  if (has_eval_data || (!by_strategy && !arguments.eval_on_start)) return;
  throw UsageError("trainer",
                   "{} asks for evaluations, and the task has no eval_data, or an empty one. Set "
                   "it (in a training file: data.eval_bytes, longer than max_seq_len, "
                   "data.eval_samples, data.eval_path, or token shards of the split val), or {}.",
                   by_strategy ? "eval_strategy" : "eval_on_start",
                   by_strategy ? "eval_strategy: no" : "eval_on_start: false");
}

std::string full_metric_name(const std::string& metric) {
  return metric.rfind("eval_", 0) == 0 ? metric : "eval_" + metric;
}

void check_metric(const TrainingArguments& arguments, const std::vector<std::string>& given) {
  const bool needed = arguments.load_best_model_at_end || arguments.early_stopping_patience ||
                      arguments.save_strategy == Interval::kBest;
  const std::string name = full_metric_name(arguments.metric_for_best_model);
  if (!needed || std::find(given.begin(), given.end(), name) != given.end()) return;
  throw UsageError(
      "trainer",
      "metric_for_best_model is '{}' and evaluation gives no {}.{} It gives {}. Choose "
      "one of them, or give the task totals of that name.",
      arguments.metric_for_best_model, name, did_you_mean(name, given), fmt::join(given, ", "));
}

void check_precision(const TrainingArguments& arguments, bool on_cpu) {
  if (!arguments.fp16 || !on_cpu) return;
  if (env::get_bool("LOCKSTEP_HALF_ON_CPU").value_or(false)) return;
  throw UsageError("trainer",
                   "fp16 needs a GPU, and this rank computes on the CPU. Use bf16, which a CPU "
                   "computes too, or neither.");
}

void check_resume(const std::string& flag) {
  std::error_code ignored;
  if (flag == "auto" || flag == "never") return;
  if (std::filesystem::is_directory(flag, ignored)) {
    if (io::has_manifest(flag)) return;
    const auto inside = io::list_numbered(flag, kCheckpointPrefix);
    if (inside.empty()) return;  // reading it reports what is missing
    throw UsageError("checkpoint",
                     "{} is an output_dir and not a checkpoint. Its newest checkpoint is {}. Give "
                     "that folder, or set output_dir to {} and resume_from_checkpoint (--resume) "
                     "to auto.",
                     flag, inside.front().path, flag);
  }
  throw UsageError(
      "checkpoint",
      "{} cannot be used: there is no such folder.{} resume_from_checkpoint (--resume) "
      "is auto (continue from the newest whole checkpoint in output_dir), never (start "
      "again) or the folder of a checkpoint.",
      flag, did_you_mean(flag, std::vector<std::string>{"auto", "never"}));
}

void check_weights(const std::string& folder, const io::SafetensorsSet& weights,
                   const std::vector<io::TensorShape>& model) {
  std::set<std::string> known;
  std::vector<std::string> missing;
  for (const io::TensorShape& tensor : model) {
    known.insert(tensor.name);
    const auto found = weights.find(tensor.name);
    if (found.entry == nullptr) {
      missing.push_back(tensor.name);
    } else if (found.entry->shape != tensor.shape) {
      throw UsageError("checkpoint",
                       "{}: '{}' is [{}] and the model's is [{}]. The checkpoint belongs to "
                       "another model{}.",
                       folder, tensor.name, fmt::join(found.entry->shape, ", "),
                       fmt::join(tensor.shape, ", "),
                       std::filesystem::exists(folder + "/training_args.json")
                           ? "; compare `model` in its training_args.json"
                           : "");
    }
  }
  std::vector<std::string> unknown;
  for (const std::string& name : weights.names())
    if (!known.contains(name)) unknown.push_back(name);
  if (missing.empty() && unknown.empty()) return;
  throw UsageError("checkpoint",
                   "{} does not fit the model: {} of its tensors are missing ({}), {} are not "
                   "the model's ({}). It belongs to another model.",
                   folder, missing.size(), fmt::join(missing, ", "), unknown.size(),
                   fmt::join(unknown, ", "));
}

void check_output_dir(const std::string& output_dir) {
  std::error_code error;
  for (std::filesystem::path place = std::filesystem::absolute(output_dir, error); !place.empty();
       place = place.parent_path()) {
    const auto type = std::filesystem::status(place, error).type();
    if (type == std::filesystem::file_type::directory) {
      if (::access(place.c_str(), W_OK | X_OK) == 0) return;
      throw UsageError("trainer",
                       "output_dir {}: nothing can be written in {} ({}). Choose another "
                       "output_dir, or change the permissions of that folder.",
                       output_dir, place.string(), std::strerror(errno));
    }
    if (place == place.parent_path()) return;
    if (type == std::filesystem::file_type::not_found || type == std::filesystem::file_type::none)
      continue;
    throw UsageError("trainer", "output_dir {}: {} is a file, not a folder. Choose another one.",
                     output_dir, place.string());
  }
}

void check_room(const TrainingArguments& arguments, const CheckpointSize& size, bool two) {
  check_output_dir(arguments.output_dir);
  const bool by_plan = arguments.save_strategy != Interval::kNo;
  if (!by_plan && !arguments.enable_jit_checkpoint) return;
  const std::uint64_t one =
      size.model + (arguments.save_only_model ? 0 : size.optimizer) + kSmallFiles;
  const std::uint64_t free = io::free_space(arguments.output_dir);
  if (free >= (two ? 2 * one : one)) return;
  const std::string found =
      fmt::format("{} has room for {} and one checkpoint takes about {}", arguments.output_dir,
                  io::size_text(free), io::size_text(one));
  if (!by_plan) {
    log::warning("trainer", "{}: a stop signal will not be able to save. Free some space.", found);
    return;
  }
  throw UsageError("trainer",
                   "{}{}. Free some space, choose another output_dir, or set save_strategy: no.",
                   found,
                   two ? "; two exist side by side until the older one is deleted "
                         "(save_total_limit)"
                       : "");
}

}  // namespace lockstep::train
