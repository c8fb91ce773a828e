// How the ranks of a group are ended: by word, by SIGTERM, by SIGKILL, and then nothing more is
// expected of them.
//
//   kIdle ──> kWarned ──> kAsked ──> kKilled
//             head start  grace      until they are given up
//
// Each stage lasts for a time, at the end of which its step is taken; a stage may be left earlier,
// never entered again. Only the times are here. The steps are the owner's.
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
  enum class Stage { kIdle, kWarned, kAsked, kKilled };
  struct Steps {
    std::function<void()> terminate;  // the head start is over
    std::function<void()> overdue;    // so is the grace
    std::function<void()> abandon;    // SIGKILL has not helped
  };
  static constexpr std::chrono::milliseconds kKillTimeout{5000};  // for SIGKILL to end a process

  StopSequence(EventLoop& loop, Steps steps) : steps_(std::move(steps)), timer_(loop) {}

  // Without a head start `terminate` is not called: the caller signals in its own way.
  void begin(std::chrono::milliseconds head_start, std::chrono::milliseconds grace);
  // They have been asked by other means: no SIGTERM follows. No-op unless kWarned.
  void skip_head_start();
  // From any stage: `abandon` follows after kKillTimeout.
  void kill();
  void cancel() { timer_.cancel(); }  // they have ended

  bool killed() const { return stage_ == Stage::kKilled; }
  Stage stage() const { return stage_; }
  // What is left until SIGKILL, 0 after it; nothing when it did not begin.
  std::optional<std::chrono::milliseconds> time_left() const;

 private:
  Steps steps_;
  Stage stage_ = Stage::kIdle;
  EventLoop::Clock::time_point kill_time_;
  Timer timer_;
};

// What ranks have started and left behind: found below the supervisor, which is their subreaper
// (supervisor_guard.h), asked to end, and then made to.
//
//   Orphans orphans(loop, ranks, {.reap = reap_all, .gone = finish, .say = print});
//   orphans.sweep(1s);              // once no rank is alive: SIGTERM, grace, SIGKILL
//
// What a living rank has started is that rank's to end. Owned by a WorkerGroup, one thread.

class Orphans {
 public:
  struct Handlers {
    std::function<void()> reap;  // waits for every child that has ended
    std::function<void()> gone;  // the sweep is over
    std::function<void(const std::string&)> say;
  };
  // `ranks` must outlive it.
  Orphans(EventLoop& loop, const std::vector<RankRecord>& ranks, Handlers handlers)
      : ranks_(ranks), handlers_(std::move(handlers)), timer_(loop) {}

  // Before the ranks: a rank that dies of its own signal at once turns its children into orphans,
  // and those have had the signal with its group.
  void signal(int number);
  void sweep(std::chrono::milliseconds grace);
  // SIGKILL until nothing is left, or for some rounds; what cannot be killed is named.
  void kill(int rounds);
  void cancel() { timer_.cancel(); }

  static constexpr int kRounds = 100;
  static constexpr std::chrono::milliseconds kRound{50};

 private:
  std::vector<pid_t> find() const;
  void ask_once();
  void give_up();

  const std::vector<RankRecord>& ranks_;
  Handlers handlers_;
  std::set<pid_t> asked_;
  Timer timer_;
};

}  // namespace lockstep::launch
