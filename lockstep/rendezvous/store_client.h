// The key-value store that the launcher serves: its protocol, and a rank's connections to it.
//
// The launcher gives every rank one end of a Unix-domain socket pair (SOCK_SEQPACKET), the channel,
// and names it in LOCKSTEP_STORE_CHANNEL. To connect, a rank creates a stream socket pair and sends
// one end over the channel (SCM_RIGHTS). It may have several connections, because a wait blocks the
// connection that it was made on. No TCP port is involved.
//
// Connections use the protocol of c10d's TCPStore as LibTorch 2.11 defines it, in host byte order,
// so the same server also answers Python ranks at MASTER_PORT.
//
//   StoreClient client(env.store_channel);
//   client.change(StoreRequest(Command::kSet).key("k").value(bytes), {"setting k", deadline});
//   client.exchange(StoreRequest(Command::kGet).key("k"), {"reading k", deadline},
//                   &StoreConnection::receive_value);
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

namespace lockstep {

// The value of LOCKSTEP_STORE_CHANNEL. Every process below a rank inherits it, including those in
// which the descriptor is closed or reused, or another launcher has set RANK, WORLD_SIZE and
// MASTER_PORT. So it also says which socket and which rank it belongs to.
struct StoreChannel {
  int fd = -1;
  std::uint64_t inode = 0;
  int rank = 0;
  int world_size = 1;
  int master_port = 0;

  static std::optional<StoreChannel> from_env();
  std::string text() const;
  // Whether the descriptor is still the socket that the launcher passed on.
  bool intact() const;
  bool operator==(const StoreChannel&) const = default;
};

// The inode of an open descriptor; 0 if it is not open.
std::uint64_t inode_of(int fd);

// A new connection, blocking and close-on-exec. Sets FD_CLOEXEC on the channel too, so that
// children of a rank do not use it. Throws CommError if the launcher is gone, TimeoutError if it
// does not accept the connection.
Fd open_store_connection(int channel_fd, const Deadline& deadline);

namespace store {

// The first message of a connection is kValidate and this number.
constexpr std::uint32_t kMagic = 0x3C85F7CE;

// Arguments -> reply. Lengths and counts are 64-bit; a key or value is its length and its bytes.
enum class Command : std::uint8_t {
  kValidate,    // magic
  kSet,         // key, value
  kCompareSet,  // key, expected, desired -> value
  kGet,         // key -> value, empty if it is missing
  kAdd,         // key, int64 -> int64
  kCheck,       // count, keys -> kReady or kNotReady
  kWait,        // count, keys -> kStopWaiting, once all of them are set
  kNumKeys,     // -> int64
  kDeleteKey,   // key -> int64, the number of deleted keys
  kAppend,      // key, value
  kMultiGet,    // count, keys -> values
  kMultiSet,    // count, (key, value)...
  kCancelWait,  // -> kWaitCanceled
  kPing,        // uint32 -> the same
  kQueuePush,   // key, value
  kQueuePop,    // key -> int64 length of the queue, and a value unless that is 0
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

// One command in the protocol's form. Throws UsageError for a key or value above the limits.
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

// What a call does, for error messages, and until when.
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

  // Sends a command that has no reply, and a ping, whose reply confirms it: the next call may use
  // another connection and must see the new value. A stopped launcher (Ctrl-Z) must not block ranks
  // that only write, so after a moment the reply is left to the next call on this connection.
  void change(const std::string& request, const StoreCall& call);
  void read_answers(const StoreCall& call);

 private:
  Fd fd_;
  int unanswered_ = 0;
};

// May be used by several threads at once: each call has a connection of its own, which is reused
// later. Every call ends by its deadline (TimeoutError), or with the failure that the launcher
// announces (CommError).
class StoreClient {
 public:
  // `channel` must stay open as long as the process.
  explicit StoreClient(int channel) : channel_(channel) {}

  void change(const StoreRequest& request, const StoreCall& call);

  // Returns the reply, as `read(connection, call)` reads it. After an error the connection is
  // closed: the rest of its reply would be taken for the next call's, and closing it ends a wait in
  // the launcher.
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
  std::vector<StoreConnection> idle_;
};

}  // namespace lockstep::detail
