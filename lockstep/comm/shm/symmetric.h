// Symmetric blocks: how they are made, and which of them an address lies in.
//
// Making one is collective: all ranks say that they want the same and have room for it, then every
// rank makes a segment and hands its descriptor to all others over the pairs' sockets, then all say
// whether they could map them. Freeing one is local: every rank has mapped the others' parts
// itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "lockstep/comm/shm/engine_types.h"
#include "lockstep/comm/shm/peers.h"

namespace lockstep::shm {

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

// Why it is useless to wait longer for that rank; null while it may still answer.
using DoomOf = std::function<std::exception_ptr(int awaited)>;

// The ranks that make a block together: who this one is, its ends of the pairs' sockets, and what
// keeps another from answering.
struct BlockMakers {
  const RankAndSize& info;
  const std::vector<Peer>& peers;
  DoomOf doom_of;
};

// Collective; see Engine::symmetric. The block is entered into `blocks`.
std::shared_ptr<MappedBlock> make_symmetric(SymmetricBlocks& blocks, const BlockMakers& ranks,
                                            std::size_t bytes, const Deadline& deadline);

}  // namespace lockstep::shm
