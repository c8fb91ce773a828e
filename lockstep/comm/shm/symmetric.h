// Symmetric blocks: how they are made, and which of them an address lies in.
//
// Making one is collective: all ranks say that they want the same and have room for it, then every
// rank makes a segment and hands its descriptor to all others over the pairs' sockets, then all say
// whether they could map them. Letting go of one is local: every
// rank has mapped the others' parts itself.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "lockstep/comm/shm/engine_types.h"

namespace lockstep::shm {

class EngineCore;

class Segment;

class MappedBlock final : public SymmetricBlock {
 public:
  MappedBlock(std::uint32_t id, int rank, std::size_t bytes,
              std::vector<std::shared_ptr<Segment>> segments);
  std::uint32_t id() const { return id_; }

 private:
  const std::uint32_t id_;
  const std::vector<std::shared_ptr<Segment>> segments_;
};

// Safe from any thread.
class SymmetricBlocks {
 public:
  struct Location {
    std::shared_ptr<MappedBlock> block;  // null: private memory
    std::uint64_t offset = 0;
  };
  void add(const std::shared_ptr<MappedBlock>& block);
  Location find(const void* data, std::size_t bytes) const;
  std::uint32_t next_id() { return ++last_id_; }

 private:
  mutable std::mutex mutex_;
  std::map<std::uintptr_t, std::weak_ptr<MappedBlock>> blocks_;
  std::uint32_t last_id_ = 0;
};

// Collective; see Engine::symmetric.
std::shared_ptr<MappedBlock> make_symmetric(EngineCore& core, std::size_t bytes,
                                            const Deadline& deadline);

}  // namespace lockstep::shm
