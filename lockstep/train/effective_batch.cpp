#include "lockstep/train/effective_batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "lockstep/core/error.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/config.h"

namespace lockstep::train {
namespace {

std::string row_text(const std::string& name, const TrainingArguments& arguments, int world_size) {
  return fmt::format("  {:<14}{:>6}{:>8}{:>9}{:>17}\n", name, arguments.per_device_train_batch_size,
                     accumulation_steps(arguments, world_size),
                     static_cast<double>(arguments.logging_steps),
                     effective_batch(arguments, world_size));
}

}  // namespace

int batch_ranks(const TrainingArguments& arguments, int ranks) {
  const std::int64_t stages = arguments.pipeline_parallel_degree;
  const std::int64_t slices = arguments.tensor_parallel_degree;
  const std::int64_t holders = ranks_of_copy(arguments);
  if (ranks % holders != 0)
    throw UsageError("config",
                     "{} is {}, and there {} rank{}. Start a multiple of it: each {} ranks hold "
                     "one copy of the model.",
                     slices == 1   ? "pipeline_parallel_degree"
                     : stages == 1 ? "tensor_parallel_degree"
                                   : "pipeline_parallel_degree x tensor_parallel_degree",
                     holders, ranks == 1 ? "is 1" : fmt::format("are {}", ranks),
                     ranks == 1 ? "" : "s", holders);
  return static_cast<int>(ranks / holders);
}

std::string other_batch_text(const BatchParts& then, const BatchParts& now) {
  const auto whole = [](const BatchParts& p) { return p.ranks * p.batch * p.accumulation; };
  return fmt::format(
      "the checkpoint was made with {} data parallel rank{} x batch {} x accumulation {}, now {} x "
      "{} x {}: the samples come in the same order, each once per epoch; the effective batch {}.",
      then.ranks, then.ranks == 1 ? "" : "s", then.batch, then.accumulation, now.ranks, now.batch,
      now.accumulation,
      whole(then) == whole(now) ? fmt::format("is {} as before", whole(now))
                                : fmt::format("is {} instead of {}", whole(now), whole(then)));
}

std::int64_t accumulation_steps(const TrainingArguments& arguments, int world_size) {
  if (world_size < 1)
    throw UsageError("config", "a world of {} ranks does not exist. Give at least 1.", world_size);
  if (arguments.tokens_per_update && !arguments.max_seq_len) {
    throw UsageError("config",
                     "tokens_per_update needs to know how long a sample is. Set max_seq_len.");
  }
  const std::optional<UpdateSize> size = update_size(arguments);
  if (!size) return arguments.gradient_accumulation_steps;
  const std::string uneven = uneven_text(*size, world_size);
  if (!uneven.empty()) throw UsageError("config", "{}", uneven);
  return size->wanted / (size->per_pass * world_size);
}

std::int64_t effective_batch(const TrainingArguments& arguments, int world_size) {
  return arguments.per_device_train_batch_size * accumulation_steps(arguments, world_size) *
         world_size;
}

std::string effective_batch_text(const TrainingArguments& arguments, int world_size) {
  return fmt::format("effective batch {} = {} per device x {} accumulation x {}",
                     effective_batch(arguments, world_size), arguments.per_device_train_batch_size,
                     accumulation_steps(arguments, world_size),
                     copies_text(world_size, ranks_of_copy(arguments)));
}

std::string preset_comparison(const TrainingArguments& arguments, int world_size) {
  std::string text = fmt::format("{}\n  {:<14}{:>6}{:>8}{:>9}{:>17}\n",
                                 effective_batch_text(arguments, world_size), "", "batch", "accum",
                                 "logging", "effective batch");
  text += row_text("this", arguments, world_size);
  const std::int64_t own = effective_batch(arguments, world_size);
  std::vector<std::string> others;
  for (const std::string& name : preset_names()) {
    TrainingArguments preset;
    for (const Entry& entry : preset_entries(name))
      assign(preset, *find_key(entry.key), entry.value);
    text += row_text(name, preset, world_size);
    if (effective_batch(preset, world_size) != own) others.push_back(name);
  }
  return text + (others.empty()
                     ? "  The effective batch is the same: they differ in speed alone.\n"
                     : fmt::format("  The effective batch differs from {}: expect to tune the "
                                   "learning rate again.\n",
                                   fmt::join(others, " and ")));
}

std::string learning_rate_advice(const TrainingArguments& arguments, int world_size,
                                 std::optional<std::int64_t> reference) {
  const std::int64_t now = effective_batch(arguments, world_size);
  if (arguments.learning_rate_batch_size) reference = arguments.learning_rate_batch_size;
  const bool known = reference.has_value();
  // If the file sets the samples of a step, their number does not depend on the ranks.
  if (!known && update_size(arguments)) return {};
  const std::int64_t then = known ? *reference : now / world_size;
  if (then == now || then < 1) return {};
  const bool linear = arguments.optim == "sgd";
  const double ratio = static_cast<double>(now) / static_cast<double>(then);
  const std::string suggestion =
      fmt::format("the {} rule for {} suggests {:.3g}", linear ? "linear" : "square-root",
                  arguments.optim, arguments.learning_rate * (linear ? ratio : std::sqrt(ratio)));
  if (known)
    return fmt::format("learning_rate {} was set for {} samples per step; {} now: {}.",
                       arguments.learning_rate, then, now, suggestion);
  return fmt::format(
      "learning_rate {}: a step has {} samples on {} {}, {} on one. If it was chosen for {}, "
      "{}; set learning_rate_batch_size to what it was chosen for, or global_batch_size to keep "
      "the batch.",
      arguments.learning_rate, now, world_size,
      ranks_of_copy(arguments) == 1 ? "ranks" : "data parallel groups", then, then, suggestion);
}

std::int64_t smaller_batch(const TrainingArguments& arguments, int world_size) {
  const std::int64_t batch = arguments.per_device_train_batch_size;
  const std::int64_t window = batch * accumulation_steps(arguments, world_size);
  std::int64_t smaller = batch / 2;
  while (smaller > 1 && window % smaller != 0) --smaller;
  return smaller;
}

std::string out_of_memory_advice(const TrainingArguments& arguments, int world_size) {
  const std::int64_t batch = arguments.per_device_train_batch_size;
  const std::int64_t steps = accumulation_steps(arguments, world_size);
  const std::int64_t now = batch * steps * world_size;
  if (batch == 1) {
    return fmt::format(
        "per_device_train_batch_size is 1 already ({}). Try gradient_checkpointing: true, bf16: "
        "true, or a shorter max_seq_len.",
        effective_batch_text(arguments, world_size));
  }
  const std::int64_t smaller = smaller_batch(arguments, world_size);
  const std::int64_t passes = batch * steps / smaller;
  if (const auto size = update_size(arguments)) {  // there is one way out
    return fmt::format(
        "{}. Try per_device_train_batch_size: {}: {} makes the accumulation {} (effective batch "
        "stays {}).",
        effective_batch_text(arguments, world_size), smaller, size->key, passes, now);
  }
  const std::int64_t fewer = std::max<std::int64_t>(1, batch * 3 / 4);
  return fmt::format(
      "{}. Try per_device_train_batch_size: {} (effective batch {} instead of {}), or "
      "per_device_train_batch_size: {} with gradient_accumulation_steps: {} (effective batch stays "
      "{}).",
      effective_batch_text(arguments, world_size), fewer, fewer * steps * world_size, now, smaller,
      passes, now);
}

std::string evaluation_memory_advice(const TrainingArguments& arguments) {
  const std::int64_t batch = arguments.per_device_eval_batch_size;
  if (batch == 1)
    return "per_device_eval_batch_size is 1 already. Try bf16: true, or a shorter max_seq_len.";
  return fmt::format(
      "per_device_eval_batch_size is {}. Try {}: evaluation takes longer and its metrics stay.",
      batch, batch / 2);
}

}  // namespace lockstep::train
