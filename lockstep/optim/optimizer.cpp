#include "lockstep/optim/optimizer.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>
#include <cctype>
#include <unordered_map>
#include <unordered_set>

#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/kernels/cuda/graph.h"
#include "lockstep/kernels/cuda/table.h"
#include "lockstep/optim/adamw_pass.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/cpu_step.h"
#include "lockstep/optim/local_gradients.h"

namespace lockstep::optim {
namespace {

constexpr const char* kOptimizer = "optimizer";

std::vector<at::Tensor> trainable(const NamedParameters& names) {
  std::vector<at::Tensor> params;
  for (const auto& [name, tensor] : names)
    if (tensor.requires_grad()) params.push_back(tensor);
  return params;
}

// The names by which Hugging Face's Trainer excludes parameters from weight decay: "bias",
// "layernorm" or "rmsnorm" anywhere in the name, "norm" as a whole part of it, or "_norm" at the
// end of a part.
bool is_named_as_norm_or_bias(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const char* word : {"bias", "layernorm", "rmsnorm"})
    if (name.find(word) != std::string::npos) return true;
  std::size_t begin = 0;
  while (begin <= name.size()) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    if (part == "norm" || part.ends_with("_norm")) return true;
    begin = end + 1;
  }
  return false;
}

}  // namespace

void detail::check(const StepOptions& options) {
  if (!(options.max_grad_norm >= 0))
    throw UsageError(kOptimizer, "max_grad_norm = {} must be positive, or 0 for no clipping.",
                     options.max_grad_norm);
}

// ---------------------------------------------------------------- Optimizer

Optimizer::Optimizer(const std::vector<ParamGroup>& groups) {
  for (const auto& group : groups) groups_.push_back(group.options);
}

Rule& Optimizer::options(std::size_t group) {
  detail::check_group(kOptimizer, group, groups_.size());
  return groups_[group];
}

double Optimizer::lr(std::size_t group) const {
  detail::check_group(kOptimizer, group, groups_.size());
  return groups_[group].get("lr");
}

void Optimizer::set_lr(double lr) {
  for (std::size_t group = 0; group < groups_.size(); ++group) set_lr(group, lr);
}

void Optimizer::set_lr(std::size_t group, double lr) {
  options(group).set("lr", lr);
}

// ---------------------------------------------------------------- ReplicatedOptimizer

ReplicatedOptimizer::ReplicatedOptimizer(NamedParameters names, Rule options, World world)
    : ReplicatedOptimizer(names, std::vector<ParamGroup>{{trainable(names), std::move(options)}},
                          std::move(world)) {}

ReplicatedOptimizer::ReplicatedOptimizer(NamedParameters names, std::vector<ParamGroup> groups,
                                         World world)
    : Optimizer(groups), names_(std::move(names)), world_(std::move(world)) {
  std::unordered_map<at::TensorImpl*, std::size_t> grouped;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    parts_.push_back(std::make_unique<RuleOptimizer>(
        std::vector{torch::optim::OptimizerParamGroup(groups[g].params)}, groups[g].options));
    for (const auto& param : groups[g].params)
      if (grouped.emplace(param.unsafeGetTensorImpl(), g).first->second != g)
        throw UsageError(kOptimizer, "a parameter of shape [{}] is in two groups. Put it into one.",
                         fmt::join(param.sizes(), ", "));
  }
  std::unordered_set<at::TensorImpl*> seen;
  for (const auto& [name, tensor] : names_) {
    const auto found = grouped.find(tensor.unsafeGetTensorImpl());
    if (found == grouped.end() || !seen.insert(found->first).second) continue;
    params_.push_back(tensor);
    group_of_.emplace(name, found->second);
  }
  if (params_.size() != grouped.size())
    throw UsageError(kOptimizer,
                     "{} of {} parameters in the groups have none of the {} names. They are "
                     "probably of another module. Pass module->named_parameters().pairs() of the "
                     "one that is trained.",
                     grouped.size() - params_.size(), grouped.size(), names_.size());
}

ReplicatedOptimizer::~ReplicatedOptimizer() = default;

void ReplicatedOptimizer::apply_options() {
  for (std::size_t g = 0; g < parts_.size(); ++g) {
    Rule& held = static_cast<detail::GroupRule&>(parts_[g]->param_groups()[0].options()).rule;
    if (held->name() != groups_[g]->name())
      throw UsageError(
          kOptimizer,
          "group {} has options of another optimizer: it was made with {}, whose state "
          "{} cannot use. Make a new optimizer.",
          g, held->name(), groups_[g]->name());
    groups_[g]->check();
    held = groups_[g];
  }
}

StepResult ReplicatedOptimizer::step(const StepOptions& options) {
  const ledger::PhaseScope optimizer(ledger::Phase::kOptimizer);
  detail::check(options);
  apply_options();
  GradScaler* const scaler =
      options.scaler != nullptr && options.scaler->enabled() ? options.scaler : nullptr;
  if (has_pass()) return step_in_one_pass(options, scaler);
  if (kernels::cuda::capturing())
    throw Error(kOptimizer,
                "a parameter has no gradient, so that the step would have a fixed learning rate");
  if (scaler != nullptr) scaler->unscale_(this, params_);
  // Where kernels sum blocks, the norm has the bits of ShardedOptimizer's.
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
  for (auto& part : parts_) {
    if (result.skipped.defined()) {
      part->step_unless(result.skipped);
    } else {
      part->step();
    }
  }
  if (scaler != nullptr) scaler->update();
  return result;
}

// ---------------------------------------------------------------- in one pass, on a GPU

// Decided at the first step, when the model is where it is trained.
bool ReplicatedOptimizer::has_pass() {
  const auto has_gradient = [](const auto& param) { return param.grad().defined(); };
  const bool all_have_gradients =
      std::any_of(params_.begin(), params_.end(), has_gradient) &&
      std::all_of(params_.begin(), params_.end(), [&](const auto& param) {
        return has_gradient(param) || !param.requires_grad();  // or was frozen meanwhile
      });
  if (pass_ || !no_pass_.empty()) return pass_ != nullptr && all_have_gradients;
  const c10::Device device = params_.empty() ? c10::Device(c10::kCPU) : params_[0].device();
  const bool adamw = std::all_of(groups_.begin(), groups_.end(),
                                 [](const Rule& rule) { return rule.is<AdamWOptions>(); });
  const bool fits = std::all_of(params_.begin(), params_.end(), [&](const auto& param) {
    return param.device() == device && param.scalar_type() == at::kFloat && param.is_contiguous();
  });
  if (!adamw) no_pass_ = "the optimizer is not AdamW";
  if (!fits) no_pass_ = "parameters are not contiguous float tensors of one device";
  if (!device.is_cuda()) no_pass_ = "the parameters are not on a GPU";
  if (no_pass_.empty() && kernels::cuda::table() == nullptr)
    no_pass_ = kernels::cuda::unavailable_reason();
  if (!no_pass_.empty()) return false;
  std::vector<AdamWItem> items;
  std::vector<AdamWOptions> groups;
  std::unordered_map<at::TensorImpl*, std::size_t> group_of;
  for (std::size_t g = 0; g < parts_.size(); ++g) {
    groups.push_back(groups_[g].as<AdamWOptions>());
    for (const auto& param : parts_[g]->param_groups()[0].params())
      group_of[param.unsafeGetTensorImpl()] = g;
  }
  for (const auto& param : params_) {
    const std::size_t g = group_of.at(param.unsafeGetTensorImpl());
    const RuleState& state = parts_[g]->ensure_state(param, *groups_[g]);
    items.push_back({.param = param,
                     .grad = {},
                     .exp_avg = state["exp_avg"],
                     .exp_avg_sq = state["exp_avg_sq"],
                     .step = state.step,
                     .group = g});
  }
  pass_ = std::make_unique<AdamWPass>(std::move(items), std::move(groups));
  return all_have_gradients;
}

void ReplicatedOptimizer::publish_options(const StepOptions& options) {
  if (!pass_) return;
  for (std::size_t g = 0; g < groups_.size(); ++g)
    pass_->set_options(g, groups_[g].as<AdamWOptions>());
  pass_->set_max_norm(options.max_grad_norm);
  pass_->prepare_capture();
}

std::string ReplicatedOptimizer::unavailable_for_capture(const StepOptions&) {
  return has_pass() || pass_ ? "" : no_pass_;
}

StepResult ReplicatedOptimizer::step_in_one_pass(const StepOptions& options, GradScaler* scaler) {
  refuse_local_gradients(params_, kOptimizer);
  // What a graph would write in every replay is written before it is captured.
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

// The norm is infinite or not a number exactly when a gradient is, or when the sum of squares
// overflows, which a step would not survive either.
at::Tensor ReplicatedOptimizer::any_rank_not_finite(const at::Tensor& norm) {
  const at::NoGradGuard no_grad;
  at::Tensor found = at::isfinite(norm).logical_not().to(at::kFloat).reshape({1});
  if (world_.size() > 1) world_.all_reduce(found, ReduceOp::kMax).wait();
  return found;
}

void ReplicatedOptimizer::zero_grad() {
  for (auto& part : parts_) part->zero_grad();
}

TensorDict ReplicatedOptimizer::state_dict(const StateDictOptions& options) {
  TensorDict state;
  if (!options.wanted) return state;
  for (auto& part : parts_) state.merge(part->state_dict(names_, options.copy));
  return state;
}

void ReplicatedOptimizer::load_state_dict(const TensorDict& state) {
  // What belongs to no parameter goes to the first, which refuses it.
  std::vector<TensorDict> states(parts_.size());
  for (const auto& [key, tensor] : state) {
    const auto group = group_of_.find(key.substr(0, key.rfind('.')));
    states[group == group_of_.end() ? 0 : group->second].emplace(key, tensor);
  }
  for (std::size_t g = 0; g < parts_.size(); ++g) parts_[g]->check_state_dict(names_, states[g]);
  for (std::size_t g = 0; g < parts_.size(); ++g) parts_[g]->load_state_dict(names_, states[g]);
}

// ---------------------------------------------------------------- groups

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

}  // namespace lockstep::optim
