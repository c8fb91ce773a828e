#include "lockstep/optim/stepper.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>
#include <cctype>
#include <unordered_set>

#include "lockstep/core/error.h"
#include "lockstep/optim/clip.h"

namespace lockstep::optim {
namespace {

class ReplicatedStepper final : public Stepper {
 public:
  ReplicatedStepper(std::shared_ptr<FusedBase> optimizer, NamedParameters names, World world)
      : optimizer_(std::move(optimizer)), names_(std::move(names)), world_(std::move(world)) {
    std::unordered_set<at::TensorImpl*> seen;
    for (const auto& group : optimizer_->param_groups())
      for (const auto& param : group.params())
        if (seen.insert(param.unsafeGetTensorImpl()).second) params_.push_back(param);
    std::unordered_set<at::TensorImpl*> named;
    for (const auto& [name, tensor] : names_) named.insert(tensor.unsafeGetTensorImpl());
    for (const auto& param : params_)
      if (!named.contains(param.unsafeGetTensorImpl()))
        throw UsageError("replicated",
                         "the optimizer has a parameter that none of the {} names belongs to. It "
                         "is probably of another module. Pass named(module) of the one it trains.",
                         names_.size());
  }

  StepResult step(const StepRequest& request) override {
    StepResult result;
    const bool scaled = request.scaler != nullptr && request.scaler->enabled();
    if (scaled) request.scaler->unscale_(*optimizer_);
    if (request.max_grad_norm > 0) {
      result.grad_norm = clip_grad_norm_(params_, request.max_grad_norm);
    } else if (request.want_grad_norm) {
      result.grad_norm = grad_norm(params_);
    }
    if (scaled) {
      request.scaler->step(*optimizer_);
      result.skipped = request.scaler->found_inf(optimizer_.get());
      request.scaler->update();
    } else if (request.skip_non_finite) {
      result.skipped = any_rank_not_finite(result.grad_norm);
      optimizer_->step_unless(result.skipped);
    } else {
      optimizer_->step();
    }
    return result;
  }

  void zero_grad() override { optimizer_->zero_grad(); }

  std::size_t groups() const override { return optimizer_->param_groups().size(); }
  double lr(std::size_t group) const override { return optimizer_->lr(group); }
  void set_lr(std::size_t group, double lr) override { optimizer_->set_lr(group, lr); }

  TensorDict state_dict() override { return optimizer_->state_dict(names_); }
  void load_state_dict(const TensorDict& state) override {
    optimizer_->load_state_dict(names_, state);
  }

 private:
  // The norm is infinite or not a number exactly when a gradient is, or when the sum of squares
  // overflows, which a step would not survive either.
  at::Tensor any_rank_not_finite(const at::Tensor& norm) {
    const at::NoGradGuard no_grad;
    const at::Tensor value = norm.defined() ? norm : grad_norm(params_);
    at::Tensor found = at::isfinite(value).logical_not().to(at::kFloat).reshape({1});
    if (world_.size() > 1) world_.all_reduce(found, ReduceOp::kMax).wait();
    return found;
  }

  std::shared_ptr<FusedBase> optimizer_;
  NamedParameters names_;
  World world_;
  std::vector<at::Tensor> params_;
};

// The patterns by which Hugging Face's Trainer leaves parameters out of weight decay: "bias",
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

std::unique_ptr<Stepper> replicated(std::shared_ptr<FusedBase> optimizer, NamedParameters names,
                                    World world) {
  return std::make_unique<ReplicatedStepper>(std::move(optimizer), std::move(names),
                                             std::move(world));
}

NamedParameters named(const torch::nn::Module& module) {
  return module.named_parameters().pairs();
}

DecayGroups decay_groups(const torch::nn::Module& module) {
  std::unordered_set<at::TensorImpl*> of_norms, seen;
  const auto add_norm = [&](const torch::nn::Module& part) {
    if (part.as<torch::nn::LayerNormImpl>() == nullptr) return;
    for (const auto& param : part.parameters()) of_norms.insert(param.unsafeGetTensorImpl());
  };
  add_norm(module);  // modules() lists itself only where a shared pointer holds it
  for (const auto& part : module.modules(/*include_self=*/false)) add_norm(*part);
  DecayGroups groups;
  for (const auto& item : module.named_parameters()) {
    at::TensorImpl* impl = item.value().unsafeGetTensorImpl();
    if (!item.value().requires_grad() || !seen.insert(impl).second) continue;
    const bool plain = of_norms.contains(impl) || is_named_as_norm_or_bias(item.key());
    (plain ? groups.not_decayed : groups.decayed).push_back(item.value());
  }
  return groups;
}

}  // namespace lockstep::optim
