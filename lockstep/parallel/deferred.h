// What a reducer and a ShardedOptimizer exchange. The functions are the group "For
// ShardedOptimizer" of reducer.h, which is all that the optimizer calls on a reducer:
//
//   defer, resume, begin_deferred_step, end_deferred_step, joining, check_unchanged,
//   check_all_used, check_own_memory, check_deferrable, scale_deferred, world
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

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

}  // namespace lockstep
