// One TCP connection between two launchers, and the messages on it: lines of JSON, beside frames of
// the store, over TLS if there is a secret.
//
//   Connection connection(loop, std::move(socket), channel, {.message = ..., .closed = ...});
//   connection.send(message);
//
// Messages from another host are checked before anything acts on them: numbers are in range, exit
// codes and signals cannot turn a failure into exit code 0, and text is printable, because much of
// it ends on a terminal.
//
// The kernel's TCP keep-alive detects a lost host (kLostAfter). There are no heartbeat messages, so
// a launcher that is busy for some seconds is not taken for dead.
//
// Owned by a NodeServer or NodeClient (node_link.h), one thread. Callbacks come from the event
// loop, never from a call.
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
#include "lockstep/rendezvous/store_table.h"

namespace lockstep::launch {

struct Message {
  enum class Kind {
    kHandshake,     // node -> 0: asks to join
    kRefused,       // 0 -> node: `text` says why
    kSay,           // 0 -> nodes: `text` to print while waiting
    kStart,         // 0 -> nodes: start `attempt` with the ranks of `nodes`
    kFailed,        // node -> 0 -> nodes: `failure` ends this attempt
    kStop,          // node -> 0 -> nodes: `node` received stop request number `request`, `signal`
    kDown,          // node -> 0: no process of this attempt is left; its first `failure`, if any
    kRestart,       // 0 -> nodes: print `failure` and `text`; another attempt follows
    kEnd,           // 0 -> nodes: the run is over; print `failure` and exit with `code`
    kOtherVersion,  // never sent: a peer's message of another version, which `text` says
  };
  Kind kind = Kind::kSay;
  int node = 0;
  int attempt = 0;
  int signal = 0;
  int request = 1;  // kStop only: counts the requests of its node
  int code = 0;
  std::string text = {};
  std::optional<RankFailure> failure = {};
  std::vector<NodeShare> nodes = {};  // kStart only: by node rank
  std::string run = {};  // the token of the run; in kHandshake, empty for a launcher without one
  // kHandshake only, where `attempt` is the lowest that the node can take part in.
  std::string run_id = {};
  std::string host = {};
  int nnodes = 0;
  NodeShare share = {};
  std::map<std::string, std::string> flags = {};  // those that must be equal on all nodes
};

std::string encode(const Message& message);  // one line with its newline
Message decode(const std::string& line);     // throws UsageError

std::string failure_to_json(const RankFailure& failure);
RankFailure failure_from_json(const std::string& text);  // throws UsageError

constexpr std::chrono::milliseconds kLostAfter{4000};

// Why a connection was closed.
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
    std::function<void(const StoreFrame&)> frame;  // of a trusted peer; may throw UsageError
    std::function<void(const Closing&)> closed;    // once
  };
  // `channel` is null without a secret.
  Connection(EventLoop& loop, Fd socket, std::unique_ptr<SecureChannel> channel, Handlers handlers);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void send(const Message& message) { send_bytes(encode(message)); }
  void send(const StoreFrame& frame) { send_bytes(encode(frame)); }
  // The peer has joined and may send long lines and frames.
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
  bool silent_ = true;  // no byte was received yet
  bool trusted_ = false;
  std::string incoming_;
  std::string outgoing_;
  std::shared_ptr<int> alive_ = std::make_shared<int>();
};

}  // namespace lockstep::launch
