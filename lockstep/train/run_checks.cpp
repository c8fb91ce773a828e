#include "lockstep/train/run_checks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/spelling.h"

namespace lockstep::train {

void check_evaluation(const TrainingArguments& arguments, bool has_eval_data) {
  const bool by_strategy = arguments.eval_strategy != Interval::kNo;
  if (has_eval_data || (!by_strategy && !arguments.eval_on_start)) return;
  throw UsageError("trainer",
                   "{} asks for evaluations, and the task has no eval_data. Set it (in a training "
                   "file: data.eval_bytes, longer than max_seq_len, data.eval_samples, "
                   "data.eval_path, or token shards of the split val), or {}.",
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

void check_resume(const std::string& wish) {
  std::error_code ignored;
  if (wish == "auto" || wish == "never" || std::filesystem::is_directory(wish, ignored)) return;
  throw UsageError(
      "checkpoint",
      "{} cannot be used: there is no such folder.{} resume_from_checkpoint (--resume) "
      "is auto (go on from the newest whole checkpoint in output_dir), never (start "
      "anew) or the folder of a checkpoint.",
      wish, did_you_mean(wish, std::vector<std::string>{"auto", "never"}));
}

}  // namespace lockstep::train
