// World: the ranks that train together, as seen from one of them.
//
//   lockstep::World world = lockstep::World::from_env();   // a world of one when nothing is set
//   auto x = torch::ones({4}, world.device());
//   world.all_reduce(x).wait();                            // x is now the sum over ranks
//
// numbers.h does the same with numbers, strings and errors.
//
// Every rank must call the same operations in the same order. LOCKSTEP_DEBUG=1 checks it and prints
// both sides of a mismatch instead of hanging.
//
// A copyable handle: copies are the same world. There is no global state: several worlds, even in
// one process, live side by side. One thread at a time issues operations on a world. The last
// copy's destructor frees resources and never communicates.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/types.h"  // IWYU pragma: export

namespace lockstep {

namespace detail {
class WorldImpl;
struct Access;
}  // namespace detail

class World {
 public:
  World();  // a world of one on the CPU: the identity for every operation
  explicit World(std::shared_ptr<detail::WorldImpl> impl);

  // Reads who this process is (lockstep run, torchrun, mpirun, srun, by hand), connects to the
  // others and runs the start-up checks. Throws UsageError or CommError; never waits past
  // startup_timeout.
  static World from_env(const WorldOptions& options = {});

  int rank() const;
  int size() const;
  int local_rank() const;
  int local_size() const;
  int node_rank() const;
  c10::Device device() const;
  const std::string& backend() const;  // "single", "shm", "gloo", "nccl"
  bool is_leader() const { return rank() == 0; }
  std::chrono::milliseconds timeout() const;
  bool shares_memory() const;  // collectives go through memory that all ranks map

  // Collectives on tensors, in place where there is one tensor. Non-contiguous and empty tensors
  // are fine. Shapes and dtypes must agree over ranks.
  Work all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::kSum);
  Work reduce(at::Tensor tensor, int root, ReduceOp op = ReduceOp::kSum);  // others: unspecified
  Work broadcast(at::Tensor tensor, int root = 0);
  // output is {size, ...input's shape}
  Work all_gather(at::Tensor output, at::Tensor input);
  // input is {size, ...output's shape}
  Work reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op = ReduceOp::kSum);
  // `outputs` on root only (empty elsewhere), one tensor per rank
  Work gather(std::vector<at::Tensor> outputs, at::Tensor input, int root = 0);
  Work scatter(at::Tensor output, std::vector<at::Tensor> inputs, int root = 0);
  Work all_to_all(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs);
  // Messages between two ranks arrive in the order of the calls. On a GPU they also run in that
  // order, so two ranks that both receive first wait forever: put both directions into one batch.
  Work send(at::Tensor tensor, int peer);
  Work recv(at::Tensor tensor, int peer);
  Work batch_isend_irecv(std::vector<P2p> messages);

  // Blocking conveniences.
  std::vector<at::Tensor> all_gather(const at::Tensor& input);    // equal shapes
  std::vector<at::Tensor> all_gather_v(const at::Tensor& input);  // first dimension may differ
  // Returns when every rank has arrived; at the deadline throws TimeoutError naming the ranks that
  // did not. Operations whose handles nobody waited for may still be under way.
  void barrier(std::optional<std::chrono::milliseconds> timeout = std::nullopt);

  // Memory that all ranks of one host map: reducing a tensor that lies in it moves no byte twice.
  // Collective, with equal sizes. symmetric() is every rank's tensor as this process sees it, and
  // empty where there is no such memory (gloo, nccl, a world of one); symmetric_empty() is this
  // rank's, or an ordinary tensor. The memory lives as long as one of the tensors does.
  std::vector<at::Tensor> symmetric(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat);
  at::Tensor symmetric_empty(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat);

  // Ranks that pass the same color form a world, ordered by (key, rank). A negative color gets
  // none.
  std::optional<World> split(int color, int key = 0);

  // The end of a successful run: waits until every rank is here, so that none loses a peer, or the
  // store that rank 0 hosts, while it still works. run() calls it.
  void finish(std::optional<std::chrono::milliseconds> timeout = std::nullopt);

  // Fails every pending and later operation on this rank with `cause`; local, safe from any thread.
  void abort(const std::string& cause);

 private:
  friend struct detail::Access;
  std::shared_ptr<detail::WorldImpl> impl_;
};

// For programs that launch CUDA graphs with collectives in them, as CapturedStep does: whether what
// is started on the world's device now is recorded into a graph.
bool recording(const World& world);
// An operation that ends when the current stream reaches it. It gives a graph that was launched
// before it a deadline and a line in the ledger, as a collective has. All ranks call it.
Work after_stream(World& world, const char* name);

}  // namespace lockstep
