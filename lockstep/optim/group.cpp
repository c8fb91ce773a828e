#include "lockstep/optim/group.h"

#include <ATen/ops/empty_like.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <unordered_map>

#include "lockstep/optim/local_gradients.h"

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
  refuse_local_gradients(params, who);
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
    // The CPU kernels walk the memory of both and do not look at strides, nor at what is not there.
    if (!same_layout(param, grad) || grad.is_neg() || grad._is_zerotensor())
      grad = at::empty_like(param).copy_(grad);
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

void check_group(std::string_view who, std::size_t group, std::size_t count) {
  if (group < count) return;
  throw UsageError(who, "there is no group {}. Groups count from 0; there {} {}.", group,
                   count == 1 ? "is" : "are", count);
}

void check_loaded(std::string_view who, const at::Tensor& param, const at::Tensor& loaded) {
  if (!loaded.defined() || loaded.sizes() == param.sizes()) return;
  throw UsageError(who,
                   "the archive holds state of shape {} for a parameter of shape {}. It was "
                   "probably saved for another model, or parameters are listed in another order.",
                   shape_of(loaded), shape_of(param));
}

namespace {

using StateDict = std::map<std::string, at::Tensor>;
using Group = torch::optim::OptimizerParamGroup;

// Each parameter once, with its name and group, in the optimizer's order.
template <typename Visit>
void for_each_named(std::string_view who, std::vector<Group>& groups, const NamedParameters& names,
                    Visit&& visit) {
  std::unordered_map<at::TensorImpl*, const std::string*> known;
  for (const auto& [name, tensor] : names) known.try_emplace(tensor.unsafeGetTensorImpl(), &name);
  Seen seen;
  for (auto& group : groups) {
    for (const auto& param : group.params()) {
      if (!seen.insert(param.unsafeGetTensorImpl()).second) continue;
      const auto name = known.find(param.unsafeGetTensorImpl());
      if (name == known.end())
        throw UsageError(who,
                         "a parameter of shape {} has no name. It is probably not a parameter of "
                         "the module whose names were given. Give the names of all.",
                         shape_of(param));
      visit(*name->second, param, group);
    }
  }
}

const at::Tensor& find_state(std::string_view who, const StateDict& state, const std::string& name,
                             at::IntArrayRef sizes) {
  const auto found = state.find(name);
  if (found == state.end())
    throw UsageError(
        who, "the state has no '{}'. It belongs to another model or another optimizer.", name);
  if (found->second.sizes() != sizes)
    throw UsageError(who,
                     "'{}' has shape {} in the state, but [{}] is wanted. The state belongs to "
                     "another model.",
                     name, shape_of(found->second), fmt::join(sizes, ", "));
  return found->second;
}

}  // namespace

void FusedBase::step_unless(const at::Tensor& found_inf) {
  if (!found_inf.defined() || found_inf.numel() != 1 || found_inf.scalar_type() != at::kFloat)
    throw UsageError(who(),
                     "step_unless() takes one float: 1 to leave the step out, 0 to take it. Pass "
                     "what GradScaler::found_inf() gives.");
  step_groups(found_inf.reshape({}));  // the counters of steps have no dimension either
}

double FusedBase::lr(std::size_t group) const {
  check_group(who(), group, param_groups_.size());
  return param_groups_[group].options().get_lr();
}

void FusedBase::set_lr(double lr) {
  for (std::size_t group = 0; group < param_groups_.size(); ++group) set_lr(group, lr);
}

void FusedBase::set_lr(std::size_t group, double lr) {
  check_group(who(), group, param_groups_.size());
  param_groups_[group].options().set_lr(lr);
}

std::map<std::string, at::Tensor> FusedBase::state_dict(const NamedParameters& names, bool copy) {
  const torch::NoGradGuard no_grad;
  const auto out = [copy](const at::Tensor& tensor) {
    if (!copy) return tensor;
    return tensor.to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true,
                     at::MemoryFormat::Contiguous);
  };
  StateDict state;
  for_each_named(who(), param_groups_, names,
                 [&](const auto& name, const auto& param, auto& group) {
                   // What is frozen and was never stepped has none, as in PyTorch.
                   if (!param.requires_grad() && state_.count(param.unsafeGetTensorImpl()) == 0)
                     return;
                   State one = state_of(param, group);
                   for (auto& [part, tensor] : one.tensors) state[name + "." + part] = out(tensor);
                   state[name + ".step"] = out(one.step);
                 });
  return state;
}

void FusedBase::check_state_dict(const NamedParameters& names, const StateDict& state) {
  read_state(names, state);
}

void FusedBase::load_state_dict(const NamedParameters& names, const StateDict& state) {
  const torch::NoGradGuard no_grad;
  for (auto& [param, one] : read_state(names, state)) set_state(param, std::move(one));
}

std::vector<std::pair<at::Tensor, FusedBase::State>> FusedBase::read_state(
    const NamedParameters& names, const StateDict& state) {
  std::vector<std::pair<at::Tensor, State>> loaded;
  std::size_t used = 0;
  for_each_named(who(), param_groups_, names,
                 [&](const auto& name, const auto& param, auto& group) {
                   if (!param.requires_grad() && !state.contains(name + ".step")) return;
                   State one = state_of(param, group);
                   for (auto& [part, tensor] : one.tensors)
                     tensor = find_state(who(), state, name + "." + part, param.sizes());
                   one.step = find_state(who(), state, name + ".step", {});
                   used += one.tensors.size() + 1;
                   loaded.emplace_back(param, std::move(one));
                 });
  if (used != state.size()) {
    std::unordered_set<std::string> wanted;
    for_each_named(who(), param_groups_, names, [&](const auto& name, const auto& p, auto& group) {
      if (!p.requires_grad() && !state.contains(name + ".step")) return;
      for (const auto& [part, tensor] : state_of(p, group).tensors)
        wanted.insert(name + "." + part);
      wanted.insert(name + ".step");
    });
    for (const auto& [name, tensor] : state)
      if (!wanted.contains(name))
        throw UsageError(who(),
                         "the state holds '{}', which this optimizer has no place for. It belongs "
                         "to another model or another optimizer.",
                         name);
  }
  return loaded;
}

}  // namespace lockstep::optim::detail
