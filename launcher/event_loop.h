// The launcher's event loop: one thread that waits for descriptors, timers and name lookups.
//
//   EventLoop loop;
//   loop.watch(fd, EPOLLIN, [&](std::uint32_t) { read_some(fd); });
//   loop.after(std::chrono::seconds(5), [&] { loop.stop(); });
//   loop.run();
//
// A callback may forget any descriptor, including its own, while a batch of events is delivered. So
// each watch has an id that is never reused, and events of a removed id are dropped, even if the
// descriptor's number already belongs to another file.
//
// Owned and called by one thread. Descriptors are not owned: forget them before closing them.
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

  // `events` as for epoll (EPOLLIN, EPOLLOUT); errors and hang-ups are always delivered.
  void watch(int fd, std::uint32_t events, OnEvent on_event);
  void change(int fd, std::uint32_t events);
  void forget(int fd);  // a no-op unless it is watched
  bool watching(int fd) const { return ids_.count(fd) != 0; }

  TimerId after(std::chrono::milliseconds delay, Task task);
  // Resets `timer`; a no-op if it has fired.
  void cancel(TimerId& timer) { timers_.erase(std::exchange(timer, {})); }

  // Runs the task after the callbacks of the current batch, so that state changes do not nest.
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

// A timer that is cancelled by its destructor; its task may destroy it.
class Timer {
 public:
  explicit Timer(EventLoop& loop) : loop_(loop) {}
  ~Timer() { cancel(); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  void start(std::chrono::milliseconds delay, EventLoop::Task task) {  // replaces an earlier start
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

// getaddrinfo's answer.
struct Addresses {
  int error = 0;
  std::shared_ptr<const addrinfo> first;
};

// Blocks until the system's resolver answers. An IPv6 address may have brackets.
Addresses look_up(const std::string& host, int port);

// Resolves a name on a thread of its own: a name server that does not answer takes many seconds, in
// which the loop could not handle signals. Calls `done` in the loop once, unless the Lookup is
// destroyed before; `done` may destroy it. An abandoned thread ends when it has its answer.
//
//   Lookup lookup(loop, "n0", 29500, [](const Addresses& found) { connect(found.first); });
class Lookup {
 public:
  Lookup(EventLoop& loop, const std::string& host, int port,
         std::function<void(const Addresses&)> done);
  ~Lookup() { loop_.forget(ready_.get()); }
  Lookup(const Lookup&) = delete;
  Lookup& operator=(const Lookup&) = delete;

 private:
  EventLoop& loop_;
  Fd ready_;  // a pipe; end of file when there is an answer
  std::future<Addresses> answer_;
};

}  // namespace lockstep::launch
