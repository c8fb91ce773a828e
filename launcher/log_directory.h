// Where the files of a run go. A temporary directory is removed at the end, unless it holds output
// that was shown nowhere else, or output or an error file of a failed run.
//
// Nobody may be left to remove it, so each start sweeps what earlier ones of the same user have
// left beside it: whose process is gone, which the kernel's lock on the directory shows, and whose
// time of modification is a day ago. That time is 1970 until the directory is preserved. What
// --redirects has stored in one is the user's, and stays.
//
//   LogDirectory logs(plan);
//   write(logs.attempt(0) + "/0/stdout.log");
//   const std::string report = logs.preserve(failed);   // "": there is nothing to read
//
// Owned by the supervisor.
#pragma once

#include <string>

#include "launcher/plan.h"
#include "lockstep/core/fd.h"

namespace lockstep::launch {

class LogDirectory {
 public:
  explicit LogDirectory(const LaunchPlan& plan);  // throws UsageError
  ~LogDirectory();
  LogDirectory(const LogDirectory&) = delete;
  LogDirectory& operator=(const LogDirectory&) = delete;

  bool temporary() const { return temporary_; }
  std::string attempt(int number) const;
  // The directory, if it holds anything to read; it is preserved then.
  std::string preserve(bool failed);

 private:
  void make_temporary(bool for_output);

  bool temporary_;
  bool preserved_ = false;
  Fd lock_;  // of a temporary one
  std::string base_;
  std::string root_;
};

}  // namespace lockstep::launch
