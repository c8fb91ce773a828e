// How a rank waits for others: a short while awake, then asleep, never for long at a time.
//
// Nobody may fall asleep at the moment it is posted to. A sleeper first says for whom it waits
// (`waiting_for`), then looks once more, then sleeps unless its bell has changed; who posts writes
// first and then looks whether someone waits for it. Both do so with sequentially consistent
// atomics, so at least one of the two sees the other.
//
//   Backoff backoff(size > allowed_cores());
//   while (!look()) if (backoff.pass() == Backoff::kPark) sleep_on(header, code, look);
#pragma once

#include <sched.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/comm/shm/layout.h"

namespace lockstep::shm {

// For how long a waiting thread stays awake. With a core for each rank the answer is usually there
// within microseconds; without, the core is offered to the others at once.
class Backoff {
 public:
  explicit Backoff(bool oversubscribed) : oversubscribed_(oversubscribed) {}

  // Call when there was something to do.
  void renew() {
    if (turns_ > 0 && wary_ > 0) --wary_;
    turns_ = 0;
    offering_ = false;
    since_ = {};
    looked_ = {};
  }
  enum State {
    kSpin,
    kYield,  // once in a wait: it takes longer than an answer of ranks with cores of their own
    kPark    // it is time to sleep
  };
  // Passes a moment.
  State pass();

 private:
  using Clock = std::chrono::steady_clock;
  const bool oversubscribed_;
  unsigned turns_ = 0;
  unsigned wary_ = 0;      // waits in which the core is not offered
  bool offering_ = false;  // the core, to others
  Clock::time_point since_{};
  Clock::time_point looked_{};  // at the clock
};

// Moves this thread to a core that none of `taken` is, if it may use one; it may use the same cores
// as before afterwards (all that the process has, where the kernel refuses those). The scheduler
// likes to wake a process on the core of who woke it, and two ranks that take turns on one core
// look to it like little work: it can leave them there for long with a core idle beside them. `set`
// is how cores are allowed, for tests.
using SetAffinity = int (*)(pid_t thread, std::size_t bytes, const cpu_set_t* cores);
void migrate_off_cores(const std::vector<int>& taken, SetAffinity set = ::sched_setaffinity);

// Wakes a rank that waits for `from` or for anyone.
void wake_if_waiting(Header& header, int from);
// Wakes a rank that sleeps, for whatever it waits.
void wake(Header& header);

// `still` is asked after waiting_for has been published; if it returns false, there is no sleep.
// Ends when rung, or after at most kLongestSleep.
inline constexpr std::chrono::milliseconds kLongestSleep{20};
void sleep_on(std::atomic<std::uint32_t>& bell, std::uint32_t value);

template <typename Still>
void sleep_unless(Header& own, std::uint32_t code, Still still) {
  const std::uint32_t value = own.bell.load();
  own.waiting_for.store(code);
  if (still()) sleep_on(own.bell, value);
  own.waiting_for.store(0);
}

}  // namespace lockstep::shm
