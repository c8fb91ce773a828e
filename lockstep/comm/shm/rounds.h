// The rounds of collectives (engine.h says what a round is), one after the other. Driver only.
//
//   if (rounds.step(*queue.front()) == Rounds::Step::kDone) queue.pop_front();
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/comm/shm/collective.h"
#include "lockstep/comm/shm/group.h"

namespace lockstep::shm {

class Rounds {
 public:
  explicit Rounds(const Group& group) : group_(group) {}

  enum class Step { kBlocked, kMoved, kDone };
  // Does for a collective what can be done without waiting. The same one is given until it is done.
  // Throws Disagreement when the ranks have called different operations.
  Step step(Collective& collective);
  // Forgets the collective that is not done.
  void drop();

  // The round that this rank has posted and not all others; 0 when there is none.
  std::uint64_t awaited() const { return posted_ ? round_ : 0; }
  bool in_first() const { return posted_ && first_; }
  // All ranks below it have posted the round; to sleep until this one does.
  int awaited_rank() const { return arrived_; }
  std::vector<int> behind() const;  // ranks that have not posted it

 private:
  void post(const Collective& collective);
  bool all_posted();
  void check_agreement(Collective& collective) const;

  const Group& group_;
  std::uint64_t round_ = 0;  // the last one posted
  bool posted_ = false;      // and not finished
  bool first_ = true;        // of its collective
  int arrived_ = 0;
};

}  // namespace lockstep::shm
