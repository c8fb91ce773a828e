// How a group of ranks is stopped: the times between notification, SIGTERM and SIGKILL, and the
// processes that ranks have started and left behind.
//
//   kIdle ──> kNotified ──> kTerminated ──> kKilled
//             head start    grace           until the ranks are abandoned
//
// At the end of each stage its step is called. A stage may end earlier, and is never entered again.
// StopSequence only measures the times; its owner implements the steps.
//
//   StopSequence stop(loop, {.terminate = ..., .overdue = ..., .abandon = ...});
//   stop.begin(100ms, 30s);     // SIGTERM after the head start, SIGKILL after the grace
//
// Owned by a WorkerGroup, one thread.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launcher/event_loop.h"
#include "launcher/rank_record.h"

namespace lockstep::launch {

class StopSequence {
 public:
  enum class Stage { kIdle, kNotified, kTerminated, kKilled };
  struct Steps {
    std::function<void()> terminate;  // after the head start
    std::function<void()> overdue;    // after the grace
    std::function<void()> abandon;    // SIGKILL has not ended all ranks
  };
  static constexpr std::chrono::milliseconds kKillTimeout{5000};  // for SIGKILL to end a process

  StopSequence(EventLoop& loop, Steps steps) : steps_(std::move(steps)), timer_(loop) {}

  // Without a head start, `terminate` is not called: the caller signals the ranks itself.
  void begin(std::chrono::milliseconds head_start, std::chrono::milliseconds grace);
  // The caller has signalled the ranks, so `terminate` is not called. No-op unless kNotified.
  void skip_head_start();
  // From any stage; `abandon` follows after kKillTimeout.
  void kill();
  void cancel() { timer_.cancel(); }  // the ranks have ended

  bool killed() const { return stage_ == Stage::kKilled; }
  Stage stage() const { return stage_; }
  // The time until SIGKILL; 0 after it, none before begin().
  std::optional<std::chrono::milliseconds> time_left() const;

 private:
  Steps steps_;
  Stage stage_ = Stage::kIdle;
  EventLoop::Clock::time_point kill_time_;
  Timer timer_;
};

// Ends the processes that ranks have started and left behind. They are found below the supervisor,
// which is their subreaper (process.h). A live rank ends its own processes.
//
//   Orphans orphans(loop, ranks, {.reap = reap_all, .gone = finish, .say = print});
//   orphans.sweep(1s);              // once no rank is alive: SIGTERM, grace, SIGKILL
class Orphans {
 public:
  struct Handlers {
    std::function<void()> reap;  // reaps the children that have exited
    std::function<void()> gone;  // no orphan is left, or those that are cannot be killed
    std::function<void(const std::string&)> say;
  };
  // `ranks` must outlive it.
  Orphans(EventLoop& loop, const std::vector<RankRecord>& ranks, Handlers handlers)
      : ranks_(ranks), handlers_(std::move(handlers)), timer_(loop) {}

  // Call this before signalling the ranks: their children, which become orphans when they die, get
  // the signal with the group.
  void signal(int number);
  void sweep(std::chrono::milliseconds grace);
  // Sends SIGKILL until no orphan is left, at most `rounds` times; then names those that are left.
  void kill(int rounds);
  void cancel() { timer_.cancel(); }

  static constexpr int kRounds = 100;
  static constexpr std::chrono::milliseconds kRound{50};

 private:
  std::vector<pid_t> find() const;
  void terminate_once();
  void give_up();

  const std::vector<RankRecord>& ranks_;
  Handlers handlers_;
  std::set<pid_t> signalled_;
  Timer timer_;
};

}  // namespace lockstep::launch
