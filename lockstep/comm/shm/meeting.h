// How the ranks of one host find each other before they share memory.
//
// Every rank listens on a random abstract socket and writes its name on a board that all can read
// (the world's store). Each pair connects once, checks that the other end belongs to the same user,
// and hands over two descriptors: the rank's control segment and a pidfd of itself. Nothing has a
// name in a file system, so nothing can be left behind.
//
//   Meeting meeting = meet(board, place, segment, deadline);
//   if (!meeting.why_not.empty()) log::info("world", "gloo instead: {}", meeting.why_not);
//
// The one hard idea: whatever stops one rank (another host, another user, no memory) must stop all
// of them alike, so every rank's outcome goes over the board and rank 0's verdict is everybody's.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/deadline.h"
#include "lockstep/core/fd.h"

namespace lockstep::shm {

class Segment;

// Strings by name, readable by all ranks. Each key is set once, by one rank. get() waits until it
// is set and throws when the deadline has passed or the board is lost. Called by one thread.
class Board {
 public:
  virtual ~Board() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::string get(const std::string& key, const Deadline& deadline) = 0;
};

struct Place {
  int rank = 0;
  int size = 1;
};

// The other end of one pair; at the own rank everything is empty.
struct Peer {
  Fd socket;  // SOCK_SEQPACKET, non-blocking, kept for later exchanges of descriptors
  Fd pidfd;   // readable once that process has ended
  int pid = 0;
  std::shared_ptr<Segment> segment;  // its control segment, mapped here
};

struct Meeting {
  std::vector<Peer> peers;  // one per rank
  std::string why_not;      // not empty: the ranks agreed not to share memory
};

// Collective. `make_segment` makes this rank's control segment; what it throws becomes the reason
// not to share memory, as does any failure of the handshake on any rank. Throws only what the board
// throws.
Meeting meet(Board& board, const Place& place,
             const std::function<std::shared_ptr<Segment>()>& make_segment,
             const Deadline& deadline);

// One message and at most one descriptor over a pair's socket; both wait until the deadline and
// throw CommError when the other end is gone. `doomed` is asked about 50 times a second while they
// wait: what it returns is thrown, unless the socket is ready by then.
struct Packet {
  std::string text;
  Fd fd;
};
using Doomed = std::function<std::exception_ptr()>;
void send_packet(int socket, std::string_view text, int fd, const Deadline& deadline,
                 const Doomed& doomed = {});
Packet receive_packet(int socket, const Deadline& deadline, const Doomed& doomed = {});

}  // namespace lockstep::shm
