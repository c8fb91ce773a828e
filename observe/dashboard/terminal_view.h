// A run as text for a terminal: its state (the snapshot of docs/dashboard.md) on one screen, for
// `lockstep monitor`, and the lines of `lockstep run --doctor`.
//
//   fmt::print("\033[H{}", terminal_view(snapshot, {.columns = 120, .rows = 40, .colour = true}));
//
// Control characters that ranks wrote are removed from the output. Stateless functions; any thread
// may call them.
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
  int rows = 0;  // 0: unlimited
  bool colour = false;
};

// Parses a snapshot's JSON; CommError if it is invalid.
Node parse_snapshot(const std::string& json);
// Lines, each at most `columns` wide.
std::string terminal_view(const Node& snapshot, const TerminalOptions& options = {});
// One line, for a log or a terminal without cursor control.
std::string status_line(const Node& snapshot);
// "starting", "running", "ended" or "failed".
std::string run_state(const Node& snapshot);

// Filters findings for display: each is reported once, after several looks. Used by one thread.
class StandingFindings {
 public:
  static constexpr int kStands = 2;  // consecutive looks before a finding is reported
  static constexpr int kGone = 5;    // looks without it, after which it is reported again

  // The lines to print now. `step` is the ranks' current step; -1: not known.
  std::vector<std::string> look(const std::vector<monitor::Finding>& findings, std::int64_t step);

 private:
  struct Seen {
    int present = 0;
    int absent = 0;
    bool said = false;
  };
  std::map<std::string, Seen> seen_;  // by rule, rank and cause
};

// A table of each rank's time, and the findings or that there are none. Only a run that did not
// fail and had enough steps is called healthy.
std::vector<std::string> doctor_summary(const monitor::RunRecord& run,
                                        const std::vector<monitor::Finding>& findings,
                                        bool failed = false);

}  // namespace lockstep::dashboard
