// Puts a deadline on something that may block forever (a store call, a backend's constructor).
//
//   auto store = bounded<Store>("connecting to the store", deadline, [=] { return open(); });
//
// The body runs on a thread of its own and must own everything it touches: when the deadline passes
// or the launcher announces a failure, the caller gets an exception and the thread is left behind.
#pragma once

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
#include "lockstep/rendezvous/control.h"

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
