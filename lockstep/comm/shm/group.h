// The ranks of one engine as this rank sees them: all that an operation needs of the engine.
//
//   std::memcpy(to, group.view(peer).buffers[parity], bytes);
//
// Nothing here changes but the registry of symmetric blocks, which is safe from any thread.
#pragma once

#include <utility>
#include <vector>

#include "lockstep/comm/shm/layout.h"
#include "lockstep/comm/shm/parking.h"
#include "lockstep/comm/shm/rendezvous.h"
#include "lockstep/comm/shm/segment.h"
#include "lockstep/comm/shm/symmetric.h"

namespace lockstep::shm {

class Group {
 public:
  Group(const RankInfo& info, const Layout& layout, std::vector<Peer> peers)
      : info_(info), layout_(layout), peers_(std::move(peers)) {
    for (const Peer& peer : peers_) views_.push_back(layout_.view(peer.segment->data()));
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return info_.rank; }
  int size() const { return info_.size; }
  const RankInfo& info() const { return info_; }
  const Layout& layout() const { return layout_; }
  const std::vector<Peer>& peers() const { return peers_; }
  // Where this process sees that rank's segment.
  const View& view(int rank) const { return views_[static_cast<std::size_t>(rank)]; }
  const View& own() const { return view(info_.rank); }
  SymmetricBlocks& blocks() { return blocks_; }
  const SymmetricBlocks& blocks() const { return blocks_; }

  // To be called after a write that this rank may wait for.
  void wake_peer(int rank) const { wake_if_waiting(*view(rank).header, info_.rank); }
  // This rank too.
  void wake_all() const {
    for (const View& each : views_) wake(*each.header);
  }

 private:
  const RankInfo info_;
  const Layout layout_;
  const std::vector<Peer> peers_;
  std::vector<View> views_;
  SymmetricBlocks blocks_;
};

}  // namespace lockstep::shm
