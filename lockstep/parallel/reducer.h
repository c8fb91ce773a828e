// Reducer: averages the gradients of a list of parameters across a world, during backward.
//
//   Reducer reducer{named_parameters, named_buffers, world, {.bucket_cap_mb = 25}};
//   loss.backward();        // hooks on the gradient accumulators do the rest
//
// The hard idea: a gradient lies in its slot of a bucket, and the bucket is reduced as soon as its
// last slot is written, while backward still works on earlier layers. Buckets are launched in one
// order on every rank. The end of backward is found by counting; a callback of the autograd engine
// is the point where launched reductions are waited for.
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
#include "lockstep/parallel/options.h"
#include "lockstep/parallel/reducer_types.h"

namespace lockstep {

struct DeferredGradients;
struct DeferredOwner;
struct DeferredStep;

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

  // The wrapper calls this; a user of a plain parameter list may.
  at::Tensor watch(at::Tensor output);  // see find_unused_parameters in docs/ddp.md

  void set_sync(bool on);  // no_sync() is the guard for this
  void join(const std::function<void()>& body, const JoinOptions& options);
  void register_comm_hook(CommHook hook);
  void verify_replicas();

  // For ShardedOptimizer: from now on backward leaves gradients local, in their buckets, and the
  // plan stays as it is; resume() takes it back. Every step begins and ends here; in a join, a rank
  // that has run out takes `idle_step` for each step of the others.
  DeferredGradients defer(DeferredOwner owner);
  void resume();
  DeferredStep begin_deferred_step(bool has_inputs);
  void end_deferred_step();
  bool joining() const;
  // Throws UsageError where defer() would because of the model.
  void check_deferrable() const;
  // The step that follows multiplies its averages by it. False: backward has averaged already.
  bool scale_deferred(double factor);
  // Throws UsageError naming a parameter that is not as it was when the buckets were laid out.
  void check_unchanged() const;
  // Throws UsageError naming trained parameters without a gradient, where that is not allowed.
  void check_all_used() const;
  // Throws UsageError naming a trained parameter and what it shares memory with, if anything.
  void check_own_memory() const;

  const StepTiming& last_timing() const;
  std::size_t bucket_count() const;
  World& world();

 private:
  std::shared_ptr<parallel::ReducerImpl> impl_;
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
