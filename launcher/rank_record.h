// The state of each rank in an attempt, and which rank caused the attempt to fail.
//
// The rank whose end is noticed first is often a victim (report.h). The cause is determined from
// the records afterwards.
//
//   const RankRecord* first = first_to_fail(ranks);
//   if (first != nullptr) report(describe(*first, info));
#pragma once

#include <sys/types.h>

#include <array>
#include <optional>
#include <set>
#include <span>
#include <string>

#include "launcher/event_loop.h"
#include "launcher/process.h"
#include "launcher/report.h"
#include "lockstep/core/error.h"

namespace lockstep::launch {

// The state of a rank, as its launcher sees it:
//
//   kNew -> kRunning -> kFailed -> kNotified -> kSignalled -> kEnded, kExitedEarly or kAbandoned
//
// Any of the middle states may be skipped, and a rank may end in each of them; only one that was
// signalled can be abandoned. Earlier states are remembered, because a rank that was told to end
// does not fail by ending.
//
//   life.move(RankLife::kNotified);
//   if (life.was(RankLife::kSignalled)) ...
class RankLife {
 public:
  enum State : unsigned {
    kNew,          // not started
    kRunning,      // not told to end
    kFailed,       // alive, but stalled: the launcher counts it as failed
    kNotified,     // was told that another rank failed; its end is a consequence from then on
    kSignalled,    // its group was sent a signal to end
    kEnded,        // reaped
    kExitedEarly,  // reaped, with code 0 before its body had returned
    kAbandoned,    // SIGKILL did not end it
  };

  State now() const { return now_; }
  bool was(State state) const { return (visited_ & bit(state)) != 0; }  // now or before
  bool alive() const { return now_ != kNew && now_ < kEnded; }
  // Notified or signalled: its end is not its own decision.
  bool was_told_to_end() const { return was(kNotified) || was(kSignalled); }
  bool may_move(State next) const { return (kAllowed[now_] & bit(next)) != 0; }

  void move(State next) {
    LOCKSTEP_ASSERT(may_move(next));
    now_ = next;
    visited_ |= bit(next);
  }

 private:
  static constexpr unsigned bit(State state) { return 1u << state; }
  static constexpr unsigned kEnds = 1u << kEnded | 1u << kExitedEarly;
  static constexpr std::array<unsigned, kAbandoned + 1> kAllowed = {
      /*kNew*/ 1u << kRunning,
      /*kRunning*/ 1u << kFailed | 1u << kNotified | 1u << kSignalled | kEnds,
      /*kFailed*/ 1u << kNotified | 1u << kSignalled | kEnds,
      /*kNotified*/ 1u << kSignalled | kEnds,
      /*kSignalled*/ 1u << kSignalled | 1u << kAbandoned | kEnds,
      /*kEnded*/ 0,
      /*kExitedEarly*/ 0,
      /*kAbandoned*/ 0};

  State now_ = kNew;
  unsigned visited_ = bit(kNew);
};

struct RankRecord {
  int rank = 0;
  int local_rank = 0;
  pid_t pid = -1;  // until it has started
  std::string error_file = {};
  RankLife life = {};
  std::optional<Ending> ending = {};
  double ended_at = 0;     // seconds since the epoch; for kFailed, when the launcher noticed it
  std::string cause = {};  // for kFailed: why
  int code = 0;            // for kFailed: the launcher's exit code

  bool ended_ok() const { return ending && ending->ok(); }
};

// The rank that failed first; null if none failed. A rank whose error file says that another rank
// failed first is returned only if no other failed.
const RankRecord* first_to_fail(std::span<const RankRecord> ranks);

// The rank that failed while it was stopped by `requests`, which are signals; null if none did.
// `killed`: SIGKILL followed.
const RankRecord* failed_stopping(std::span<const RankRecord> ranks, const std::set<int>& requests,
                                  bool killed);

struct AttemptInfo {
  int number = 0;
  int node = 0;
  std::string host = {};
  std::string program = {};
  EventLoop::Clock::time_point started = {};
};
RankFailure describe(const RankRecord& rank, const AttemptInfo& attempt);

// Adds how the other ranks of this host ended: before the failure, after it, or because of it.
void add_others(RankFailure& failure, std::span<const RankRecord> ranks);

}  // namespace lockstep::launch
