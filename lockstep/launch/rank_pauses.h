// Which of a rank's stops (SIGSTOP and the like) the launcher reports: the first few, then one a
// minute with a count. A debugger or a batch system may stop and continue a rank many times a
// second.
//
//   if (pauses.stopped(now)) say(text + pauses.report(now));
//   if (pauses.continued()) say("continues");
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <string>
#include <utility>

namespace lockstep::launch {

class RankPauses {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr int kFirst = 3;
  static constexpr std::chrono::seconds kEvery{60};

  // Whether this stop is reported now; if so, the caller then calls report().
  bool stopped(Clock::time_point now) {
    is_stopped_ = true;
    reported_ = false;
    ++unreported_;
    return ++stops_ <= kFirst || now - last_ >= kEvery;
  }
  // Whether the stop before was reported, so that its end is news.
  bool continued() {
    is_stopped_ = false;
    return std::exchange(reported_, false);
  }
  // For the end of the sentence that reports the stop.
  std::string report(Clock::time_point now) {
    reported_ = true;
    last_ = now;
    const int before = std::exchange(unreported_, 0) - 1;
    return before > 0 ? fmt::format(" (and {} times since the last such line)", before) : "";
  }

  bool is_stopped() const { return is_stopped_; }
  bool reported() const { return reported_; }
  int stops() const { return stops_; }

 private:
  bool is_stopped_ = false;
  bool reported_ = false;
  int stops_ = 0;
  int unreported_ = 0;
  Clock::time_point last_{};
};

}  // namespace lockstep::launch
