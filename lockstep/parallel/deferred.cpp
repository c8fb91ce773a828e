// Deferred mode: backward only fills the buckets, and a ShardedOptimizer reduces them in its step.
#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/parallel/reducer_impl.h"

namespace lockstep::parallel {

DeferredGradients ReducerImpl::defer(DeferredOwner owner) {
  if (deferred_)
    throw UsageError("ShardedOptimizer",
                     "this model already has a ShardedOptimizer. One per model; use groups for "
                     "different options.");
  if (hook_)
    throw UsageError("ShardedOptimizer",
                     "this model has a communication hook, which would never run: gradients are "
                     "reduced in step(). Leave the hook out, or use a replicated optimizer.");
  if (joining_)
    throw UsageError("ShardedOptimizer",
                     "it was made inside join(). Make it before, so that ranks that have run out "
                     "know of it.");
  check_deferrable();
  if (passive_) {
    // A world of one has no buckets yet; the optimizer's pass needs them all the same.
    auto order = dense_parameters();
    std::reverse(order.begin(), order.end());
    plan(order);
    install_hooks();
    post_sentinels();
    passive_ = false;
  }
  DeferredGradients gradients;
  for (const auto& bucket : buckets_) {
    DeferredBucket& out = gradients.buckets.emplace_back();
    out.mine = bucket->flat;
    for (const auto& part : bucket->parts)
      out.parts.push_back(part.narrow(0, 0, bucket->flat.numel()));
    for (const std::size_t i : bucket->members) {
      const Parameter& p = parameters_[i];
      const std::int64_t offset = p.slot.storage_offset() - bucket->flat.storage_offset();
      out.slots.push_back({p.name, i, p.tensor, p.slot, offset});
    }
  }
  deferred_ = true;
  owner_ = std::move(owner);
  return gradients;
}

void ReducerImpl::check_deferrable() const {
  for (const auto& p : parameters_) {
    if (p.sparse)
      throw UsageError("ShardedOptimizer",
                       "parameter '{}' has sparse gradients, which are not summed in step(). Make "
                       "the embedding dense, or use a replicated optimizer.",
                       p.name);
  }
  check_forms("the model was wrapped");
  check_own_memory();
}

bool ReducerImpl::scale_deferred(double factor) {
  if (deferred_) owner_.scale(factor);
  return deferred_;
}

void ReducerImpl::resume() {
  deferred_ = false;
  for (auto& p : parameters_) p.used = false;
  owner_ = {};
}

DeferredStep ReducerImpl::begin_deferred_step(bool has_inputs) {
  // A rank without inputs has exchanged already, to learn that there is a step.
  if (joining_ && has_inputs) exchange_active(true);
  return {divisor(), root_, joining()};
}

void ReducerImpl::end_deferred_step() {
  if (options_.broadcast_buffers) broadcast_buffers(root_);
  for (auto& p : parameters_) p.used = false;
  ++step_;
}

void ReducerImpl::check_unchanged() const {
  check_forms("the optimizer was made");
}

// The optimizer gives every parameter that it steps memory of its own: what shares memory with one
// would part from it, and nothing would show it.
void ReducerImpl::check_own_memory() const {
  struct Range {
    c10::Device device;
    const char* begin;
    const char* end;
    const std::string* name;
    bool moves;
  };
  std::vector<Range> ranges;
  const auto add = [&](const std::string& name, const at::Tensor& t, bool moves) {
    if (!t.defined() || !t.has_storage() || t.numel() == 0 || t.is_meta()) return;
    const auto* const begin = static_cast<const char*>(t.const_data_ptr());
    const auto bytes = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize());
    ranges.push_back({t.device(), begin, begin + bytes, &name, moves});
  };
  for (const auto& p : parameters_) add(p.name, p.tensor, p.form.requires_grad);
  for (const auto& b : buffers_) add(b.name, b.tensor, false);
  for (const auto& i : ignored_) add(i.name, i.tensor, false);
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return std::tuple(a.device.type(), a.device.index(), a.begin) <
           std::tuple(b.device.type(), b.device.index(), b.begin);
  });
  // What reaches furthest, of all and of those that move.
  const Range* all = nullptr;
  const Range* moving = nullptr;
  for (const Range& range : ranges) {
    const Range* before = range.moves ? all : moving;
    if (before != nullptr && before->device == range.device && before->end > range.begin) {
      const auto [first, second] = std::minmax(*before->name, *range.name);
      throw UsageError("ShardedOptimizer",
                       "'{}' and '{}' lie in the same memory (set_data?), and each parameter that "
                       "is stepped gets memory of its own. To tie two parameters, register one "
                       "tensor under both names; otherwise clone one, or use a replicated "
                       "optimizer.",
                       first, second);
    }
    const auto reach = [&](const Range*& furthest) {
      const bool further =
          furthest == nullptr || furthest->device != range.device || furthest->end < range.end;
      if (further) furthest = &range;
    };
    reach(all);
    if (range.moves) reach(moving);
  }
}

void ReducerImpl::check_forms(const char* since) const {
  for (const auto& p : parameters_) {
    const Form now = form_of(p);
    if (now == p.form) continue;
    std::string change = "given another shape";
    if (now.device != p.form.device) change = "moved to " + now.device.str();
    if (now.dtype != p.form.dtype) change = fmt::format("moved to {}", c10::toString(now.dtype));
    if (now.requires_grad != p.form.requires_grad)
      change = now.requires_grad ? "unfrozen" : "frozen";
    throw UsageError("ShardedOptimizer",
                     "parameter '{}' was {} after {}. Change the model first, then wrap it and "
                     "make the optimizer again.",
                     p.name, change, since);
  }
}

}  // namespace lockstep::parallel
