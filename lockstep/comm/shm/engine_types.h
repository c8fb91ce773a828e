// What callers of the engine and its operations share: options, arrays and symmetric memory.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/core/deadline.h"

namespace lockstep::shm {

class Group;
class ProgressPolicy;
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

// Memory of the same size on every rank, each rank's part mapped by all. The owner is whoever holds
// the pointer; freeing it is local. Its memory is zero at first.
class SymmetricBlock {
 public:
  virtual ~SymmetricBlock() = default;
  std::byte* data() const { return peer(rank_); }
  std::size_t bytes() const { return bytes_; }
  // Where this process sees that rank's part. The caller decides who may touch it when; a barrier
  // orders accesses.
  std::byte* peer(int rank) const { return bases_.at(static_cast<std::size_t>(rank)); }

 protected:
  SymmetricBlock() = default;
  int rank_ = 0;
  std::size_t bytes_ = 0;
  std::vector<std::byte*> bases_;
};

}  // namespace lockstep::shm
