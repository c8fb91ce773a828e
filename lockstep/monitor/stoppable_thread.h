// A thread that is asked to stop and joined within a limit. If a driver or a disk blocks it for
// longer, it is abandoned, with the state that it shares.
//
//   struct State : StoppableState { ... };
//   thread_ = start_stoppable(state_, [](State& state) { state.work(); });
//   stop_or_leave(*state_, thread_, std::chrono::seconds(2));      // in the destructor
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "lockstep/core/thread_signals.h"

namespace lockstep::monitor {

struct StoppableState {
  mutable std::mutex mutex;  // also of what derives from it
  mutable std::condition_variable changed;
  bool stop = false;
  bool ended = false;

  // False when it is time to end.
  bool wait_until(std::chrono::steady_clock::time_point time) const {
    std::unique_lock lock(mutex);
    return !changed.wait_until(lock, time, [this] { return stop; });
  }
};

// The body must not throw. Signals sent to the process are handled on other threads.
template <typename State, typename Body>
std::thread start_stoppable(std::shared_ptr<State> state, Body body) {
  const SignalsBlocked blocked;
  return std::thread([state = std::move(state), body] {
    body(*state);
    const std::lock_guard lock(state->mutex);
    state->ended = true;
    state->changed.notify_all();
  });
}

// Does nothing for a thread that was never started, and when called again.
inline void stop_or_leave(StoppableState& state, std::thread& thread,
                          std::chrono::milliseconds limit) {
  if (!thread.joinable()) return;
  std::unique_lock lock(state.mutex);
  state.stop = true;
  state.changed.notify_all();
  const bool ended = state.changed.wait_for(lock, limit, [&] { return state.ended; });
  lock.unlock();
  if (ended)
    thread.join();
  else
    thread.detach();
}

}  // namespace lockstep::monitor
