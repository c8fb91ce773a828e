// Ranks as real processes, for everything with faults, signals and exits.
//
//   TEST(World, SumsOverProcesses) {
//     auto ranks = testing::run_processes(2, [](World& w) { EXPECT_EQ(all_reduce(w, 1), 2); });
//     EXPECT_EQ(ranks[0].exit_code, 0) << ranks[0].output;
//   }
//
// A rank is a fork of this test program, which spares it loading LibTorch. Where a fork is not
// enough, because the test has threads or the rank must see its launcher's descriptor as it starts,
// run_processes starts the program again, once per rank, with a filter for the running test; in a
// rank the same call runs the body on World::from_env() and ends the process. So the body may be a
// lambda, and nothing is forked from a process with threads.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep::testing {

struct RankResult {
  int exit_code = -1;  // -1 when a signal ended it
  int signal = 0;
  bool timed_out = false;  // killed by the test after ProcessOptions::timeout
  std::string output;      // stdout and stderr together
};

// The running ranks, for a test that hurts them. Thread-safe.
class RunningRanks {
 public:
  virtual ~RunningRanks() = default;
  virtual void kill(int rank, int signal) = 0;
  // What `lockstep run` writes to the control descriptor of every rank when one has failed.
  virtual void announce_failure(int rank, const std::string& cause) = 0;
  // Waits until a rank has printed `text`; false when it ended or `limit` has passed.
  virtual bool wait_for(int rank, const std::string& text,
                        std::chrono::milliseconds limit = std::chrono::seconds(60)) = 0;
};

using Variables = std::map<std::string, std::string>;

struct ProcessOptions {
  Variables env = {};                                // for all ranks; "" removes a variable
  std::function<Variables(int rank)> rank_env = {};  // for one
  bool control = false;                              // give ranks a control descriptor
  bool port_is_taken = false;                        // somebody listens on MASTER_PORT
  std::chrono::milliseconds timeout{std::chrono::seconds(120)};
  std::function<void(RunningRanks&)> meanwhile = {};  // runs beside the ranks
};

// Runs a program as `size` ranks of one world, all on this host and, unless env says otherwise, on
// the CPU.
std::vector<RankResult> run_program(int size, const std::vector<std::string>& command,
                                    const ProcessOptions& options = {});

// In the test: see the top. In a rank: does not return. The exit code is 0, 1 after an exception or
// a failed EXPECT, 2 after a UsageError.
std::vector<RankResult> run_processes(int size, const std::function<void(World&)>& body,
                                      const ProcessOptions& options = {});

// The same for bodies that make their worlds themselves.
std::vector<RankResult> run_bare_processes(int size, const std::function<void()>& body,
                                           const ProcessOptions& options = {});

}  // namespace lockstep::testing
