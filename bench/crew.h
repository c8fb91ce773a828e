// The ranks of one contender, started once; contenders take turns working.
//
//   Crew crew({.name = "ours", .ranks = 2, .command = {"lockstep-bench", "_train-rank", ...}},
//             scratch.file("ours"));
//   const auto answers = crew.request("run 8 10 own", std::chrono::seconds(60));   // one per rank
//   crew.finish();
//
// Contenders must not disturb each other while they wait. A rank blocks in a read of its socket
// until it gets an order, and exits when the socket is closed, so no process is left when the
// benchmark dies. Ranks are started by `lockstep run`, whatever program they are; they connect to
// the path that follows --orders.
//
// A rank says "rank R" first and then answers each line with one line.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "launcher/process.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/fd.h"

namespace lockstep::bench {

struct CrewOptions {
  std::string name;
  int ranks = 1;
  std::vector<std::string> command;  // a program and its arguments
};

// Owned and used by one thread.
class Crew {
 public:
  // Starts the ranks and listens at the path `socket`. Does not wait for them.
  Crew(const CrewOptions& options, const std::string& socket);
  // Terminates ranks that are still running; kills them after some seconds.
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  const std::string& name() const { return options_.name; }
  // Returns when all ranks have connected.
  void wait_ready(std::chrono::milliseconds timeout);
  // Sends the same line to all ranks and returns their answers by rank. Error: one ended or is
  // silent.
  std::vector<std::string> request(const std::string& line, std::chrono::milliseconds timeout);
  // The end of orders: waits until the ranks have ended, and throws Error if they failed.
  void finish();

 private:
  std::string read_line(std::size_t member, const Deadline& deadline);
  // False at the deadline; throws Error when the ranks have ended.
  bool readable(int fd, const Deadline& deadline);
  [[noreturn]] void fail(const std::string& what);

  struct Member {
    Fd socket;
    std::string unread;
  };
  CrewOptions options_;
  Fd listener_;
  launch::Process launcher_;
  std::vector<Member> members_;
};

// The rank's side: connects, introduces itself and answers until there are no more orders.
class Orders {
 public:
  Orders(const std::string& path, int rank);
  bool next(std::string& line);  // false: no more
  void answer(const std::string& line);

 private:
  Fd socket_;
  std::string unread_;
};

}  // namespace lockstep::bench
