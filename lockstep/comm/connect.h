// Creates a World through any c10d store that all ranks can reach. World::from_env uses it for
// processes (a TCPStore), and tests use it for threads (a HashStore).
//
//   World world = connect(store, {.rank = r, .size = n});      // on every rank, all at once
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/comm/world.h"

namespace lockstep {

// Finds the other ranks through `store`, runs the start-up checks and connects the backends. Throws
// UsageError where the ranks contradict each other, TimeoutError naming ranks that did not come.
World connect(c10::intrusive_ptr<c10d::Store> store, Identity identity,
              const WorldOptions& options = {});

// For a rank that fails before it could ask for a world (a file that its host does not have): joins
// the rendezvous of World::from_env only to report `why`, so that the others end with that reason,
// this rank and its host instead of waiting for it. Returns when they know, or when it has waited
// for them as long as from_env would. Never throws: the failure that led here is the one to report.
// Does nothing in a world of one.
void report_startup_failure(const std::string& why) noexcept;

}  // namespace lockstep
