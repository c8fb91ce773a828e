#include "lockstep/parallel/sharded_stepper.h"

#include <ATen/ATen.h>

#include <limits>
#include <utility>

namespace lockstep {
namespace {

class ShardedStepper final : public optim::Stepper {
 public:
  explicit ShardedStepper(std::unique_ptr<ShardedOptimizer> optimizer)
      : optimizer_(std::move(optimizer)) {}

  optim::StepResult step(const optim::StepRequest& request) override {
    optim::GradScaler* scaler =
        request.scaler != nullptr && request.scaler->enabled() ? request.scaler : nullptr;
    // Infinity clips nothing, and has the norm computed.
    const double no_clip = request.want_grad_norm ? std::numeric_limits<double>::infinity() : 0;
    optimizer_->options() = {
        .max_grad_norm = request.max_grad_norm > 0 ? request.max_grad_norm : no_clip,
        .skip_non_finite = request.skip_non_finite || scaler != nullptr,
        .loss_scale = scaler != nullptr ? scaler->get_scale() : 1};
    const StepOutcome outcome = optimizer_->step();
    if (scaler != nullptr) {
      scaler->record_step(optimizer_.get(), outcome.skipped);
      scaler->update();
    }
    optim::StepResult result;
    if (request.max_grad_norm > 0 || request.want_grad_norm)
      result.grad_norm = at::scalar_tensor(outcome.grad_norm, at::kFloat);
    if (scaler != nullptr || request.skip_non_finite)
      result.skipped = at::full({1}, outcome.skipped ? 1.0 : 0.0, at::kFloat);
    return result;
  }

  void zero_grad() override { optimizer_->zero_grad(); }

  std::size_t groups() const override { return optimizer_->groups(); }
  double lr(std::size_t group) const override { return optimizer_->lr(group); }
  void set_lr(std::size_t group, double lr) override { optimizer_->set_lr(group, lr); }

  optim::TensorDict state_dict() override { return optimizer_->state_dict(); }
  void load_state_dict(const optim::TensorDict& state) override {
    optimizer_->load_state_dict(state);
  }
  void sync_from_model() override { optimizer_->sync_from_model(); }

 private:
  std::unique_ptr<ShardedOptimizer> optimizer_;
};

}  // namespace

std::unique_ptr<optim::Stepper> sharded(std::unique_ptr<ShardedOptimizer> optimizer) {
  return std::make_unique<ShardedStepper>(std::move(optimizer));
}

}  // namespace lockstep
