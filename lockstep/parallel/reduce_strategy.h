// How the buckets of a Reducer are reduced outside of backward. Internal.
//
// By default a Reducer averages a bucket in backward, as soon as it is full. Once its gradients are
// handed over to a strategy, backward leaves them local, in their buckets, and the strategy chooses
// when to reduce them; ShardedOptimizer does it in its step:
//
//   GradientStore& store = reducer.gradients();
//   buckets = store.hand_over(strategy);
//   const StepTurn turn = store.begin_step(/*has_inputs=*/true);
//   ...                                         // reduces what the buckets hold
//   store.end_step(/*has_inputs=*/true);
//   store.take_back();                          // before the strategy ends
//
// For the thread that trains.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::parallel {

struct GradientSlot {
  std::string name;
  std::size_t index = 0;  // of the parameter, in the model's order
  at::Tensor parameter;
  at::Tensor gradient;  // its slot in the bucket, in the parameter's shape
  std::int64_t offset = 0;
};
// `parts` is every rank's memory as this process sees it, and empty where ranks share none.
struct GradientBucket {
  at::Tensor mine;
  std::vector<at::Tensor> parts;
  std::vector<GradientSlot> slots;
};

// The functions of a strategy that a reducer calls.
class ReduceStrategy {
 public:
  virtual ~ReduceStrategy() = default;
  virtual void on_backward() = 0;  // the last one before a step begins; may throw UsageError
  virtual void on_backward_end() = 0;
  virtual void idle_step() = 0;            // of a rank that has run out of inputs, in a join
  virtual void check_written() const = 0;  // throws UsageError when others wrote its parameters
};

struct StepTurn {
  double divisor = 1;    // of the sum over ranks
  int root = 0;          // whose settings and buffers count
  bool joining = false;  // ranks may have run out of inputs
};

// The functions of a reducer that a strategy calls.
class GradientStore {
 public:
  virtual ~GradientStore() = default;
  // Buckets stay as they are until take_back(). UsageError where another strategy has them, in a
  // join, and for what check_hand_over() refuses because of the model.
  virtual std::vector<GradientBucket> hand_over(ReduceStrategy& strategy) = 0;
  virtual void check_hand_over() const = 0;
  virtual void take_back() = 0;

  // Every step begins and ends here; in a join, a rank that has run out takes `idle_step` for each
  // step of the others.
  virtual StepTurn begin_step(bool has_inputs) = 0;
  virtual void end_step(bool has_inputs) = 0;
  virtual bool joining() const = 0;

  // Each throws UsageError. A parameter is not as it was when the buckets were laid out:
  virtual void check_unchanged() const = 0;
  // A trained parameter has no gradient, where that is not allowed:
  virtual void check_all_used() const = 0;
  // A trained parameter shares memory with something:
  virtual void check_own_memory() const = 0;
};

}  // namespace lockstep::parallel
