// Progress of a long read: silent for two seconds, then a line on stderr. On a terminal the line is
// overwritten in place; elsewhere a new one is printed every ten seconds.
//
//   data::load_instructions(path, ReadingProgress(path));
//
// One object per reading, one thread. The clock is a parameter for tests.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>

namespace lockstep::cli {

class ReadingProgress {
 public:
  using Clock = std::chrono::steady_clock;
  using Now = std::function<Clock::time_point()>;

  explicit ReadingProgress(std::string what, std::FILE* to = stderr, Now now = Clock::now)
      : what_(std::move(what)),
        to_(to),
        now_(std::move(now)),
        terminal_(::isatty(::fileno(to)) == 1),
        start_(now_()),
        next_(start_ + std::chrono::seconds(2)) {}

  void operator()(std::uint64_t done, std::uint64_t total) {
    const Clock::time_point now = now_();
    const bool last = done == total;
    if (now < next_ && !(last && said_)) return;
    next_ = now + (terminal_ ? std::chrono::milliseconds(200) : std::chrono::seconds(10));
    said_ = true;
    const double part = total == 0 ? 1.0 : static_cast<double>(done) / static_cast<double>(total);
    fmt::print(to_, "{}reading {}: {:.0f} % after {:.0f} s{}", terminal_ ? "\r" : "", what_,
               100 * part, std::chrono::duration<double>(now - start_).count(),
               terminal_ && !last ? "\033[K" : "\n");
    std::fflush(to_);
  }

 private:
  std::string what_;
  std::FILE* to_;
  Now now_;
  bool terminal_;
  bool said_ = false;
  Clock::time_point start_;
  Clock::time_point next_;
};

}  // namespace lockstep::cli
