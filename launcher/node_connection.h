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
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/event_loop.h"
#include "launcher/report.h"
#include "lockstep/core/fd.h"
#include "lockstep/rendezvous/rank_env.h"
#include "lockstep/rendezvous/secure_channel.h"
#include "lockstep/rendezvous/store_streams.h"

namespace lockstep::launch {

// What the launchers of several hosts send each other: lines of JSON.
//
// Whatever comes from another host is checked here before anything acts on it: numbers have their
// range, codes and signals cannot turn a failure into exit code 0, and text is printable, since
// much of it ends on a terminal.
//
//   connection.send(encode(message));
//   Message message = decode(line);   // throws UsageError
//
// Plain values and free functions; nothing is owned.

struct Message {
  enum class Kind {
    kHandshake,  // node -> 0: who I am
    kRefused,    // 0 -> node: text says why
    kSay,        // 0 -> nodes: text to print while waiting
    kStart,      // 0 -> nodes: begin `attempt` as one of `nodes`
    kFailed,     // node -> 0 -> nodes: `failure` ends this attempt
    kStop,       // node -> 0 -> nodes: `node` was asked to stop by `signal`, `request` times now
    kDown,       // node -> 0: nothing of this attempt is left here (`failure`: the first one here)
    kRestart,    // 0 -> nodes: print `failure`; a next attempt follows (text)
    kEnd,        // 0 -> nodes: the run is over; exit with `code`, print `failure`
    kForeign,    // never sent: from a launcher of another version; text says so
  };
  Kind kind = Kind::kSay;
  int node = 0;
  int attempt = 0;
  int signal = 0;
  int request = 1;  // kStop only: the first, the second, ... of its node
  int code = 0;
  std::string text = {};
  std::optional<RankFailure> failure = {};
  std::vector<NodeShare> nodes = {};  // kStart only: by node rank
  // The token of the run; kHandshake: empty for a launcher that has not been in one.
  std::string run = {};
  // kHandshake only. `attempt`: the lowest that it may take part in, since it has seen earlier
  // ones.
  std::string run_id = {};
  std::string host = {};
  int nnodes = 0;
  NodeShare share = {};
  std::map<std::string, std::string> flags = {};  // those that must be the same everywhere
};

std::string encode(const Message& message);  // one line with its newline
Message decode(const std::string& line);     // throws UsageError

std::string failure_to_json(const RankFailure& failure);
RankFailure failure_from_json(const std::string& text);  // throws UsageError when it is not one

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
