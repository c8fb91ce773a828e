// The curves of a run that writes metrics.jsonl, read while it grows.
//
//   MetricsTail tail;
//   tail.follow("out/run");
//   tail.read();                        // once a second
//   plot(tail.series());
//
// Used by one thread. The file is the program's: it may be missing, replaced, torn or anything
// else, and what cannot be read is left out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/core/fd.h"
#include "lockstep/dashboard/live_view.h"

namespace lockstep::dashboard {

class MetricsTail {
 public:
  static constexpr std::size_t kPoints = 500;
  static constexpr std::size_t kSeries = 16;  // a program may log any number of names

  // The folder that holds the file; the same one again changes nothing.
  void follow(const std::string& folder);
  void read();

  const LoggedSeries& series() const { return series_; }

 private:
  void take(std::string_view line);
  LiveSeries* series_of(const std::string& name);

  std::string path_;
  std::uint64_t inode_ = 0;
  std::uint64_t offset_ = 0;
  std::string partial_;
  LoggedSeries series_;
};

// Adds a point. Steps only grow: a run that was resumed from an earlier one replaces what it
// repeats.
void add_point(LiveSeries& series, std::int64_t step, double value,
               std::size_t most = MetricsTail::kPoints);

}  // namespace lockstep::dashboard
