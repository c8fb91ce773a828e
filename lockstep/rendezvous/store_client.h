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
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/deadline.h"
#include "lockstep/core/fd.h"
#include "lockstep/rendezvous/store_channel.h"

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
