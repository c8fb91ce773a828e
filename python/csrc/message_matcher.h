// Message matching by tag and source (recvAnysource), which torch.distributed needs and the engine
// does not have.
//
// The engine delivers messages from one rank to another in order and knows only their length. So
// every message here is two of the engine's: an envelope (tag and length) and the contents. An
// envelope is received as soon as a posted receive could match it; a message without a matching
// receive is buffered until one is posted. A receive from any source does not commit to a rank: the
// polling thread asks all of them until one has begun to send. It also serves receives that nobody
// waits for; most are waited for at once, are completed by the waiter and wake no other thread.
//
//   auto receive = matcher->receive({data, bytes, MessageMatcher::kAnyone, tag, owner});
//   matcher->wait(*receive, Deadline::after(timeout));
//
// Any thread may call any function. The engine is the caller's, who gives it to close().
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/shm/engine.h"

namespace lockstep::python {

// Keeps a program's own callbacks out of the adaptor's locks.
//
// The engine may complete any operation inside any call, even while it starts another one, and the
// completion callbacks (a future with a Python callback) may call back into the adaptor or wait for
// peers. While a Deferral exists on a thread, such callbacks are deferred; the destructor of the
// outermost one runs them. Declare it before the lock, so that it is destroyed after it:
//
//   Deferral deferral;
//   std::lock_guard lock(mutex_);
//
// Belongs to the thread that made it. Actions must not throw.
class Deferral {
 public:
  Deferral() { ++depth(); }
  Deferral(const Deferral&) = delete;
  Deferral& operator=(const Deferral&) = delete;
  ~Deferral() {
    if (--depth() > 0) return;
    // An action may defer others while it runs; they come after it.
    for (auto actions = std::exchange(waiting(), {}); !actions.empty();
         actions = std::exchange(waiting(), {})) {
      for (const auto& action : actions) action();
    }
  }

  static void run(std::function<void()> action) {
    if (depth() > 0)
      waiting().push_back(std::move(action));
    else
      action();
  }

 private:
  static int& depth() {
    thread_local int value = 0;
    return value;
  }
  static std::vector<std::function<void()>>& waiting() {
    thread_local std::vector<std::function<void()>> value;
    return value;
  }
};

class Receive {
 public:
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Whether its envelope has arrived and the contents are being received into its array.
  bool matched() const { return matched_.load(std::memory_order_acquire); }
  // False when the deadline passes first.
  bool wait_until(const Deadline& deadline);
  std::exception_ptr error() const;  // null unless it has ended in failure
  int source() const { return from_.load(); }

 private:
  friend class MessageMatcher;
  void give_up(std::exception_ptr error);
  void finish(int from, std::exception_ptr error);

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  int source_ = 0;
  int tag_ = 0;
  std::shared_ptr<void> owner_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr given_up_;  // how it ends, whatever else happens
  std::exception_ptr error_;
  std::atomic<int> from_{-1};
  std::atomic<bool> matched_{false};
  std::atomic<bool> done_{false};
};

class MessageMatcher : public std::enable_shared_from_this<MessageMatcher> {
 public:
  static constexpr int kAnyone = -1;

  explicit MessageMatcher(shm::Engine& engine);
  ~MessageMatcher();

  struct Message {
    const void* data = nullptr;
    std::size_t bytes = 0;
    int peer = 0;
    int tag = 0;
  };
  // The contents must live until the last ticket is done.
  std::vector<shm::TicketPtr> send(const Message& message, const Deadline& deadline);

  struct ReceiveRequest {
    void* data = nullptr;
    std::size_t bytes = 0;
    int source = kAnyone;
    int tag = 0;
    std::shared_ptr<void> owner;  // held until the receive has ended
  };
  std::shared_ptr<Receive> receive(ReceiveRequest request);
  // Returns when it has ended, even in failure; at the deadline the engine is broken.
  void wait(Receive& receive, const Deadline& deadline);
  // Somebody wants to know when it ends without calling wait().
  void request_progress(const Receive& receive);

  // Ends the engine and fails what is pending. Called once, before the matcher goes.
  void close(std::unique_ptr<shm::Engine> engine) noexcept;

 private:
  struct Envelope {
    std::int64_t tag = 0;
    std::uint64_t bytes = 0;
  };
  struct Unexpected {
    int from = 0;
    Envelope envelope;
    std::vector<std::byte> contents;
  };
  // What is on its way from one rank: an envelope, then its contents.
  struct Incoming {
    Envelope envelope;
    shm::TicketPtr header;
    shm::TicketPtr contents;
    bool watched = false;  // the engine's thread carries it over if nobody waits
    std::chrono::steady_clock::time_point asked{};
    std::shared_ptr<Receive> target;  // null: into `unexpected`
    Unexpected unexpected;
  };

  void make_progress() noexcept;
  void advance_all();
  bool advance(int peer);
  bool opened(int peer);
  void arrived(int peer);
  bool wants(int peer) const;
  std::list<std::shared_ptr<Receive>>::iterator find_request(int peer, std::int64_t tag);
  void give_up(Receive& receive, const Deadline& deadline);
  void fail_all(const std::exception_ptr& error);
  void watch(Incoming& incoming);
  bool watch_over();
  void poll();
  void look_for_anyone();
  bool anyone_wanted() const;
  shm::TicketPtr ticket_of(const Receive& receive);
  Incoming& incoming_from(int peer) { return incoming_[static_cast<std::size_t>(peer)]; }

  shm::Engine& engine_;
  // Recursive, because the engine may end something inside a call from here, on the same thread.
  mutable std::recursive_mutex mutex_;
  std::condition_variable_any called_;
  bool progressing_ = false;
  bool again_ = false;
  bool closed_ = false;
  std::vector<Incoming> incoming_;
  std::list<std::shared_ptr<Receive>> requests_;  // in the order of the calls
  std::deque<Unexpected> unexpected_;             // in the order of arrival
  struct Sent {
    Envelope envelope;
    shm::TicketPtr ticket;
  };
  std::list<Sent> sent_;  // envelopes that the engine may still read
  std::thread poller_;
  bool polling_ = false;  // awake, or about to look whether it should be
  std::chrono::steady_clock::time_point received_{};  // the last call of receive()
};

}  // namespace lockstep::python
