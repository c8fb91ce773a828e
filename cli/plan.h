// A training file converted for observe/plan, which `lockstep plan` reports on and `lockstep train`
// applies with elastic_gpu (plan_training.cpp), and this host's measurements for the next plan; the
// parts of `lockstep plan`: its devices, its report, the probe that runs a few steps, and the
// training file that it writes.
//
//   const plan::Training training = training_of(config, task);
//   const std::string said = apply_plan(arguments, training, card, world.size());
//   save_link("NVIDIA L40S", {.backend = "nccl", .ranks = 4, .bandwidth = 11e9});
//   if (const auto link = saved_link("NVIDIA L40S", 4)) use_measured(cluster, *link);
//   const Here here = devices_here("4xH100-80GB");      // "": what is found here
//   plan::Cluster cluster = cluster_of("nvlink+ib400", 8, here);
//   const auto measured = probe_strategy("train.yaml", strategy, /*cpu=*/true);
//   write_file_atomically("planned.yaml", planned_text(file, "train.yaml", strategy.settings));
//
// Functions without state; call from any thread. Of two processes that save at once one wins.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/task_config.h"
#include "launcher/host.h"
#include "lockstep/core/document.h"
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

// ---------------------------------------------------------------- devices

struct Here {
  plan::Devices devices;
  std::string name;  // of this machine's devices; empty: they were named, and may be elsewhere
};

// Parses the text of --gpus. UsageError for a card that is not known.
Here devices_here(const std::string& gpus);
// Parses the text of --link; if empty, uses this host's measurement, or the card's usual link.
plan::Cluster cluster_of(const std::string& link, int per_node, const Here& here);

// ---------------------------------------------------------------- the report

struct PlanRequest {
  std::string file{};
  Args flags{};
  std::string gpus{};
  std::optional<double> tokens{};
  std::vector<int> scale{};
  std::string link{};
  std::optional<int> per_node{};
  plan::Speed speed{};
  bool unfused = false;
  bool json = false;
  std::string write{};
  std::optional<int> strategy{};
  std::size_t strategies = 8;
  bool probe = false;
  int probe_strategies = 4;
};

struct PlanRow : plan::Timed {
  double speedup = 0;
  // The settings of the strategy in this row, if the file's own strategy does not fit.
  std::vector<plan::Setting> settings{};
  std::size_t number = 0;  // its number in the table of strategies; 0: it is not in it
};

struct PlanReport {
  PlanRequest request;
  plan::Training training;
  plan::Devices devices;
  plan::Machine machine;
  plan::Parameters parameters;
  std::vector<std::string> notes{};
  std::vector<PlanRow> rows{};
  std::vector<plan::ScalePoint> points{};
  int stops_at = 0;
  std::vector<plan::Change> changes{};
  std::uint64_t written_bytes = 0;  // the size before the changes
  std::vector<plan::Strategy> strategies{};

  const char* device_text() const { return devices.card.cpu ? "rank" : "GPU"; }
  std::string devices_text(int count) const {
    return fmt::format("{} {}{}", count, device_text(), count == 1 ? "" : "s");
  }
  double utilisation() const {
    return request.speed.utilisation.value_or(plan::utilisation_of(training, devices.card));
  }
  bool fits() const { return rows.back().choice.as_written; }
  // Whether it fits but `lockstep train` refuses it, for the reasons in the notes.
  bool refused() const {
    const plan::Choice& asked = rows.back().choice;
    return asked.fits && !plan::refusals(training, devices.card, asked).empty();
  }
  void note(std::string text) {
    if (std::ranges::find(notes, text) == notes.end()) notes.push_back(std::move(text));
  }
  std::string strategy_text(const plan::Choice& choice) const {
    return plan::parts_text(choice, devices.card.cpu);
  }
  const char* unit() const { return training.model.causal_lm() != nullptr ? "token" : "sample"; }
};

constexpr double kPlanFloor = 0.8;  // below this efficiency a run counts as one that stops scaling

// "bf16: true, fsdp: full_shard", or a text that the file is used unchanged.
std::string settings_text(const std::vector<plan::Setting>& settings);
// The tables, and the same as one JSON object.
std::string plan_text(const PlanReport& report);
Node plan_node(const PlanReport& report);

// ---------------------------------------------------------------- probe and file

// Runs a few steps on this machine, with the file's settings replaced by the strategy's, on the
// file's data; nothing is saved, evaluated or reported. The fastest of the last three steps counts,
// because the others were disturbed. Prints on stderr the measurement, or why there is none; then
// there is no value.
std::optional<plan::Measurement> probe_strategy(const std::string& file,
                                                const plan::Strategy& strategy, bool cpu);

// YAML: the settings, each below a comment with the key's meaning and its value in the file
// `name`, then the file's other keys with their values, one on a line. fsdp_config is omitted where
// a setting turns fsdp off.
std::string planned_text(const Node& file, const std::string& name,
                         const std::vector<plan::Setting>& settings);

}  // namespace lockstep::cli
