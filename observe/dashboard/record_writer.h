// `lockstep run --record DIR`: the files of monitor/run_record.h, written from outside the ranks.
//
//   RecordWriter writer(dir, node_rank);
//   writer.add(rank, interval);
//
// Used by one thread. Moves an earlier run's files to monitor.<n> before the first line. After
// monitor::kFineLines lines of a file one covers ten seconds. A file that cannot be written is
// reported once by problem(), and the run continues without it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>

#include "lockstep/monitor/rank_recorder.h"

namespace lockstep::dashboard {

class RecordWriter {
 public:
  // Makes the folder. Throws SystemError.
  RecordWriter(const std::string& directory, int host);
  ~RecordWriter();  // writes what is left
  RecordWriter(const RecordWriter&) = delete;
  RecordWriter& operator=(const RecordWriter&) = delete;

  // Whether the rank has added to its own file, while this writer has written nothing.
  bool rank_records(int rank) const;

  void write(const monitor::RunFacts& facts);  // where they have changed
  // Writes the facts before anything is recorded, and only into an empty folder.
  void write_first(const monitor::RunFacts& facts);
  void add(int rank, const monitor::Interval& interval);
  void add(const monitor::GpuSample& sample, const std::vector<monitor::GpuIdentity>& gpus);

  // Since the last call: where an earlier run's record is now, and what failed; empty: nothing.
  std::string moved_to();
  std::string problem();

 private:
  using Listing = std::map<std::string, std::pair<std::uintmax_t, std::filesystem::file_time_type>>;
  Listing listing() const;
  void begin();
  template <typename Body>
  void attempt(const Body& body);

  std::string folder_;
  int host_;
  Listing before_;  // what an earlier run left
  bool began_ = false;
  std::string facts_;  // as written
  monitor::RecordFiles files_;
  std::string moved_to_;
  std::string problem_;
  bool failed_ = false;
};

}  // namespace lockstep::dashboard
