// A run as text for a terminal: its state (the snapshot of docs/dashboard.md) on one screen, for
// `lockstep monitor`, and the lines of `lockstep run --doctor`.
//
//   fmt::print("\033[H{}", terminal_view(snapshot, {.columns = 120, .rows = 40, .colour = true}));
//
// Whatever the ranks wrote: what is printed has no control characters of theirs. Any thread may
// call the functions, which have no state.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/core/document.h"
#include "lockstep/monitor/diagnosis.h"

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

// The findings that are news: one is said once it has stood for some looks. Used by one thread.
class StandingFindings {
 public:
  static constexpr int kStands = 2;  // looks in a row
  static constexpr int kGone = 5;    // looks without it, after which it would be news again

  // What is to be said now. `step` is where the ranks are; -1: not known.
  std::vector<std::string> look(const std::vector<monitor::Finding>& findings, std::int64_t step);

 private:
  struct Seen {
    int present = 0;
    int absent = 0;
    bool said = false;
  };
  std::map<std::string, Seen> seen_;  // by rule, rank and cause
};

// A table of where each rank's time went, and the findings or that there are none. Only a run that
// did not fail and had enough steps is called healthy.
std::vector<std::string> doctor_summary(const monitor::RunRecord& run,
                                        const std::vector<monitor::Finding>& findings,
                                        bool failed = false);

}  // namespace lockstep::dashboard
