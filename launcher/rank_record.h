// What is known of one rank of an attempt, and which rank is to blame for the attempt's end.
//
// The rank that is seen to die first is often a victim: see report.h. All of it is read from the
// records, after the fact.
//
//   const RankRecord* first = first_to_fail(ranks);
//   if (first != nullptr) report(describe(*first, info));
//
// Plain values and free functions; nothing is owned.
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

// The life of one rank as its launcher sees it: one state, and the transitions there are.
//
//   kNew ──> kRunning
//               ├─> kFailed            the launcher fails it while it is alive
//               ├─> kNotified          it knows that another rank has failed
//               ├─> kAsked             it has had a signal to end
//               └─> kEnded or kLeft
//
// From kFailed it may be notified, from there on asked, and from each of them it ends; a rank that
// was asked and outlives even SIGKILL is kAbandoned. The states that it was in are remembered: a
// rank that was asked to end has not failed by ending.
//
//   life.move(RankLife::kNotified);
//   if (life.was(RankLife::kAsked)) ...
//
// A plain value.

class RankLife {
 public:
  enum State : unsigned {
    kNew,        // not started
    kRunning,    // nobody has asked it for anything
    kFailed,     // alive; stalled
    kNotified,   // knows that another rank failed: its own end is no news after that
    kAsked,      // the same, by a signal to its group
    kEnded,      // reaped
    kLeft,       // the same, with code 0 while its body had not returned
    kAbandoned,  // SIGKILL did not end it
  };

  State now() const { return now_; }
  bool was(State state) const { return (visited_ & bit(state)) != 0; }  // now or before
  bool alive() const { return now_ != kNew && now_ < kEnded; }
  // It was notified or asked: it does not end by itself.
  bool ends_for_us() const { return was(kNotified) || was(kAsked); }
  bool may_move(State next) const { return (kAllowed[now_] & bit(next)) != 0; }

  void move(State next) {
    LOCKSTEP_ASSERT(may_move(next));
    now_ = next;
    visited_ |= bit(next);
  }

 private:
  static constexpr unsigned bit(State state) { return 1u << state; }
  static constexpr unsigned kEnds = 1u << kEnded | 1u << kLeft;
  static constexpr std::array<unsigned, kAbandoned + 1> kAllowed = {
      /*kNew*/ 1u << kRunning,
      /*kRunning*/ 1u << kFailed | 1u << kNotified | 1u << kAsked | kEnds,
      /*kFailed*/ 1u << kNotified | 1u << kAsked | kEnds,
      /*kNotified*/ 1u << kAsked | kEnds,
      /*kAsked*/ 1u << kAsked | 1u << kAbandoned | kEnds,
      /*kEnded*/ 0,
      /*kLeft*/ 0,
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
  double ended_at = 0;     // seconds since the epoch; for one that the launcher failed, when it did
  std::string cause = {};  // what the launcher failed it for while it was alive
  int code = 0;            // the exit code for that

  bool ended_ok() const { return ending && ending->ok(); }
};

// The earliest of those that failed. A rank that says itself that another one failed first is the
// cause only where no other is known. Null where none has failed.
const RankRecord* first_to_fail(std::span<const RankRecord> ranks);

// The rank that did not end as the requests to stop, which are signals, asked it to; null where all
// did. `killed`: SIGKILL followed.
const RankRecord* failed_stopping(std::span<const RankRecord> ranks, const std::set<int>& requests,
                                  bool killed);

// The attempt that the ranks belong to.
struct AttemptInfo {
  int number = 0;
  int node = 0;
  std::string host = {};
  std::string program = {};
  EventLoop::Clock::time_point started = {};
};
RankFailure describe(const RankRecord& rank, const AttemptInfo& attempt);

// How the other ranks of this host ended: before the failure, after it, or because of it.
void add_others(RankFailure& failure, std::span<const RankRecord> ranks);

}  // namespace lockstep::launch
