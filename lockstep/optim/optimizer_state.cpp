// The state of an Optimizer in and out: by the names of parameters, and as an archive of torch's.
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>
#include <torch/utils.h>

#include <string>
#include <unordered_map>
#include <unordered_set>

#include "lockstep/core/error.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/optim/rule_state.h"

namespace lockstep::optim {
namespace {

using Group = torch::optim::OptimizerParamGroup;

// What is to become a parameter's state.
struct Loaded {
  at::Tensor param;
  const UpdateRule* rule;
  RuleState state;
};

// Each parameter once, with its name and rule, in the optimizer's order.
template <typename Visit>
void for_each_named(std::string_view who, std::vector<Group>& groups, const NamedParameters& names,
                    const Visit& visit) {
  std::unordered_map<at::TensorImpl*, const std::string*> known;
  for (const auto& [name, tensor] : names) known.try_emplace(tensor.unsafeGetTensorImpl(), &name);
  std::unordered_set<at::TensorImpl*> seen;
  for (Group& group : groups) {
    const Rule& rule = detail::rule_of(who, group);
    for (const auto& param : group.params()) {
      if (!seen.insert(param.unsafeGetTensorImpl()).second) continue;
      const auto name = known.find(param.unsafeGetTensorImpl());
      if (name == known.end())
        throw UsageError(who,
                         "a parameter of shape {} has no name, which its state is saved under. "
                         "Give the names of all parameters to name_parameters().",
                         detail::shape_of(param));
      visit(*name->second, param, *rule);
    }
  }
}

void reset_state(torch::optim::Optimizer& optimizer, const at::Tensor& param) {
  const auto held = optimizer.state().find(param.unsafeGetTensorImpl());
  if (held == optimizer.state().end()) return;
  if (!param.is_cuda()) {
    optimizer.state().erase(held);
    return;
  }
  const auto& state = static_cast<const RuleState&>(*held->second);
  if (state.step.defined()) state.step.zero_();
  for (const at::Tensor& tensor : state.tensors) tensor.zero_();
}

// In place where there is a state: a CUDA graph may read it there.
void set_state(torch::optim::Optimizer& optimizer, const Loaded& loaded) {
  const auto& [param, rule, state] = loaded;
  if (state.names.empty() && !state.step.defined()) return reset_state(optimizer, param);
  const bool counts = rule->counts_steps();
  const bool stepped = !state.step.defined() || state.step.item<double>() != 0;
  if ((!counts && state.names.empty()) || (!stepped && !(counts && param.is_cuda()))) {
    optimizer.state().erase(param.unsafeGetTensorImpl());
    return;
  }
  ensure_state(optimizer, param, *rule);
  static_cast<RuleState&>(*optimizer.state()[param.unsafeGetTensorImpl()]).assign(state);
}

// UsageError where an archive's state is not that of the parameter.
void check_archived(const Loaded& loaded) {
  const auto& [param, rule, state] = loaded;
  bool whole = !rule->counts_steps() || state.step.defined();
  for (const StateSpec& spec : rule->state(param.sizes())) {
    const at::Tensor& tensor = state[spec.name];
    whole &= tensor.defined();
    if (tensor.defined() && tensor.sizes() != at::IntArrayRef(spec.sizes))
      throw UsageError(
          rule->name(),
          "the archive holds state of shape {} for a parameter of shape {}. It was "
          "probably saved for another model, or parameters are listed in another order.",
          detail::shape_of(tensor), detail::shape_of(param));
  }
  if (!whole)
    throw UsageError(rule->name(),
                     "the archive lacks state of a parameter of shape {}. It was probably "
                     "saved by another optimizer.",
                     detail::shape_of(param));
}

void check_replicated(bool replicated) {
  if (!replicated)
    throw UsageError("optimizer",
                     "torch::save and torch::load know nothing of a state that is divided over "
                     "ranks. Use state_dict() and load_state_dict(), or save_checkpoint() and "
                     "resume().");
}

}  // namespace

// ---------------------------------------------------------------- by name

void Optimizer::name_parameters(NamedParameters names) {
  if (!for_model_) names_.clear();
  std::unordered_set<at::TensorImpl*> known;
  for (const auto& [name, tensor] : names_) known.insert(tensor.unsafeGetTensorImpl());
  for (auto& [name, tensor] : names)
    if (known.insert(tensor.unsafeGetTensorImpl()).second)
      names_.emplace_back(std::move(name), std::move(tensor));
}

TensorDict Optimizer::state_dict(const StateDictOptions& options) {
  const torch::NoGradGuard no_grad;
  const auto out = [&](const at::Tensor& tensor) {
    if (!options.copy) return tensor;
    return tensor.to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true,
                     at::MemoryFormat::Contiguous);
  };
  TensorDict state;
  if (!options.wanted) return state;
  for_each_named(who(), param_groups_, names_,
                 [&](const auto& name, const auto& param, const UpdateRule& rule) {
                   const RuleState* const held = find_state(*this, param);
                   // A frozen parameter that was never stepped has no state, as in PyTorch.
                   if (!param.requires_grad() && held == nullptr) return;
                   for (const StateSpec& spec : rule.state(param.sizes())) {
                     at::Tensor tensor = held != nullptr ? (*held)[spec.name] : at::Tensor();
                     if (!tensor.defined())
                       tensor =
                           at::zeros(spec.sizes, at::dtype(dtype_of(spec, param.scalar_type())));
                     state[name + "." + spec.name] = out(tensor);
                   }
                   const bool counted = held != nullptr && held->step.defined();
                   state[name + ".step"] =
                       out(counted ? held->step.to(at::kDouble).reshape({})
                                   : at::scalar_tensor(held != nullptr ? 1.0 : 0.0, at::kDouble));
                 });
  return state;
}

void Optimizer::load_state_dict(const TensorDict& state) {
  const torch::NoGradGuard no_grad;
  std::vector<Loaded> loaded;
  detail::StateReader reader(who(), state);
  for_each_named(who(), param_groups_, names_,
                 [&](const auto& name, const auto& param, const UpdateRule& rule) {
                   Loaded& one = loaded.emplace_back(Loaded{param, &rule, {}});
                   if (!param.requires_grad() && !state.contains(name + ".step")) return;
                   for (const StateSpec& spec : rule.state(param.sizes()))
                     one.state.add(spec.name, reader.tensor(name + "." + spec.name, spec.sizes));
                   one.state.step = reader.number(name + ".step");
                 });
  reader.finish();
  for (const Loaded& one : loaded) set_state(*this, one);
}

std::int64_t Optimizer::state_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [param, held] : state_)
    for (const at::Tensor& tensor : static_cast<const RuleState&>(*held).tensors)
      bytes += static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

// ---------------------------------------------------------------- archives

void Optimizer::save(torch::serialize::OutputArchive& archive) const {
  check_replicated(replicated_);
  for (Group group : param_groups_) detail::rule_of(who(), group);  // torch's code casts them
  torch::optim::serialize<RuleState, GroupRule>(archive, *this);
}

// The keys are those that torch::optim::serialize writes.
void Optimizer::load(torch::serialize::InputArchive& archive) {
  check_replicated(replicated_);
  const torch::NoGradGuard no_grad;
  torch::serialize::InputArchive states, saved;
  archive.read("state", states);
  archive.read("param_groups", saved);
  const std::vector<std::string> all = states.keys();
  const std::unordered_set<std::string> keys(all.begin(), all.end());
  const auto check_count = [&](torch::serialize::InputArchive& from, const std::string& what,
                               std::size_t mine) {
    at::Tensor size;
    from.read(what + "/size", size);
    if (size.item<std::int64_t>() != static_cast<std::int64_t>(mine))
      throw UsageError(who(),
                       "the archive has {} {}, and the optimizer has {}. It belongs to "
                       "another model or to other groups.",
                       size.item<std::int64_t>(), what, mine);
  };
  check_count(saved, "param_groups", groups());
  std::vector<GroupRule> rules;  // copies: nothing is changed before all is read
  rules.reserve(groups());       // they are pointed to
  std::vector<Loaded> loaded;
  for (std::size_t g = 0; g < groups(); ++g) {
    torch::serialize::InputArchive group, values;
    saved.read("param_groups/" + std::to_string(g), group);
    const std::vector<at::Tensor>& params = param_groups_[g].params();
    check_count(group, "params", params.size());
    group.read("options", values);
    rules.emplace_back(options(g)).serialize(values);
    for (std::size_t i = 0; i < params.size(); ++i) {
      c10::IValue key;
      group.read("params/" + std::to_string(i), key);
      Loaded& state = loaded.emplace_back(Loaded{params[i], &*rules[g].rule, {}});
      if (!keys.contains(key.toStringRef())) continue;  // it was not stepped yet
      torch::serialize::InputArchive one;
      states.read(key.toStringRef(), one);
      state.state.serialize(one);
      check_archived(state);
    }
  }
  for (std::size_t g = 0; g < groups(); ++g) options(g) = rules[g].rule;
  for (const Loaded& one : loaded) set_state(*this, one);
}

}  // namespace lockstep::optim
