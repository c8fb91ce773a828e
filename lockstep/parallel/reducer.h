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

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/parallel/options.h"

namespace lockstep {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// What a communication hook is given: one bucket's gradients, local to this rank.
struct Bucket {
  std::size_t index = 0;
  bool is_last = false;
  at::Tensor data;                    // flat; must hold the average when the reduction has finished
  std::vector<at::Tensor> gradients;  // the slots as tensors of the parameters' shapes
  std::vector<at::Tensor> parameters;
};

// A hook's answer: the operation to wait for, and what to do with its result before .grad is used.
struct Reduction {
  Work work{};
  std::function<void()> finish{};
};
using CommHook = std::function<Reduction(World&, const Bucket&)>;

// Host clock, in milliseconds since the step's first gradient.
struct BucketTiming {
  double ready_ms = 0;      // this rank's last gradient of the bucket was written
  double launched_ms = 0;   // the reduction was started
  double completed_ms = 0;  // it had finished (CPU), or was waited for (CUDA)
  std::int64_t bytes = 0;
};
struct StepTiming {
  std::uint64_t step = 0;
  double last_gradient_ms = 0;
  double finalized_ms = 0;
  std::vector<BucketTiming> buckets;
};

// Where the gradients of a deferred reducer lie. `parts` is every rank's memory as this process
// sees it, and empty where ranks share none.
struct DeferredSlot {
  std::string name;
  std::size_t index = 0;  // of the parameter, in the model's order
  at::Tensor parameter;
  at::Tensor gradient;  // its place in the bucket, in the parameter's shape
  std::int64_t offset = 0;
};
struct DeferredBucket {
  at::Tensor mine;
  std::vector<at::Tensor> parts;
  std::vector<DeferredSlot> slots;
};
struct DeferredGradients {
  std::vector<DeferredBucket> buckets;
};
// What a deferred reducer asks of the optimizer that steps in its stead.
struct DeferredOwner {
  std::function<void()> idle_step;      // the step of a rank that has run out of inputs, in a join
  std::function<void()> on_backward;    // a backward begins; may throw UsageError
  std::function<void()> check_written;  // throws UsageError when others wrote shared parameters
  std::function<void(double)> scale;    // of this step's averages
};
// One step of a deferred reducer.
struct DeferredStep {
  double divisor = 1;    // of the sum over ranks
  int root = 0;          // whose settings and buffers count
  bool joining = false;  // ranks may have run out of inputs
};

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
