// Deferred mode: backward only fills the buckets, and a ShardedOptimizer reduces them in its step.
#include <algorithm>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/parallel/reducer_impl.h"

namespace lockstep::parallel {

DeferredGradients ReducerImpl::defer(DeferredOwner owner) {
  if (deferred_)
    throw UsageError("ShardedOptimizer",
                     "this model already has a ShardedOptimizer. One per model; use groups for "
                     "several rules.");
  if (hook_)
    throw UsageError("ShardedOptimizer",
                     "this model has a communication hook, which would never run: gradients are "
                     "reduced in step(). Leave the hook out, or use a replicated optimizer.");
  if (joining_)
    throw UsageError("ShardedOptimizer",
                     "it was made inside join(). Make it before, so that ranks that have run out "
                     "know of it.");
  for (const auto& p : parameters_) {
    if (p.sparse)
      throw UsageError("ShardedOptimizer",
                       "parameter '{}' has sparse gradients, which are not summed in step(). Make "
                       "the embedding dense, or use a replicated optimizer.",
                       p.name);
  }
  check_forms("the model was wrapped");
  if (passive_) {
    // A world of one has no buckets yet; the optimizer's pass needs them all the same.
    passive_ = false;
    auto order = dense_parameters();
    std::reverse(order.begin(), order.end());
    plan(order);
    install_hooks();
    post_sentinels();
  }
  deferred_ = true;
  owner_ = std::move(owner);
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
  return gradients;
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
  if (options_.broadcast_buffers && world_.size() > 1)
    broadcast_coalesced(world_, buffer_tensors(), root_);
  for (auto& p : parameters_) p.used = false;
  ++step_;
}

void ReducerImpl::check_unchanged() const {
  check_forms("the optimizer was made");
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
                     "make the optimizer anew.",
                     p.name, change, since);
  }
}

}  // namespace lockstep::parallel
