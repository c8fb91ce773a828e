#include "lockstep/optim/lion.h"

#include <ATen/ops/lerp.h>

namespace lockstep::optim {
namespace {

class LionRule final : public RuleOf<LionOptions> {
 public:
  using RuleOf::RuleOf;

  std::vector<StateSpec> state(at::IntArrayRef sizes) const override {
    return options.state(sizes);
  }
  void update(const std::vector<StepItem>& items, const at::Tensor&) const override {
    for (const StepItem& item : items) {
      const at::Tensor& average = item.state[0];
      const at::Tensor direction = average.lerp(item.grad, 1 - options.betas.first).sign_();
      item.param.mul_(1 - options.lr * options.weight_decay).add_(direction, -options.lr);
      average.lerp_(item.grad, 1 - options.betas.second);
    }
  }
};

}  // namespace

std::unique_ptr<UpdateRule> make_rule(const LionOptions& options) {
  return std::make_unique<LionRule>(options);
}

}  // namespace lockstep::optim
