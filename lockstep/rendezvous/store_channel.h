// How a rank reaches the key-value store that its launcher serves.
//
// The launcher gives every rank one end of a Unix-domain socket pair (SOCK_SEQPACKET) and names it
// in LOCKSTEP_STORE_CHANNEL. A rank that wants to use the store makes a stream socket pair and
// sends one end over the channel (SCM_RIGHTS); the other end is its connection. A rank may open
// several, because a wait blocks the connection it is made on. No TCP port takes part.
//
// A connection speaks the protocol of c10d's TCPStore as LibTorch 2.11 defines it, in the byte
// order of the host, so that the same server also answers Python ranks at MASTER_PORT.
//
//   if (auto channel = StoreChannel::from_env(); channel && channel->intact())
//     Fd connection = open_store_connection(channel->fd, deadline);
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/core/deadline.h"
#include "lockstep/core/fd.h"

namespace lockstep {

// The value of LOCKSTEP_STORE_CHANNEL. It is inherited by every process below a rank, even where
// the descriptor is closed or its number belongs to something else, and where something else has
// set RANK, WORLD_SIZE or MASTER_PORT again; so it says what it was made for.
struct StoreChannel {
  int fd = -1;
  std::uint64_t inode = 0;
  int rank = 0;
  int world_size = 1;
  int master_port = 0;

  static std::optional<StoreChannel> from_env();
  std::string text() const;
  // Is the descriptor in this process still the one that the launcher gave?
  bool intact() const;
  bool operator==(const StoreChannel&) const = default;
};

// The inode of an open descriptor, 0 when it is not open.
std::uint64_t inode_of(int fd);

// A new connection: blocking, close-on-exec; the channel is closed on exec from now on, so that
// children of a rank do not use it. Throws CommError when the launcher is gone, TimeoutError when
// it does not take the connection.
Fd open_store_connection(int channel_fd, const Deadline& deadline);

namespace store {

// The first message of a connection is kValidate and this number.
constexpr std::uint32_t kMagic = 0x3C85F7CE;

// Lengths and counts are 64-bit; a key or value is its length and its bytes.
enum class Command : std::uint8_t {
  kValidate,    // magic
  kSet,         // key, value
  kCompareSet,  // key, expected, desired -> value
  kGet,         // key -> value, empty when it is missing
  kAdd,         // key, int64 -> int64
  kCheck,       // count, keys -> kReady or kNotReady
  kWait,        // count, keys -> kStopWaiting, when all of them are there
  kNumKeys,     // -> int64
  kDeleteKey,   // key -> int64, how many were deleted
  kAppend,      // key, value
  kMultiGet,    // count, keys -> values
  kMultiSet,    // count, (key, value)...
  kCancelWait,  // -> kWaitCanceled
  kPing,        // uint32 -> the same
  kQueuePush,   // key, value
  kQueuePop,    // key -> int64 length of the queue, and where that is not 0 a value
  kQueueLen,    // key -> int64
  kListKeys,    // -> int64, keys
};
constexpr char kReady = 0;
constexpr char kNotReady = 1;
constexpr char kStopWaiting = 0;
constexpr char kWaitCanceled = 1;

// c10d's own limits, for one key, one value and the number of keys in one command.
constexpr std::size_t kMaxKeyBytes = 8u << 10;
constexpr std::size_t kMaxValueBytes = 8u << 20;
constexpr std::size_t kMaxKeys = 128u << 10;

}  // namespace store
}  // namespace lockstep
