// Why an engine is broken, and how the ranks learn it from each other.
//
// The first failure of a rank wins. It is published in the rank's segment, where the peers read it
// and fail with the same message.
//
//   failure.set({.text = "rank 1 has ended", .culprit = 1});
//   if (failure.broken()) std::rethrow_exception(failure.as_exception());
//
// Safe from any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/shm/group.h"
#include "lockstep/core/error.h"

namespace lockstep::shm {

// What to try where ranks do not call the same.
inline constexpr const char* kUnevenCalls =
    "A rank may have fewer batches than the others (give every rank the same number, or train "
    "inside model.join()), or a call may be inside `if (rank == 0)` (move it out).";

// What to try where a rank has ended, or has nothing more to do, and others wait for it.
inline constexpr const char* kUnevenInputs =
    "If a rank has fewer batches than the others, give every rank the same number, or train inside "
    "model.join().";

// What to try where one rank saves a checkpoint and another does something else.
inline constexpr const char* kUnevenSaves =
    "Every rank must call save_checkpoint(), which is collective: take it out of `if (rank == 0)`.";

// Thrown only by what the driver does.
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
