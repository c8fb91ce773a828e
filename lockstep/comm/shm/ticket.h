// An operation on its way through the engine.
//
// A thread that waits drives the engine itself if no other thread does, and carries out what is
// pending; only work that nobody waits for is done by the engine's own thread.
//
//   TicketPtr ticket = engine->all_reduce(data, count, DType::kF32, Op::kSum);
//   ticket->wait(Deadline::after(std::chrono::seconds(30)));
//
// Any thread may call any function, several at once too. The memory of an operation belongs to the
// caller and must live until its ticket is done; a ticket may be dropped before that.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/core/deadline.h"

namespace lockstep::shm {

class Ticket;

// What a ticket needs of the engine that carries it out. Any thread may call any function.
class Executor {
 public:
  virtual ~Executor() = default;
  // Returns when the ticket is done.
  virtual void wait(Ticket& ticket, const Deadline& deadline) = 0;
  // Does what can be done at once, and has the rest done.
  virtual bool poll(Ticket& ticket) = 0;
  // Someone needs the end of an operation but does not wait for it.
  virtual void request_progress() = 0;
  // In a child forked off the process that made the engine, everything belongs to the parent: the
  // rank, the thread, and perhaps a lock. Nothing may be touched there.
  virtual bool inherited() const = 0;
};

class Ticket {
 public:
  virtual ~Ticket() = default;
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  // Returns when the operation has succeeded. Throws CommError or TimeoutError; at the deadline the
  // operation is given up, which breaks the engine forever.
  void wait(const Deadline& deadline);
  // Waits until the deadline that the operation was started with.
  void wait();

  // True once it has ended, even in failure. Never waits; does what can be done at once.
  bool poll();
  bool done() const { return done_.load(std::memory_order_acquire); }
  const Deadline& deadline() const { return deadline_; }
  // Null unless it has ended in failure.
  std::exception_ptr error() const;

  // Runs `callback` once, after the end, without any lock held, on the thread that ended it; at
  // once if it has ended already. What it holds is released without a lock too. An operation with a
  // callback ends even when nobody waits. The callback must not throw.
  void on_done(std::function<void()> callback);

  // "all_reduce(float32 x 12, sum)"
  virtual std::string text() const = 0;

 protected:
  explicit Ticket(const Deadline& deadline) : deadline_(deadline) {}

 private:
  friend class Completions;
  friend class EngineCore;

  std::shared_ptr<Executor> executor_;  // from its start
  const Deadline deadline_;
  std::atomic<bool> done_{false};
  std::mutex mutex_;  // the two below, until it is done
  std::exception_ptr error_;
  std::function<void()> callback_;
};

using TicketPtr = std::shared_ptr<Ticket>;

// Ends operations, and collects their callbacks: these run later, without a lock. Driver only.
class Completions {
 public:
  void finish(Ticket& ticket, std::exception_ptr error = nullptr);

  std::vector<std::function<void()>> callbacks;
  bool any = false;  // finished, since someone has set this to false
};

}  // namespace lockstep::shm
