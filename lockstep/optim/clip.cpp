#include "lockstep/optim/clip.h"

#include <ATen/ATen.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "lockstep/core/error.h"
#include "lockstep/kernels/step.h"
#include "lockstep/optim/cpu_step.h"
#include "lockstep/optim/local_gradients.h"

namespace lockstep::optim {
namespace {

// Gradients of one device and dtype, which foreach kernels take together. Groups are in the order
// in which the first gradient of each appears, since the order of a sum decides its bits.
using Groups = std::vector<std::vector<at::Tensor>>;

// Those of `params`, in their order.
std::vector<at::Tensor> list_of(const std::vector<at::Tensor>& params, const char* who) {
  refuse_local_gradients(params, who);
  std::vector<at::Tensor> gradients;
  std::unordered_set<at::TensorImpl*> seen;
  for (const auto& param : params) {
    if (!param.defined() || !seen.insert(param.unsafeGetTensorImpl()).second) continue;
    const at::Tensor& grad = param.grad();
    if (!grad.defined()) continue;
    if (grad.layout() != at::kStrided)
      throw UsageError(who,
                       "a gradient is sparse. Clipping takes dense ones. Make its Embedding with "
                       "sparse(false), or leave its parameter out.");
    gradients.push_back(grad);
  }
  return gradients;
}

Groups groups_of(const std::vector<at::Tensor>& gradients) {
  Groups groups;
  for (const auto& grad : gradients) {
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) {
      return g[0].device() == grad.device() && g[0].scalar_type() == grad.scalar_type();
    });
    if (group == groups.end()) group = groups.emplace(groups.end());
    group->push_back(grad);
  }
  return groups;
}

void check_norm(const at::Tensor& total, const ClipOptions& options, const char* who) {
  if (!options.error_if_nonfinite || std::isfinite(total.item<double>())) return;
  throw UsageError(who,
                   "the norm of order {} over all gradients is {}, so they cannot be clipped. "
                   "The loss has probably diverged, or fp16 gradients were not unscaled. Set "
                   "error_if_nonfinite = false to scale them all the same.",
                   options.norm_type, total.item<double>());
}

// A gradient's memory, flat: it need not lie row by row (channels_last).
template <typename T>
void add_blocks_of(const at::Tensor& grad, double* sums) {
  const at::Tensor flat = grad.is_non_overlapping_and_dense() ? grad : grad.contiguous();
  const T* const values = flat.const_data_ptr<T>();
  constexpr std::int64_t kBlock = kernels::kNormBlock;
  detail::share_out(
      kernels::norm_blocks(flat.numel()), kBlock, [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t first = begin * kBlock;
        kernels::block_norms(values + first, std::min(end * kBlock, flat.numel()) - first,
                             sums + begin);
      });
}

at::Tensor norm_by_blocks(const std::vector<at::Tensor>& gradients, const ClipOptions& options,
                          const char* who) {
  if (options.norm_type != 2)
    throw UsageError(who, "by_blocks computes norms of order 2 alone, and norm_type is {}.",
                     options.norm_type);
  std::vector<double> sums;
  for (const auto& grad : gradients) {
    const bool wide = grad.scalar_type() == at::kDouble;
    if (!grad.is_cpu() || !(wide || grad.scalar_type() == at::kFloat))
      throw UsageError(who,
                       "by_blocks takes float and double gradients on the CPU, and one is {} on "
                       "{}. Leave the option out.",
                       c10::toString(grad.scalar_type()), grad.device().str());
    const std::size_t first = sums.size();
    sums.resize(first + static_cast<std::size_t>(kernels::norm_blocks(grad.numel())));
    wide ? add_blocks_of<double>(grad, sums.data() + first)
         : add_blocks_of<float>(grad, sums.data() + first);
  }
  const auto blocks = static_cast<std::int64_t>(sums.size());
  const at::Tensor total =
      at::scalar_tensor(std::sqrt(kernels::add_blocks(sums.data(), blocks)), at::kDouble);
  check_norm(total, options, who);
  return total;
}

at::Tensor norm_of(const Groups& groups, const ClipOptions& options, const char* who) {
  if (!(options.norm_type > 0))
    throw UsageError(who,
                     "norm_type = {} is not a norm. Use 2, another positive number or infinity.",
                     options.norm_type);
  if (groups.empty()) return at::scalar_tensor(0.0, at::kFloat);
  const c10::Device first = groups[0][0].device();
  std::vector<at::Tensor> norms;
  for (const auto& group : groups)
    for (const auto& norm : at::_foreach_norm(group, options.norm_type))
      norms.push_back(to_device(norm, first));
  // Mixed dtypes are stacked as the widest of them, as torch.stack does.
  at::ScalarType widest = norms[0].scalar_type();
  for (const auto& norm : norms) widest = c10::promoteTypes(widest, norm.scalar_type());
  for (auto& norm : norms) norm = norm.to(widest);
  at::Tensor total = at::linalg_vector_norm(at::stack(norms), options.norm_type);
  check_norm(total, options, who);
  return total;
}

}  // namespace

at::Tensor grad_norm(const std::vector<at::Tensor>& params, const ClipOptions& options) {
  const torch::NoGradGuard no_grad;
  const auto gradients = list_of(params, "grad_norm");
  if (options.by_blocks) return norm_by_blocks(gradients, options, "grad_norm");
  return norm_of(groups_of(gradients), options, "grad_norm");
}

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& params, double max_norm,
                           const ClipOptions& options) {
  constexpr const char* kWho = "clip_grad_norm_";
  if (!(max_norm >= 0))
    throw UsageError(kWho, "max_norm = {} is not a bound. Use a number that is not negative.",
                     max_norm);
  const torch::NoGradGuard no_grad;
  refuse_incomplete(params, kWho);
  const auto gradients = list_of(params, kWho);
  if (options.by_blocks) {
    const at::Tensor norm = norm_by_blocks(gradients, options, kWho);
    const double factor = max_norm / (norm.item<double>() + 1e-6);
    if (factor >= 1) return norm;  // a NaN norm makes NaN gradients
    for (const at::Tensor& grad : gradients) grad.mul_(factor);
    return norm;
  }
  const Groups groups = groups_of(gradients);
  const at::Tensor total = norm_of(groups, options, kWho);
  if (groups.empty()) return total;
  // Multiplies even by 1: a comparison would wait for the device.
  const at::Tensor coefficient = at::clamp_max(max_norm / (total + 1e-6), 1.0);
  for (const auto& group : groups)
    at::_foreach_mul_(group, to_device(coefficient, group[0].device()));
  return total;
}

void clip_grad_value_(const std::vector<at::Tensor>& params, double clip_value) {
  constexpr const char* kWho = "clip_grad_value_";
  if (!(clip_value >= 0))
    throw UsageError(kWho, "clip_value = {} is not a bound. Use a number that is not negative.",
                     clip_value);
  const torch::NoGradGuard no_grad;
  for (const auto& group : groups_of(list_of(params, kWho))) {
    at::_foreach_clamp_min_(group, -clip_value);
    at::_foreach_clamp_max_(group, clip_value);
  }
}

}  // namespace lockstep::optim
