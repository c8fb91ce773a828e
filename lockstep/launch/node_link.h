// How the launchers of several hosts talk: one TCP connection from each to node 0's, lines of JSON
// and frames of the store (store_streams.h), over TLS with a --secret-file (secure_channel.h).
//
// Node 0 listens on the master port until all nodes are there, and starts the ranks
// then. So one port is enough, and nobody can connect to it from the network while ranks run.
//
// Until a peer has joined, it is anybody: it has a deadline, short lines, few connections of which
// the greediest address loses one first, and an answer that says nothing of this run.
//
// A lost host is noticed by the kernel's keep-alive (kLostAfter): a busy launcher is not lost.
//
//   Hub hub(loop, plan, port.listener(), {...});       // node 0
//   Spoke spoke(loop, plan, {...}); spoke.connect();   // the others
//
// Owned by the supervisor, one thread. Callbacks come from the event loop, never from a call.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/launch/event_loop.h"
#include "lockstep/launch/lookup.h"
#include "lockstep/launch/node_message.h"
#include "lockstep/launch/plan.h"
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
    std::function<void(const StoreFrame&)> frame;  // of a peer that has joined; throws UsageError
    std::function<void(const Closing&)> closed;    // once
  };
  // `channel`: none without a secret.
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

// Node 0's side.
class Hub {
 public:
  struct Handlers {
    std::function<void()> complete;  // every node is here; the port is free for rank 0
    std::function<void(const std::string& text)> overdue;  // rendezvous_timeout has passed
    std::function<void(int node, const Message&)> message;
    std::function<void(int node, const StoreFrame&)> frame;
    std::function<void(int node, const std::string& host, const std::string& why)> lost;
    std::function<void(const std::string& text)> say;
  };
  Hub(EventLoop& loop, const LaunchPlan& plan, Fd listener, Handlers handlers);
  ~Hub();

  void broadcast(const Message& message);
  void send(int node, const StoreFrame& frame);
  // An own address that another host reached us at; a loopback one when all are on this host.
  std::string local_address() const;
  // What each node brings, by node rank; of all of them once `complete` was called.
  std::vector<NodeShare> nodes() const;
  // Calls `done` when the others have hung up, or after `timeout`.
  void wait_for_goodbyes(std::chrono::milliseconds timeout, EventLoop::Task done);

 private:
  struct Guest {
    std::unique_ptr<Connection> connection;
    std::string address;
    std::string host;
    int node = -1;  // until it has joined
    NodeShare share;
    EventLoop::TimerId deadline = 0;
  };
  void on_connect();
  void pause_accept();
  bool evict();
  void on_message(std::uint64_t guest, const Message& message);
  void on_frame(std::uint64_t guest, const StoreFrame& frame);
  void on_handshake(std::uint64_t guest, const Message& handshake);
  void refuse(std::uint64_t guest, const std::string& reason);
  void on_closed(std::uint64_t guest, const Closing& closing);
  void drop(std::uint64_t guest);
  std::string reason_to_refuse(const Message& handshake) const;
  std::string what_is_wrong(const Guest& guest, const Message& message) const;
  std::string missing() const;
  void report(const std::string& rejection);
  void report_progress();
  void check_complete();

  EventLoop& loop_;
  const LaunchPlan& plan_;
  Fd listener_;
  Handlers handlers_;
  std::unique_ptr<SecureContext> secure_;
  std::map<std::uint64_t, Guest> guests_;
  std::map<int, std::uint64_t> guest_of_node_;
  std::vector<NodeShare> shares_;  // fixed when all are here
  std::uint64_t last_guest_ = 0;
  std::set<std::string> reported_;  // since the last progress line
  std::size_t unreported_ = 0;
  EventLoop::Clock::time_point started_;
  EventLoop::TimerId overdue_timer_ = 0, progress_timer_ = 0;
  EventLoop::TimerId accept_timer_ = 0, goodbye_timer_ = 0;
  EventLoop::Task on_goodbyes_;
};

// The other nodes' side.
class Spoke {
 public:
  struct Handlers {
    std::function<void(const Message&)> message;  // kStart and what follows
    std::function<void(const StoreFrame&)> frame;
    // Refused (2), or node 0 or another node did not come in time (1).
    std::function<void(int code, const std::string& text)> failed;
    std::function<void(const std::string& why)> lost;  // after it had answered
    std::function<void(const std::string& text)> say;
  };
  Spoke(EventLoop& loop, const LaunchPlan& plan, std::string host, Handlers handlers);
  ~Spoke();

  void connect();
  void send(const Message& message);
  void send(const StoreFrame& frame);
  void close() { connection_.reset(); }
  std::string local_address() const { return local_address_; }

 private:
  void try_now();
  void try_addresses(const Addresses& found);
  void on_connected(Fd socket);
  void disconnect();
  void on_closed(const Closing& closing);
  void try_later(const std::string& why);
  void on_message(const Message& message);
  std::string what_is_wrong(const Message& message) const;
  void report_progress();

  EventLoop& loop_;
  const LaunchPlan& plan_;
  std::string host_;
  Handlers handlers_;
  std::unique_ptr<SecureContext> secure_;
  std::unique_ptr<Lookup> lookup_;
  Fd pending_;
  std::unique_ptr<Connection> connection_;
  bool welcome_ = false;
  std::size_t tries_ = 0;
  std::string last_problem_ = "not tried yet";
  std::string local_address_;
  EventLoop::Clock::time_point started_;
  EventLoop::TimerId overdue_timer_ = 0, retry_timer_ = 0, answer_timer_ = 0, progress_timer_ = 0;
};

}  // namespace lockstep::launch
