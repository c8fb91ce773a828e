// A rank's side of the launcher's store: connections over its channel, and commands on them in the
// protocol of store_channel.h.
//
//   StoreClient client(env.store_channel);
//   client.change(StoreRequest(Command::kSet).key("k").value(bytes), {"setting k", deadline});
//   client.exchange(StoreRequest(Command::kGet).key("k"), {"reading k", deadline},
//                   &StoreConnection::receive_value);
//
// May be used by several threads at once: each call has a connection of its own while it lasts, and
// connections are used again. Every call ends at its deadline (TimeoutError), or with the failure
// that the launcher announces (CommError).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/deadline.h"
#include "lockstep/core/fd.h"

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

namespace lockstep::detail {

using StoreBytes = std::vector<std::uint8_t>;

// One command, as the protocol writes it. Throws UsageError for what the store does not accept.
class StoreRequest {
 public:
  explicit StoreRequest(store::Command command) : bytes_(1, static_cast<char>(command)) {}

  template <typename T>
  StoreRequest& number(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  StoreRequest& key(const std::string& key);
  StoreRequest& value(const StoreBytes& value);
  StoreRequest& keys(const std::vector<std::string>& keys);

  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// What a call is doing, for its errors.
struct StoreCall {
  std::string what;
  Deadline deadline;
};

class StoreConnection {
 public:
  explicit StoreConnection(Fd fd) : fd_(std::move(fd)) {}

  void send(const std::string& bytes, const StoreCall& call) const;
  void receive(void* to, std::size_t size, const StoreCall& call) const;
  template <typename T>
  T receive_number(const StoreCall& call) const {
    T value{};
    receive(&value, sizeof value, call);
    return value;
  }
  StoreBytes receive_value(const StoreCall& call) const;

  // The protocol does not answer a change; a ping behind it does. Until then what one call has set
  // may not be seen by the next, which may have another connection. A launcher that is stopped
  // (Ctrl-Z) must not hold up ranks that only leave something in the store, so a late answer is
  // read by the next call on this connection.
  void change(const std::string& request, const StoreCall& call);
  void read_answers(const StoreCall& call);

 private:
  Fd fd_;
  int unanswered_ = 0;
};

class StoreClient {
 public:
  // `channel` stays open as long as the process.
  explicit StoreClient(int channel) : channel_(channel) {}

  void change(const StoreRequest& request, const StoreCall& call);

  // Returns the reply as `read(connection, call)` reads it. A connection on which something
  // failed is closed: its replies would belong to another call, and the launcher ends a wait when
  // its connection closes.
  template <typename Read>
  auto exchange(const StoreRequest& request, const StoreCall& call, const Read& read) {
    StoreConnection connection = take(call);
    connection.send(request.bytes(), call);
    connection.read_answers(call);
    auto reply = std::invoke(read, connection, call);
    give_back(std::move(connection));
    return reply;
  }

 private:
  StoreConnection take(const StoreCall& call);
  void give_back(StoreConnection connection);

  const int channel_;
  std::mutex mutex_;
  std::vector<StoreConnection> idle_;  // a wait blocks its connection, so a call has one of its own
};

}  // namespace lockstep::detail
