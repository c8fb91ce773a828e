// Messages between two ranks, through a ring of bytes for each direction of each pair.
//
// A message is its length and its bytes. Sender and receiver each advance as far as the ring lets
// them and come back later, so no order of sends and receives can block another pair, a collective
// or the opposite direction. Belongs to the thread that drives the engine.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/shm/group.h"
#include "lockstep/comm/shm/ticket.h"

namespace lockstep::shm {

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
  // Moves what can be moved, at most about a ring's worth each way with each rank: while the other
  // side works too, a pass would otherwise last as long as the message, and others must have their
  // turn. One call takes everything that a rank which does no more has left behind. Finishes
  // messages. True when anything moved. Throws CommError when sender and receiver disagree on the
  // length.
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
