// The number of samples in one optimizer step: per device x accumulation x ranks.
//
// Learning depends on the effective batch only, not on how the three factors divide it. So every
// text that proposes to change one of them says what happens to the effective batch.
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

// The number of ranks with samples of their own: stages of a pipeline and slices of a layer share
// samples. UsageError where their degrees do not divide `ranks`.
int batch_ranks(const TrainingArguments& arguments, int ranks);

// In all functions below `world_size` is this number.

// gradient_accumulation_steps, or the value that gives the update the wanted size with this number
// of ranks. Throws UsageError naming the nearest values that divide evenly.
std::int64_t accumulation_steps(const TrainingArguments& arguments, int world_size);

std::int64_t effective_batch(const TrainingArguments& arguments, int world_size);
std::string effective_batch_text(const TrainingArguments& arguments, int world_size);

// The factors of the effective batch, to compare a continued run's with the checkpoint's.
struct BatchParts {
  std::int64_t ranks = 1, batch = 1, accumulation = 1;
  bool operator==(const BatchParts&) const = default;
};
std::string other_batch_text(const BatchParts& then, const BatchParts& now);

// Compares the arguments with the presets at this world size: batch, accumulation, logging,
// effective batch, and whether it is the same.
std::string preset_comparison(const TrainingArguments& arguments, int world_size);

// Advice to scale learning_rate from the effective batch that it was chosen for: linearly for sgd,
// by the square root for Adam. `reference`: the checkpoint's effective batch, if the run continues
// from one. Empty: the batches are equal, or the arguments fix the batch.
std::string learning_rate_advice(const TrainingArguments& arguments, int world_size,
                                 std::optional<std::int64_t> reference = {});

// The largest batch per device, at most half of the present one, that divides the effective batch:
// more accumulation then compensates exactly. 0: there is none, the batch is 1 already.
std::int64_t smaller_batch(const TrainingArguments& arguments, int world_size);

// The remedies when memory runs out, and the effect of each on the effective batch.
std::string out_of_memory_advice(const TrainingArguments& arguments, int world_size);
// The same in evaluation, where no metric depends on the batch.
std::string evaluation_memory_advice(const TrainingArguments& arguments);

}  // namespace lockstep::train
