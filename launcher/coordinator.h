// Node 0's decisions: when an attempt starts, which failure ends it, and whether another follows.
//
// Every node, including node 0, sends reports (failed, stop, down) and follows orders (start,
// failed, stop, restart, end). So one host works like several, all launchers report the same cause
// and exit code, and no node restarts before the attempt has ended on all nodes.
//
// A lost launcher is a failure like any other. If a restart is left, the next attempt starts when
// all nodes have joined again, with the same launchers or with replacements.
//
//   Coordinator coordinator(loop, plan, {.broadcast = notify_all, .await_nodes = listen});
//   coordinator.begin(nodes);
//   coordinator.on_message(node, message);
//   coordinator.on_lost(node, why);
//
// Lives on node 0 only; owned by the supervisor, one thread.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launcher/event_loop.h"
#include "launcher/node_link.h"
#include "launcher/plan.h"

namespace lockstep::launch {

class Coordinator {
 public:
  struct Actions {
    std::function<void(const Message&)> broadcast;  // to every node, including this one
    std::function<void()> await_nodes;              // then call begin() or give_up()
    std::function<std::vector<int>()> missing;      // nodes that have not joined
  };

  Coordinator(EventLoop& loop, const LaunchPlan& plan, Actions orders);

  // All nodes have joined. `attempt`: the lowest number that all of them can take part in.
  void begin(std::vector<NodeShare> nodes = {}, int attempt = 0);
  void give_up();  // lost nodes did not come back in time
  void on_message(int node, const Message& message);
  void on_lost(int node, const std::string& host, const std::string& why);
  bool waiting() const { return phase_ == Phase::kWaiting; }  // for the first attempt

  // The delay from the end of an attempt to the next: half a second, doubled each time.
  static std::chrono::milliseconds backoff(int attempt);

 private:
  enum class Phase { kWaiting, kRunning, kBackoff, kAwaitingNodes, kEnded };

  void start_attempt();
  void on_failed(const RankFailure& failure);
  void on_stop(int node, const Message& request);
  void expect_all_down();
  void check_all_down();
  void decide();
  void announce_restart(const std::string& when);
  void await_lost_nodes();
  void end(int code);

  const LaunchPlan& plan_;
  Actions actions_;
  std::vector<NodeShare> nodes_;
  Phase phase_ = Phase::kWaiting;
  int attempt_ = 0;
  int stop_signal_ = 0;
  std::set<int> down_;
  std::map<int, RankFailure> lost_;  // nodes lost since all had joined
  std::optional<RankFailure> failure_;
  // Of a node that is down: a rank that exited early with code 0, or failed during a stop.
  std::optional<RankFailure> node_outcome_;
  Timer backoff_timer_;
  Timer down_timer_;
};

}  // namespace lockstep::launch
