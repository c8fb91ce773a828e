// How a rank learns at once that another rank failed, and waits that such news interrupts.
//
// `lockstep run` gives every rank the read end of a pipe, the control descriptor
// (LOCKSTEP_CONTROL_FD). When a rank fails, it writes one line of JSON:
//   {"failed": {"rank": 3, "host": "n1", "cause": "killed by SIGKILL"}}
// One thread per process reads the pipe. Worlds subscribe, so their waits end with that cause
// instead of a timeout.
//
// After a failure, SIGTERM comes from the launcher and is not a request to save: its default action
// is restored, and it ends the process. A SIGTERM handler may run before the line was read, so a
// program that saves on SIGTERM calls failure() first. A process that is still running 3 s after
// the announcement is terminated.
//
//   auto token = control::subscribe([&](const control::PeerFailure& f) { world.abort(f.text()); });
//   auto store = run_with_deadline<Store>("connecting to the store", limit, [] { return open(); });
//
// All functions may be called from any thread, but not from a signal handler, because they lock.
// The first use sets FD_CLOEXEC on the descriptor, so that children of a rank do not read it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"

namespace lockstep::control {

struct PeerFailure {
  int rank = -1;  // -1: not a rank, but the launcher
  std::string host;
  std::string cause;
  std::string text() const;  // "rank 3 on n1 failed: killed by SIGKILL"
};

// Whether this process has a control descriptor.
bool connected();

// The failure that was announced, or is announced within `wait`: a rank often notices a peer's
// broken connection just before its cause is announced. The first call starts the listening thread.
// Without a control descriptor this returns at once. If the launcher dies, its pipe closes, which
// counts as a failure.
std::optional<PeerFailure> failure(std::chrono::milliseconds wait = std::chrono::milliseconds(0));

// A descriptor for poll(), which reports POLLHUP as soon as a failure is announced. The launcher's
// SIGTERM follows shortly, so a loop that checks only now and then would end too late to report the
// failure. Do not read or close it. Without a launcher it is -1, which poll() skips.
int failure_fd();

// Calls `callback` once: from the listening thread, or at once if a failure is already known.
// Destroying the returned token cancels the call, and waits for one in progress unless it is
// destroyed by that call. The callback must return quickly; exceptions that it throws are logged.
using Subscription = std::shared_ptr<void>;
[[nodiscard]] Subscription subscribe(std::function<void(const PeerFailure&)> callback);

}  // namespace lockstep::control

namespace lockstep::detail {

// Throws CommError if the launcher has announced a failure.
inline void throw_if_failure_announced(const std::string& what) {
  if (const auto failure = control::failure())
    throw CommError("world", fmt::format("{} was given up: {}.", what, failure->text()));
}

// Runs `body`, which may block forever (a store call, a backend's constructor), on a thread of its
// own. When the deadline passes or the launcher announces a failure, this throws and abandons the
// thread, so `body` must own everything that it uses.
template <typename T>
T run_with_deadline(const std::string& what, const Deadline& deadline, std::function<T()> body) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    bool interrupted = false;
    std::optional<T> value;
    std::exception_ptr error;
  };
  auto shared = std::make_shared<Shared>();
  std::thread([shared, body = std::move(body)]() mutable {
    std::optional<T> value;
    std::exception_ptr error;
    try {
      value.emplace(body());
    } catch (...) {
      error = std::current_exception();
    }
    body = nullptr;
    const std::lock_guard lock(shared->mutex);
    shared->value = std::move(value);
    shared->error = error;
    shared->done = true;
    shared->changed.notify_all();
  }).detach();

  const auto token = control::subscribe([shared](const control::PeerFailure&) {
    const std::lock_guard lock(shared->mutex);
    shared->interrupted = true;
    shared->changed.notify_all();
  });
  // Destroyed before the token, whose destructor waits for a callback that may want the mutex.
  std::unique_lock lock(shared->mutex);
  shared->changed.wait_until(lock, deadline.time(),
                             [&] { return shared->done || shared->interrupted; });
  if (!shared->done) {
    throw_if_failure_announced(what);
    throw TimeoutError("world", fmt::format("{} did not finish within {} ms. A rank is missing, "
                                            "stopped or unreachable. Raise "
                                            "LOCKSTEP_STARTUP_TIMEOUT_S if it is only slow.",
                                            what, deadline.total().count()));
  }
  if (shared->error) std::rethrow_exception(shared->error);
  return std::move(*shared->value);
}

}  // namespace lockstep::detail
