// The ranks of one engine as this rank sees them: where their segments lie, and how they sleep and
// wake each other. It is all that an operation needs of the engine.
//
// Nobody may fall asleep at the moment it is posted to. A sleeper first publishes for whom it waits
// (`waiting_for`), then looks once more, then sleeps unless its bell has changed; a rank that posts
// writes first and then checks whether someone waits for it. Both do so with sequentially
// consistent atomics, so at least one of the two sees the other.
//
//   group.sleep_while(peer + 1, [&] { return !posted(peer); });
//
// Nothing here changes but the registry of symmetric blocks. Safe from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "lockstep/comm/shm/layout.h"
#include "lockstep/comm/shm/peers.h"
#include "lockstep/comm/shm/symmetric.h"

namespace lockstep::shm {

inline constexpr std::chrono::milliseconds kLongestSleep{20};

class Group {
 public:
  Group(const RankAndSize& info, const Layout& layout, std::vector<Peer> peers);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return info_.rank; }
  int size() const { return info_.size; }
  const RankAndSize& info() const { return info_; }
  const Layout& layout() const { return layout_; }
  const std::vector<Peer>& peers() const { return peers_; }
  // Where this process sees that rank's segment.
  const View& view(int rank) const { return views_[static_cast<std::size_t>(rank)]; }
  const View& own() const { return view(info_.rank); }
  SymmetricBlocks& blocks() { return blocks_; }
  const SymmetricBlocks& blocks() const { return blocks_; }

  // After a write that this rank may wait for.
  void wake_peer(int rank) const;
  // Whatever they wait for. Also wakes this rank, from another of its threads.
  void wake_self() const;
  void wake_all() const;
  // `still` is asked after `code` has been published as what this rank waits for; if it returns
  // false, there is no sleep. Ends when woken, or after at most kLongestSleep.
  void sleep_while(std::uint32_t code, const std::function<bool()>& still) const;

 private:
  const RankAndSize info_;
  const Layout layout_;
  const std::vector<Peer> peers_;
  std::vector<View> views_;
  SymmetricBlocks blocks_;
};

}  // namespace lockstep::shm
