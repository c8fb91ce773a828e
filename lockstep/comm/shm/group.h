// The ranks of one engine as this rank sees them: where their segments lie, how they sleep and wake
// each other, and how they learn that an engine is broken.
//
// Nobody may fall asleep at the moment it is posted to. A sleeper first publishes for whom it waits
// (`waiting_for`), then looks once more, then sleeps unless its bell has changed; a rank that posts
// writes first and then checks whether someone waits for it. Both do so with sequentially
// consistent atomics, so at least one of the two sees the other.
//
//   group.sleep_while(peer + 1, [&] { return !posted(peer); });
//
// All functions here may be called from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/shm/peers.h"
#include "lockstep/comm/shm/segment.h"
#include "lockstep/core/error.h"

namespace lockstep::shm {

inline constexpr std::chrono::milliseconds kLongestSleep{20};

// The part of the engine that operations use. It is immutable except for the registry of symmetric
// blocks.
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
  // That rank's segment, as mapped in this process.
  const View& view(int rank) const { return views_[static_cast<std::size_t>(rank)]; }
  const View& own() const { return view(info_.rank); }
  SymmetricBlocks& blocks() { return blocks_; }
  const SymmetricBlocks& blocks() const { return blocks_; }

  // Wakes that rank after a write that it may be waiting for.
  void wake_peer(int rank) const;
  // Both wake whatever the rank waits for; wake_self() is called by its other threads.
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

// Advice for ranks that have called different operations.
inline constexpr const char* kUnevenCalls =
    "A rank may have fewer batches than the others (give every rank the same number, or train "
    "inside model.join()), or a call may be inside `if (rank == 0)` (move it out).";

// Advice for when others wait for a rank that has ended or has nothing more to do.
inline constexpr const char* kUnevenInputs =
    "If a rank has fewer batches than the others, give every rank the same number, or train inside "
    "model.join().";

// Advice for when one rank saves a checkpoint and another does something else.
inline constexpr const char* kUnevenSaves =
    "Every rank must call save_checkpoint(), which is collective: take it out of `if (rank == 0)`.";

// Why an engine is broken. Thrown only by code that the driver runs.
struct EngineFailure {
  bool timeout = false;
  bool disagreement = false;  // between ranks that are all alive
  std::string text{};
  std::size_t why_at = 0;  // where in `text` the reason of a timeout begins; 0: nowhere
  int culprit = -1;        // the rank to blame, if one is known
  int origin = -1;         // the rank that found it
  CommContext context{};
};

// Why `doing` failed: the kind, the text and the rank that the exception names.
EngineFailure failure_from(std::string_view doing, const std::exception& error);

// The first failure of this rank wins. It is published in the rank's segment, where the peers read
// it and fail with the same message.
//
//   failure.set({.text = "rank 1 has ended", .culprit = 1});
//   if (failure.broken()) std::rethrow_exception(failure.as_exception());
class FailureRecord {
 public:
  explicit FailureRecord(const Group& group) : group_(group) {}

  // Does nothing after the first time. Wakes all ranks.
  void set(EngineFailure failure) noexcept;
  bool broken() const { return broken_.load(); }
  std::string text() const;                 // empty while nothing has failed
  std::exception_ptr as_exception() const;  // the failure that was set
  std::exception_ptr as_exception(const EngineFailure& failure) const;
  // Peers that are dead, broken or closed, most severe first.
  std::vector<EngineFailure> of_peers() const;

 private:
  EngineFailure published_by(int rank) const;
  std::string composed(const EngineFailure& failure) const;

  const Group& group_;
  mutable std::mutex mutex_;
  EngineFailure failure_;
  std::atomic<bool> broken_{false};
};

}  // namespace lockstep::shm
