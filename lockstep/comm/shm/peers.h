// Connects the ranks of one host to each other so that they can share memory, and creates their
// symmetric blocks.
//
// Every rank listens on a random abstract socket and writes its name in the world's store. Each
// pair connects once, checks that the other end belongs to the same user, and hands over the rank's
// control segment and a pidfd of itself. Nothing has a name in a file system.
//
//   PeersResult result = connect_peers(kv, place, {bytes, make_segment}, deadline);
//   if (!result.unavailable_reason.empty()) use_gloo();
//
// Whatever stops one rank (another host, another user, no memory) must stop all identically, so
// ranks report outcomes over the store and adopt rank 0's. A process that ends meanwhile reports
// nothing, so rank 0 watches all processes, and all watch rank 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/shm/engine_types.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/fd.h"
#include "lockstep/rendezvous/startup.h"

namespace lockstep::shm {

struct RankAndSize {
  int rank = 0;
  int size = 1;
};

// This rank's connection to one peer; at its own index only `groups` is set.
struct Peer {
  Fd socket;  // SOCK_SEQPACKET, non-blocking, for later exchanges of descriptors
  Fd pidfd;   // readable once that process has ended
  int pid = 0;
  std::shared_ptr<Segment> segment;  // its control segment, mapped here
  std::string groups;                // its control groups (core/host.h); also set for this rank
};

// A rank's control segment: its size, equal on all ranks, and the function that creates it.
struct ControlSegment {
  std::size_t bytes = 0;
  std::function<std::shared_ptr<Segment>()> make;
};

struct PeersResult {
  std::vector<Peer> peers;         // one per rank
  std::string unavailable_reason;  // not empty: the ranks agreed not to share memory
};

// Collective. A rank without room, what `control.make` throws (called once all ranks have room),
// and any failure of the handshake on any rank become the reason not to share memory. Throws what
// the kv throws, and CommError naming the rank when a process ends after it has come; ranks in
// containers with processes of their own cannot see that and wait until the deadline.
PeersResult connect_peers(KeyValueStore& kv, const RankAndSize& place,
                          const ControlSegment& control, const Deadline& deadline);

// One message and at most one descriptor over a pair's socket; both wait until the deadline and
// throw CommError when the other end is gone. `failure_check` is asked about 50 times a second
// while they wait: what it returns is thrown, unless the socket is ready by then.
struct Packet {
  std::string text;
  Fd fd;
};
using FailureCheck = std::function<std::exception_ptr()>;
void send_packet(int socket, std::string_view text, int fd, const Deadline& deadline,
                 const FailureCheck& failure_check = {});
Packet receive_packet(int socket, const Deadline& deadline, const FailureCheck& failure_check = {});

// Finds the symmetric block that contains an address. Safe from any thread.
class SymmetricBlocks {
 public:
  struct Location {
    std::shared_ptr<SymmetricBlock> block;  // null: private memory
    std::uint64_t offset = 0;
  };
  void add(const std::shared_ptr<SymmetricBlock>& block);
  Location find(const void* data, std::size_t bytes) const;
  std::uint32_t next_id() { return ++last_id_; }

 private:
  mutable std::mutex mutex_;
  std::map<std::uintptr_t, std::weak_ptr<SymmetricBlock>> blocks_;
  std::uint32_t last_id_ = 0;
};

// Why it is useless to wait longer for that rank; null while it may still answer.
using PeerFailureCheck = std::function<std::exception_ptr(int awaited)>;

// The ranks that make a block together: this rank's place, its socket to each peer, and a check
// whether a peer can still answer.
struct BlockMakers {
  const RankAndSize& info;
  const std::vector<Peer>& peers;
  PeerFailureCheck peer_failure;
};

// Collective; see Engine::symmetric. All ranks say that they want the same and have room for it;
// then every rank makes a segment and hands its descriptor to all others over the pairs' sockets;
// then all say whether they could map them. The block is entered into `blocks`. Freeing it is
// local: every rank has mapped the others' parts itself.
std::shared_ptr<SymmetricBlock> make_symmetric(SymmetricBlocks& blocks, const BlockMakers& ranks,
                                               std::size_t bytes, const Deadline& deadline);

}  // namespace lockstep::shm
