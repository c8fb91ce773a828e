#include "launcher/event_loop.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <thread>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::launch {

EventLoop::EventLoop() : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) throw SystemError("launch", "cannot create an epoll descriptor", errno);
}

void EventLoop::watch(int fd, std::uint32_t events, OnEvent on_event) {
  LOCKSTEP_ASSERT(!watching(fd));
  const std::uint64_t id = ++last_id_;
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    throw SystemError("launch", fmt::format("cannot watch descriptor {}", fd), errno);
  ids_[fd] = id;
  watches_[id] = std::make_shared<OnEvent>(std::move(on_event));
}

void EventLoop::change(int fd, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = ids_.at(fd);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0)
    throw SystemError("launch", fmt::format("cannot watch descriptor {}", fd), errno);
}

void EventLoop::forget(int fd) {
  const auto found = ids_.find(fd);
  if (found == ids_.end()) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  watches_.erase(found->second);
  ids_.erase(found);
}

EventLoop::TimerId EventLoop::after(std::chrono::milliseconds delay, Task task) {
  // milliseconds::max() must not overflow the clock.
  const auto bounded = std::min(delay, std::chrono::milliseconds(std::chrono::hours(24 * 365)));
  const TimerId timer(Clock::now() + bounded, ++last_id_);
  timers_.emplace(timer, std::move(task));
  return timer;
}

int EventLoop::next_timeout_ms() const {
  if (!posted_.empty()) return 0;
  if (timers_.empty()) return -1;
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(timers_.begin()->first.first - Clock::now());
  return static_cast<int>(std::clamp<long long>(left.count(), 0, 3'600'000));
}

void EventLoop::run_posted() {
  // Excludes tasks posted by these tasks, which could starve the descriptors.
  std::deque<Task> tasks;
  tasks.swap(posted_);
  for (; !tasks.empty(); tasks.pop_front()) tasks.front()();  // also destroys what it captured
}

void EventLoop::run_timers(Clock::time_point due) {
  while (!timers_.empty() && timers_.begin()->first.first <= due) {
    timers_.extract(timers_.begin()).mapped()();
  }
}

void EventLoop::run() {
  std::array<epoll_event, 64> events;
  stopped_ = false;
  while (!stopped_) {
    // A timer fires only if the descriptors were polled after its time: the event that it is a
    // deadline for may be pending, if this process was delayed.
    const auto polled = Clock::now();
    // epoll returns ready descriptors in turn, so a few rounds reach all of them; timers must not
    // wait longer.
    constexpr int kRounds = 16;
    int wait_ms = next_timeout_ms();
    for (int round = 0; round < kRounds && !stopped_; ++round) {
      const int count =
          ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), wait_ms);
      if (count < 0 && errno != EINTR) throw SystemError("launch", "epoll_wait failed", errno);
      for (int i = 0; i < count; ++i) {
        const auto found = watches_.find(events[static_cast<std::size_t>(i)].data.u64);
        if (found == watches_.end()) continue;
        const auto watch = found->second;  // stays alive while its callback forgets it
        (*watch)(events[static_cast<std::size_t>(i)].events);
      }
      if (count < static_cast<int>(events.size())) break;
      wait_ms = 0;
    }
    run_timers(polled);
    run_posted();
  }
}

Addresses look_up(const std::string& host, int port) {
  std::string name = host;
  if (name.size() > 2 && name.front() == '[' && name.back() == ']')
    name = name.substr(1, name.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  Addresses result;
  result.error = ::getaddrinfo(name.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (result.error == 0) result.first = {found, [found](auto) { ::freeaddrinfo(found); }};
  return result;
}

Lookup::Lookup(EventLoop& loop, const std::string& host, int port,
               std::function<void(const Addresses&)> done)
    : loop_(loop) {
  Pipe pipe = make_pipe();
  ready_ = std::move(pipe.read);
  std::promise<Addresses> promise;
  answer_ = promise.get_future();
  // Detached: a lookup cannot be interrupted, and the launcher does not wait for it.
  std::thread([host, port, promise = std::move(promise), end = std::move(pipe.write)]() mutable {
    promise.set_value(look_up(host, port));
    end.reset();
  }).detach();
  loop_.watch(ready_.get(), EPOLLIN, [this, done = std::move(done)](std::uint32_t) {
    loop_.forget(ready_.get());
    const auto call = done;  // which may destroy this object
    call(answer_.get());
  });
}

}  // namespace lockstep::launch
