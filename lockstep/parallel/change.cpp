// A model that is not what it was when the buckets were laid out: frozen, unfrozen, moved to
// another dtype or device.
//
// The hard idea: a rank that changed cannot know whether the others did, and nothing may be asked
// of them in every step. So it takes part once more in the pass that the others may be in: the
// buckets of the old plan, as zeros, with a change flag behind the first one's gradients. Everyone
// reads the change flag when that pass ends. If it was cast, all ranks compare their models, and
// either all plan again or all throw, naming rank and parameter.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/parallel/reducer_impl.h"

namespace lockstep::parallel {

// ---------------------------------------------------------------- hooks that were lost

// LibTorch drops an accumulator, and the hooks on it, when a parameter is moved to another dtype; a
// parameter that was frozen at planning never had any. This hook belongs to the tensor, survives
// both, and stands in for the other one. (It alone would not do: it is not called for an undefined
// gradient, and a tensor has one place for it.)
struct ReducerImpl::Sentinel final : torch::autograd::PostAccumulateGradHook {
  Sentinel(ReducerImpl& reducer, std::size_t i)
      : id(&reducer), owner(reducer.weak_from_this()), index(i) {}

  void operator()(const at::Tensor& tensor) override {
    if (previous) (*previous)(tensor);
    if (auto reducer = owner.lock()) reducer->on_sentinel(index);
  }

  const ReducerImpl* id;
  std::weak_ptr<ReducerImpl> owner;
  std::size_t index;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> previous;
};

void ReducerImpl::post_sentinels() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    auto sentinel = std::make_unique<Sentinel>(*this, i);
    auto previous = std::move(torch::autograd::impl::post_acc_grad_hooks(tensor));
    // Those of reducers that are gone.
    for (auto* old = dynamic_cast<Sentinel*>(previous.get()); old && old->owner.expired();
         old = dynamic_cast<Sentinel*>(previous.get()))
      previous = std::move(old->previous);
    sentinel->previous = std::move(previous);
    torch::autograd::impl::set_post_acc_grad_hooks(tensor, std::move(sentinel));
  }
}

void ReducerImpl::withdraw_sentinels() {
  for (const auto& p : parameters_) {
    auto& hook = torch::autograd::impl::post_acc_grad_hooks(p.tensor);
    auto* sentinel = dynamic_cast<Sentinel*>(hook.get());
    if (sentinel == nullptr || sentinel->id != this) continue;
    hook = std::move(sentinel->previous);
  }
}

void ReducerImpl::on_sentinel(std::size_t index) {
  const auto& hooked = parameters_[index].accumulator;
  if (hooked && torch::autograd::get_current_node() == hooked) return;  // its own hook follows
  hooks_lost_ = true;
  on_gradient(index);
}

// On the tensor itself: nobody but this reducer is shown its gradient.
bool ReducerImpl::has_no_other_hook(const Parameter& p) const {
  const auto* sentinel =
      dynamic_cast<const Sentinel*>(torch::autograd::impl::post_acc_grad_hooks(p.tensor).get());
  return sentinel != nullptr && sentinel->id == this && !sentinel->previous;
}

// ---------------------------------------------------------------- planning again, together

bool ReducerImpl::changed() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) {
    return p.tensor.requires_grad() != p.form.requires_grad ||
           p.tensor.scalar_type() != p.form.dtype || p.tensor.device() != p.form.device ||
           p.tensor.sizes() != p.form.sizes;
  });
}

// At the first gradient of a synchronised pass, before anything was sent.
void ReducerImpl::plan_anew_together() {
  torch::NoGradGuard no_grad;
  announce_change();
  check_same_model();
  for (auto& p : parameters_) {
    p.form = form_of(p);
    p.slot = at::Tensor();
    p.expected = 1;  // what static_graph learned is learned again
  }
  rebuilt_ = learned_ = stale_ = false;
  auto order = dense_parameters();
  std::reverse(order.begin(), order.end());
  plan(order);
}

ReducerImpl::Zeros::Zeros(ReducerImpl& borrower) : reducer(borrower) {
  for (auto& bucket : reducer.buckets_) {
    live.emplace_back(bucket->wire, bucket->flat);
    bucket->wire = at::zeros_like(bucket->wire);
    bucket->flat = bucket->wire.narrow(0, 0, bucket->flat.numel());
  }
  if (!live.empty()) first = reducer.buckets_.front().get();
}

ReducerImpl::Zeros::~Zeros() {
  auto& buckets = reducer.buckets_;
  if (buckets.empty() || buckets.front().get() != first) return;  // laid out again
  for (std::size_t i = 0; i < live.size(); ++i)
    std::tie(buckets[i]->wire, buckets[i]->flat) = live[i];
}

void ReducerImpl::announce_change() {
  const Zeros zeros(*this);
  if (buckets_.empty()) send_change_flag();
  bool everyone = false;
  for (std::size_t i = 0; i < buckets_.size() && !everyone; ++i) {
    next_launch_ = i + 1;
    launch(i);
    if (i > 0) continue;
    const bool sum = !flag_in_bucket() || (joining_ && !joining_->divide_by_initial_world_size);
    everyone = received_change_flag().eq(sum ? world_.size() : 1).item<bool>();
  }
  for (auto& bucket : buckets_) {
    bucket->reduction.work.wait();
    bucket->reduction = {};
  }
  static_cast<void>(received_change_flag());
  next_launch_ = 0;
}

// ---------------------------------------------------------------- the change flag

// In the first bucket, where it costs nothing. Reading it there would make a host wait for its GPU,
// and a communication hook may do anything with a bucket: then it is a message of its own.
bool ReducerImpl::flag_in_bucket() const {
  return !hook_ && !buckets_.empty() && buckets_.front()->wire.is_cpu();
}

void ReducerImpl::send_change_flag() {
  if (flag_in_bucket()) {
    const BucketState& first = *buckets_.front();
    first.wire.narrow(0, first.flat.numel(), 1).fill_(stale_ ? 1 : 0);
    return;
  }
  change_flag_ = at::full({1}, stale_ ? 1 : 0, at::kLong);
  change_flag_work_ = world_.all_reduce(change_flag_);
}

// Waits for it. Zero: nobody's model has changed.
at::Tensor ReducerImpl::received_change_flag() {
  if (flag_in_bucket()) {
    BucketState& first = *buckets_.front();
    first.reduction.work.wait();
    return first.wire.narrow(0, first.flat.numel(), 1);
  }
  change_flag_work_.wait();
  return change_flag_;
}

// Throws on every rank and leaves them in step: with the change taken back, or made everywhere,
// training could continue.
void ReducerImpl::refuse_change_of_another() {
  for (auto& bucket : buckets_) {
    bucket->reduction.work.wait();
    bucket->reduction = {};
  }
  for (auto& p : parameters_) p.used = false;
  close_pass();
  check_same_model();
  LOCKSTEP_ASSERT(false && "a change was announced, but the models are the same");
}

}  // namespace lockstep::parallel
