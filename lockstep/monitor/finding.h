// A reason why a run is slower than it could be, with its evidence and what to change.
#pragma once

#include <string>
#include <vector>

#include "lockstep/core/document.h"

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

// "loader-bound (rank 1): ... . Evidence: ... . Change: ... . Expected gain: about 15 %."
std::string finding_text(const Finding& finding);
// All of them for JSON.
Node findings_node(const std::vector<Finding>& findings);

}  // namespace lockstep::monitor
