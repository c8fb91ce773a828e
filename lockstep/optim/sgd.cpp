#include "lockstep/optim/sgd.h"

#include <ATen/ops/_fused_sgd.h>

#include <memory>
#include <optional>

#include "lockstep/core/error.h"
#include "lockstep/kernels/step.h"

namespace lockstep::optim {
namespace {

template <typename T>
void sgd_span(const kernels::Span<T>& span, const void* values) {
  const auto& o = *static_cast<const SGDOptions*>(values);
  kernels::sgd<T>(span.gradient, {span.param, span.state[0]}, span.slice,
                  {.lr = o.lr,
                   .momentum = o.momentum,
                   .dampening = o.dampening,
                   .weight_decay = o.weight_decay,
                   .nesterov = o.nesterov,
                   .first = span.step == 1});
}

class SgdRule final : public RuleOf<SGDOptions> {
 public:
  using RuleOf::RuleOf;

  std::vector<StateSpec> state(at::IntArrayRef sizes) const override {
    return options.state(sizes);
  }
  bool counts_steps() const override { return false; }
  // Momentum begins with the first gradient, undamped. When that step is skipped on the device,
  // the buffer stays zero, and the next step's `momentum * 0 + gradient` is the same; only with
  // dampening is it not, and then the host must know.
  bool needs_host_skip() const override { return options.momentum != 0 && options.dampening != 0; }
  SpanKernels kernels() const override { return {&sgd_span<float>, &sgd_span<double>, &options}; }

  // In CPU memory only 16-bit parameters come here: see kernels(). ATen's fused kernel leaves most
  // of their elements unchanged (LibTorch 2.11).
  void update(const std::vector<StepItem>& items, const at::Tensor& found_inf) const override {
    if (items[0].param.is_cpu()) {
      for (const StepItem& item : items) step_plainly(item);
    } else {
      step_fused(items, found_inf);
    }
  }

 private:
  // PyTorch's operators in PyTorch's order, which decides the bits.
  void step_plainly(const StepItem& item) const {
    at::Tensor change = item.grad;
    if (options.weight_decay != 0) change = change.add(item.param, options.weight_decay);
    if (options.momentum != 0) {
      const at::Tensor& momentum = item.state[0];
      if (item.is_first_step) {
        momentum.copy_(change);
      } else {
        momentum.mul_(options.momentum).add_(change, 1 - options.dampening);
      }
      change = options.nesterov ? change.add(momentum, options.momentum) : momentum;
    }
    item.param.add_(change, -options.lr);
  }

  // ATen's kernel cannot mix first steps with later ones.
  void step_fused(const std::vector<StepItem>& items, const at::Tensor& found_inf) const {
    for (const bool first : {true, false}) {
      std::vector<at::Tensor> params, grads, momenta;
      for (const StepItem& item : items) {
        if (item.is_first_step != first) continue;
        params.push_back(item.param);
        grads.push_back(item.grad);
        if (options.momentum != 0) momenta.push_back(item.state[0]);
      }
      if (params.empty()) continue;
      at::_fused_sgd_(params, grads, momenta, options.weight_decay, options.momentum, options.lr,
                      options.dampening, options.nesterov, /*maximize=*/false, first,
                      /*grad_scale=*/{},
                      found_inf.defined() ? std::optional(found_inf) : std::nullopt);
    }
  }
};

}  // namespace

void SGDOptions::check() const {
  if (nesterov && (momentum <= 0 || dampening != 0))
    throw UsageError(kName,
                     "nesterov with momentum {} and dampening {}. Nesterov momentum needs momentum "
                     "above 0 and dampening 0. Set them, or leave nesterov off.",
                     momentum, dampening);
}

std::unique_ptr<UpdateRule> make_rule(const SGDOptions& options) {
  return std::make_unique<SgdRule>(options);
}

}  // namespace lockstep::optim
