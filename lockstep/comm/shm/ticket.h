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

#include "lockstep/core/deadline.h"

namespace lockstep::shm {

class EngineCore;

class Ticket {
 public:
  virtual ~Ticket();
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  // Returns when the operation has succeeded. Throws CommError or TimeoutError; at the deadline the
  // operation is given up, which breaks the engine forever.
  void wait(const Deadline& deadline);
  // Against the deadline that the operation was started with.
  void wait();

  // True once it has ended, also in failure. Never waits; does what can be done at once.
  bool poll();
  bool done() const { return done_.load(std::memory_order_acquire); }
  const Deadline& deadline() const { return deadline_; }
  // Null unless it has ended in failure.
  std::exception_ptr error() const;

  // Runs `callback` once, after the end, without any lock held, on the thread that ended it; at
  // once if it has ended already. What it holds is released without a lock, too. An operation with
  // a callback ends also when nobody waits. It must not throw.
  void on_done(std::function<void()> callback);

  // "all_reduce(float32 x 12, sum)"
  virtual std::string text() const = 0;

 protected:
  Ticket(std::shared_ptr<EngineCore> core, const Deadline& deadline);

 private:
  friend class EngineCore;

  const std::shared_ptr<EngineCore> core_;
  const Deadline deadline_;
  std::atomic<bool> done_{false};
  std::mutex mutex_;  // the two below, until it is done
  std::exception_ptr error_;
  std::function<void()> callback_;
};

using TicketPtr = std::shared_ptr<Ticket>;

}  // namespace lockstep::shm
