#include "lockstep/models/causal_lm.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/kernels/cuda/table.h"
#include "lockstep/nn/functional.h"

namespace lockstep::models {

// ---------------------------------------------------------------- the cache

std::pair<at::Tensor, at::Tensor> KvCache::append(std::size_t layer, const at::Tensor& keys,
                                                  const at::Tensor& values) {
  const torch::NoGradGuard no_grad;
  if (layers_.size() <= layer) layers_.resize(layer + 1);
  Layer& held = layers_[layer];
  const std::int64_t time = keys.size(2);
  const std::int64_t total = held.length + time;
  const auto put = [&](at::Tensor& all, const at::Tensor& more) {
    if (!all.defined() || all.size(2) < total) {
      auto shape = more.sizes().vec();
      shape[2] = all.defined() ? std::max(total, 2 * all.size(2)) : std::max(total, capacity_);
      const at::Tensor larger = torch::empty(shape, more.options());
      if (held.length > 0) larger.narrow(2, 0, held.length).copy_(all.narrow(2, 0, held.length));
      all = larger;
    }
    all.narrow(2, held.length, time).copy_(more);
  };
  put(held.keys, keys);
  put(held.values, values);
  held.length = total;
  return {held.keys.narrow(2, 0, total), held.values.narrow(2, 0, total)};
}

// ---------------------------------------------------------------- any family

at::Tensor CausalLm::hidden_states(const at::Tensor& ids, KvCache* cache) {
  const bool limited = config_.gpt() != nullptr;  // rotary positions have no end
  const std::int64_t past = cache != nullptr ? cache->length() : 0;
  const std::int64_t most = config_.max_positions();
  if (ids.dim() != 2 || ids.scalar_type() != at::kLong || (limited && past + ids.size(1) > most)) {
    throw UsageError(limited ? "gpt" : "llama",
                     "input of shape [{}] and type {}{}. Token ids are int64 [batch, time]{}.",
                     fmt::join(ids.sizes(), ", "), c10::toString(ids.scalar_type()),
                     past > 0 ? fmt::format(" after {} tokens in the cache", past) : "",
                     limited ? fmt::format(", with time at most n_positions = {}", most) : "");
  }
  if (cache == nullptr && fused_on(ids.device())) return run_fused(ids, runner_, residual_in_fp32_);
  return run(placement_ ? ids.to(placement_->input) : ids, cache,
             cache != nullptr ? BlockRunner() : runner_);
}

bool CausalLm::fused_on(c10::Device device) const {
  if (placement_) return false;  // activations move between its devices
  return fused_.value_or(device.is_cuda() && kernels::cuda::table() != nullptr);
}

at::Tensor CausalLm::loss(const at::Tensor& ids, const at::Tensor& targets) {
  const at::Tensor hidden = hidden_states(ids);
  const at::Tensor* const weight = head_weight();
  if (!fused_on(ids.device()) || weight == nullptr) return next_token_loss(logits(hidden), targets);
  return nn::linear_cross_entropy(hidden, *weight, targets.to(hidden.device()));
}

at::Tensor CausalLm::logits(const at::Tensor& hidden_states) {
  at::Tensor in = hidden_states;
  if (placement_ && placement_->copy_to_head)
    in = in.to(in.options().device(*placement_->copy_to_head), /*non_blocking=*/false,
               /*copy=*/true);
  return head(in);
}

void CausalLm::to(c10::Device device, c10::ScalarType dtype, bool non_blocking) {
  if (placement_)
    to(dtype, non_blocking);
  else
    Module::to(device, dtype, non_blocking);
}

void CausalLm::to(c10::Device device, bool non_blocking) {
  if (!placement_) Module::to(device, non_blocking);
}

std::int64_t CausalLm::parameter_count() const {
  std::int64_t count = 0;
  for (const auto& parameter : parameters()) count += parameter.numel();
  return count;
}

at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& targets) {
  return torch::cross_entropy_loss(logits.flatten(0, -2), targets.to(logits.device()).flatten());
}

}  // namespace lockstep::models
