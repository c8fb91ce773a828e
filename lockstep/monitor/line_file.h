// LineFile: a file of a run's record (run_record.h), to which whole lines are appended.
//
//   LineFile file("out/monitor/rank_0.jsonl");
//   file.append(interval_json(interval));
//
// Used by one thread. Whoever reads meanwhile, or after a kill, finds every line but the one that
// was being written.
#pragma once

#include <string>
#include <utility>

#include "lockstep/core/fd.h"

namespace lockstep::monitor {

// After that many lines of a second each a line covers kCoarser seconds: a run of days would make a
// large file.
inline constexpr int kFineLines = 3600;
inline constexpr int kCoarser = 10;

// The file is made when the first line comes; half a line that a killed run left is cut off.
class LineFile {
 public:
  explicit LineFile(std::string path) : path_(std::move(path)) {}

  // Without the line's end. Throws SystemError, and leaves the file without this line.
  void append(const std::string& line);

 private:
  void open();

  std::string path_;
  Fd fd_;
};

}  // namespace lockstep::monitor
