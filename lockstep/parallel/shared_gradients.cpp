#include "lockstep/parallel/shared_gradients.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/parallel/shard_unit.h"

namespace lockstep::parallel {

SharedGradients::SharedGradients(const ModelTensors& model, World& world,
                                 std::function<void(const std::string&)> check)
    : model_(model), world_(world), check_(std::move(check)) {}

bool SharedGradients::install() {
  forget_scales();
  return lay_out();
}

// One bucket for each type: nothing is sent.
bool SharedGradients::lay_out() {
  constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();
  std::vector<ParameterForm> forms;
  for (const ModelParameter& p : model_.parameters()) forms.push_back(p.form());
  auto order = reverse_order(model_.size());
  std::erase_if(order, [&](std::size_t i) { return !forms[i].requires_grad; });
  buckets_.lay_out(forms, order, {.first_cap_bytes = kUnlimited, .cap_bytes = kUnlimited});
  places_.assign(model_.size(), {});
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    if (buckets_[b].parts.empty()) return false;
    for (const Slot& slot : buckets_[b].slots) places_[slot.parameter] = {b, slot.offset};
  }
  hooks_.install(weak_from_this(), forms);
  return true;
}

void SharedGradients::on_gradient(std::size_t parameter, const at::Tensor& arrived) {
  const ModelParameter& p = model_[parameter];
  check_(p.name);
  const at::Tensor& grad = p.tensor.grad();
  if (grad.defined() && grad.layout() != at::kStrided)
    throw UsageError(kFullyShard,
                     "parameter '{}' has a sparse gradient, which is not divided by rows. Make the "
                     "embedding dense (sparse = false).",
                     p.name);
  if (places_[parameter].bucket != kNoBucket) buckets_.store(parameter, arrived, /*sync=*/true);
}

at::Tensor SharedGradients::free_slot(std::size_t parameter) {
  const std::lock_guard lock(mutex_);
  const ModelParameter& p = model_[parameter];
  if (places_[parameter].bucket == kNoBucket || p.tensor.grad().defined()) return {};
  return hooks_.alone(parameter) ? buckets_.slot(parameter) : at::Tensor();
}

void SharedGradients::place(const at::Tensor& flags) {
  const at::NoGradGuard no_grad;
  apply_scales();
  auto* const used = flags.mutable_data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < model_.size(); ++i) {
    const at::Tensor& grad = model_[i].tensor.grad();
    used[i] = grad.defined() ? 1 : 0;
    if (places_[i].bucket == kNoBucket) continue;
    const at::Tensor& slot = buckets_.slot(i);
    if (!grad.defined())
      at::Tensor(slot).zero_();
    else if (!grad.is_same(slot))
      at::Tensor(slot).copy_(grad);
  }
}

// Every rank has trained the same parameters since.
void SharedGradients::make_room(const at::Tensor& flags) {
  const auto lacks_place = [this](std::size_t i) {
    return places_[i].bucket == kNoBucket && model_[i].tensor.requires_grad();
  };
  bool lacks = false;
  for (std::size_t i = 0; i < model_.size(); ++i) lacks |= lacks_place(i);
  if (!lacks) return;
  if (!lay_out())
    throw UsageError(kFullyShard,
                     "a parameter is trained since the model was divided, and the ranks cannot "
                     "share memory for its gradient. Make it trained before, or use "
                     "Shard::kGradients.");
  place(at::empty_like(flags));
  const ledger::PhaseScope communication(ledger::Phase::kCommunication);
  world_.all_reduce(at::zeros({1}, at::kByte), ReduceOp::kMax).wait();
}

void SharedGradients::scale(std::size_t parameter, double factor) {
  const at::Tensor& grad = model_[parameter].tensor.grad();
  if (!grad.defined()) return;
  Scale& scale = scales_[parameter];
  if (scale.is_of(grad)) factor *= scale.factor;
  scale = {factor, grad.unsafeGetTensorImpl(), static_cast<std::uint32_t>(grad._version())};
}

// A gradient that was assigned or written since is not the one that was scaled.
void SharedGradients::apply_scales() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < model_.size(); ++i)
    if (const at::Tensor& grad = model_[i].tensor.grad();
        scales_[i].factor != 1 && grad.defined() && scales_[i].is_of(grad))
      at::Tensor(grad).mul_(scales_[i].factor);
  forget_scales();
}

std::vector<at::Tensor> SharedGradients::parts(std::size_t parameter, std::int64_t begin,
                                               std::int64_t count) const {
  const Place& place = places_[parameter];
  std::vector<at::Tensor> parts;
  for (const at::Tensor& part : buckets_[place.bucket].parts)
    parts.push_back(part.narrow(0, place.offset + begin, count));
  return parts;
}

}  // namespace lockstep::parallel
