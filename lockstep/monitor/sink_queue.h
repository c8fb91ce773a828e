// A bounded queue in front of a slow consumer (a file, a table), so that a training step never
// waits for one: push() takes a lock for the length of one move. What finds no room is dropped and
// counted.
//
//   SinkQueue<Event> queue({.capacity = 4096}, [file](const std::vector<Event>& batch) { ... });
//   queue.push(event);
//   queue.dropped();
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/monitor/stoppable_thread.h"

namespace lockstep::monitor {

struct SinkQueueOptions {
  std::size_t capacity = 16384;
  std::chrono::milliseconds interval{100};  // how long a batch gathers
  std::chrono::milliseconds end_limit{2000};
};

// Any thread may push. The consumer runs on the queue's own thread and must not throw; it must own
// what it uses, because the destructor waits for it for `end_limit` only, and leaves a thread
// behind whose disk does not answer.
template <typename T>
class SinkQueue {
 public:
  using Consumer = std::function<void(const std::vector<T>& batch)>;

  SinkQueue(const SinkQueueOptions& options, Consumer consumer)
      : state_(std::make_shared<State>(options, std::move(consumer))),
        thread_(start_stoppable(state_, [](State& state) { state.work(); })) {}

  // What was pushed is consumed first.
  ~SinkQueue() { stop_or_leave(*state_, thread_, state_->options.end_limit); }
  SinkQueue(const SinkQueue&) = delete;
  SinkQueue& operator=(const SinkQueue&) = delete;

  // False when there was no room.
  bool push(T item) {
    const std::lock_guard lock(state_->mutex);
    if (state_->waiting.size() >= state_->options.capacity) {
      ++state_->dropped;
      return false;
    }
    state_->waiting.push_back(std::move(item));
    ++state_->pushed;
    // A batch that fills the queue by half does not wait for the end of its interval.
    if (state_->waiting.size() == state_->options.capacity / 2 + 1) state_->changed.notify_all();
    return true;
  }

  std::uint64_t dropped() const {
    const std::lock_guard lock(state_->mutex);
    return state_->dropped;
  }

  // Until all that was pushed before is consumed; false when the time is over first.
  bool flush(std::chrono::milliseconds limit) {
    std::unique_lock lock(state_->mutex);
    const std::uint64_t goal = state_->pushed;
    state_->flush = true;
    state_->changed.notify_all();
    return state_->changed.wait_for(lock, limit, [&] { return state_->consumed >= goal; });
  }

 private:
  struct State : StoppableState {
    State(const SinkQueueOptions& chosen, Consumer consume)
        : options(chosen), consumer(std::move(consume)) {}

    void work() {
      std::vector<T> batch;  // its memory is used again: push() seldom allocates
      std::unique_lock lock(mutex);
      while (!stop || !waiting.empty()) {
        changed.wait_for(lock, options.interval,
                         [&] { return stop || flush || waiting.size() > options.capacity / 2; });
        flush = false;
        if (waiting.empty()) continue;
        batch.swap(waiting);
        lock.unlock();
        consumer(batch);
        const std::size_t count = batch.size();
        batch.clear();
        lock.lock();
        consumed += count;
        changed.notify_all();
      }
    }

    const SinkQueueOptions options;
    const Consumer consumer;
    std::vector<T> waiting;
    std::uint64_t pushed = 0;
    std::uint64_t consumed = 0;
    std::uint64_t dropped = 0;
    bool flush = false;
  };

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace lockstep::monitor
