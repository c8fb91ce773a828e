// The shm backend: the ranks of one host through memory that all of them map. Always built.
//
//   auto made = detail::shm::make({.store = store, .rank = 0, .size = 2});
//   if (!made.backend) use_gloo(made.unavailable_reason);     // the same answer on every rank
//
// A thin adaptor: tensors become pointers, and the thread that waits for a Work carries it out.
// The engine below (engine.h) knows nothing of torch.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/comm/backend.h"

namespace lockstep::detail::shm {

struct Options {
  c10::intrusive_ptr<c10d::Store> store = {};
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds startup_timeout{std::chrono::seconds(300)};
};

struct BackendResult {
  std::unique_ptr<Backend> backend;
  std::string unavailable_reason;  // a sentence: the ranks cannot share memory
};

// Collective. Blocks until all ranks have connected or the start-up timeout has passed.
BackendResult make(const Options& options);

}  // namespace lockstep::detail::shm
