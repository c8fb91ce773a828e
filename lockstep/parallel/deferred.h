// Between a Reducer and the ShardedOptimizer that reduces in its place, in its step. Internal.
//
//   Deferral deferral(*reducer);
//   gradients = deferral.defer({.idle_step = ..., .scale = ...});   // backward leaves them local
//   const DeferredStep step = deferral.begin_step(/*has_inputs=*/true);
//   ...
//   deferral.end_step(/*has_inputs=*/true);
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {
class Reducer;
}

namespace lockstep::parallel {

class ReducerImpl;

// Where the gradients of a deferred reducer lie. `parts` is every rank's memory as this process
// sees it, and empty where ranks share none.
struct DeferredSlot {
  std::string name;
  std::size_t index = 0;  // of the parameter, in the model's order
  at::Tensor parameter;
  at::Tensor gradient;  // its slot in the bucket, in the parameter's shape
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
// What a deferred reducer asks of the optimizer that reduces in its place.
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

// A Reducer as an optimizer sees it; shares its state. For the thread that trains.
class Deferral {
 public:
  explicit Deferral(Reducer& reducer);

  // From now on backward leaves gradients local, in their buckets, and the plan stays as it is;
  // resume() takes it back.
  DeferredGradients defer(DeferredOwner owner);
  void resume();
  // Every step begins and ends here; in a join, a rank that has run out takes `idle_step` for each
  // step of the others.
  DeferredStep begin_step(bool has_inputs);
  void end_step(bool has_inputs);
  bool joining() const;
  // The step that follows multiplies its averages by it. False: backward has averaged already.
  bool scale(double factor);

  // Each throws UsageError. Where defer() would, because of the model:
  void check_deferrable() const;
  // A parameter is not as it was when the buckets were laid out.
  void check_unchanged() const;
  // A trained parameter has no gradient, where that is not allowed.
  void check_all_used() const;
  // A trained parameter shares memory with something.
  void check_own_memory() const;

 private:
  std::shared_ptr<ReducerImpl> impl_;
};

}  // namespace lockstep::parallel
