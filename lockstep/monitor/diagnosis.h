// The diagnosis of a slow run: rules over its record, each with evidence, the setting to change and
// the expected gain.
//
//   for (const Finding& finding : diagnose(read_run("out"))) print(finding_text(finding));
//
// A healthy run has no findings. Rules are pure functions of the record, so the live doctor, the
// report and the dashboard say the same. The most valuable finding comes first.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/document.h"
#include "lockstep/monitor/run_record.h"

namespace lockstep::monitor {

// A reason why a run is slower than it could be.
struct Finding {
  std::string rule;        // "loader-bound": stable, for scripts and tests
  int rank = -1;           // the rank it is about; -1: all
  std::string cause{};     // one word where a rule has several: "data", "cpu-starved", ...
  std::string what{};      // one sentence: what happens
  std::string evidence{};  // the figures
  std::string remedy{};    // the flag or key to change, and to what
  double gain = 0;         // share of step time that it may save, 0.15: 15 %; 0: not known
};

// "loader-bound (rank 1): ... . Evidence: ... . Change: ... . Expected gain: about 15 %."
std::string finding_text(const Finding& finding);
// All findings, for JSON.
Node findings_node(const std::vector<Finding>& findings);

// If the record lacks some ranks, only the rules that do not compare ranks are applied.
std::vector<Finding> diagnose(const RunRecord& run);
// Whether every rank is recorded with enough steps. Otherwise an empty list of findings does not
// mean that the run is healthy.
bool enough_to_judge(const RunRecord& run);
// The missing ranks, and how to add their records; empty where none is missing.
std::string missing_ranks_text(const RunRecord& run);
// The share of time in which at least half of the ranks waited for a core, if it is so large that
// the figures do not describe an idle machine. Nothing below that, or if it is unknown.
std::optional<double> starved_share(const RunRecord& run);
// The sentence shown instead of findings when there are none.
std::string nothing_found_text(const RunRecord& run);

}  // namespace lockstep::monitor
