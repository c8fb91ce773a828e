// The files of a run's record (run_record.h), to which whole lines are appended: by a rank that
// records itself (rank_recorder.h), and by a launcher from outside (dashboard/record_writer.h).
//
//   RecordFiles files("out/monitor");
//   files.add(rank, interval);
//
// Used by one thread. Whoever reads meanwhile, or after a kill, finds every line but the one that
// was being written.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/fd.h"
#include "lockstep/monitor/run_record.h"

namespace lockstep::monitor {

// After that many lines of a second each a line covers kCoarser seconds: a run of days would make a
// large file.
inline constexpr int kFineLines = 3600;
inline constexpr int kCoarser = 10;

struct LineLimits {
  int fine_lines = kFineLines;
  double coarse_s = kCoarser - 0.5;  // looks come a little early or late
};

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

// rank_<r>.jsonl and gpus_<host>.jsonl of one folder. Throws SystemError; an interval that could
// not be written is part of the next line.
class RecordFiles {
 public:
  explicit RecordFiles(std::string folder, const LineLimits& limits = {})
      : folder_(std::move(folder)), limits_(limits) {}

  void add(int rank, const Interval& interval);
  void add(int host, const GpuSample& sample, const std::vector<GpuIdentity>& gpus);
  void end();  // writes what is left

 private:
  struct File {
    LineFile file;
    int lines = 0;
    Interval pending{};  // of a rank
    double time_s = 0;   // of the newest sample that was written
  };
  File& file(const char* kind, int number);
  void write(File& file);

  std::string folder_;
  LineLimits limits_;
  std::map<std::string, File> files_;
};

}  // namespace lockstep::monitor
