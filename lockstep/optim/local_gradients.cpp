#include "lockstep/optim/local_gradients.h"

#include <fmt/ranges.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "lockstep/core/error.h"

namespace lockstep::optim {
namespace {

template <typename Condition>
bool has_hook(const at::Tensor& param, Condition&& condition) {
  if (!param.defined() || !param.requires_grad() || !param.is_leaf()) return false;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(param);
  if (!accumulator) return false;
  const auto& hooks = accumulator->post_hooks();
  return std::any_of(hooks.begin(), hooks.end(), [&](const auto& each) {
    const auto* hook = dynamic_cast<const GradientHook*>(each.get());
    return hook != nullptr && condition(*hook);
  });
}

bool has_local_gradient(const at::Tensor& param) {
  return has_hook(param, [](const GradientHook& hook) { return hook.is_local(); });
}

}  // namespace

bool is_watched(const at::Tensor& param) {
  return has_hook(param, [](const GradientHook&) { return true; });
}

void refuse_local_gradients(const std::vector<at::Tensor>& params, std::string_view who) {
  for (const auto& param : params) {
    if (!has_local_gradient(param)) continue;
    throw UsageError(
        who,
        "the parameter of shape [{}] belongs to a ShardedOptimizer, so its gradient is this rank's "
        "own until step() averages and uses it, or to FullyShard, Pipeline or TensorParallel, "
        "where a rank has a part of it. Make the optimizer by model.make_optimizer() instead of on "
        "the parameters, and leave clipping and unscaling to it: step({{.max_grad_norm = 1, "
        ".scaler = &scaler, .skip_non_finite = true}}) also skips a bad step; ShardedOptimizer's "
        "reduce_now() shows averaged gradients.",
        fmt::join(param.sizes(), ", "));
  }
}

}  // namespace lockstep::optim
