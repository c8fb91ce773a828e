// Worlds for tests, whose ranks are threads of this process or processes, and comparisons of
// tensors.
//
//   testing::run_threads(3, [](World& world) { EXPECT_EQ(all_reduce(world, 1), 3); });
//   auto ranks = testing::run_processes(2, [](World& w) { EXPECT_EQ(all_reduce(w, 1), 2); });
//   EXPECT_EQ(ranks[0].exit_code, 0) << ranks[0].output;
//   EXPECT_TENSOR_EQ(a, b);          // bit for bit, shape and dtype included
//   EXPECT_TENSOR_NEAR(a, b, 1e-6);  // largest absolute difference
//
// Threads are cheap (milliseconds) and see each other's variables; processes are for everything
// with faults, signals or exits. An exception in one rank aborts the others, so that no test hangs.
// A comparison that fails prints the first element that differs.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lockstep/comm/connect.h"
#include "lockstep/comm/mesh.h"
#include "lockstep/comm/world.h"
#include "lockstep/core/helpers_for_test.h"

namespace lockstep::testing {

struct ThreadOptions {
  WorldOptions world = {.timeout = std::chrono::seconds(60),
                        .startup_timeout = std::chrono::seconds(60)};
  // Changes what a rank says about itself (for the start-up checks).
  std::function<void(Identity&, WorldOptions&)> adjust = {};
};

// Runs `body` on `size` threads, each with its own handle of one World, on shared memory unless the
// options or LOCKSTEP_BACKEND say otherwise. Rethrows the first rank's exception that was not
// itself a consequence.
void run_threads(int size, const std::function<void(World&)>& body,
                 const ThreadOptions& options = {});

// The same on as many ranks as the axes have, which are a mesh.
void run_on_mesh(const std::vector<MeshAxis>& axes, const std::function<void(const Mesh&)>& body,
                 const ThreadOptions& options = {});

// As run_threads(), but returns what each rank threw ("" for nothing) instead of rethrowing.
std::vector<std::string> run_threads_collecting(int size, const std::function<void(World&)>& body,
                                                const ThreadOptions& options = {});

::testing::AssertionResult tensors_equal(const at::Tensor& a, const at::Tensor& b);
::testing::AssertionResult tensors_near(const at::Tensor& a, const at::Tensor& b, double tolerance);

using lockstep::message_of;

// The reference: one blocking all-reduce per parameter after backward, nothing else. Tests compare
// DistributedDataParallel with it.
inline void average_gradients(World& world, const std::vector<at::Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    if (!parameter.requires_grad()) continue;
    at::Tensor grad = parameter.grad().defined() ? parameter.grad() : at::zeros_like(parameter);
    world.all_reduce(grad, ReduceOp::kAvg).wait();
    parameter.mutable_grad() = grad;
  }
}

// ---------------------------------------------------------------- processes
//
// A rank is a fork of this test program, which spares it loading LibTorch. Where a fork is not
// enough, because the test has threads or the rank must see its launcher's descriptor as it starts,
// run_processes starts the program again, once per rank, with a filter for the running test; in a
// rank the same call runs the body on World::from_env() and ends the process. So the body may be a
// lambda, and nothing is forked from a process with threads.

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

// In the test: see above. In a rank: does not return. The exit code is 0, 1 after an exception or
// a failed EXPECT, 2 after a UsageError.
std::vector<RankResult> run_processes(int size, const std::function<void(World&)>& body,
                                      const ProcessOptions& options = {});

// The same for bodies that make their worlds themselves.
std::vector<RankResult> run_bare_processes(int size, const std::function<void()>& body,
                                           const ProcessOptions& options = {});

}  // namespace lockstep::testing

#define EXPECT_TENSOR_EQ(a, b) EXPECT_TRUE(::lockstep::testing::tensors_equal(a, b))
#define EXPECT_TENSOR_NEAR(a, b, t) EXPECT_TRUE(::lockstep::testing::tensors_near(a, b, t))
