// Converts a training file for observe/plan: `lockstep plan` reports on it, and `lockstep train`
// applies the plan with elastic_gpu. Also keeps this host's measurements for the next plan.
//
//   const plan::Training training = training_of(config, task);
//   const std::string said = apply_plan(arguments, training, card, world.size());
//   save_link("NVIDIA L40S", {.backend = "nccl", .ranks = 4, .bandwidth = 11e9});
//   if (const auto link = saved_link("NVIDIA L40S", 4)) use_measured(cluster, *link);
//
// Functions without state; call from any thread. Of two processes that save at once one wins.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/task_config.h"
#include "launcher/host.h"
#include "lockstep/train/config.h"
#include "observe/plan/machine.h"
#include "observe/plan/ranking.h"

namespace lockstep::cli {

plan::Training training_of(const train::Config& config, const TaskConfig& task);

// The cards that the driver has found. UsageError for none, and where it does not say what they
// are.
plan::Devices found_cards(const launch::Gpus& gpus);

// Reduces the batch per device to the largest with which this many copies of the model share
// global_batch_size or tokens_per_update evenly. UsageError with the nearest values if not even a
// batch of 1 does.
TrainingArguments with_shared_batch(TrainingArguments arguments, int copies);

// elastic_gpu: sets the batch per device, the accumulation and the sharding (optimizer, or all by
// fsdp) that fit this card at this number of ranks and preserve the global batch; `measured`, if it
// fits, replaces the estimate. Returns a line that says what was chosen; empty for a model with a
// device map, which is not changed. UsageError for a global batch that the ranks cannot share.
// Every rank must pass the same card.
std::string apply_plan(TrainingArguments& arguments, const plan::Training& training,
                       const plan::Card& card, int ranks,
                       std::optional<plan::Measurement> measured = {});

// ---------------------------------------------------------------- what was measured on this host

// The file with links measured by `lockstep doctor` and strategies run by `lockstep plan --probe`.
// One for each user: plan.json in LOCKSTEP_CACHE, or in lockstep of XDG_CACHE_HOME (~/.cache). An
// entry has its host's name, because hosts may share home folders, and the load by other programs:
// a disturbed figure never replaces an undisturbed one. An unreadable file counts as none; a failed
// write is reported on stderr and no error.
std::string plan_record_path();

// `device`: "cpu", or the driver's name for the cards.
void save_link(const std::string& device, const plan::MeasuredLink& link);
// The saved link with the nearest number of ranks.
std::optional<plan::MeasuredLink> saved_link(const std::string& device, int ranks);

// Identifies comparable trainings: sizes, lengths, global batch, optimizer and device.
std::string training_key(const plan::Training& training, const std::string& device, int gpus);
void save_strategies(const std::string& training, const std::vector<plan::Measurement>& strategies);
std::vector<plan::Measurement> saved_strategies(const std::string& training);

// The fastest strategy for this many data-parallel ranks that the file's keys do not rule out.
std::optional<plan::Measurement> fastest_strategy(const std::vector<plan::Measurement>& strategies,
                                                  const plan::Training& training, int ranks);
// Encodes a measurement as a line for other ranks; the inverse returns nothing for an empty line.
std::string measurement_text(const plan::Measurement& strategy);
std::optional<plan::Measurement> parse_measurement(const std::string& text);

}  // namespace lockstep::cli
