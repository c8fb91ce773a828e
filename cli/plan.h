// The parts of `lockstep plan`: its devices, its report, the probe that runs a few steps, and the
// training file that it writes.
//
//   const Here here = devices_here("4xH100-80GB");      // "": what is found here
//   plan::Cluster cluster = cluster_of("nvlink+ib400", 8, here);
//   const auto measured = probe_strategy("train.yaml", strategy, /*cpu=*/true);
//   write_file_atomically("planned.yaml", planned_text(file, "train.yaml", strategy.settings));
//
// Functions without state; call from any thread.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "lockstep/core/document.h"
#include "observe/plan/machine.h"
#include "observe/plan/ranking.h"

namespace lockstep::cli {

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
