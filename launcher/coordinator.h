// Node 0's decisions: when an attempt begins, which failure ends it, whether there is another.
//
// Every node, node 0 included, only reports (failed, stop, down) and obeys (start, failed, stop,
// restart, end). So one host and many hosts are the same program, all launchers name the same cause
// and return the same code, and a restart begins nowhere before the old attempt has ended
// everywhere.
//
// A lost launcher is a failure like any other. Where a restart is left, the next attempt begins
// when all nodes are here again, be it with the same launchers or with others in their places.
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
  struct Orders {
    std::function<void(const Message&)> broadcast;  // to every node, this one included
    std::function<void()> await_nodes;          // those that are lost; begin() or give_up() follows
    std::function<std::vector<int>()> missing;  // those that are not here
  };

  Coordinator(EventLoop& loop, const LaunchPlan& plan, Orders orders);

  // All nodes are here. `attempt`: the lowest allowed number, where nodes have seen earlier ones.
  void begin(std::vector<NodeShare> nodes = {}, int attempt = 0);
  void give_up();  // lost nodes did not come back in time
  void on_message(int node, const Message& message);
  void on_lost(int node, const std::string& host, const std::string& why);
  bool waiting() const { return phase_ == Phase::kWaiting; }  // for the first attempt

  // Delay between the end of attempt k and the start of the next: half a second, doubled each time.
  static std::chrono::milliseconds backoff(int attempt);

 private:
  enum class Phase { kWaiting, kRunning, kBackoff, kAwaiting, kEnded };

  void start_attempt();
  void on_failed(const RankFailure& failure);
  void on_stop(int node, const Message& request);
  void expect_all_down();
  void check_all_down();
  void decide();
  void announce_restart(const std::string& when);
  void await_lost();
  void end(int code);

  const LaunchPlan& plan_;
  Orders orders_;
  std::vector<NodeShare> nodes_;
  Phase phase_ = Phase::kWaiting;
  int attempt_ = 0;
  int stop_signal_ = 0;
  std::set<int> down_;
  std::map<int, RankFailure> lost_;  // since all nodes were last here
  std::optional<RankFailure> failure_;
  // From a node that is down: a rank that left early with code 0, or failed while it was stopping.
  std::optional<RankFailure> left_;
  Timer backoff_timer_;
  Timer down_timer_;
};

}  // namespace lockstep::launch
