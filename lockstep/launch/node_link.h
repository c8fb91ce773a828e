// How the launchers of several hosts talk: one TCP connection from each to node 0's, lines of JSON
// and frames of the store (store_streams.h), over TLS with a --secret-file (secure_channel.h).
//
// Node 0 listens on the master port until all nodes are there, and then starts the ranks; it
// listens again while it waits for a node that was lost. So one port is enough, and nobody can
// connect to it from the network while ranks run.
//
// Until a peer has joined, it may be anybody: it has a deadline, short lines and few connections,
// of which the greediest address loses one first, and the answer reveals nothing about this run.
//
//   Hub hub(loop, plan, {...}); hub.await_nodes(port.listener());   // node 0
//   Spoke spoke(loop, plan, {...}); spoke.connect();                // the others
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
#include "lockstep/launch/node_connection.h"
#include "lockstep/launch/node_message.h"
#include "lockstep/launch/plan.h"

namespace lockstep::launch {

// Node 0's side.
class Hub {
 public:
  struct Handlers {
    std::function<void()> complete;  // every node is here, and the port is free
    std::function<void(const std::string& text)> overdue;  // rendezvous_timeout has passed
    std::function<void(int node, const Message&)> message;
    std::function<void(int node, const StoreFrame&)> frame;
    std::function<void(int node, const std::string& host, const std::string& why)> lost;
    std::function<void(const std::string& text)> say;
  };
  Hub(EventLoop& loop, const LaunchPlan& plan, Handlers handlers);
  ~Hub();

  // Waits for the nodes that are not here; `complete` or `overdue` follows.
  void await_nodes(Fd listener);

  void broadcast(const Message& message);
  void send(int node, const StoreFrame& frame);
  // An address of ours that another host reached; a loopback one when all are on this host.
  std::string local_address() const;
  // What each node brings, by node rank; complete once `complete` was called.
  std::vector<NodeShare> nodes() const;
  std::vector<int> missing() const;
  int first_attempt() const { return first_attempt_; }  // the least that they may take part in
  // Calls `done` when the others have hung up, or after `timeout`.
  void wait_for_goodbyes(std::chrono::milliseconds timeout, EventLoop::Task done);

 private:
  struct Guest {
    std::unique_ptr<Connection> connection;
    std::string address;
    std::string host;
    int node = -1;         // until it has joined
    bool asked = false;    // to join
    bool started = false;  // all nodes were here since
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
  std::string taken_text(const Message& handshake) const;
  std::string what_is_wrong(const Guest& guest, const Message& message) const;
  std::string missing_text() const;
  void report(const std::string& rejection);
  void report_progress();
  void check_complete();
  void stop_waiting();

  EventLoop& loop_;
  const LaunchPlan& plan_;
  Fd listener_;
  Handlers handlers_;
  std::unique_ptr<SecureContext> secure_;
  std::map<std::uint64_t, Guest> guests_;
  std::map<int, std::uint64_t> guest_of_node_;
  std::vector<NodeShare> shares_;  // fixed when all are here for the first time
  int first_attempt_ = 0;
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
    // After it had answered; one that is waited for a second time, after an attempt had begun.
    std::function<void(const std::string& why)> lost;
    std::function<void(const std::string& text)> say;
  };
  Spoke(EventLoop& loop, const LaunchPlan& plan, std::string host, Handlers handlers);
  ~Spoke();

  // Tries until node 0 answers. `first_attempt`: the lowest it may start, after node 0 was lost.
  void connect(int first_attempt = 0);
  void send(const Message& message);
  void send(const StoreFrame& frame);
  void close();
  std::string local_address() const { return local_address_; }

 private:
  void expect_node_zero();
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
  bool begun_ = false;  // an attempt, since connect()
  int first_attempt_ = 0;
  std::size_t tries_ = 0;
  std::string last_problem_ = "no answer yet";
  std::string local_address_;
  EventLoop::Clock::time_point started_;
  EventLoop::TimerId overdue_timer_ = 0, retry_timer_ = 0, answer_timer_ = 0, progress_timer_ = 0;
};

}  // namespace lockstep::launch
