// What `lockstep run --doctor` prints: a finding once it has stood for some looks, and a summary.
//
//   StandingFindings standing;
//   for (const std::string& line : standing.look(diagnose(record))) say(line);
//   for (const std::string& line : doctor_summary(record, diagnose(record))) say(line);
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/monitor/diagnosis.h"

namespace lockstep::dashboard {

// Used by one thread.
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
