// One TCP connection between two launchers: lines of JSON and frames of the store, over TLS where
// there is a secret.
//
//   Connection connection(loop, std::move(socket), channel, {.message = ..., .closed = ...});
//   connection.send(message);
//
// A lost host is noticed by the kernel's own keep-alive (kLostAfter), not by messages: a launcher
// that is busy for some seconds is not taken for dead.
//
// Owned by a Hub or a Spoke (node_link.h), one thread. Callbacks come from the event loop, never
// from a call.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "launcher/event_loop.h"
#include "launcher/node_message.h"
#include "lockstep/core/fd.h"
#include "lockstep/rendezvous/secure_channel.h"
#include "lockstep/rendezvous/store_streams.h"

namespace lockstep::launch {

constexpr std::chrono::milliseconds kLostAfter{4000};

// Why a connection has ended.
struct Closing {
  enum class Secret { kFine, kPeerHasNone, kPeerHasOne, kDiffers };
  std::string why;
  Secret secret = Secret::kFine;
};

// One connected socket that carries messages. Its handlers may destroy it.
class Connection {
 public:
  struct Handlers {
    std::function<void(const Message&)> message;
    std::function<void(const StoreFrame&)> frame;  // from a peer that has joined; throws UsageError
    std::function<void(const Closing&)> closed;    // once
  };
  // `channel` is null without a secret.
  Connection(EventLoop& loop, Fd socket, std::unique_ptr<SecureChannel> channel, Handlers handlers);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void send(const Message& message) { send_bytes(encode(message)); }
  void send(const StoreFrame& frame) { send_bytes(encode(frame)); }
  // The peer has joined: lines may be long from here on, and there may be frames.
  void trust() { trusted_ = true; }
  std::string local_address() const;
  std::string peer_address() const;

 private:
  void on_event(std::uint32_t events);
  void read_some();
  bool take(std::string_view bytes);
  bool is_other_protocol(char first);
  void read_messages();
  std::size_t read_one(std::string_view bytes, std::optional<Message>& message);
  void send_bytes(std::string_view bytes);
  void write_some();
  void close(Closing closing);

  EventLoop& loop_;
  Fd socket_;
  std::unique_ptr<SecureChannel> channel_;
  Handlers handlers_;
  bool silent_ = true;  // nothing was received yet
  bool trusted_ = false;
  std::string incoming_;
  std::string outgoing_;
  std::shared_ptr<int> alive_ = std::make_shared<int>();
};

}  // namespace lockstep::launch
