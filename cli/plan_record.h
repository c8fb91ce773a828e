// What was measured on this host, kept for the next plan: the links that `lockstep doctor` has
// measured, and the ways that `lockstep plan --probe` has run.
//
//   save_link("NVIDIA L40S", {.backend = "nccl", .ranks = 4, .bandwidth = 11e9});
//   if (const auto link = saved_link("NVIDIA L40S", 4)) use_measured(cluster, *link);
//
// One file for a user: plan.json in LOCKSTEP_CACHE, or in lockstep of XDG_CACHE_HOME (~/.cache).
// Each entry holds the name of its host, because home folders are shared between hosts, and what
// other programs used meanwhile: a disturbed figure never replaces an undisturbed one. A file that
// cannot be read counts as none; one that cannot be written is reported on stderr and no error.
//
// Functions without state; of two processes that write at once one wins.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "observe/plan/ranking.h"
#include "observe/plan/scaling.h"

namespace lockstep::cli {

std::string plan_record_path();

// `device`: "cpu", or the name that the driver has for the cards.
void save_link(const std::string& device, const plan::MeasuredLink& link);
// The one with the nearest number of ranks.
std::optional<plan::MeasuredLink> saved_link(const std::string& device, int ranks);

// What makes two trainings comparable: sizes, lengths, global batch, optimizer and the device.
std::string training_key(const plan::Training& training, const std::string& device, int gpus);
void save_ways(const std::string& training, const std::vector<plan::Measurement>& ways);
std::vector<plan::Measurement> saved_ways(const std::string& training);

// The fastest that so many data-parallel ranks can follow with what the file leaves open.
std::optional<plan::Measurement> fastest_way(const std::vector<plan::Measurement>& ways,
                                             const plan::Training& training, int ranks);
// A line that ranks send each other; nothing for an empty one.
std::string measurement_text(const plan::Measurement& way);
std::optional<plan::Measurement> parse_measurement(const std::string& text);

}  // namespace lockstep::cli
