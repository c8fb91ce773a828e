#include "lockstep/optim/rmsprop.h"

#include <memory>
#include <vector>

namespace lockstep::optim {
namespace {

// PyTorch's operators in PyTorch's order, which decides the bits.
class RMSpropRule final : public RuleOf<RMSpropOptions> {
 public:
  using RuleOf::RuleOf;

  std::vector<StateSpec> state(at::IntArrayRef sizes) const override {
    return options.state(sizes);
  }
  bool counts_steps() const override { return false; }
  void update(const std::vector<StepItem>& items, const at::Tensor&) const override {
    for (const StepItem& item : items) {
      const at::Tensor grad =
          options.weight_decay == 0 ? item.grad : item.grad.add(item.param, options.weight_decay);
      const at::Tensor& square_avg = item.state[0];
      square_avg.mul_(options.alpha).addcmul_(grad, grad, 1 - options.alpha);
      const at::Tensor divisor = square_avg.sqrt().add_(options.eps);
      if (options.momentum > 0) {
        item.state[1].mul_(options.momentum).addcdiv_(grad, divisor);
        item.param.add_(item.state[1], -options.lr);
      } else {
        item.param.addcdiv_(grad, divisor, -options.lr);
      }
    }
  }
};

}  // namespace

std::unique_ptr<UpdateRule> make_rule(const RMSpropOptions& options) {
  return std::make_unique<RMSpropRule>(options);
}

}  // namespace lockstep::optim
