// Every decision about waiting: how the driving thread passes the time until a peer has
// posted, when it sleeps, and when the engine's own thread is woken for work that no thread
// waits for.
//
// No result depends on it: a policy that always yields or always sleeps passes the same tests
// (worlds_for_test.h). It decides how long an operation takes, and how much of the cores others
// get meanwhile.
//
//   while (!step()) if (policy.pause(round)) sleep_until_a_peer_posts();
#pragma once

#include <sched.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "lockstep/comm/shm/engine_types.h"
#include "lockstep/comm/shm/group.h"

namespace lockstep::shm {

// The engine as its policy sees it. Called with the engine's mutex held.
class ProgressHost {
 public:
  virtual bool driven() const = 0;       // a thread drives
  virtual bool has_waiters() const = 0;  // threads wait for tickets; one of them drives, or will
  virtual bool has_work() const = 0;     // may be asked only when no thread drives
  // Makes the engine's thread drive as soon as nobody else drives or waits.
  virtual void wake_thread() = 0;
  // The engine's thread sleeps until it has to drive or to end, or `also` holds and someone wakes
  // it. False: the limit was reached.
  virtual bool sleep_thread(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit,
                            const std::function<bool()>& also) = 0;

 protected:
  ~ProgressHost() = default;
};

class ProgressPolicy {
 public:
  virtual ~ProgressPolicy() = default;

  // Called by the driver, without a lock, after a step that made progress:
  virtual void progressed() = 0;
  // Called when no step can make progress: passes a moment. True when the driver should sleep.
  // `round` is the posted round that is awaited; 0: none is, there are only messages.
  virtual bool pause(std::uint64_t round) = 0;
  // How many steps a thread may execute when it has not come to wait.
  int steps_in_passing = 8;
  // The driver stops to run callbacks when so many are pending, and whenever it has nothing to do.
  std::size_t callbacks_at_once = 1;

  // Called on a thread with the engine's mutex held. An operation was started that needs more work,
  // and no caller has promised to wait for it:
  virtual void started(const Ticket& ticket, ProgressHost& host) = 0;
  // No thread waits any more, but work is left. True: wake the engine's thread for it.
  virtual bool takes_over() = 0;
  // The engine's thread has nothing to do. Returns when it may have work, at any time.
  virtual void park_thread(std::unique_lock<std::mutex>& lock, ProgressHost& host) = 0;

  // Someone has come to wait for the ticket, done or not. Any thread; `mutex` is the engine's,
  // which the caller does not hold.
  virtual void waited_for(const Ticket& ticket, std::mutex& mutex) = 0;
};

// Spins while the answer is near, then offers the core, then sleeps; moves to another core when the
// rank that it waits for was last seen on this one; leaves the thread alone while callers wait for
// what they start.
std::unique_ptr<ProgressPolicy> make_adaptive_policy(const Group& group);

// Moves this thread to a core that is not in `taken`, if it may use one; it may use the same cores
// as before afterwards (all that the process has, where the kernel refuses those). The scheduler
// likes to wake a process on the core of its waker, and two ranks that take turns on one core look
// to it like little work: it can leave them there for long with a core idle beside them. `set` is
// how cores are allowed, for tests.
using SetAffinity = int (*)(pid_t thread, std::size_t bytes, const cpu_set_t* cores);
void migrate_off_cores(const std::vector<int>& taken, SetAffinity set = ::sched_setaffinity);

}  // namespace lockstep::shm
