// How a World comes to be, below World::from_env: any c10d store where ranks can meet will do, so
// worlds of threads (a HashStore) and of processes (a TCPStore) are made by the same code.
//
//   World world = connect(store, {.rank = r, .size = n});      // on every rank, all at once
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/comm/world.h"

namespace lockstep {

namespace detail {
class Backend;
}

// Who a rank is. The launcher knows it; threads and tests say it.
struct Identity {
  int rank = 0;
  int size = 1;
  int local_rank = 0;                 // -1: not known, found by counting hosts at the meeting
  int local_size = 1;                 // 0: likewise
  int node = 0;                       // -1: likewise
  std::string host = {};              // names the machine in messages; empty: asked for
  std::string address = "127.0.0.1";  // where the others reach this one
  std::string gpu = {};      // names the physical GPU; empty: the driver is asked where one is used
  std::string program = {};  // must be equal on all ranks; empty: this executable's build
  bool part = false;         // of another world: the launcher numbers its ranks otherwise
};

// Meets the other ranks through `store`, runs the start-up checks and connects the backends. Throws
// UsageError where the ranks contradict each other, TimeoutError naming ranks that did not come.
World connect(c10::intrusive_ptr<c10d::Store> store, Identity identity,
              const WorldOptions& options = {});

// For a rank that fails before it could ask for a world (a file that its host does not have): comes
// to the meeting of World::from_env only to say `why`, so that the others end with that reason,
// this rank and its host instead of waiting for it. Returns when they know, or when it has waited
// for them as long as from_env would. Never throws: the failure that led here is the one to report.
// A world of one has nobody to tell.
void decline(const std::string& why) noexcept;

}  // namespace lockstep
