// The buckets in which gradients are reduced: plan_buckets() assigns gradients to buckets, and a
// BucketSet owns the memory and copies gradients in and out.
//
//   auto plans = plan_buckets(parameters, reverse_order(n), {.first_cap_bytes = 1 << 20});
//   buckets.lay_out(forms, order, limits);      // collective
//   buckets.store(i, arrived, /*sync=*/true);   // .grad of parameter i is in its slot
//   world.all_reduce(buckets[0].flat);
//   buckets.publish({});                        // every .grad holds what its slot holds
//
// BucketSet::store() may run on several threads at once, for different parameters; everything else
// of it belongs to the thread that trains.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/parallel/model_tensors.h"
#include "lockstep/parallel/reducer_types.h"

namespace lockstep::parallel {

struct ParameterInfo {
  std::int64_t numel = 0;
  c10::ScalarType dtype = c10::kFloat;
  c10::Device device = c10::kCPU;
};

struct BucketLimits {
  std::int64_t first_cap_bytes = 1 << 20;  // small, so that communication starts early
  std::int64_t cap_bytes = 25 << 20;
  std::int64_t min_bytes = 0;         // a last bucket below this is joined to the one before it
  std::int64_t alignment_bytes = 64;  // of each slot within its bucket
};

struct Slot {
  std::size_t parameter = 0;  // index into the parameter list
  std::int64_t offset = 0;    // in elements
};

struct BucketPlan {
  c10::ScalarType dtype = c10::kFloat;
  c10::Device device = c10::kCPU;
  std::int64_t numel = 0;  // padding included
  std::vector<Slot> slots;
};

// Buckets in launch order: by the position, in `order`, of the parameter that completes them.
// `order` lists parameter indices in the expected order of readiness, so that a bucket is complete
// early and its reduction overlaps the rest of backward. An index that is not in it, as that of a
// sparse parameter, gets no slot. A bucket holds one dtype on one device. A pure function: ranks
// that agree on the parameters and the order agree on the plan.
std::vector<BucketPlan> plan_buckets(const std::vector<ParameterInfo>& parameters,
                                     const std::vector<std::size_t>& order,
                                     const BucketLimits& limits = {});

// n-1, ..., 0: the order of readiness before anything was observed.
std::vector<std::size_t> reverse_order(std::size_t n);

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

  // Existing gradients are moved along; a .grad that is its slot stays the same tensor.
  void lay_out(const std::vector<ParameterForm>& forms, const std::vector<std::size_t>& order,
               const BucketLimits& limits);

  std::size_t size() const { return buckets_.size(); }
  bool empty() const { return buckets_.empty(); }
  const BucketMemory& operator[](std::size_t index) const { return buckets_[index]; }
  // kNoBucket and an undefined tensor for a parameter without a slot.
  std::size_t bucket_of(std::size_t parameter) const { return slots_[parameter].bucket; }
  const at::Tensor& slot(std::size_t parameter) const { return slots_[parameter].tensor; }

  // Called before `arrived` is reduced, or kept for a later pass: moves .grad to its slot. Throws
  // UsageError for a gradient that is unexpectedly sparse, or unexpectedly dense.
  void store(std::size_t parameter, const at::Tensor& arrived, bool sync);
  // For a parameter without a gradient in this pass: stores .grad of earlier passes, or zeros. With
  // `save` publish() can restore it.
  void store_unused(std::size_t parameter, bool save);
  void publish(const std::vector<bool>& used);  // empty: all
  void drop_saved();

  Bucket for_hook(std::size_t index, const at::Tensor& flat) const;  // with other gradients

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
