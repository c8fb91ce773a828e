// Where the files of a run go. A temporary directory is removed at the end, unless it holds output
// that was shown nowhere else, or output or an error file of a failed run.
//
// Nobody may be left to remove it, so each start sweeps what earlier ones of the same user have
// left beside it: directories whose process has ended (the kernel has released its lock on them)
// and which were modified more than a day ago. Until preserve() keeps a directory its time of
// modification is 1970. So the next start removes the directory of a launcher that was killed, and
// keeps that of a failed run for a day. Output of --redirects is never removed.
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
