// The two kinds of operation and their execution: a collective is a sequence of rounds (engine.h),
// a message goes through a ring of bytes. For the thread that drives the engine.
//
//   if (rounds.step(*queue.front()) == Rounds::Step::kDone) queue.pop_front();
//   messages.pump(completions);
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/shm/engine_types.h"
#include "lockstep/comm/shm/group.h"
#include "lockstep/comm/shm/segment.h"

namespace lockstep::shm {

// A collective is a sequence of rounds. For each: fill() writes what the others need, the round is
// posted, all have posted, take() reads. Neither may wait.
class Collective : public Ticket {
 public:
  enum class Next { kDone, kRound, kAgain };  // kAgain: call take() again, there is more to do

  Descriptor what;
  bool quick = false;  // cheap enough to be stepped by a thread that does not wait for it
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

// A message is its length and its bytes. There is a ring for each direction of each pair of ranks.
// Sender and receiver each advance as far as the ring lets them and come back later, so no order of
// sends and receives can block another pair, a collective or the opposite direction.
class Message : public Ticket {
 public:
  struct Ends {
    std::byte* data = nullptr;  // only read when sending
    std::size_t bytes = 0;
    int peer = -1;
    bool sending = false;
  };
  Message(const Group& group, const Deadline& deadline, const Ends& ends);

  const Ends ends;
  std::uint64_t moved = 0;     // with padding
  bool announced = false;      // the length has been written, or read
  std::uint64_t left() const;  // with padding
  // How many of the next `advance` bytes are the message's own.
  std::size_t real(std::uint64_t advance) const;
  std::string text() const override;
};

class Messages {
 public:
  explicit Messages(const Group& group);

  void add(const std::shared_ptr<Message>& message);
  int pending() const { return pending_; }
  // Moves what can be moved, but at most about one ring's worth in each direction per rank:
  // otherwise one pass would last as long as a long message and starve the others. One call drains
  // the ring of a rank that has ended. Completes finished messages. True when anything moved.
  // Throws CommError when sender and receiver disagree on the length.
  bool pump(Completions& completions);
  // The oldest message with that rank, or null.
  const Message* with(int rank) const;
  // The message whose deadline is the first to come, or null.
  const Message* most_urgent() const;
  std::vector<std::shared_ptr<Message>> take_all();

 private:
  using Line = std::deque<std::shared_ptr<Message>>;
  bool pump_line(int peer, Line& line, Completions& completions);
  void announce(Message& message, std::byte* in_ring) const;

  const Group& group_;
  std::vector<Line> sends_;
  std::vector<Line> receives_;
  int pending_ = 0;
};

}  // namespace lockstep::shm
