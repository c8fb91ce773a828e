// The link between the launchers of several hosts: one TCP connection from each to node 0's, with
// lines of JSON and frames of the store (node_connection.h), over TLS with a --secret-file.
//
// Node 0 listens on the master port until all nodes have joined, and then starts the ranks; it
// listens again while it waits for a node that was lost. So one port is enough, and nobody can
// connect to it from the network while ranks run. Node 0 holds the port all the time, so a node
// that comes back cannot connect to another process.
//
// When all nodes have joined, node 0 sends them a random token of the run. A node that comes back
// presents it, so that it cannot continue in another run with the same port and flags.
//
// A peer that has not joined is not trusted: it has a deadline, its lines are short, its
// connections are few and evicted from the busiest address, and a refusal tells it nothing about
// the run.
//
//   NodeServer server(loop, plan, port, {...});         // node 0
//   server.await_nodes();
//   NodeClient client(loop, plan, host, {...});         // every other node
//   client.connect();
//
// Owned by the supervisor, one thread. Callbacks come from the event loop, never from a call.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "launcher/event_loop.h"
#include "launcher/host.h"
#include "launcher/node_connection.h"
#include "launcher/plan.h"

namespace lockstep::launch {

NodeShare share_of(const LaunchPlan& plan);

// Node 0's side.
class NodeServer {
 public:
  struct Handlers {
    std::function<void()> complete;                        // every node has joined
    std::function<void(const std::string& text)> overdue;  // rendezvous_timeout has passed
    std::function<void(int node, const Message&)> message;
    std::function<void(int node, const StoreFrame&)> frame;
    std::function<void(int node, const std::string& host, const std::string& why)> lost;
    std::function<void(const std::string& text)> say;
  };
  // `port` has one socket and must outlive this object.
  NodeServer(EventLoop& loop, const LaunchPlan& plan, const HeldPort& port, Handlers handlers);
  ~NodeServer();

  // Waits for the missing nodes; calls `complete` or `overdue`.
  void await_nodes();

  void broadcast(Message message);
  void send(int node, const StoreFrame& frame);
  // This host's address on the link; a loopback address only if all nodes are on this host.
  std::string local_address() const;
  // Each node's ranks, by node rank; complete once `complete` was called.
  std::vector<NodeShare> nodes() const;
  std::vector<int> missing() const;
  int first_attempt() const {
    return first_attempt_;
  }  // the lowest that all nodes can take part in
  // Calls `done` when all peers have disconnected, or after `timeout`.
  void wait_for_disconnects(std::chrono::milliseconds timeout, EventLoop::Task done);

 private:
  struct Peer {
    explicit Peer(EventLoop& loop) : deadline(loop) {}

    std::unique_ptr<Connection> connection;
    std::string address;
    std::string host;
    std::string run;     // the token that it presented
    int node = -1;       // until it has joined
    bool asked = false;  // to join
    bool refused = false;
    bool started = false;  // all nodes have joined since
    NodeShare share;
    Timer deadline;
  };
  void on_connect();
  void pause_accept();
  bool evict();
  void on_message(std::uint64_t peer, const Message& message);
  void on_frame(std::uint64_t peer, const StoreFrame& frame);
  void on_handshake(std::uint64_t peer, const Message& handshake);
  void refuse(std::uint64_t peer, const std::string& reason);
  void on_closed(std::uint64_t peer, const Closing& closing);
  int listener() const { return port_.sockets().front().get(); }
  std::string token_of_peers() const;
  std::string reason_to_refuse(const Message& handshake) const;
  std::string program_text(const Message& handshake) const;
  std::string taken_text(const Message& handshake) const;
  std::string problem_of(const Peer& peer, const Message& message) const;
  void report(const std::string& rejection);
  void report_progress();
  void check_complete();
  void stop_waiting();

  EventLoop& loop_;
  const LaunchPlan& plan_;
  const HeldPort& port_;
  Handlers handlers_;
  std::unique_ptr<SecureContext> secure_;
  std::map<std::uint64_t, Peer> peers_;
  std::map<int, std::uint64_t> peer_of_node_;
  std::vector<NodeShare> shares_;  // empty until all nodes have joined once, then fixed
  std::string run_;                // the token, likewise
  int first_attempt_ = 0;
  std::uint64_t last_peer_ = 0;
  std::set<std::string> reported_;  // since the last progress line
  std::size_t unreported_ = 0;
  EventLoop::Clock::time_point started_;
  Timer overdue_timer_{loop_}, progress_timer_{loop_}, accept_timer_{loop_},
      disconnect_timer_{loop_};
  EventLoop::Task on_disconnected_;
};

// The side of every other node: it tries to connect until node 0 answers, joins, and passes
// messages on.
class NodeClient {
 public:
  struct Handlers {
    std::function<void(const Message&)> message;  // kStart and later ones
    std::function<void(const StoreFrame&)> frame;
    // Refused (2), or node 0 or another node did not join in time (1).
    std::function<void(int code, const std::string& text)> failed;
    // Lost after it had accepted this node; while this waits for node 0 again, only after the start
    // of an attempt.
    std::function<void(const std::string& why)> lost;
    std::function<void(const std::string& text)> say;
  };
  NodeClient(EventLoop& loop, const LaunchPlan& plan, std::string host, Handlers handlers);
  ~NodeClient();

  // Tries until node 0 answers. `first_attempt`: the lowest that may start, after node 0 was lost.
  void connect(int first_attempt = 0);
  void send(const Message& message);
  void send(const StoreFrame& frame);
  void close();
  std::string local_address() const { return local_address_; }

 private:
  void start_join_timeout();
  void try_now();
  void try_addresses(const Addresses& found);
  void on_connected(Fd socket);
  void on_closed(const Closing& closing);
  void try_later(const std::string& why);
  void on_message(const Message& message);
  std::string problem_of(const Message& message) const;
  void report_progress();

  EventLoop& loop_;
  const LaunchPlan& plan_;
  std::string host_;
  Handlers handlers_;
  std::unique_ptr<SecureContext> secure_;
  std::unique_ptr<Lookup> lookup_;
  Fd pending_;
  std::unique_ptr<Connection> connection_;
  bool accepted_ = false;
  bool attempt_started_ = false;  // since connect()
  int first_attempt_ = 0;
  std::string run_;  // the token, once an attempt has started
  std::size_t tries_ = 0;
  std::string last_problem_ = "no answer yet";
  std::string local_address_;
  EventLoop::Clock::time_point started_;
  Timer overdue_timer_{loop_}, retry_timer_{loop_}, answer_timer_{loop_}, progress_timer_{loop_};
};

}  // namespace lockstep::launch
