// Worlds for tests, whose ranks are threads of this process, and comparisons of tensors.
//
//   testing::run_threads(3, [](World& world) { EXPECT_EQ(all_reduce(world, 1), 3); });
//   EXPECT_TENSOR_EQ(a, b);          // bit for bit, shape and dtype included
//   EXPECT_TENSOR_NEAR(a, b, 1e-6);  // largest absolute difference
//
// Threads are cheap (milliseconds) and see each other's variables; processes (processes.h) are for
// everything with faults, signals or exits. An exception in one rank aborts the others, so that no
// test hangs. A comparison that fails prints the first element that differs.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
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

}  // namespace lockstep::testing

#define EXPECT_TENSOR_EQ(a, b) EXPECT_TRUE(::lockstep::testing::tensors_equal(a, b))
#define EXPECT_TENSOR_NEAR(a, b, t) EXPECT_TRUE(::lockstep::testing::tensors_near(a, b, t))
