// The state of a run (the snapshot of docs/dashboard.md) as text for a terminal.
//
//   fmt::print("\033[H{}", terminal_view(snapshot, {.columns = 120, .rows = 40, .colour = true}));
//
// Whatever the ranks wrote: what is printed has no control characters of theirs. Functions without
// state; any thread may call.
#pragma once

#include <string>

#include "lockstep/core/document.h"

namespace lockstep::dashboard {

struct TerminalOptions {
  int columns = 100;
  int rows = 0;  // as many as it takes
  bool colour = false;
};

// A snapshot's JSON; CommError where it is none.
Node parse_snapshot(const std::string& json);
// Lines, each at most `columns` wide.
std::string terminal_view(const Node& snapshot, const TerminalOptions& options = {});
// One line: for a log, or a terminal that cannot be drawn on.
std::string status_line(const Node& snapshot);
// "starting", "running", "ended" or "failed".
std::string run_state(const Node& snapshot);

}  // namespace lockstep::dashboard
