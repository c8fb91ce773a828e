// Why a run is slower than it could be: rules over its record, each with the evidence, what to
// change and what that is worth.
//
//   for (const Finding& finding : diagnose(read_run("out"))) print(finding_text(finding));
//
// A healthy run has no findings. Rules are pure functions of the record, so the live doctor, the
// report and the dashboard say the same. The most valuable finding comes first.
#pragma once

#include <optional>
#include <vector>

#include "lockstep/monitor/finding.h"
#include "lockstep/monitor/run_record.h"

namespace lockstep::monitor {

// Where a record lacks some ranks, it says what can be said without them.
std::vector<Finding> diagnose(const RunRecord& run);
// Whether every rank is there, with enough steps: otherwise no finding means little.
bool enough_to_judge(const RunRecord& run);
// What that leaves open, and how the others are added; empty where no rank is missing.
std::string missing_ranks_text(const RunRecord& run);
// Share of the time in which at least half of the ranks could run and had no core, where that is so
// much that figures of the run are not those of an idle machine; nothing: it is not, or not known.
std::optional<double> starved_share(const RunRecord& run);
// What is to be said where there is no finding.
std::string nothing_found_text(const RunRecord& run);

}  // namespace lockstep::monitor
