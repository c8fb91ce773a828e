// The curves of a run that writes metrics.jsonl, read while it grows.
//
//   MetricsTail tail;
//   tail.follow("out/run");
//   tail.read();                        // once a second
//   plot(tail.loss());
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

  // The folder that holds the file; the same one again changes nothing.
  void follow(const std::string& folder);
  void read();

  const LiveSeries& loss() const { return loss_; }
  const LiveSeries& tokens_per_second() const { return tokens_per_second_; }
  const LiveSeries& samples_per_second() const { return samples_per_second_; }

 private:
  void take(std::string_view line);

  std::string path_;
  std::uint64_t inode_ = 0;
  std::uint64_t offset_ = 0;
  std::string partial_;
  LiveSeries loss_;
  LiveSeries tokens_per_second_;
  LiveSeries samples_per_second_;
};

// Adds a point. Steps only grow: a run that was resumed from an earlier one replaces what it
// repeats.
void add_point(LiveSeries& series, std::int64_t step, double value,
               std::size_t most = MetricsTail::kPoints);

}  // namespace lockstep::dashboard
