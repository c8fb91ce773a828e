// How the launchers of several hosts talk: one TCP connection from each to node 0's, lines of JSON
// and frames of the store (store_streams.h), over TLS with a --secret-file (secure_channel.h).
//
// Node 0 listens on the master port until all nodes are there, and then starts the ranks; it
// listens again while it waits for a node that was lost. So one port is enough, and nobody can
// connect to it from the network while ranks run. It holds the port all the time: a node that comes
// back can meet nobody else there.
//
// A run has a token, which node 0 draws when all are there and tells them. A node that comes back
// shows it, so that it cannot continue in another run that has the same port and flags.
//
// Until a peer has joined, it may be anybody: it has a deadline, short lines and few connections,
// of which the greediest address loses one first, and the answer reveals nothing about this run.
//
//   Hub hub(loop, plan, port, {...});         // node 0; the others: node_spoke.h
//   hub.await_nodes();
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
#include "launcher/node_connection.h"
#include "launcher/plan.h"
#include "launcher/ports.h"

namespace lockstep::launch {

// ---------------------------------------------------------------- what both sides check

// What must be the same on all launchers, as it is written on a command line: node 0 decides by its
// own values, and what the others were given would be ignored or would contradict it.
std::map<std::string, std::string> flags_of_the_run(const LaunchPlan& plan);
// What this launcher brings to the world.
NodeShare share_of(const LaunchPlan& plan);
// Whether a launcher forwards the signal by default, or was asked to. If not, why it is refused.
bool may_stop(const LaunchPlan& plan, int signal);
std::string bad_signal(int signal);
// Null without a --secret-file.
std::unique_ptr<SecureContext> secure_context(const LaunchPlan& plan, SecureContext::Side side);
std::string secret_text(Closing::Secret secret, const std::string& peer);
// More than StoreStreams::kLinkWindow, even for a peer that is stopped and does not read. Only
// takes effect before the connection is made.
void enlarge_buffer(int fd);

// By when the kernel has noticed that a host is lost. A node that wants to join has an answer later
// than that, if its node rank is taken.
constexpr std::chrono::milliseconds kLossKnown = kLostAfter + std::chrono::milliseconds(1500);
constexpr std::chrono::milliseconds kFirstProgress{3000};  // a line while launchers wait, and then
constexpr std::chrono::milliseconds kProgress{10'000};

// Node 0's side.
class Hub {
 public:
  struct Handlers {
    std::function<void()> complete;                        // every node is here
    std::function<void(const std::string& text)> overdue;  // rendezvous_timeout has passed
    std::function<void(int node, const Message&)> message;
    std::function<void(int node, const StoreFrame&)> frame;
    std::function<void(int node, const std::string& host, const std::string& why)> lost;
    std::function<void(const std::string& text)> say;
  };
  // The port outlives it, and has one socket.
  Hub(EventLoop& loop, const LaunchPlan& plan, const HeldPort& port, Handlers handlers);
  ~Hub();

  // Waits for the nodes that are not here; `complete` or `overdue` follows.
  void await_nodes();

  void broadcast(Message message);
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
    explicit Guest(EventLoop& loop) : deadline(loop) {}

    std::unique_ptr<Connection> connection;
    std::string address;
    std::string host;
    std::string run;       // the token that it has shown
    int node = -1;         // until it has joined
    bool asked = false;    // to join
    bool started = false;  // all nodes were here since
    NodeShare share;
    Timer deadline;
  };
  void on_connect();
  void pause_accept();
  bool evict();
  void on_message(std::uint64_t guest, const Message& message);
  void on_frame(std::uint64_t guest, const StoreFrame& frame);
  void on_handshake(std::uint64_t guest, const Message& handshake);
  void refuse(std::uint64_t guest, const std::string& reason);
  void on_closed(std::uint64_t guest, const Closing& closing);
  int listener() const { return port_.sockets().front().get(); }
  std::string run_of_guests() const;
  std::string reason_to_refuse(const Message& handshake) const;
  std::string program_text(const Message& handshake) const;
  std::string taken_text(const Message& handshake) const;
  std::string what_is_wrong(const Guest& guest, const Message& message) const;
  void report(const std::string& rejection);
  void report_progress();
  void check_complete();
  void stop_waiting();

  EventLoop& loop_;
  const LaunchPlan& plan_;
  const HeldPort& port_;
  Handlers handlers_;
  std::unique_ptr<SecureContext> secure_;
  std::map<std::uint64_t, Guest> guests_;
  std::map<int, std::uint64_t> guest_of_node_;
  std::vector<NodeShare> shares_;  // fixed when all are here for the first time
  std::string run_;                // its token, since then
  int first_attempt_ = 0;
  std::uint64_t last_guest_ = 0;
  std::set<std::string> reported_;  // since the last progress line
  std::size_t unreported_ = 0;
  EventLoop::Clock::time_point started_;
  Timer overdue_timer_{loop_}, progress_timer_{loop_}, accept_timer_{loop_}, goodbye_timer_{loop_};
  EventLoop::Task on_goodbyes_;
};

// The side of a node that is not node 0 in the link between launchers (node_link.h): it looks for
// node 0 until that answers, joins, and passes on what is said.
//
//   Spoke spoke(loop, plan, host, {...});
//   spoke.connect();
//
// Owned by the supervisor, one thread. Callbacks come from the event loop, never from a call.

struct Addresses;
class Lookup;

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
  std::string run_;  // its token, once an attempt has begun
  std::size_t tries_ = 0;
  std::string last_problem_ = "no answer yet";
  std::string local_address_;
  EventLoop::Clock::time_point started_;
  Timer overdue_timer_{loop_}, retry_timer_{loop_}, answer_timer_{loop_}, progress_timer_{loop_};
};

}  // namespace lockstep::launch
