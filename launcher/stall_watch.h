// StallWatch: notices from outside that no rank moves any more, and says who is behind.
//
// A rank moves when its ledger's heartbeat changes: a step, a phase, an operation that begins or
// ends. When no rank of this host has moved for the stall time, which is what the user asked for
// and at least ten median steps, the ranks are asked for their stacks by a signal, against a
// deadline, and the report is made from their ledgers and /proc. Where nobody waits for anybody
// and CPU time grows, the ranks are busy and nothing is wrong, unless all of them are in a CUDA
// library after the same enqueued operation. One report per stall: the next one is made only after
// something has moved.
//
//   StallWatch watch(loop, {.stall_time = 30s}, {.stalled = print, .busy = print});
//   watch.add({.rank = 0, .pid = pid, .ledger = &file});
//
// Owned and called by the supervisor's one thread. The ledgers belong to the caller: remove a rank
// before its ledger goes.
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
  pid_t pid = -1;  // the process that the launcher started
  const ledger::File* ledger = nullptr;
  // Where Python's faulthandler writes when the rank is asked for its stack.
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
    double cpu_s = 0;           // when the comparison began
    std::uint64_t stacks = 0;   // those taken before it was asked
    std::string no_stack = {};  // why it was not asked
  };

  enum class Reported { kNothing, kBusy, kStall };

  void look_later();
  void look();
  void rest(Clock::time_point now);
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
  void say_busy();

  const StallOptions options_;
  const StallEvents events_;
  std::vector<Watched> ranks_;
  std::deque<std::uint64_t> steps_ns_;
  Clock::time_point quiet_since_;
  std::optional<Clock::time_point> compared_since_;  // the time at which cpu_s was read
  Clock::time_point judged_;
  Reported reported_ = Reported::kNothing;  // during this quiet period
  bool said_busy_ = false;                  // during this quiet period
  bool perhaps_busy_ = false;               // the stacks decide
  bool collecting_ = false;                 // collecting stacks for a report
  Timer timer_;
};

}  // namespace lockstep::launch
