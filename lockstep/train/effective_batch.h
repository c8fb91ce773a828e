// How many samples one optimizer step really sees: per device x accumulation x ranks.
//
// The effective batch is what learning depends on, the other three are only how it is reached. So
// every text that proposes to change one of them says what becomes of it.
//
//   accumulation_steps(arguments, world_size)      // from global_batch_size where that is set
//   effective_batch_text(arguments, 2)             // "effective batch 16 = 4 per device x ..."
//
// Pure functions; call from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/train/arguments.h"

namespace lockstep::train {

// What decides the accumulation in the place of gradient_accumulation_steps: the samples
// (global_batch_size) or tokens (tokens_per_update) of one optimizer step over all ranks.
struct UpdateSize {
  std::string_view key;
  std::int64_t wanted = 0;
  std::int64_t per_pass = 0;  // of one rank's forward pass
  std::string pass_text{};    // "batch 4 x 1024 tokens"
};
std::optional<UpdateSize> update_size(const TrainingArguments& arguments);
// Why the ranks' passes do not add up to it, with the nearest values that would; empty: they do.
std::string uneven_text(const UpdateSize& size, int world_size);

// gradient_accumulation_steps, or what makes the update the wanted size at this number of ranks.
// Throws UsageError naming the nearest values that divide evenly.
std::int64_t accumulation_steps(const TrainingArguments& arguments, int world_size);

std::int64_t effective_batch(const TrainingArguments& arguments, int world_size);
std::string effective_batch_text(const TrainingArguments& arguments, int world_size);

// The arguments beside the presets at this world size: batch, accumulation, logging, effective
// batch, and whether it is the same.
std::string preset_comparison(const TrainingArguments& arguments, int world_size);

// The largest batch per device, at most half of today's, that the effective batch is a multiple of:
// with more accumulation nothing else changes. 0: there is none, the batch is 1 already.
std::int64_t smaller_batch(const TrainingArguments& arguments, int world_size);

// What to try when memory runs out, and what each does to the effective batch.
std::string out_of_memory_advice(const TrainingArguments& arguments, int world_size);
// The same in evaluation, where no metric depends on the batch.
std::string evaluation_memory_advice(const TrainingArguments& arguments);

}  // namespace lockstep::train
