// Adam and AdamW: the same state, two kernels.
#include "lockstep/optim/adam.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

#include <memory>
#include <optional>
#include <type_traits>

#include "lockstep/kernels/step.h"

namespace lockstep::optim {
namespace {

template <typename T, typename Options>
void adam_span(const kernels::Span<T>& span, const void* values) {
  const auto& o = *static_cast<const Options*>(values);
  const kernels::AdamTensors<T> tensors{span.param, span.state[0], span.state[1]};
  const kernels::AdamStep step{.lr = o.lr,
                               .beta1 = o.betas.first,
                               .beta2 = o.betas.second,
                               .eps = o.eps,
                               .weight_decay = o.weight_decay,
                               .step = span.step};
  if constexpr (std::is_same_v<Options, AdamWOptions>) {
    kernels::adamw<T>(span.gradient, tensors, span.slice, step);
  } else {
    kernels::adam<T>(span.gradient, tensors, span.slice, step);
  }
}

template <typename Options>
class AdamRule final : public RuleOf<Options> {
 public:
  using RuleOf<Options>::RuleOf;
  using RuleOf<Options>::options;

  std::vector<StateSpec> state(at::IntArrayRef sizes) const override {
    return options.state(sizes);
  }
  bool needs_host_skip() const override { return false; }
  SpanKernels kernels() const override {
    return {&adam_span<float, Options>, &adam_span<double, Options>, &options};
  }

  void update(const std::vector<StepItem>& items, const at::Tensor& found) const override {
    std::vector<at::Tensor> params, grads, exp_avgs, exp_avg_sqs, steps;
    for (const StepItem& item : items) {
      params.push_back(item.param);
      grads.push_back(item.grad);
      exp_avgs.push_back(item.state[0]);
      exp_avg_sqs.push_back(item.state[1]);
      steps.push_back(item.step);
    }
    const std::optional<at::Tensor> found_inf =
        found.defined() ? std::optional(found) : std::nullopt;
    const auto call = [&](auto&& fused) {
      fused(params, grads, exp_avgs, exp_avg_sqs, std::vector<at::Tensor>{}, steps, options.lr,
            options.betas.first, options.betas.second, options.weight_decay, options.eps,
            /*amsgrad=*/false, /*maximize=*/false, std::optional<at::Tensor>{}, found_inf);
    };
    if constexpr (std::is_same_v<Options, AdamWOptions>) {
      call([](auto&&... args) { at::_fused_adamw_(args...); });
    } else {
      call([](auto&&... args) { at::_fused_adam_(args...); });
    }
  }
};

}  // namespace

std::unique_ptr<UpdateRule> make_rule(const AdamWOptions& options) {
  return std::make_unique<AdamRule<AdamWOptions>>(options);
}
std::unique_ptr<UpdateRule> make_rule(const AdamOptions& options) {
  return std::make_unique<AdamRule<AdamOptions>>(options);
}

}  // namespace lockstep::optim
