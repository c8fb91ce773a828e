// What a collective is made of, rounds (engine.h), and what carries them out one after the other.
//
//   if (rounds.step(*queue.front()) == Rounds::Step::kDone) queue.pop_front();
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/shm/failure.h"
#include "lockstep/comm/shm/group.h"
#include "lockstep/comm/shm/layout.h"
#include "lockstep/comm/shm/ticket.h"

namespace lockstep::shm {

// A collective is a sequence of rounds. For each: fill() writes what the others need, the round is
// posted, all have posted, take() reads. Neither may wait.
class Collective : public Ticket {
 public:
  enum class Next { kDone, kRound, kAgain };  // kAgain: call take() again, there is more to do

  Descriptor what;
  bool quick = false;  // cheap enough to be stepped by a thread that has not come to wait
  // The first round is the last one on every rank, so a rank that has posted it may turn to
  // something else. Depends only on what all ranks know: `what` and the layout.
  bool one_round = false;

  virtual void fill(const Group& group, int parity) = 0;
  virtual Next take(const Group& group, int parity) = 0;
  // After the descriptions have been compared: what else the ranks must agree on; a sentence.
  virtual std::string disagreement(const Group&, int) { return ""; }
  std::string text() const override { return what.text(); }

 protected:
  using Ticket::Ticket;
};

// Driver only.
class Rounds {
 public:
  explicit Rounds(const Group& group) : group_(group) {}

  enum class Step { kBlocked, kMoved, kDone };
  // Does what can be done for a collective without waiting. The same one is given until it is done.
  // Throws EngineFailure when the ranks have called different operations.
  Step step(Collective& collective);
  // Forgets the collective that is not done.
  void drop();

  // The round that this rank has posted but some others have not; 0 when there is none.
  std::uint64_t awaited() const { return posted_ ? round_ : 0; }
  bool in_first() const { return posted_ && first_; }
  // All ranks below this one have posted the round; a rank sleeps until this one does.
  int awaited_rank() const { return arrived_; }
  std::vector<int> behind() const;  // ranks that have not posted it

 private:
  void post(const Collective& collective);
  bool all_posted();
  void check_agreement(Collective& collective) const;
  // What that rank has called in this round; this rank has called `own`.
  const Descriptor& called_by(int rank, const Descriptor& own) const;
  std::string difference(const Descriptor& own) const;
  bool any_has_finished(const Descriptor& own) const;

  const Group& group_;
  std::uint64_t round_ = 0;  // the last one posted
  bool posted_ = false;      // and not finished
  bool first_ = true;        // the first round of its collective
  int arrived_ = 0;
};

}  // namespace lockstep::shm
