// `lockstep plan --probe`: a few steps of a way on this machine, in place of its estimate.
//
//   const auto measured = probe_way("train.yaml", way, {.cpu = true});
//   if (measured) save_ways(key, {*measured});
//
// The ranks train as the file says with the way's settings in it, on its own data; nothing is
// saved, evaluated or reported. The fastest of the last three steps counts: others were disturbed.
#pragma once

#include <optional>
#include <string>

#include "observe/plan/ranking.h"

namespace lockstep::cli {

struct ProbeOptions {
  bool cpu = false;
  int timeout_s = 300;
};

// Says on stderr what was measured, or why nothing was; then there is no value.
std::optional<plan::Measurement> probe_way(const std::string& file, const plan::Way& way,
                                           const ProbeOptions& options);

}  // namespace lockstep::cli
