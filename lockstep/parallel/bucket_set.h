// BucketSet: the buckets, which gradient has which slot in them, and bringing gradients there.
//
//   buckets.lay_out(forms, order, limits);      // collective
//   buckets.store(i, arrived, /*sync=*/true);   // .grad of parameter i is in its slot
//   world.all_reduce(buckets[0].flat);
//   buckets.publish({});                        // every .grad holds what its slot holds
//
// store() may run on several threads at once, for different parameters; everything else belongs to
// the thread that trains.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/parallel/bucket_plan.h"
#include "lockstep/parallel/model_tensors.h"
#include "lockstep/parallel/reduce_strategy.h"
#include "lockstep/parallel/reducer_types.h"

namespace lockstep::parallel {

inline constexpr std::size_t kNoBucket = static_cast<std::size_t>(-1);

struct BucketMemory {
  at::Tensor wire;  // flat and, behind it in the first bucket, one element for the change flag
  at::Tensor flat;  // the gradients
  std::vector<at::Tensor> parts;  // every rank's wire, in memory that all of them map
  std::vector<Slot> slots;        // in flat
};

class BucketSet {
 public:
  // With `views`, .grad is its slot.
  BucketSet(World& world, const ModelTensors& model, bool views)
      : world_(world), model_(model), views_(views) {}

  // Gradients that exist move along, and a .grad that is its slot stays the tensor that it is.
  void lay_out(const std::vector<ParameterForm>& forms, const std::vector<std::size_t>& order,
               const BucketLimits& limits);

  std::size_t size() const { return buckets_.size(); }
  bool empty() const { return buckets_.empty(); }
  const BucketMemory& operator[](std::size_t index) const { return buckets_[index]; }
  // kNoBucket and an undefined tensor for a parameter without a slot.
  std::size_t bucket_of(std::size_t parameter) const { return slots_[parameter].bucket; }
  const at::Tensor& slot(std::size_t parameter) const { return slots_[parameter].tensor; }

  // Before `arrived` is reduced, or waits for a later pass: .grad goes to its slot. Throws
  // UsageError for a gradient that is sparse and should not be, or the reverse.
  void store(std::size_t parameter, const at::Tensor& arrived, bool sync);
  // For a parameter without a gradient in this pass: what .grad holds from earlier ones, or zeros.
  // With `save` publish() can restore it.
  void store_unused(std::size_t parameter, bool save);
  void publish(const std::vector<bool>& used);  // empty: all
  void drop_saved();

  Bucket for_hook(std::size_t index, const at::Tensor& flat) const;  // with other gradients
  std::vector<GradientBucket> for_strategy() const;

 private:
  struct SlotState {
    at::Tensor tensor;  // in the parameter's shape
    std::size_t bucket = kNoBucket;
    at::Tensor saved;
  };
  void bind_slot(const Slot& place, const at::Tensor& wire, const ParameterForm& form);
  void claim(std::size_t parameter, const at::Tensor& arrived) const;
  void fill(const at::Tensor& slot, const at::Tensor& grad) const;

  World& world_;
  const ModelTensors& model_;
  const bool views_;
  at::Tensor block_;  // the buckets of CPU gradients, one behind the other, as bytes
  std::vector<BucketMemory> buckets_;
  std::vector<SlotState> slots_;  // by parameter
};

}  // namespace lockstep::parallel
