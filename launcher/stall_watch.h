// Detects a stall, in which no rank makes progress any more, and reports which rank is behind.
//
// A rank makes progress when its ledger's heartbeat changes: with a step, a phase, or the begin or
// end of an operation. The stall time is --stall-timeout, and at least ten median steps. When no
// rank of this host has made progress for that time, the ranks are asked for their stacks by a
// signal, and the report is made from these, the ledgers and /proc. If no rank waits for another
// and CPU time grows, the ranks are busy and there is no stall, unless all are in a CUDA library
// after the same enqueued operation. A stall is reported once; the next report follows only after
// progress.
//
//   StallWatch watch(loop, {.stall_time = 30s}, {.stalled = print, .busy = print});
//   watch.add({.rank = 0, .pid = pid, .ledger = &file});
//
// Owned and called by the supervisor's one thread. The caller owns the ledgers; it removes a rank
// before destroying its ledger.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "launcher/event_loop.h"
#include "launcher/stall_table.h"
#include "lockstep/core/ledger_file.h"

namespace lockstep::launch {

struct StallOptions {
  std::chrono::milliseconds stall_time{30'000};
  bool other_hosts = false;
};

struct StallEvents {
  std::function<void(const StallReport&)> stalled;
  std::function<void(const std::string&)> busy;  // a line
};

struct WatchedRank {
  int rank = 0;
  pid_t pid = -1;  // of the process that the launcher started
  const ledger::File* ledger = nullptr;
  // The file to which Python's faulthandler writes the stack on request.
  std::string python_stack = {};
};

class StallWatch {
 public:
  StallWatch(EventLoop& loop, const StallOptions& options, StallEvents events);
  ~StallWatch() = default;
  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

  void add(const WatchedRank& rank);
  void remove(int rank);

 private:
  using Clock = EventLoop::Clock;
  struct Watched {
    WatchedRank rank;
    std::uint64_t heartbeat = 0;
    std::int64_t step = -1;
    double cpu_s = 0;           // at compared_since_
    std::uint64_t stacks = 0;   // stacks taken before the request
    std::string no_stack = {};  // why its stack was not requested
  };

  enum class Reported { kNothing, kBusy, kStall };

  void look_later();
  void look();
  void reset(Clock::time_point now);
  bool moved();
  void begin_quiet(Clock::time_point now);
  std::chrono::milliseconds stall_time() const;
  std::vector<RankView> views() const;
  bool watches() const;
  void judge();
  void begin_report(const std::vector<RankView>& seen);
  void ask(Watched& watched, const RankView& view);
  void collect(Clock::time_point until);
  void report();
  void report_busy();

  const StallOptions options_;
  const StallEvents events_;
  std::vector<Watched> ranks_;
  std::deque<std::uint64_t> steps_ns_;
  Clock::time_point quiet_since_;
  std::optional<Clock::time_point> compared_since_;  // when cpu_s was read
  Clock::time_point judged_;
  Reported reported_ = Reported::kNothing;  // during this quiet period
  bool said_busy_ = false;                  // during this quiet period
  bool perhaps_busy_ = false;               // unless the stacks show otherwise
  Timer timer_;
};

}  // namespace lockstep::launch
