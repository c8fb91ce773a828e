// What ranks have started and left behind: found below the supervisor, which is their subreaper
// (supervisor_guard.h), asked to end, and then made to.
//
//   Orphans orphans(loop, ranks, {.reap = reap_all, .gone = finish, .say = print});
//   orphans.sweep(1s);              // once no rank is alive: SIGTERM, grace, SIGKILL
//
// What a living rank has started is that rank's to end. Owned by a WorkerGroup, one thread.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "launcher/event_loop.h"
#include "launcher/rank_record.h"

namespace lockstep::launch {

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
