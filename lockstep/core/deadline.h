// The moment at which a wait must give up, and conversions of clock readings to seconds.
//
// Pass a Deadline down instead of a duration: nested waits then share one budget, and no wait is
// without an end.
//
//   Deadline deadline = Deadline::after(std::chrono::seconds(30));
//   while (!done()) poll(fds, n, deadline.remaining_ms());
#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline after(std::chrono::milliseconds duration) {
    return Deadline(Clock::now(), duration);
  }

  bool expired() const { return Clock::now() >= end_; }
  std::chrono::milliseconds elapsed() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start_);
  }
  std::chrono::milliseconds total() const { return total_; }
  // Never negative; rounded up, so that poll() does not spin in the last millisecond.
  std::chrono::milliseconds remaining() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end_ - Clock::now());
    return std::max(left, std::chrono::milliseconds(0));
  }
  int remaining_ms() const {
    return static_cast<int>(std::min<long long>(remaining().count(), 1'000'000'000));
  }
  Clock::time_point time() const { return end_; }

 private:
  Deadline(Clock::time_point start, std::chrono::milliseconds duration)
      // A caller's "forever" (milliseconds::max) must not overflow the clock.
      : start_(start),
        total_(std::min(duration, std::chrono::milliseconds(std::chrono::hours(24 * 365)))),
        end_(start + total_) {}

  Clock::time_point start_;
  std::chrono::milliseconds total_;
  Clock::time_point end_;
};

inline double seconds_since(Deadline::Clock::time_point start) {
  return std::chrono::duration<double>(Deadline::Clock::now() - start).count();
}

// Seconds since 1970 by this host's clock, comparable between hosts and over time.
inline double unix_time_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace lockstep
