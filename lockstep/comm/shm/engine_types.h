// The types of Engine's interface: options, arrays, tickets and symmetric memory.
//
//   TicketPtr ticket = engine->all_reduce(data, count, DType::kF32, Op::kSum);
//   ticket->wait(Deadline::after(std::chrono::seconds(30)));
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/core/deadline.h"

namespace lockstep::shm {

class EngineCore;
class Group;
class ProgressPolicy;
class Segment;
using PolicyFactory = std::unique_ptr<ProgressPolicy> (*)(const Group& group);

// Zero means the measured default. Sizes must be equal on all ranks.
struct EngineOptions {
  std::size_t small_bytes = 0;  // up to here an all-reduce is one round and every rank sums it all
  std::size_t chunk_bytes = 0;  // each of a rank's two buffers; larger arrays go in chunks
  std::size_t ring_bytes = 0;   // the ring for messages from one rank to one other
  PolicyFactory policy = nullptr;  // how this rank waits (progress_policy.h)
};

struct StartOptions {
  Deadline deadline = Deadline::after(std::chrono::minutes(30));
  // The caller waits for the ticket next: the engine's own thread need not be woken for it.
  bool caller_waits = false;
  // The caller's own number for this collective, used in messages; 0: the engine's.
  std::uint64_t number = 0;
  bool saving = false;  // the caller saves a checkpoint; for messages only
};

struct Part {
  void* data = nullptr;
  std::size_t bytes = 0;
};
struct ConstPart {
  const void* data = nullptr;
  std::size_t bytes = 0;
};

// Memory of the same size on every rank, each rank's part mapped by all and zeroed at first.
// Whoever holds the pointer owns it; freeing it is local.
class SymmetricBlock {
 public:
  // The ranks' segments, by rank.
  SymmetricBlock(std::uint32_t id, int rank, std::size_t bytes,
                 std::vector<std::shared_ptr<Segment>> segments);
  std::uint32_t id() const { return id_; }
  std::byte* data() const { return peer(rank_); }
  std::size_t bytes() const { return bytes_; }
  // That rank's part, as mapped in this process. The caller decides who may access it when; a
  // barrier orders accesses.
  std::byte* peer(int rank) const { return bases_.at(static_cast<std::size_t>(rank)); }

 private:
  const std::uint32_t id_;
  const int rank_;
  const std::size_t bytes_;
  const std::vector<std::shared_ptr<Segment>> segments_;
  std::vector<std::byte*> bases_;
};

// An operation that the engine was asked for. A thread that waits drives the engine itself if no
// other thread does, and carries out what is pending; only work that nobody waits for is done by
// the engine's own thread.
//
// Any thread may call any function, several at once too. The memory of an operation belongs to the
// caller and must live until its ticket is done; a ticket may be dropped before that.
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

  std::shared_ptr<EngineCore> engine_;  // set when the operation starts
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
  bool any = false;  // an operation was ended since this was set to false
};

}  // namespace lockstep::shm
