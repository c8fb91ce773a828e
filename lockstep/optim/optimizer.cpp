#include "lockstep/optim/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>
#include <torch/utils.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/kernels/cuda/table.h"
#include "lockstep/optim/adamw_pass.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/cpu_step.h"
#include "lockstep/optim/local_gradients.h"
#include "lockstep/optim/option.h"
#include "lockstep/optim/rule_state.h"

namespace lockstep::optim {

namespace {

using Group = torch::optim::OptimizerParamGroup;

constexpr const char* kOptimizer = "optimizer";

std::vector<at::Tensor> trainable(const NamedParameters& names) {
  std::vector<at::Tensor> params;
  for (const auto& [name, tensor] : names)
    if (tensor.requires_grad()) params.push_back(tensor);
  return params;
}

std::vector<Group> torch_groups(const std::vector<ParamGroup>& groups) {
  std::vector<Group> made;
  for (const ParamGroup& group : groups)
    made.emplace_back(group.params, std::make_unique<GroupRule>(group.options));
  return made;
}

// For groups that torch's functions add without options.
Rule first_rule(const std::vector<ParamGroup>& groups) {
  return groups.empty() ? Rule(AdamWOptions{}) : groups[0].options;
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
        detail::shape_of(param));
  }
  if (!param.is_non_overlapping_and_dense()) {
    throw UsageError(
        who,
        "the parameter of shape {} is not dense in memory. It is probably a slice of a "
        "larger tensor. Make it a tensor of its own: param.contiguous().",
        detail::shape_of(param));
  }
}

// Tensors of one device and dtype, which a fused kernel steps in one call.
struct Batch {
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;  // with the memory layout of their parameters
};

// The parameters with a gradient; one without is skipped, as in Python. A sparse gradient, a
// parameter that is a strided slice and one whose gradient is not averaged yet (see
// local_gradients.h) throw UsageError.
std::vector<Batch> gather(std::string_view who, const std::vector<at::Tensor>& params) {
  refuse_local_gradients(params, who);
  std::vector<Batch> batches;
  for (const auto& param : params) {
    at::Tensor grad = param.grad();
    if (!grad.defined()) continue;
    check_steppable(who, param, grad);
    // CPU kernels read the memory of parameter and gradient as it lies: no strides, no lazy
    // negation, no zero tensors without memory.
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

// ATen's kernels take their options from the host: a graph would repeat the recorded values.
void refuse_capture() {
  if (kernels::cuda::capturing())
    throw Error(kOptimizer,
                "a parameter has no gradient in its own layout, so that the step would have a "
                "fixed learning rate");
}

// For what no kernel averages in its pass.
at::Tensor average_of(const SplitGradient& split, const at::Tensor& like) {
  at::Tensor sum = split.sources[0].to(split.sources[0].scalar_type(), false, /*copy=*/true);
  for (std::size_t i = 1; i < split.sources.size(); ++i) sum.add_(split.sources[i]);
  if (split.divisor != 1) sum.div_(split.divisor);
  if (split.scale != 1) sum.mul_(split.scale);
  return sum.view_as(like);
}

using Origins = std::map<at::TensorImpl*, Origin>;

void step_batch(torch::optim::Optimizer& optimizer, const Batch& batch, const UpdateRule& rule,
                const at::Tensor& skip, const SplitGradients* split, const Origins& origins) {
  const SpanKernels kernels = rule.kernels();
  std::vector<detail::CpuItem> here;
  std::vector<StepItem> rest;
  std::vector<at::Tensor> counters;
  for (std::size_t i = 0; i < batch.params.size(); ++i) {
    const at::Tensor& param = batch.params[i];
    const at::Tensor& grad = batch.grads[i];
    const bool known = find_state(optimizer, param) != nullptr;
    const RuleState& state = ensure_state(optimizer, param, rule);
    const bool first = !known && find_state(optimizer, param) != nullptr;
    StateTensors tensors;
    for (const StateSpec& spec : rule.state(param.sizes())) tensors.push_back(state[spec.name]);
    const SplitGradient* const found = split != nullptr ? split->find(param) : nullptr;
    if (detail::covered(kernels, param, grad, tensors)) {
      double steps = first ? 1 : 2;
      if (rule.counts_steps()) steps = ++*state.step.mutable_data_ptr<float>();
      here.push_back({param, grad, std::move(tensors), steps, found});
      continue;
    }
    if (rule.counts_steps()) counters.push_back(state.step);
    rest.push_back({param, found != nullptr ? average_of(*found, grad) : grad, std::move(tensors),
                    state.step, first, origins.at(param.unsafeGetTensorImpl())});
  }
  detail::step_on_cpu(here, kernels);
  if (!counters.empty()) at::_foreach_add_(counters, 1);
  if (!rest.empty()) rule.update(rest, skip);
  // A step that was skipped does not count.
  if (!counters.empty() && skip.defined())
    at::_foreach_sub_(counters, std::vector<at::Tensor>(counters.size(), skip));
  // A graph retained across the step then raises an error instead of using the new values, which
  // ATen's fused kernels do not ensure either.
  for (const auto& param : batch.params) param.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

void detail::check(const StepOptions& options) {
  if (!(options.max_grad_norm >= 0))
    throw UsageError(kOptimizer, "max_grad_norm = {} must be positive, or 0 for no clipping.",
                     options.max_grad_norm);
}

torch::optim::OptimizerParamGroup detail::make_group(std::vector<at::Tensor> params,
                                                     const Rule& rule) {
  rule->check();
  return {std::move(params), std::make_unique<GroupRule>(rule)};
}

// ---------------------------------------------------------------- construction, groups

Optimizer::Optimizer(const std::vector<ParamGroup>& groups)
    : torch::optim::Optimizer(torch_groups(groups),
                              std::make_unique<GroupRule>(first_rule(groups))),
      replicated_(false) {}

Optimizer::Optimizer(const std::vector<Group>& groups, const Rule& defaults)
    : torch::optim::Optimizer(groups, std::make_unique<GroupRule>(defaults)) {
  defaults->check();
  for (const Group& group : param_groups_) {
    const auto* const own = dynamic_cast<const GroupRule*>(&group.options());
    if (own == nullptr) continue;  // the first step says so
    own->rule->check();
    for (const at::Tensor& param : group.params()) (void)own->rule->state(param.sizes());
  }
}

Optimizer::Optimizer(NamedParameters names, Rule rule, World world)
    : Optimizer(names, std::vector<ParamGroup>{{trainable(names), std::move(rule)}},
                std::move(world)) {}

Optimizer::Optimizer(NamedParameters names, std::vector<ParamGroup> groups, World world)
    : Optimizer(torch_groups(groups), first_rule(groups)) {
  for_model_ = true;
  names_ = std::move(names);
  world_ = std::move(world);
  list_parameters();
  std::unordered_set<at::TensorImpl*> named;
  for (const auto& [name, tensor] : names_) named.insert(tensor.unsafeGetTensorImpl());
  const auto unnamed = std::count_if(params_.begin(), params_.end(), [&](const auto& param) {
    return !named.contains(param.unsafeGetTensorImpl());
  });
  if (unnamed != 0)
    throw UsageError(kOptimizer,
                     "{} of {} parameters in the groups have none of the {} names. They are "
                     "probably of another module. Pass module->named_parameters().pairs() of the "
                     "one that is trained.",
                     unnamed, params_.size(), names_.size());
}

Optimizer::Optimizer(Optimizer&& other) noexcept = default;
Optimizer::~Optimizer() = default;

// For messages: the rule, where there is one.
std::string_view Optimizer::who() const {
  std::string_view name;
  for (const Group& group : param_groups_) {
    const auto* const own = dynamic_cast<const GroupRule*>(&group.options());
    if (own == nullptr || own->rule->name() == name) continue;
    if (!name.empty()) return kOptimizer;
    name = own->rule->name();
  }
  return name.empty() ? kOptimizer : name;
}

// Groups and parameters may have been added since the last time. A parameter listed twice in a
// group (tied weights: C++ modules list them under both names) is one.
void Optimizer::list_parameters() {
  std::vector<at::TensorImpl*> now;
  for (const Group& group : param_groups_)
    for (const at::Tensor& param : group.params()) now.push_back(param.unsafeGetTensorImpl());
  if (now == listed_ && by_group_.size() == param_groups_.size()) return;
  std::unordered_map<at::TensorImpl*, std::size_t> group_of;
  std::vector<std::vector<at::Tensor>> by_group(param_groups_.size());
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    for (const at::Tensor& param : param_groups_[g].params()) {
      const auto [slot, fresh] = group_of.emplace(param.unsafeGetTensorImpl(), g);
      if (fresh) by_group[g].push_back(param);
      if (slot->second != g)
        throw UsageError(who(),
                         "the parameter of shape {} is in two parameter groups. It would be "
                         "stepped twice. Leave it in one.",
                         detail::shape_of(param));
    }
  }
  params_.clear();
  const auto add = [&](const at::Tensor& param) {
    if (group_of.erase(param.unsafeGetTensorImpl()) != 0) params_.push_back(param);
  };
  std::unordered_map<at::TensorImpl*, std::uint32_t> identities;
  if (for_model_)
    for (const auto& [name, param] : names_) {
      add(param);
      identities.try_emplace(param.unsafeGetTensorImpl(), origin_named(name));
    }
  for (const auto& params : by_group)
    for (const at::Tensor& param : params) add(param);
  for (std::size_t i = 0; i < params_.size(); ++i) {
    at::TensorImpl* const param = params_[i].unsafeGetTensorImpl();
    const auto own = identities.try_emplace(param, static_cast<std::uint32_t>(i)).first;
    origins_[param].parameter = own->second;
  }
  by_group_ = std::move(by_group);
  listed_ = std::move(now);
  pass_.reset();
  no_pass_.clear();
  ++layout_;
}

Rule& Optimizer::options(std::size_t group) {
  detail::check_group(who(), group, groups());
  return detail::rule_of(who(), param_groups_[group]);
}

double Optimizer::lr(std::size_t group) const {
  detail::check_group(who(), group, groups());
  return param_groups_[group].options().get_lr();
}

void Optimizer::set_lr(double lr) {
  for (std::size_t group = 0; group < groups(); ++group) set_lr(group, lr);
}

void Optimizer::set_lr(std::size_t group, double lr) {
  options(group).set("lr", lr);
}

void Optimizer::add_param_group(const Group& group) {
  if (!replicated_)
    throw UsageError(who(),
                     "add_param_group() was called on an optimizer whose ranks have divided the "
                     "parameters among them already. Make a new optimizer with all groups; "
                     "state_dict() and load_state_dict() carry the state over.");
  torch::optim::Optimizer::add_param_group(group);
}

void Optimizer::set_begin(const at::Tensor& param, std::int64_t begin) {
  origins_[param.unsafeGetTensorImpl()].begin = begin;
}

void Optimizer::zero_grad() {
  torch::optim::Optimizer::zero_grad();
}

// ---------------------------------------------------------------- a step

at::Tensor Optimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  step(StepOptions{});
  return loss;
}

void Optimizer::step_unless(const at::Tensor& found_inf) {
  if (!found_inf.defined() || found_inf.numel() != 1 || found_inf.scalar_type() != at::kFloat)
    throw UsageError(who(),
                     "step_unless() takes one float: 1 to skip the step, 0 to take it. Pass "
                     "what GradScaler::found_inf() gives.");
  if (!replicated_) {
    if (found_inf.item<float>() == 0) step();
    return;
  }
  const ledger::PhaseScope optimizer(ledger::Phase::kOptimizer);
  detail::check_groups(who(), param_groups_);
  list_parameters();
  refuse_incomplete(params_, who());
  if (!has_pass()) {
    refuse_capture();
    step_groups(found_inf);
    return;
  }
  refuse_local_gradients(params_, kOptimizer);
  if (!kernels::cuda::capturing()) publish_options({});
  pass_->measure();
  pass_->update(found_inf);
}

StepResult Optimizer::step(const StepOptions& options) {
  const ledger::PhaseScope optimizer(ledger::Phase::kOptimizer);
  LOCKSTEP_ASSERT(replicated_);
  detail::check(options);
  detail::check_groups(who(), param_groups_);
  list_parameters();
  refuse_incomplete(params_, who());
  GradScaler* const scaler =
      options.scaler != nullptr && options.scaler->enabled() ? options.scaler : nullptr;
  if (has_pass()) return step_in_one_pass(options, scaler);
  refuse_capture();
  if (scaler != nullptr) scaler->unscale_(this, params_);
  // Norms summed in blocks by the kernels have the bits of Shard::kState's.
  const ClipOptions how{.by_blocks = std::all_of(params_.begin(), params_.end(), [](const auto& p) {
                          return detail::has_kernel(p.scalar_type(), p.device());
                        })};
  const bool clips = options.max_grad_norm > 0;
  const bool agrees = options.skip_non_finite && scaler == nullptr;
  at::Tensor norm;
  if (clips) norm = clip_grad_norm_(params_, options.max_grad_norm, how);
  if (!clips && (agrees || options.want_grad_norm)) norm = grad_norm(params_, how);
  StepResult result;
  if (clips || options.want_grad_norm) result.grad_norm = norm;
  if (scaler != nullptr) result.skipped = scaler->found_inf(this);
  if (agrees) result.skipped = any_rank_not_finite(norm);
  step_groups(result.skipped);
  if (scaler != nullptr) scaler->update();
  return result;
}

void Optimizer::step_split(const SplitGradients& gradients) {
  const ledger::PhaseScope optimizer(ledger::Phase::kOptimizer);
  LOCKSTEP_ASSERT(replicated_);
  detail::check_groups(who(), param_groups_);
  list_parameters();
  step_groups({}, &gradients);
}

void Optimizer::step_groups(const at::Tensor& found_inf, const SplitGradients* split) {
  const torch::NoGradGuard no_grad;
  for (std::size_t g = 0; g < by_group_.size(); ++g) {
    const Rule& rule = options(g);
    for (const Batch& batch : gather(rule->name(), by_group_[g])) {
      at::Tensor skip;  // without dimensions, as the counters of steps are
      if (found_inf.defined()) skip = found_inf.to(batch.params[0].device()).reshape({});
      // The host reads it where that needs no waiting, or where the rule cannot skip by itself.
      if (skip.defined() && (skip.is_cpu() || rule->needs_host_skip())) {
        if (skip.item<float>() != 0) continue;
        skip = at::Tensor();
      }
      step_batch(*this, batch, *rule, skip, split, origins_);
    }
  }
}

// Defined here because it needs optim::Optimizer.
void GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return;
  }
  require_scale("step()");
  if (optimizers_[&optimizer].stage == Stage::kStepped)
    throw UsageError("GradScaler",
                     "step() was already called on this optimizer since the last update(). Call "
                     "update() once per step, after all optimizers.");
  if (optimizers_[&optimizer].stage == Stage::kReady) unscale_(optimizer);
  PerOptimizer& state = optimizers_[&optimizer];
  if (auto* const ours = dynamic_cast<Optimizer*>(&optimizer)) {
    ours->step_unless(state.found_inf);
  } else if (state.found_inf.item<float>() == 0) {
    optimizer.step();
  }
  state.stage = Stage::kStepped;
}

// ---------------------------------------------------------------- in one pass, on a GPU

// Decided at the first step, when the model is on the device it is trained on.
bool Optimizer::has_pass() {
  if (!no_pass_.empty()) return false;
  // Other gradients, sparse ones too, are copied or refused by gather().
  const auto has_gradient = [](const at::Tensor& param) {
    const at::Tensor& grad = param.grad();
    return grad.defined() && grad.layout() == at::kStrided && grad.is_contiguous();
  };
  const bool all_have_gradients =
      std::any_of(params_.begin(), params_.end(), has_gradient) &&
      std::all_of(params_.begin(), params_.end(), [&](const auto& param) {
        return has_gradient(param) || (!param.requires_grad() && !param.grad().defined());
      });
  if (pass_) return all_have_gradients;
  const c10::Device device = params_.empty() ? c10::Device(c10::kCPU) : params_[0].device();
  bool adamw = true, rounded = true;
  for (std::size_t g = 0; g < groups(); ++g) {
    adamw &= options(g).is<AdamWOptions>();
    rounded &= adamw && options(g).as<AdamWOptions>().bf16_state;
  }
  const bool fits = std::all_of(params_.begin(), params_.end(), [&](const auto& param) {
    return param.device() == device && param.is_contiguous() &&
           (param.scalar_type() == at::kFloat || (rounded && param.scalar_type() == at::kBFloat16));
  });
  if (!for_model_) no_pass_ = "the optimizer was made from a list of parameters, not for a model";
  if (!adamw) no_pass_ = "the optimizer is not AdamW";
  if (!fits) no_pass_ = "parameters are not contiguous float tensors of one device";
  if (!device.is_cuda()) no_pass_ = "the parameters are not on a GPU";
  if (no_pass_.empty() && kernels::cuda::table() == nullptr)
    no_pass_ = kernels::cuda::unavailable_reason();
  if (!no_pass_.empty()) return false;
  std::vector<AdamWItem> items;
  std::vector<AdamWOptions> rules;
  std::unordered_map<at::TensorImpl*, std::size_t> group_of;
  for (std::size_t g = 0; g < by_group_.size(); ++g) {
    rules.push_back(options(g).as<AdamWOptions>());
    for (const at::Tensor& param : by_group_[g]) group_of[param.unsafeGetTensorImpl()] = g;
  }
  for (const auto& param : params_) {
    const std::size_t g = group_of.at(param.unsafeGetTensorImpl());
    const RuleState& state = ensure_state(*this, param, *options(g));
    items.push_back({.param = param,
                     .grad = {},
                     .exp_avg = state["exp_avg"],
                     .exp_avg_sq = state["exp_avg_sq"],
                     .step = state.step,
                     .group = g,
                     .origin = origins_.at(param.unsafeGetTensorImpl())});
  }
  pass_ = std::make_unique<AdamWPass>(std::move(items), std::move(rules));
  return all_have_gradients;
}

std::uint64_t Optimizer::layout() {
  if (replicated_) list_parameters();
  return layout_;
}

void Optimizer::publish_options(const StepOptions& options) {
  if (!pass_) return;
  for (std::size_t g = 0; g < groups(); ++g)
    pass_->set_options(g, Optimizer::options(g).as<AdamWOptions>());
  pass_->set_max_norm(options.max_grad_norm);
  pass_->prepare_capture();
}

std::string Optimizer::unavailable_for_capture(const StepOptions&) {
  if (!replicated_) return "this optimizer cannot be captured";
  list_parameters();
  return has_pass() || pass_ ? "" : no_pass_;
}

StepResult Optimizer::step_in_one_pass(const StepOptions& options, GradScaler* scaler) {
  refuse_local_gradients(params_, kOptimizer);
  // Values that every replay reads are written before the capture, not in the graph.
  if (!kernels::cuda::capturing()) publish_options(options);
  if (scaler != nullptr) scaler->unscale_(this, params_);
  pass_->measure();
  StepResult result;
  if (options.max_grad_norm > 0 || options.want_grad_norm) result.grad_norm = pass_->norm().clone();
  if (scaler != nullptr) {
    result.skipped = scaler->found_inf(this);
  } else if (options.skip_non_finite) {
    result.skipped = pass_->found_inf().clone();
    if (world_.size() > 1) world_.all_reduce(result.skipped, ReduceOp::kMax).wait();
  }
  pass_->update(result.skipped);
  if (scaler != nullptr) scaler->update();
  return result;
}

// The norm is not finite exactly when a gradient is not, or when the sum of squares overflows; then
// the step would fail, too.
at::Tensor Optimizer::any_rank_not_finite(const at::Tensor& norm) {
  const at::NoGradGuard no_grad;
  at::Tensor found = at::isfinite(norm).logical_not().to(at::kFloat).reshape({1});
  if (world_.size() > 1) world_.all_reduce(found, ReduceOp::kMax).wait();
  return found;
}

// ---------------------------------------------------------------- groups of a module

std::vector<ParamGroup> decay_groups(const torch::nn::Module& module, const Rule& options) {
  std::unordered_set<at::TensorImpl*> of_norms, seen;
  const auto add_norm = [&](const torch::nn::Module& part) {
    if (part.as<torch::nn::LayerNormImpl>() == nullptr) return;
    for (const auto& param : part.parameters()) of_norms.insert(param.unsafeGetTensorImpl());
  };
  add_norm(module);  // modules() lists itself only where a shared pointer holds it
  for (const auto& part : module.modules(/*include_self=*/false)) add_norm(*part);
  std::vector<ParamGroup> groups(2, {{}, options});
  if (options.has("weight_decay")) groups[1].options.set("weight_decay", 0);
  for (const auto& item : module.named_parameters()) {
    at::TensorImpl* impl = item.value().unsafeGetTensorImpl();
    if (!item.value().requires_grad() || !seen.insert(impl).second) continue;
    const bool plain = of_norms.contains(impl) || is_named_as_norm_or_bias(item.key());
    groups[plain ? 1 : 0].params.push_back(item.value());
  }
  std::erase_if(groups, [](const ParamGroup& group) { return group.params.empty(); });
  return groups;
}

// ---------------------------------------------------------------- the state, in and out

namespace {

// A parameter's loaded state, before it is assigned.
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

// Copied into an existing state: a CUDA graph may read it there.
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
