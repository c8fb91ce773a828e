// The control descriptor: how a rank learns that another one failed, at once and out of band.
//
// `lockstep run` gives every rank the read end of a pipe (LOCKSTEP_CONTROL_FD) and writes one line
// of JSON when the run is doomed:
//   {"failed": {"rank": 3, "host": "n1", "cause": "killed by SIGKILL"}}
// One thread reads it; worlds subscribe, so that their waits end with that cause instead of a
// timeout. Once a failure is known SIGTERM ends the process again whatever handler a program has:
// it is the launcher's stop, not a request to save. A handler can be called before the line was
// read, so a program that saves when it is stopped asks failure() first. A process that still runs
// 3 s after it was notified of a failure is ended.
//
//   auto token = control::subscribe([&](const control::PeerFailure& f) { world.abort(f.text()); });
//
// All functions may be called from any thread, but not in a signal handler: they lock. The
// descriptor is closed on exec from the first use on, so that a rank's own children do not listen.
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

// Is there a launcher that would notify us?
bool connected();

// What was announced up to now, or arrives within `wait`: a peer's broken connection is often seen
// a moment before its cause is reported. The first use starts the listening thread; without a
// control descriptor there is nothing to wait for and this returns at once. The launcher closing
// the pipe without a message (it died) is a failure too; after {"done": true} it is not.
std::optional<PeerFailure> failure(std::chrono::milliseconds wait = std::chrono::milliseconds(0));

// For waits in poll(): reports POLLHUP as soon as failure() has an answer. The launcher's SIGTERM
// comes a moment after that, so a wait that only checks now and then would end too late to report.
// Must not be read or closed; -1, which poll() skips, without a launcher.
int failure_fd();

// Calls `callback` once (from the listening thread, or at once when a failure is already known)
// unless the returned token is dropped before. Dropping it waits for a call in progress, except
// from inside that call. The callback must not block for long; what it throws is logged.
using Subscription = std::shared_ptr<void>;
[[nodiscard]] Subscription subscribe(std::function<void(const PeerFailure&)> callback);

}  // namespace lockstep::control

// Puts a deadline on something that may block forever (a store call, a backend's constructor).
//
//   auto store = bounded<Store>("connecting to the store", deadline, [=] { return open(); });
//
// The body runs on a thread of its own and must own everything it touches: when the deadline passes
// or the launcher announces a failure, the caller gets an exception and the thread is left behind.

namespace lockstep::detail {

// Throws CommError when the launcher has announced a failure.
inline void throw_if_doomed(const std::string& what) {
  if (const auto failure = control::failure())
    throw CommError("world", fmt::format("{} was given up: {}.", what, failure->text()));
}

template <typename T>
T bounded(const std::string& what, const Deadline& deadline, std::function<T()> body) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    bool doomed = false;
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
    shared->doomed = true;
    shared->changed.notify_all();
  });
  std::unique_lock lock(shared->mutex);  // released before the token, which waits for its call
  shared->changed.wait_until(lock, deadline.time(), [&] { return shared->done || shared->doomed; });
  if (!shared->done) {
    throw_if_doomed(what);
    throw TimeoutError("world", fmt::format("{} did not finish within {} ms. A rank is missing, "
                                            "stopped or unreachable. Raise "
                                            "LOCKSTEP_STARTUP_TIMEOUT_S if it is only slow.",
                                            what, deadline.total().count()));
  }
  if (shared->error) std::rethrow_exception(shared->error);
  return std::move(*shared->value);
}

}  // namespace lockstep::detail
