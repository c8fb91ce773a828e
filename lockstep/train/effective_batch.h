// How many samples one optimizer step really sees: per device x accumulation x ranks.
//
// The effective batch is what learning depends on, the other three are only how it is reached. So
// every text that proposes to change one of them says what happens to the effective batch.
//
//   accumulation_steps(arguments, world_size)      // from global_batch_size where that is set
//   effective_batch_text(arguments, 2)             // "effective batch 16 = 4 per device x ..."
//
// Pure functions; call from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/train/arguments.h"

namespace lockstep::train {

// The ranks that see samples of their own: stages of a pipeline and slices of a layer see the same.
// UsageError where their degrees do not divide `ranks`.
int batch_ranks(const TrainingArguments& arguments, int ranks);

// In all that follows `world_size` is the number of those.

// gradient_accumulation_steps, or the value that gives the update the wanted size with this number
// of ranks. Throws UsageError naming the nearest values that divide evenly.
std::int64_t accumulation_steps(const TrainingArguments& arguments, int world_size);

std::int64_t effective_batch(const TrainingArguments& arguments, int world_size);
std::string effective_batch_text(const TrainingArguments& arguments, int world_size);

// What is said where a run continues with other numbers than the checkpoint's.
struct BatchParts {
  std::int64_t ranks = 1, batch = 1, accumulation = 1;
  bool operator==(const BatchParts&) const = default;
};
std::string other_batch_text(const BatchParts& then, const BatchParts& now);

// Compares the arguments with the presets at this world size: batch, accumulation, logging,
// effective batch, and whether it is the same.
std::string preset_comparison(const TrainingArguments& arguments, int world_size);

// What learning_rate would become with another effective batch than it was chosen for: linear for
// sgd, the square root for Adam. `reference`: the checkpoint's effective batch, where the run
// continues from one. Empty: the batch is that one, or the arguments fix it.
std::string learning_rate_advice(const TrainingArguments& arguments, int world_size,
                                 std::optional<std::int64_t> reference = {});

// The largest batch per device, at most half of the present one, that divides the effective batch:
// with more accumulation nothing else changes. 0: there is none, the batch is 1 already.
std::int64_t smaller_batch(const TrainingArguments& arguments, int world_size);

// What to try when memory runs out, and what each does to the effective batch.
std::string out_of_memory_advice(const TrainingArguments& arguments, int world_size);
// The same in evaluation, where no metric depends on the batch.
std::string evaluation_memory_advice(const TrainingArguments& arguments);

}  // namespace lockstep::train
