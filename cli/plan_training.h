// A training file as observe/plan takes it: `lockstep plan` reports on it, and `lockstep train`
// follows it with elastic_gpu.
//
//   const plan::Training training = training_of(config, task);
//   const std::string said = apply_plan(arguments, training, card, world.size());
//
// Functions without state; call from any thread.
#pragma once

#include <optional>
#include <string>

#include "cli/task_config.h"
#include "lockstep/train/config.h"
#include "observe/plan/ranking.h"

namespace lockstep::cli {

plan::Training training_of(const train::Config& config, const TaskConfig& task);

// The largest batch per device, up to the present one, with which so many copies of the model share
// global_batch_size or tokens_per_update evenly. UsageError with the nearest values where not even
// a batch of 1 does.
TrainingArguments with_shared_batch(TrainingArguments arguments, int copies);

// elastic_gpu: the batch per device, the accumulation and what is sharded (optimizer, or all by
// fsdp) that fit this card at this number of ranks and preserve the global batch; `measured`, where
// it fits, takes the place of the estimate. Returns a line that says what was chosen; empty for a
// model with a device map, which is left as it is. UsageError for a global batch that the ranks
// cannot share. Every rank must pass the same card.
std::string apply_plan(TrainingArguments& arguments, const plan::Training& training,
                       const plan::Card& card, int ranks,
                       std::optional<plan::Measurement> measured = {});

}  // namespace lockstep::cli
