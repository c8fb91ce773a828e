// The parts of `lockstep plan`: the devices that it counts with, what it reports, the probe that
// runs a few steps, and the training file that it writes.
//
//   const Here here = devices_here("4xH100-80GB");      // "": what is found here
//   plan::Cluster cluster = cluster_of("nvlink+ib400", 8, here);
//   const auto measured = probe_way("train.yaml", way, /*cpu=*/true);
//   write_file_atomically("planned.yaml", planned_text(file, "train.yaml", way.settings));
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

// What the text of --gpus names. UsageError for a card that is not known.
Here devices_here(const std::string& gpus);
// The text of --link, or where it is empty what was measured here, or what is usual for the card.
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
  std::optional<int> way{};
  std::size_t ways = 8;
  bool probe = false;
  int probe_ways = 4;
};

struct PlanRow : plan::Timed {
  double speedup = 0;
  // Where the file's own strategy does not fit, the row is a way that has these settings.
  std::vector<plan::Setting> settings{};
  std::size_t way = 0;  // its number in the table of ways; 0: it is not in it
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
  std::uint64_t written_bytes = 0;  // what they are changes of
  std::vector<plan::Way> ways{};

  const char* device_text() const { return devices.card.cpu ? "rank" : "GPU"; }
  std::string devices_text(int count) const {
    return fmt::format("{} {}{}", count, device_text(), count == 1 ? "" : "s");
  }
  double utilisation() const {
    return request.speed.utilisation.value_or(plan::utilisation_of(training, devices.card));
  }
  bool fits() const { return rows.back().choice.as_written; }
  // It has room, and `lockstep train` does not take it: notes say why.
  bool refused() const {
    const plan::Choice& asked = rows.back().choice;
    return asked.fits && !plan::refusals(training, devices.card, asked).empty();
  }
  void note(std::string text) {
    if (std::ranges::find(notes, text) == notes.end()) notes.push_back(std::move(text));
  }
  std::string strategy(const plan::Choice& choice) const {
    return plan::parts_text(choice, devices.card.cpu);
  }
  const char* unit() const { return training.model.causal_lm() != nullptr ? "token" : "sample"; }
};

constexpr double kPlanFloor = 0.8;  // below this efficiency a run counts as one that stops scaling

// "bf16: true, fsdp: full_shard", or that the file is used as it is written.
std::string settings_text(const std::vector<plan::Setting>& settings);
// The tables, and the same as one JSON object.
std::string plan_text(const PlanReport& report);
Node plan_node(const PlanReport& report);

// ---------------------------------------------------------------- probe and file

// Runs a few steps of a way on this machine. The ranks train as the file says with the way's
// settings in it, on its own data; nothing is saved, evaluated or reported. The fastest of the last
// three steps counts: others were disturbed. Says on stderr what was measured, or why nothing was;
// then there is no value.
std::optional<plan::Measurement> probe_way(const std::string& file, const plan::Way& way, bool cpu);

// YAML: the settings, each below a comment that says what the key means and what it was in the file
// `name`, then the file's other keys with their values, one on a line. fsdp_config goes where a
// setting ends fsdp.
std::string planned_text(const Node& file, const std::string& name,
                         const std::vector<plan::Setting>& settings);

}  // namespace lockstep::cli
