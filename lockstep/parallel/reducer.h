// Reducer: averages the gradients of a list of parameters across a world, during backward.
//
//   Reducer reducer{named_parameters, named_buffers, world, {.bucket_cap_mb = 25}};
//   loss.backward();        // hooks on the gradient accumulators do the rest
//
// The key idea: a gradient lies in its slot of a bucket, and the bucket is reduced as soon as its
// last slot is written, while backward still works on earlier layers. Buckets are launched in one
// order on every rank. Counting finds the end of backward; a callback of the autograd engine then
// waits for the launched reductions.
//
// DistributedDataParallel wraps this for a module. Owned by a shared_ptr; the hooks hold a weak
// one, so parameters may outlive it. Construct on all ranks at the same point (it communicates).
// Thread-safety: hooks may fire on several threads at once (CPU and CUDA parameters); everything
// else belongs to the one thread that trains.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/parallel/reducer_types.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

namespace parallel {
class ReducerImpl;
}

class Reducer {
 public:
  Reducer(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers, World world,
          DdpOptions options = {});
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Parameters that the module gets from now on are refused at the next backward: no rank would
  // exchange their gradients. Does not hold the module.
  void follow(const torch::nn::Module& module);
  // The wrapper calls this; a user of a plain parameter list may.
  at::Tensor watch(at::Tensor output);  // see find_unused_parameters in docs/ddp.md

  void join(const std::function<void()>& body, const JoinOptions& options);
  void register_comm_hook(CommHook hook);
  void verify_replicas();  // its parameters and its buffers
  void verify_parameters();
  void verify_buffers();

  // For CapturedStep. layout() changes whenever gradients were laid out again; until settled(), the
  // next synchronised backward does that.
  std::uint64_t layout() const;
  bool settled() const;

  const StepTiming& last_timing() const;
  std::size_t bucket_count() const;
  World& world();

 private:
  friend class NoSync;  // the two guards below, which pair these calls
  friend class RecordedPasses;
  void set_sync(bool on);
  void set_recording(bool on);

  std::shared_ptr<parallel::ReducerImpl> impl_;
};

// While it lives, backward passes may be recorded into a CUDA graph. Ranks record together: a
// recorded pass has none of the exchanges that go through the host.
class [[nodiscard]] RecordedPasses {
 public:
  explicit RecordedPasses(Reducer& reducer);
  ~RecordedPasses();
  RecordedPasses(const RecordedPasses&) = delete;
  RecordedPasses& operator=(const RecordedPasses&) = delete;

 private:
  Reducer& reducer_;
};

// Holds synchronisation off while it lives.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(std::shared_ptr<Reducer> reducer);
  ~NoSync();
  NoSync(NoSync&&) noexcept = default;
  NoSync& operator=(NoSync&&) = delete;
  NoSync(const NoSync&) = delete;

 private:
  std::shared_ptr<Reducer> reducer_;
};

}  // namespace lockstep

// Whether the ranks of one host fill its cores. Reductions concurrent with backward would then only
// take cores away from it.
//
//   const int cores = cores_of_ranks(world);
//   const bool overlap = !oversubscribed(world.local_size(), at::get_num_threads(), cores);
namespace lockstep::parallel {

constexpr bool oversubscribed(int ranks, int threads, int cores) {
  return ranks * threads >= cores;
}

}  // namespace lockstep::parallel
