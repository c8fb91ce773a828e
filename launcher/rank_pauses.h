// What the launcher does about a rank that SIGSTOP or the like stops: a line, and after a time it
// is failed.
//
// A debugger or a batch system may stop and continue a rank many times a second, so only the first
// few stops are reported at once, then one a minute with a count. A later one is reported when it
// has lasted for half the time, so no rank is failed without a line before.
//
//   PauseWatch pauses(loop, plan.stopped_timeout, {.report = ..., .overdue = fail});
//   pauses.stopped(SIGSTOP);
//
// Owned by the rank's group, one thread.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "launcher/event_loop.h"

namespace lockstep::launch {

class PauseWatch {
 public:
  using Clock = EventLoop::Clock;
  static constexpr int kFirst = 3;
  static constexpr std::chrono::seconds kEvery{60};

  struct Handlers {
    // `earlier` belongs behind the signal's name, `note` to the end of the line.
    std::function<void(int signal, const std::string& earlier, const std::string& note)> report;
    std::function<void()> continued;          // after a stop that was reported
    std::function<void(int signal)> overdue;  // it has been stopped for the whole time
    // True: there is news, which was passed on to stopped() or continued(). Asked before each line:
    // a rank that was continued shows it itself, which may take a while on a busy machine.
    std::function<bool()> look;
  };
  PauseWatch(EventLoop& loop, std::chrono::milliseconds bound, Handlers handlers)
      : bound_(bound), handlers_(std::move(handlers)), timer_(loop) {}

  void stopped(int signal, Clock::time_point now = Clock::now());
  void continued();
  void cancel() { timer_.cancel(); }
  int stops() const { return stops_; }

 private:
  void report(int signal, Clock::time_point now);
  void await(int signal, std::chrono::milliseconds time);

  std::chrono::milliseconds bound_;
  Handlers handlers_;
  bool reported_ = false;  // this stop, so that its end is news
  int stops_ = 0;
  int unreported_ = 0;
  Clock::time_point last_{};  // the time of the last line
  Timer timer_;
};

}  // namespace lockstep::launch
