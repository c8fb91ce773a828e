// `lockstep run --record DIR`: the files of monitor/run_record.h, written from outside the ranks.
//
//   RecordWriter writer(dir, node_rank);
//   writer.add(rank, interval);
//
// Used by one thread. Appends whole lines, so that whoever reads meanwhile, or after a kill, finds
// every interval but the one that was being written. A file that cannot be written is reported once
// by problem(), and the run continues without it.
#pragma once

#include <map>
#include <string>

#include "lockstep/core/fd.h"
#include "lockstep/monitor/run_record.h"

namespace lockstep::dashboard {

class RecordWriter {
 public:
  // Makes the folder. Throws SystemError.
  RecordWriter(const std::string& directory, int host);

  void write(const monitor::RunFacts& facts);  // where they have changed
  void add(int rank, const monitor::Interval& interval);
  void add(const monitor::GpuSample& sample, const std::vector<monitor::GpuIdentity>& gpus);

  // What has failed since the last call; empty: nothing.
  std::string problem();

 private:
  void append(const std::string& name, const std::string& line);

  std::string folder_;
  int host_;
  std::string facts_;  // as written
  std::map<std::string, Fd> files_;
  std::string problem_;
  bool failed_ = false;
};

}  // namespace lockstep::dashboard
