// What every collective is made of: rounds.
#pragma once

#include <memory>
#include <string>

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

}  // namespace lockstep::shm
