#include "lockstep/optim/clip.h"

#include <ATen/ATen.h>
#include <torch/utils.h>

#include <cmath>
#include <unordered_set>

#include "lockstep/core/error.h"
#include "lockstep/optim/deferred_gradients.h"
#include "lockstep/optim/to_device.h"

namespace lockstep::optim {
namespace {

// Gradients of one device and dtype, which the foreach kernels take together. In the order in which
// the first of each appears: the norm is a sum, and its bits depend on the order.
using Groups = std::vector<std::vector<at::Tensor>>;

Groups gradients_of(const std::vector<at::Tensor>& params, const char* who) {
  refuse_if_deferred(params, who);
  Groups groups;
  std::unordered_set<at::TensorImpl*> seen;
  for (const auto& param : params) {
    if (!param.defined() || !seen.insert(param.unsafeGetTensorImpl()).second) continue;
    const at::Tensor& grad = param.grad();
    if (!grad.defined()) continue;
    if (grad.layout() != at::kStrided)
      throw UsageError(who,
                       "a gradient is sparse. Clipping takes dense ones. Make its Embedding with "
                       "sparse(false), or leave its parameter out.");
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) {
      return g[0].device() == grad.device() && g[0].scalar_type() == grad.scalar_type();
    });
    if (group == groups.end()) group = groups.emplace(groups.end());
    group->push_back(grad);
  }
  return groups;
}

at::Tensor norm_of(const Groups& groups, const ClipOptions& options, const char* who) {
  if (!(options.norm_type > 0))
    throw UsageError(who, "norm_type = {} is no norm. Use 2, another positive number or infinity.",
                     options.norm_type);
  if (groups.empty()) return at::scalar_tensor(0.0, at::kFloat);
  const c10::Device first = groups[0][0].device();
  std::vector<at::Tensor> norms;
  for (const auto& group : groups)
    for (const auto& norm : at::_foreach_norm(group, options.norm_type))
      norms.push_back(to_device(norm, first));
  // Mixed dtypes: as torch.stack does, into the widest of them.
  at::ScalarType widest = norms[0].scalar_type();
  for (const auto& norm : norms) widest = c10::promoteTypes(widest, norm.scalar_type());
  for (auto& norm : norms) norm = norm.to(widest);
  at::Tensor total = at::linalg_vector_norm(at::stack(norms), options.norm_type);
  if (options.error_if_nonfinite && !std::isfinite(total.item<double>()))
    throw UsageError(who,
                     "the norm of order {} over all gradients is {}, so they cannot be clipped. "
                     "The loss has probably diverged, or fp16 gradients were not unscaled. Set "
                     "error_if_nonfinite = false to scale them all the same.",
                     options.norm_type, total.item<double>());
  return total;
}

}  // namespace

at::Tensor grad_norm(const std::vector<at::Tensor>& params, const ClipOptions& options) {
  const torch::NoGradGuard no_grad;
  return norm_of(gradients_of(params, "grad_norm"), options, "grad_norm");
}

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& params, double max_norm,
                           const ClipOptions& options) {
  constexpr const char* kWho = "clip_grad_norm_";
  if (!(max_norm >= 0))
    throw UsageError(kWho, "max_norm = {} is no bound. Use a number that is not negative.",
                     max_norm);
  const torch::NoGradGuard no_grad;
  const Groups groups = gradients_of(params, kWho);
  const at::Tensor total = norm_of(groups, options, kWho);
  if (groups.empty()) return total;
  // Multiplied also where it is 1: asking whether it is would wait for the device.
  const at::Tensor coefficient = at::clamp_max(max_norm / (total + 1e-6), 1.0);
  for (const auto& group : groups)
    at::_foreach_mul_(group, to_device(coefficient, group[0].device()));
  return total;
}

void clip_grad_value_(const std::vector<at::Tensor>& params, double clip_value) {
  constexpr const char* kWho = "clip_grad_value_";
  if (!(clip_value >= 0))
    throw UsageError(kWho, "clip_value = {} is no bound. Use a number that is not negative.",
                     clip_value);
  const torch::NoGradGuard no_grad;
  for (const auto& group : gradients_of(params, kWho)) {
    at::_foreach_clamp_min_(group, -clip_value);
    at::_foreach_clamp_max_(group, clip_value);
  }
}

}  // namespace lockstep::optim
