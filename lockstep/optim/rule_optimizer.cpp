#include "lockstep/optim/rule_optimizer.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <unordered_map>

#include "lockstep/optim/cpu_step.h"
#include "lockstep/optim/local_gradients.h"

namespace lockstep::optim {
namespace {

using StateDict = std::map<std::string, at::Tensor>;
using Group = torch::optim::OptimizerParamGroup;
using detail::Seen;

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

// Whether it is as made here; an archive may hold something else.
bool is_counter(const at::Tensor& step) {
  return step.is_cpu() && step.scalar_type() == at::kFloat && step.numel() == 1;
}

// Each parameter once, with its name and group, in the optimizer's order.
template <typename Visit>
void for_each_named(std::string_view who, std::vector<Group>& groups, const NamedParameters& names,
                    Visit&& visit) {
  std::unordered_map<at::TensorImpl*, const std::string*> known;
  for (const auto& [name, tensor] : names) known.try_emplace(tensor.unsafeGetTensorImpl(), &name);
  Seen seen;
  for (auto& group : groups) {
    const Rule& rule = detail::rule_of(who, group);
    for (const auto& param : group.params()) {
      if (!seen.insert(param.unsafeGetTensorImpl()).second) continue;
      const auto name = known.find(param.unsafeGetTensorImpl());
      if (name == known.end())
        throw UsageError(who,
                         "a parameter of shape {} has no name. It is probably not a parameter of "
                         "the module whose names were given. Give the names of all.",
                         shape_of(param));
      visit(*name->second, param, *rule);
    }
  }
}

const at::Tensor& find_tensor(std::string_view who, const StateDict& state, const std::string& name,
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

namespace detail {

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
    // The CPU kernels walk the memory of both without looking at strides or at lazy negation and
    // zeros.
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

void check_group(std::string_view who, std::size_t group, std::size_t count) {
  if (group < count) return;
  throw UsageError(who, "there is no group {}. Groups count from 0; there {} {}.", group,
                   count == 1 ? "is" : "are", count);
}

at::Tensor make_state(const StateSpec& spec, const at::Tensor& param) {
  const auto dtype = spec.dtype(param.scalar_type());
  if (at::IntArrayRef(spec.sizes) == param.sizes())
    return at::zeros_like(param, param.options().dtype(dtype).requires_grad(false));
  return at::zeros(spec.sizes, param.options().dtype(dtype).requires_grad(false));
}

Rule& rule_of(std::string_view who, Group& group) {
  auto* const options = dynamic_cast<GroupRule*>(&group.options());
  if (options == nullptr || options->rule->name() != who)
    throw UsageError(who,
                     "a parameter group has options of another optimizer. It was probably added "
                     "with torch::optim's own options. Make the group with {}::group().",
                     who);
  return options->rule;
}

void GroupRule::serialize(torch::serialize::InputArchive& archive) {
  rule->each_option(OptionVisitor([&](const Option& option) {
    c10::IValue value;
    archive.read(std::string(option.name), value);
    option.value = value.isBool() ? (value.toBool() ? 1 : 0) : value.toScalar().toDouble();
  }));
}

void GroupRule::serialize(torch::serialize::OutputArchive& archive) const {
  Rule(rule)->each_option(OptionVisitor([&](const Option& option) {
    c10::IValue value(option.value);
    if (option.kind == Option::Kind::kFlag) value = c10::IValue(option.value != 0);
    if (option.kind == Option::Kind::kCount)
      value = c10::IValue(static_cast<std::int64_t>(option.value));
    archive.write(std::string(option.name), value);
  }));
}

}  // namespace detail

// ---------------------------------------------------------------- RuleState

const at::Tensor& RuleState::operator[](std::string_view name) const {
  static const at::Tensor none;
  for (std::size_t i = 0; i < names.size(); ++i)
    if (names[i] == name) return tensors[i];
  return none;
}

void RuleState::serialize(torch::serialize::InputArchive& archive) {
  for (const std::string& key : archive.keys()) {
    at::Tensor tensor;
    archive.read(key, tensor);
    if (key == "step") {
      step = tensor;
    } else {
      names.push_back(key);
      tensors.push_back(tensor);
    }
  }
}

void RuleState::serialize(torch::serialize::OutputArchive& archive) const {
  if (step.defined()) archive.write("step", step);
  for (std::size_t i = 0; i < names.size(); ++i) archive.write(names[i], tensors[i]);
}

// ---------------------------------------------------------------- a step

RuleOptimizer::RuleOptimizer(const std::vector<Group>& groups,
                             std::unique_ptr<detail::GroupRule> defaults)
    : Optimizer(groups, defaults->clone()), name_(defaults->rule->name()) {
  defaults->rule->check();
  for (auto& group : param_groups_) {
    const auto* const own = dynamic_cast<detail::GroupRule*>(&group.options());
    for (const auto& param : group.params())
      if (own != nullptr) (void)own->rule->state(param.sizes());  // refuses what it cannot step
  }
}

void RuleOptimizer::load(torch::serialize::InputArchive&) {
  throw UsageError(who(), "an archive cannot be read here. Use OptimizerOf<{}Options>.", who());
}

at::Tensor RuleOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  step_groups(at::Tensor());
  return loss;
}

void RuleOptimizer::step_unless(const at::Tensor& found_inf) {
  if (!found_inf.defined() || found_inf.numel() != 1 || found_inf.scalar_type() != at::kFloat)
    throw UsageError(who(),
                     "step_unless() takes one float: 1 to leave the step out, 0 to take it. Pass "
                     "what GradScaler::found_inf() gives.");
  step_groups(found_inf.reshape({}));  // the counters of steps have no dimension either
}

void RuleOptimizer::step_groups(const at::Tensor& found_inf) {
  const torch::NoGradGuard no_grad;
  Seen seen;
  for (auto& group : param_groups_) {
    Rule& rule = detail::rule_of(who(), group);
    for (const auto& batch : detail::gather(who(), group.params(), seen)) {
      at::Tensor skip;
      if (found_inf.defined()) skip = found_inf.to(batch.params[0].device());
      // The host looks where it need not wait, and where the rule does not look itself.
      if (skip.defined() && (skip.is_cpu() || rule->needs_host_skip())) {
        if (skip.item<float>() != 0) continue;
        skip = at::Tensor();
      }
      step_batch(batch, *rule, skip);
    }
  }
}

void RuleOptimizer::step_batch(const detail::Batch& batch, const UpdateRule& rule,
                               const at::Tensor& skip) {
  const SpanKernels kernels = rule.kernels();
  std::vector<detail::CpuItem> here;
  std::vector<StepItem> rest;
  std::vector<at::Tensor> counters;
  for (std::size_t i = 0; i < batch.params.size(); ++i) {
    const at::Tensor& param = batch.params[i];
    const at::Tensor& grad = batch.grads[i];
    const bool known = find_state(param) != nullptr;
    const RuleState& state = ensure_state(param, rule);
    const bool first = !known && find_state(param) != nullptr;
    StateTensors tensors;
    for (const StateSpec& spec : rule.state(param.sizes())) tensors.push_back(state[spec.name]);
    const bool countable = !rule.counts_steps() || is_counter(state.step);
    if (countable && detail::covered(kernels, param, grad, tensors)) {
      double steps = first ? 1 : 2;
      if (rule.counts_steps()) steps = ++*state.step.mutable_data_ptr<float>();
      here.push_back({param, grad, std::move(tensors), steps});
      continue;
    }
    if (rule.counts_steps()) counters.push_back(state.step);
    rest.push_back({param, grad, std::move(tensors), state.step, first});
  }
  detail::step_on_cpu(here, kernels);
  if (!counters.empty()) at::_foreach_add_(counters, 1);
  if (!rest.empty()) rule.update(rest, skip);
  // A step that was skipped does not count.
  if (!counters.empty() && skip.defined())
    at::_foreach_sub_(counters, std::vector<at::Tensor>(counters.size(), skip));
  // So that a graph retained across the step raises instead of using the new values. ATen's fused
  // kernels do not do it either.
  for (const auto& param : batch.params) param.unsafeGetTensorImpl()->bump_version();
}

double RuleOptimizer::lr(std::size_t group) const {
  detail::check_group(who(), group, param_groups_.size());
  return param_groups_[group].options().get_lr();
}

void RuleOptimizer::set_lr(double lr) {
  for (std::size_t group = 0; group < param_groups_.size(); ++group) set_lr(group, lr);
}

void RuleOptimizer::set_lr(std::size_t group, double lr) {
  detail::check_group(who(), group, param_groups_.size());
  param_groups_[group].options().set_lr(lr);
}

// ---------------------------------------------------------------- state

const RuleState* RuleOptimizer::find_state(const at::Tensor& param) const {
  const auto slot = state_.find(param.unsafeGetTensorImpl());
  return slot == state_.end() ? nullptr : static_cast<const RuleState*>(slot->second.get());
}

const RuleState& RuleOptimizer::ensure_state(const at::Tensor& param, const UpdateRule& rule) {
  static const RuleState none;
  const std::vector<StateSpec> specs = rule.state(param.sizes());
  if (find_state(param) == nullptr) {
    if (specs.empty() && !rule.counts_steps()) return none;
    auto fresh = std::make_unique<RuleState>();
    if (rule.counts_steps())
      fresh->step = at::zeros({}, param.options().dtype(at::kFloat).requires_grad(false));
    state_[param.unsafeGetTensorImpl()] = std::move(fresh);
  }
  auto& held = static_cast<RuleState&>(*state_[param.unsafeGetTensorImpl()]);
  // Options may have changed since and need more state.
  for (const StateSpec& spec : specs) {
    if (held[spec.name].defined()) continue;
    held.names.push_back(spec.name);
    held.tensors.push_back(detail::make_state(spec, param));
  }
  return held;
}

RuleOptimizer::Named RuleOptimizer::named_state(const at::Tensor& param,
                                                const UpdateRule& rule) const {
  const RuleState* const held = find_state(param);
  Named state;
  if (held != nullptr && held->step.defined()) {
    state.step = held->step.to(at::kDouble).reshape({});
  } else {
    state.step = at::scalar_tensor(held != nullptr ? 1.0 : 0.0, at::kDouble);
  }
  for (const StateSpec& spec : rule.state(param.sizes())) {
    at::Tensor tensor = held != nullptr ? (*held)[spec.name] : at::Tensor();
    if (!tensor.defined())
      tensor = at::zeros(spec.sizes, at::dtype(spec.dtype(param.scalar_type())));
    state.tensors.emplace_back(spec.name, tensor);
  }
  return state;
}

void RuleOptimizer::set_state(const at::Tensor& param, const UpdateRule& rule, const Named& state) {
  const auto steps = state.step.item<double>();
  const bool counts = rule.counts_steps();
  if ((!counts && state.tensors.empty()) || (steps == 0 && !(counts && param.is_cuda()))) {
    state_.erase(param.unsafeGetTensorImpl());
    return;
  }
  // In place: a CUDA graph may read it there.
  const RuleState& held = ensure_state(param, rule);
  if (counts) held.step.fill_(steps);
  for (const auto& [name, tensor] : state.tensors) held[name].copy_(tensor);
}

std::map<std::string, at::Tensor> RuleOptimizer::state_dict(const NamedParameters& names,
                                                            bool copy) {
  const torch::NoGradGuard no_grad;
  const auto out = [copy](const at::Tensor& tensor) {
    if (!copy) return tensor;
    return tensor.to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true,
                     at::MemoryFormat::Contiguous);
  };
  StateDict state;
  for_each_named(who(), param_groups_, names,
                 [&](const auto& name, const auto& param, const UpdateRule& rule) {
                   // A frozen parameter that was never stepped has no state, as in PyTorch.
                   if (!param.requires_grad() && find_state(param) == nullptr) return;
                   const Named one = named_state(param, rule);
                   for (const auto& [part, tensor] : one.tensors)
                     state[name + "." + part] = out(tensor);
                   state[name + ".step"] = out(one.step);
                 });
  return state;
}

void RuleOptimizer::check_state_dict(const NamedParameters& names, const StateDict& state) {
  read_state(names, state);
}

void RuleOptimizer::load_state_dict(const NamedParameters& names, const StateDict& state) {
  const torch::NoGradGuard no_grad;
  for (const Loaded& loaded : read_state(names, state))
    set_state(loaded.param, *loaded.rule, loaded.state);
}

std::vector<RuleOptimizer::Loaded> RuleOptimizer::read_state(const NamedParameters& names,
                                                             const StateDict& state) {
  std::vector<Loaded> loaded;
  std::unordered_set<std::string> known;
  const auto find = [&](const std::string& name, at::IntArrayRef sizes) {
    known.insert(name);
    return find_tensor(who(), state, name, sizes);
  };
  for_each_named(who(), param_groups_, names,
                 [&](const auto& name, const auto& param, const UpdateRule& rule) {
                   if (!param.requires_grad() && !state.contains(name + ".step")) return;
                   Named one;
                   for (const StateSpec& spec : rule.state(param.sizes()))
                     one.tensors.emplace_back(spec.name, find(name + "." + spec.name, spec.sizes));
                   one.step = find(name + ".step", {});
                   loaded.push_back({param, &rule, std::move(one)});
                 });
  for (const auto& [name, tensor] : state)
    if (!known.contains(name))
      throw UsageError(who(),
                       "the state holds '{}', which this optimizer has no place for. It belongs "
                       "to another model or another optimizer.",
                       name);
  return loaded;
}

void RuleOptimizer::check_loaded() {
  for (auto& group : param_groups_) {
    Rule& rule = detail::rule_of(who(), group);
    for (const auto& param : group.params()) {
      if (find_state(param) == nullptr) continue;
      auto& held = static_cast<RuleState&>(*state_[param.unsafeGetTensorImpl()]);
      bool whole = !rule->counts_steps() || held.step.defined();
      for (const StateSpec& spec : rule->state(param.sizes())) {
        const at::Tensor& loaded = held[spec.name];
        whole &= loaded.defined();
        if (loaded.defined() && loaded.sizes() != at::IntArrayRef(spec.sizes))
          throw UsageError(
              who(),
              "the archive holds state of shape {} for a parameter of shape {}. It was "
              "probably saved for another model, or parameters are listed in another order.",
              shape_of(loaded), shape_of(param));
      }
      if (!whole)
        throw UsageError(who(),
                         "the archive lacks state of a parameter of shape {}. It was probably "
                         "saved by another optimizer.",
                         shape_of(param));
    }
  }
}

}  // namespace lockstep::optim
