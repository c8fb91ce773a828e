#include "lockstep/optim/adafactor.h"

#include <ATen/ATen.h>

#include <cmath>

#include "lockstep/core/error.h"

namespace lockstep::optim {
namespace {

at::Tensor root_mean_square(const at::Tensor& values) {
  return values.norm() / std::sqrt(static_cast<double>(values.numel()));
}

class AdafactorRule final : public RuleOf<AdafactorOptions> {
 public:
  using RuleOf::RuleOf;

  // An update is bounded by its own norm, which takes the whole tensor.
  Granularity granularity() const override { return Granularity::kTensors; }

  std::vector<StateSpec> state(at::IntArrayRef sizes) const override {
    return options.state(sizes);
  }

  void update(const std::vector<StepItem>& items, const at::Tensor&) const override {
    for (const StepItem& item : items) update_one(item);
  }

 private:
  void update_one(const StepItem& item) const {
    const at::Tensor grad = item.grad.to(item.state[0].scalar_type());
    const at::Tensor param = item.param.to(item.state[0].scalar_type());
    // Computed on the device, where the count is: the host does not wait for it.
    const at::Tensor steps = item.step.to(at::kDouble);
    const at::Tensor fresh = steps.pow(options.decay_rate);  // share of this step's squares
    at::Tensor change = normalized(item, grad, fresh);
    change = change / (root_mean_square(change) / options.clip_threshold).clamp_min(1);
    const at::Tensor rate = learning_rate(param, steps).to(param.scalar_type());
    change = change * rate;
    if (options.beta1 > 0) {
      const at::Tensor& average = item.state.back();
      change = average.mul_(options.beta1).add_(change, 1 - options.beta1);
    }
    at::Tensor result = param;
    if (options.weight_decay != 0) result = result - result * (rate * options.weight_decay);
    item.param.copy_(result - change);
  }

  // The gradient over the root of its second moment.
  at::Tensor normalized(const StepItem& item, const at::Tensor& grad,
                        const at::Tensor& fresh) const {
    const at::Tensor squares = grad.square() + options.eps.first;
    const auto average = [&](const at::Tensor& state, const at::Tensor& values) {
      state.mul_((1 - fresh).to(state.scalar_type())).add_(values * fresh.to(state.scalar_type()));
      return state;
    };
    if (grad.dim() < 2) return average(item.state[0], squares).rsqrt() * grad;
    const at::Tensor rows = average(item.state[0], squares.mean(-1));
    const at::Tensor columns = average(item.state[1], squares.mean(-2));
    const at::Tensor by_row = (rows / rows.mean(-1, /*keepdim=*/true)).rsqrt().unsqueeze(-1);
    return by_row * columns.unsqueeze(-2).rsqrt() * grad;
  }

  at::Tensor learning_rate(const at::Tensor& param, const at::Tensor& steps) const {
    at::Tensor rate = at::full_like(steps, options.lr);
    if (options.relative_step) {
      const at::Tensor least = options.warmup_init ? steps * 1e-6 : at::full_like(steps, 1e-2);
      rate = at::minimum(least, steps.rsqrt());
    }
    if (options.scale_parameter)
      rate = rate * root_mean_square(param).to(at::kDouble).clamp_min(options.eps.second);
    return rate;
  }
};

}  // namespace

void AdafactorOptions::check() const {
  if (warmup_init && !relative_step)
    throw UsageError(kName, "warmup_init is for relative steps. Set relative_step, too.");
  if (clip_threshold <= 0)
    throw UsageError(kName, "clip_threshold {} must be above 0.", clip_threshold);
}

std::unique_ptr<UpdateRule> make_rule(const AdafactorOptions& options) {
  return std::make_unique<AdafactorRule>(options);
}

}  // namespace lockstep::optim
