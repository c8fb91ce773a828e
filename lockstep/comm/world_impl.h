// The implementation of World: its identity, backends, store and failure state.
//
// Two backends at most: `host` moves CPU tensors (shm or gloo), `accelerator` moves CUDA tensors
// (nccl). A CUDA world has both, so that numbers, strings and barriers never touch the GPU; a CPU
// world has host only and stages CUDA tensors through it. A world of one has neither.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/work_state.h"
#include "lockstep/comm/world.h"
#include "lockstep/rendezvous/control.h"

namespace lockstep::detail {

class WorldImpl : public std::enable_shared_from_this<WorldImpl> {
 public:
  WorldImpl(Identity identity, WorldOptions options, c10::Device device);
  ~WorldImpl();

  // Takes the backends and starts listening for failures the launcher announces.
  void open(c10::intrusive_ptr<c10d::Store> store, std::unique_ptr<Backend> host,
            std::unique_ptr<Backend> accelerator);

  // The next collective: checks that the world is alive, counts it, and in debug mode compares it
  // with the other ranks' first (`what` says what must be equal and is only called then).
  std::shared_ptr<WorkState> start(OperationInfo info, const std::function<std::string()>& what,
                                   std::optional<std::chrono::milliseconds> timeout = std::nullopt);
  std::shared_ptr<WorkState> start_message(OperationInfo info);
  // Runs `body`, which hands the operation to a backend; a throw breaks the world.
  template <typename Body>
  void launch(const std::shared_ptr<WorkState>& state, const Body& body) {
    // A failure that came between start() and here has completed the state already; adding work to
    // a backend that was aborted is harmless, but pointless.
    if (failure_state->failed()) return;
    try {
      body();
      ledger::started(state->info().ledger);
    } catch (...) {
      if (state->info().recorded) throw;  // nothing was sent
      state->complete(std::current_exception());
    }
  }
  void throw_if_failed(const OperationInfo& info) const;
  // A world made from this one fails with it.
  void adopt(const std::shared_ptr<FailureState>& child);

  // The backend that serves a tensor's device, in a world of two or more.
  Backend& backend_for(const at::Tensor& tensor) const;
  bool alone() const { return identity.size == 1; }
  // Operations on the device go into a CUDA graph now.
  bool recording() const { return accelerator && accelerator->recording(); }
  // Returns when all ranks have called it. `last`: this rank has nothing more to do.
  void barrier(std::optional<std::chrono::milliseconds> timeout, bool last);
  // The ranks that have entered fewer than `count` barriers, as far as the store knows.
  std::vector<int> missing_from_barrier(std::uint64_t count, bool last);
  // Whether the bodies of all ranks have returned, or do so within `limit`, as far as the store
  // knows. Starts no operation, so that one of a peer's that still waits for this rank is not
  // disturbed.
  bool all_finish(std::chrono::milliseconds limit);

  const Identity identity;
  const WorldOptions options;
  const c10::Device device;
  const std::shared_ptr<FailureState> failure_state;
  std::string backend_name = "single";
  std::string group;                   // what the ledger calls it; empty: it is no sub-world
  bool automatic = false;              // nobody has asked for a backend by name
  std::string shm_unavailable_reason;  // a sentence, where shm was tried and gloo took over
  bool debug = false;

  c10::intrusive_ptr<c10d::Store> store;
  std::unique_ptr<Backend> host;
  std::unique_ptr<Backend> accelerator;

  // Whether any collective or message of this process carried several floating-point numbers, as
  // gradients do. Loaders, checkpoints and mean losses exchange one at most.
  static inline std::atomic<bool> exchanged_tensors{false};
  std::atomic<std::uint64_t> sequence{0};
  std::atomic<std::uint64_t> messages{0};
  std::uint64_t barriers = 0;
  int splits = 0;
  // Messages a rank sends to itself.
  std::deque<at::Tensor> self_messages;

 private:
  void compare_fingerprints(OperationInfo info, const std::string& what);
  ledger::Ticket post(const OperationInfo& info, const Deadline& deadline, bool message) const;

  std::mutex children_mutex_;
  std::vector<std::weak_ptr<FailureState>> children_;
  control::Subscription subscription_;
};

// A sub-world of `parent` with the given place in it; its ranks rendezvous under `prefix`.
World connect_child(WorldImpl& parent, Identity identity, const std::string& prefix);

// Gives other parts of the library and its tests access to the implementation.
struct Access {
  static const std::shared_ptr<WorldImpl>& impl(const World& world);
};

}  // namespace lockstep::detail
