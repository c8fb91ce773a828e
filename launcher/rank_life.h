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
#pragma once

#include <array>

#include "lockstep/core/error.h"

namespace lockstep::launch {

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

}  // namespace lockstep::launch
