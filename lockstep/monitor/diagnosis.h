// Why a run is slower than it could be: rules over its record, each with the evidence, what to
// change and what that is worth.
//
//   for (const Finding& finding : diagnose(read_run("out"))) print(finding_text(finding));
//
// A healthy run has no findings. Rules are pure functions of the record, so the live doctor, the
// report and the dashboard say the same. The most valuable finding comes first.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/monitor/run_record.h"

namespace lockstep::monitor {

struct Finding {
  std::string rule;        // "loader-bound": stable, for scripts and tests
  int rank = -1;           // the rank it is about; -1: all
  std::string cause{};     // one word where a rule has several: "data", "cpu-starved", ...
  std::string what{};      // one sentence: what happens
  std::string evidence{};  // the figures
  std::string remedy{};    // the flag or key to change, and to what
  double gain = 0;         // share of step time that it may save, 0.15: 15 %; 0: not known
};

std::vector<Finding> diagnose(const RunRecord& run);
// Whether there are enough steps on every rank: without them no finding means little.
bool enough_to_judge(const RunRecord& run);

// "loader-bound (rank 1): ... . Evidence: ... . Change: ... . Expected gain: about 15 %."
std::string finding_text(const Finding& finding);
// All of them for JSON.
Node findings_node(const std::vector<Finding>& findings);

// What a GPU did in a run: medians over the samples of a host, empty where a card has no value.
struct GpuFigures {
  int index = 0;
  std::optional<double> utilisation_percent{};
  std::optional<double> memory_bytes{};
  std::optional<double> memory_share{};  // of what the card has
  std::optional<double> power_w{};
  double throttled_share = 0;  // of the samples, by heat, power or hardware
};
std::vector<GpuFigures> gpu_figures(const HostGpus& host);
// The share of samples in which every GPU worked for 85 % of the time or more. Ranks that work
// together have nearly all; GPUs that take turns have none.
double busy_together_share(const HostGpus& host);

}  // namespace lockstep::monitor
