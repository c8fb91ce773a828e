// What no single key can show: values that contradict each other. Private to this layer.
//
//   for (auto& text : contradictions(arguments, where)) problems.add(text);
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/train/arguments.h"

namespace lockstep::train {

// Where a key's value comes from: "train.yaml:3:1"; "default"; "" when the arguments were set in a
// program.
using Where = std::function<std::string(std::string_view key)>;

std::vector<std::string> contradictions(const TrainingArguments& arguments, const Where& where);

// What decides the accumulation instead of gradient_accumulation_steps: the samples
// (global_batch_size) or tokens (tokens_per_update) of one optimizer step over all ranks.
struct UpdateSize {
  std::string_view key;
  std::int64_t wanted = 0;
  std::int64_t per_pass = 0;       // in one rank's forward pass
  std::string pass_text{};         // "batch 4 x 1024 tokens"
  std::int64_t ranks_of_copy = 1;  // as below
};
std::optional<UpdateSize> update_size(const TrainingArguments& arguments);
// Why the passes of so many copies of the model do not add up to it, with the nearest values that
// would; empty: they do.
std::string uneven_text(const UpdateSize& size, int copies);

// The ranks that hold one copy of the model together and see the same samples: stages of a pipeline
// x slices of a layer.
std::int64_t ranks_of_copy(const TrainingArguments& arguments);
// "2 ranks", or where one does not hold the whole model "1 data parallel group of 2 ranks".
std::string copies_text(std::int64_t copies, std::int64_t ranks_of_copy);

// "tensorwise" or "rowwise" where mixed_precision is fp8, otherwise empty. UsageError for another
// `fp8` than {recipe: one of them}.
std::string fp8_recipe_name(const TrainingArguments& arguments);

// A number of steps, where below 1 stands for a share of all: rounded up.
std::int64_t in_steps(double value, std::int64_t max_steps);

// Says that training ends during its warm-up, and with which learning rate; empty: it does not.
std::string short_warmup_text(const TrainingArguments& arguments, std::int64_t max_steps);

// Expands `~` at the start of every path, for arguments that were set in a program. UsageError when
// that home directory is not known.
void expand_paths(TrainingArguments& arguments);

// What is allowed but probably not intended.
std::vector<std::string> advice(const TrainingArguments& arguments, const Where& where);

}  // namespace lockstep::train
