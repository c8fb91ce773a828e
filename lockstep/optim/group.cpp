#include "lockstep/optim/group.h"

#include <ATen/ops/empty_like.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>

#include "lockstep/optim/deferred_gradients.h"

namespace lockstep::optim::detail {
namespace {

std::string shape_of(const at::Tensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.sizes(), ", "));
}

// Strides of dimensions with one element do not matter.
bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  for (std::int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

void check_steppable(std::string_view who, const at::Tensor& param, const at::Tensor& grad) {
  if (grad.layout() != at::kStrided) {
    throw UsageError(
        who,
        "the parameter of shape {} has a sparse gradient. The fused kernels take dense "
        "ones. Make its Embedding with sparse(false), or give it to torch::optim::SGD.",
        shape_of(param));
  }
  if (!param.is_non_overlapping_and_dense()) {
    throw UsageError(
        who,
        "the parameter of shape {} is not dense in memory. It is probably a slice of a "
        "larger tensor. Make it a tensor of its own: param.contiguous().",
        shape_of(param));
  }
}

}  // namespace

std::vector<Batch> gather(std::string_view who, const std::vector<at::Tensor>& params, Seen& seen) {
  refuse_if_deferred(params, who);
  std::vector<Batch> batches;
  Seen in_group;
  for (const auto& param : params) {
    if (!in_group.insert(param.unsafeGetTensorImpl()).second) continue;
    if (!seen.insert(param.unsafeGetTensorImpl()).second) {
      throw UsageError(who,
                       "the parameter of shape {} is in two parameter groups. It would be stepped "
                       "twice. Leave it in one.",
                       shape_of(param));
    }
    at::Tensor grad = param.grad();
    if (!grad.defined()) continue;
    check_steppable(who, param, grad);
    // The CPU kernels walk the memory of both and do not look at strides.
    if (!same_layout(param, grad)) grad = at::empty_like(param).copy_(grad);
    auto batch = std::find_if(batches.begin(), batches.end(), [&](const Batch& b) {
      return b.params[0].device() == param.device() && b.params[0].dtype() == param.dtype();
    });
    if (batch == batches.end()) batch = batches.emplace(batches.end());
    batch->params.push_back(param);
    batch->grads.push_back(std::move(grad));
  }
  return batches;
}

void check_option(bool ok, std::string_view who, std::string_view option, double value) {
  if (ok) return;
  throw UsageError(who, "option {} cannot be {}. It is out of its range. See {}Options.", option,
                   value, who);
}

void check_loaded(std::string_view who, const at::Tensor& param, const at::Tensor& loaded) {
  if (!loaded.defined() || loaded.sizes() == param.sizes()) return;
  throw UsageError(who,
                   "the archive holds state of shape {} for a parameter of shape {}. It was "
                   "probably saved for another model, or parameters are listed in another order.",
                   shape_of(loaded), shape_of(param));
}

}  // namespace lockstep::optim::detail
