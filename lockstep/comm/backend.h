// One way of moving tensors between ranks. World does everything that is the same for all of them
// (checks, contiguity, dtypes a backend lacks, sequence numbers, deadlines), so that a backend only
// has to move contiguous memory.
//
// What a backend may rely on: tensors are one-dimensional, contiguous, not empty and on its device;
// all but reductions get bytes (dtype uint8); reductions are asked for only where reduces() says
// yes; size is at least 2; peers and roots are in range and, for point_to_point, not this rank.
// Calls come from one thread at a time, except abort(), which may come from any thread at any time.
//
// What it must do: start the operation, return without waiting for it, and call state->complete()
// once, or attach a DeviceOperation. An exception from a call means the world is broken. The
// destructor must not wait for peers.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "lockstep/comm/types.h"
#include "lockstep/comm/work_state.h"

namespace lockstep::detail {

class Backend {
 public:
  using State = std::shared_ptr<WorkState>;

  virtual ~Backend() = default;
  virtual const std::string& name() const = 0;
  virtual c10::DeviceType device_type() const = 0;
  virtual bool reduces(at::ScalarType dtype, ReduceOp op) const = 0;
  // True if an operation keeps only a tensor's address and storage. The world then passes the
  // caller's own tensor, because the caller may change the tensor object (set_data, requires_grad)
  // before the operation ends.
  virtual bool takes_memory() const { return false; }
  // Whether collectives use memory that all ranks map, which symmetric() allocates.
  virtual bool shares_memory() const { return false; }
  // Whether operations started now are recorded into a CUDA graph, to run when the graph runs.
  virtual bool recording() const { return false; }

  // Returns false if the backend has no barrier; the world then reduces a byte instead. `last`:
  // this rank starts nothing afterwards.
  virtual bool barrier(const State& /*state*/, bool /*last*/) { return false; }
  virtual void all_reduce(const State& state, at::Tensor tensor, ReduceOp op) = 0;
  virtual void reduce(const State& state, at::Tensor tensor, int root, ReduceOp op) = 0;
  virtual void broadcast(const State& state, at::Tensor tensor, int root) = 0;
  // output holds size times input
  virtual void all_gather(const State& state, at::Tensor output, at::Tensor input) = 0;
  // input holds size times output
  virtual void reduce_scatter(const State& state, at::Tensor output, at::Tensor input,
                              ReduceOp op) = 0;
  // The lists are given on root only.
  virtual void gather(const State& state, std::vector<at::Tensor> outputs, at::Tensor input,
                      int root) = 0;
  virtual void scatter(const State& state, at::Tensor output, std::vector<at::Tensor> inputs,
                       int root) = 0;
  // Here single tensors may be empty.
  virtual void all_to_all(const State& state, std::vector<at::Tensor> outputs,
                          std::vector<at::Tensor> inputs) = 0;
  virtual void point_to_point(const State& state, std::vector<P2p> messages) = 0;
  // An operation that ends when the current stream has finished the work enqueued before it.
  virtual void after_stream(const State& state) { state->complete(); }

  // Collective and blocking: allocates memory that all ranks map and returns every rank's part, as
  // bytes; empty where the backend has no such memory.
  virtual std::vector<at::Tensor> symmetric(std::int64_t /*bytes*/, const Deadline& /*deadline*/) {
    return {};
  }

  // Aborts the operations in progress as far as it can, so that peers notice too; never blocks for
  // long. `culprit`: the rank that the failure is attributed to, or -1.
  virtual void abort(int culprit) noexcept = 0;
};

}  // namespace lockstep::detail

// The backends. Each is made by all ranks at once, which find each other through the store.

// TCP between CPUs, on any number of hosts. Always built.
namespace lockstep::detail::gloo {

struct Options {
  c10::intrusive_ptr<c10d::Store> store = {};
  int rank = 0;
  int size = 1;
  std::string address = "127.0.0.1";  // this host's, as others reach it
  std::chrono::milliseconds startup_timeout{std::chrono::seconds(300)};
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};
};

// Connects all ranks with each other, and blocks until they are. GLOO_SOCKET_IFNAME, where set,
// names the interfaces instead of Options::address.
std::unique_ptr<Backend> make(const Options& options);

}  // namespace lockstep::detail::gloo

// The ranks of one host through memory that all of them map. Always built. A thin adaptor: tensors
// become pointers, and the thread that waits for a Work carries it out. The engine below
// (shm/engine.h) knows nothing of torch.
namespace lockstep::detail::shm {

struct Options {
  c10::intrusive_ptr<c10d::Store> store = {};
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds startup_timeout{std::chrono::seconds(300)};
};

struct BackendResult {
  std::unique_ptr<Backend> backend;  // null: the same on every rank
  std::string unavailable_reason;    // a sentence: the ranks cannot share memory
};

// Blocks until all ranks have connected or the start-up timeout has passed.
BackendResult make(const Options& options);

}  // namespace lockstep::detail::shm

// CUDA tensors between GPUs. Compiled when the build has CUDA; otherwise nccl/unavailable.cpp
// stands in. Neither links CUDA; only the plug-in (nccl/plugin.h) does.
namespace lockstep::detail::nccl {

struct Options {
  c10::intrusive_ptr<c10d::Store> store = {};
  int rank = 0;
  int size = 1;
  c10::Device device{c10::kCUDA, 0};
  // Set only where ranks share GPUs: the host id to report to NCCL for this rank.
  std::string shared_host_id = {};
};

// Whether this build has the plug-in.
bool built();
// Opens the plug-in once; throws UsageError naming the file and what the loader said.
void load();
// Makes `device` the calling thread's current one.
void set_device(c10::Device device);
// Creates the communicator at once, so that the store is not needed afterwards.
std::unique_ptr<Backend> make(const Options& options);

}  // namespace lockstep::detail::nccl
