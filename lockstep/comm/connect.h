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

namespace detail {

// The store that the launcher serves, reached over the channel that every rank inherits
// (rendezvous/store_client.h), without a TCP port. Every call has a deadline: the store's timeout;
// zero means none, as in c10d. `channel_fd` stays open as long as the process. Throws CommError
// when the launcher is gone.
c10::intrusive_ptr<c10d::Store> open_launcher_store(int channel_fd);

}  // namespace detail
}  // namespace lockstep
