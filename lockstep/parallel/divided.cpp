#include "lockstep/parallel/divided.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <limits>

#include "lockstep/core/error.h"

namespace lockstep::parallel {

void own_memory(at::Tensor tensor) {
  const bool alone = tensor.is_contiguous() && tensor.storage_offset() == 0 &&
                     tensor.storage().nbytes() == tensor.nbytes();
  if (!alone || tensor.storage().use_count() > 1)
    tensor.set_data(tensor.detach().clone(at::MemoryFormat::Contiguous));
  tensor.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);
}

// Ranks are named by their place along `where`.
void require_same(World& world, const std::string& component, const std::string& kind,
                  const std::string& where, const Fingerprints& fingerprints) {
  const auto difference =
      find_difference(world, {.component = component, .what = "this comparison"}, fingerprints);
  if (!difference) return;
  throw CommError(
      component,
      fmt::format(
          "copies differ: {} '{}' on {}{} is not what it is on rank 0. Something changed it "
          "outside the optimizer's step, or ranks took different steps. Change it on every "
          "rank alike, and resume from a checkpoint.",
          kind, difference->name, show_ranks(difference->ranks), where),
      {.rank = world.rank(), .peer = difference->ranks[0], .operation = "verify"});
}

// On a GPU the host does not read the norm: where it is not finite every gradient becomes NaN, and
// the optimizers of the parts skip the step.
optim::StepResult step_divided(const void* optimizer, const optim::StepOptions& options,
                               const DividedStep& parts) {
  optim::GradScaler* const scaler =
      options.scaler != nullptr && options.scaler->enabled() ? options.scaler : nullptr;
  const bool may_skip = options.skip_non_finite || scaler != nullptr;
  const bool clips = options.max_grad_norm > 0;
  optim::StepResult result;
  bool skipped = false;
  bool device_decides = false;
  if (may_skip || clips || options.want_grad_norm) {
    const double unscale = scaler != nullptr ? 1 / scaler->get_scale() : 1;
    const at::Tensor all = parts.norm() * unscale;
    if (clips || options.want_grad_norm) result.grad_norm = all;
    if (may_skip) result.skipped = at::isfinite(all).logical_not().to(at::kFloat).reshape({1});
    device_decides = may_skip && scaler == nullptr && !all.is_cpu();
    skipped = may_skip && !device_decides && result.was_skipped();
    at::Tensor factor = at::full_like(all, unscale);
    if (clips) factor = factor * (options.max_grad_norm / (all + 1e-6)).clamp_max(1);
    if (device_decides)
      factor = at::where(at::isfinite(all), factor,
                         at::full_like(all, std::numeric_limits<double>::quiet_NaN()));
    if (!skipped && (!factor.is_cpu() || factor.item<double>() != 1)) parts.scale(factor);
  }
  if (!skipped) parts.step({.skip_non_finite = device_decides});
  if (scaler != nullptr) {
    scaler->record_step(optimizer, skipped);
    scaler->update();
  }
  return result;
}

}  // namespace lockstep::parallel
