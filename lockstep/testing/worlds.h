// Worlds for tests: ranks as threads of this process, or as processes.
//
//   testing::run_threads(3, [](World& world) { EXPECT_EQ(all_reduce(world, 1), 3); });
//
// Threads are cheap (milliseconds) and see each other's variables; processes are for everything
// with faults, signals or exits. An exception in one rank aborts the others, so no test hangs on
// it.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lockstep/comm/connect.h"
#include "lockstep/comm/world.h"

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

// The same, but returns what each rank threw ("" for nothing) instead of rethrowing.
std::vector<std::string> run_threads_collecting(int size, const std::function<void(World&)>& body,
                                                const ThreadOptions& options = {});

}  // namespace lockstep::testing
