// One thread waiting for many descriptors and moments: the launcher's only place to wait.
//
//   EventLoop loop;
//   loop.watch(fd, EPOLLIN, [&](std::uint32_t) { read_some(fd); });
//   loop.after(std::chrono::seconds(5), [&] { loop.stop(); });
//   loop.run();
//
// A callback may forget any descriptor, its own included, while a batch of events is being handed
// out. Each watch therefore has a number that is never used again, and an event whose number is
// gone is dropped, even when the descriptor's number already belongs to something new.
//
// Owned and called by one thread. Descriptors are not owned: forget them before they are closed.
#pragma once

#include <netdb.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "lockstep/core/fd.h"

namespace lockstep::launch {

class EventLoop {
 public:
  using Clock = std::chrono::steady_clock;
  using OnEvent = std::function<void(std::uint32_t events)>;
  using Task = std::function<void()>;
  using TimerId = std::pair<Clock::time_point, std::uint64_t>;  // {}: none

  EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // `events` as for epoll (EPOLLIN, EPOLLOUT; errors and hang-ups always come).
  void watch(int fd, std::uint32_t events, OnEvent on_event);
  void change(int fd, std::uint32_t events);
  void forget(int fd);  // no-op when it is not watched
  bool watching(int fd) const { return ids_.count(fd) != 0; }

  TimerId after(std::chrono::milliseconds delay, Task task);
  // Sets it to none; no-op for none and for one that has fired.
  void cancel(TimerId& timer) { timers_.erase(std::exchange(timer, {})); }

  // Runs the task after the callbacks of the present batch, so that state changes do not nest.
  void post(Task task) { posted_.push_back(std::move(task)); }

  void run();  // until stop()
  void stop() { stopped_ = true; }

 private:
  int next_timeout_ms() const;
  void run_posted();
  void run_timers(Clock::time_point due);

  Fd epoll_;
  bool stopped_ = false;
  std::uint64_t last_id_ = 0;
  std::unordered_map<int, std::uint64_t> ids_;
  std::unordered_map<std::uint64_t, std::shared_ptr<OnEvent>> watches_;
  std::map<TimerId, Task> timers_;
  std::deque<Task> posted_;
};

// A moment that its owner awaits, at most one at a time. It is forgotten with its owner, which the
// task may destroy.
class Timer {
 public:
  explicit Timer(EventLoop& loop) : loop_(loop) {}
  ~Timer() { cancel(); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  void start(std::chrono::milliseconds delay, EventLoop::Task task) {  // in place of an earlier one
    cancel();
    id_ = loop_.after(delay, [this, task = std::move(task)] {
      id_ = {};
      task();
    });
  }
  void cancel() { loop_.cancel(id_); }
  bool pending() const { return id_.second != 0; }

 private:
  EventLoop& loop_;
  EventLoop::TimerId id_;
};

// The addresses of a name, asked from the system's resolver.
//
// A name server that does not answer takes many seconds. In the launcher's event loop no signal and
// no rank would be heard meanwhile, so there a Lookup asks in a thread of its own.
//
//   Lookup lookup(loop, "n0", 29500, [](const Addresses& found) { connect(found.first); });
//
// Owned and called by the thread of the event loop.

// getaddrinfo's answer.
struct Addresses {
  int error = 0;
  std::shared_ptr<const addrinfo> first;
};

// Waits for the answer. An IPv6 address may have brackets.
Addresses look_up(const std::string& host, int port);

// `done` runs in the loop, once, and may destroy the object. Once it is destroyed `done` is not
// called; the asking thread ends when it has its answer.
class Lookup {
 public:
  Lookup(EventLoop& loop, const std::string& host, int port,
         std::function<void(const Addresses&)> done);
  ~Lookup() { loop_.forget(ready_.get()); }
  Lookup(const Lookup&) = delete;
  Lookup& operator=(const Lookup&) = delete;

 private:
  EventLoop& loop_;
  Fd ready_;  // at end of file when the answer is there
  std::future<Addresses> answer_;
};

}  // namespace lockstep::launch
