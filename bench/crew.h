// The ranks of one side, started once; sides take turns working.
//
//   Crew ours({.name = "ours", .ranks = 2, .rank = "model", .settings = settings});
//   const json answer = ours.ask({{"do", "time"}, {"steps", 10}});     // rank 0's
//   ours.finish();
//
// A rank is one of this program's (bench.h) or a Python script of bench/peers. It gets its settings
// as JSON on its command line, and then orders, one JSON object in a line, from a Unix socket; it
// answers each with an object, {"error": TEXT} where it cannot do it. `lockstep run` starts all of
// them.
//
// Sides must not disturb each other while they wait. A rank blocks in a read of its socket until it
// gets an order, and exits when the socket is closed, so no process is left when the benchmark
// dies. Every answer says how much processor time the rank used while it waited for the order.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/processes.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/fd.h"

namespace lockstep::bench {

struct CrewOptions {
  std::string name;
  int ranks = 1;
  std::string rank;  // "model", or a script's name: "gpt_peer.py"
  nlohmann::json settings;
};

// Owned and used by one thread.
class Crew {
 public:
  // Starts the ranks. Does not wait for them; wait_ready() does, or the first order.
  explicit Crew(const CrewOptions& options);
  // Ends ranks that are still running.
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  const std::string name;

  void wait_ready();
  // Gives all ranks the same order and returns their answers by rank. Error: one cannot do it, has
  // ended or is silent.
  std::vector<nlohmann::json> ask_all(const nlohmann::json& order);
  nlohmann::json ask(const nlohmann::json& order) { return ask_all(order).front(); }
  // Error if the ranks computed while they waited, since the last call of this.
  void check_idle();
  // The end of orders: waits until the ranks have ended, and throws Error if they failed.
  void finish();

 private:
  struct Member {
    Fd socket;
    std::string unread;
  };
  std::string read_line(Member& member, const Deadline& deadline);
  // False at the deadline; throws Error when the ranks have ended.
  bool readable(int fd, const Deadline& deadline);
  [[noreturn]] void fail(const std::string& what);

  int ranks_;
  Scratch scratch_;
  Fd listener_;
  launch::Process launcher_;
  std::vector<Member> members_;
  double idle_s_ = 0, idle_cpu_s_ = 0;
};

// The rank's side: obeys until there are no more orders.
void serve(const std::string& path, int rank,
           const std::function<nlohmann::json(const nlohmann::json&)>& obey);

}  // namespace lockstep::bench
