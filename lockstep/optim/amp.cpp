#include "lockstep/optim/amp.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/utils.h>

#include <cmath>
#include <unordered_set>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/optim/local_gradients.h"

namespace lockstep::optim {

namespace {

constexpr const char* kScaler = "GradScaler";

void check(const GradScalerOptions& options) {
  if (!(options.init_scale > 0) || !std::isfinite(options.init_scale))
    throw UsageError(kScaler,
                     "init_scale = {} is not a scale. Use a positive number, 65536 by default.",
                     options.init_scale);
  if (!(options.growth_factor > 1))
    throw UsageError(kScaler, "growth_factor = {} does not grow. It must be above 1.",
                     options.growth_factor);
  if (!(options.backoff_factor < 1) || !(options.backoff_factor > 0))
    throw UsageError(kScaler, "backoff_factor = {} does not shrink. It must be between 0 and 1.",
                     options.backoff_factor);
  if (options.growth_interval < 1)
    throw UsageError(kScaler,
                     "growth_interval = {} is not a number of steps. It must be at least 1.",
                     options.growth_interval);
}

std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> params;
  std::unordered_set<at::TensorImpl*> seen;
  for (const auto& group : optimizer.param_groups())
    for (const auto& param : group.params())
      if (seen.insert(param.unsafeGetTensorImpl()).second) params.push_back(param);
  return params;
}

}  // namespace

GradScaler::GradScaler(World world, const GradScalerOptions& options)
    : world_(std::move(world)), options_(options) {
  if (options_.enabled) check(options_);
}

void GradScaler::make_scale(const c10::Device& device) {
  scale_ = at::full({}, options_.init_scale, at::dtype(at::kFloat).device(device));
  growth_tracker_ = at::full({}, initial_tracker_, at::dtype(at::kInt).device(device));
}

void GradScaler::require_scale(const char* call) const {
  if (scale_.defined()) return;
  throw UsageError(kScaler,
                   "{} was called, but no loss was scaled yet. The gradients are probably those of "
                   "the loss itself. Call scaler.scale(loss).backward().",
                   call);
}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!options_.enabled) return loss;
  if (!scale_.defined()) make_scale(loss.device());
  return loss * to_device(scale_, loss.device());
}

// Multiplies the gradients by 1 / scale and returns whether any rank found one that is not finite.
at::Tensor GradScaler::check_and_unscale(const std::vector<at::Tensor>& params) {
  refuse_local_gradients(params, kScaler);
  refuse_incomplete(params, kScaler);
  struct Grads {
    at::Tensor found_inf, inverse;
    std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype;
  };
  std::map<std::string, Grads> devices;
  const at::Tensor inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  at::Tensor found_inf = at::zeros({1}, scale_.options());
  for (const auto& param : params) {
    at::Tensor grad = param.grad();
    if (!grad.defined()) continue;
    if (grad.scalar_type() == at::kHalf)
      throw UsageError(
          kScaler,
          "a parameter of this optimizer has fp16 gradients, which cannot be unscaled "
          "without losing what scaling preserved. The model was probably converted to fp16. "
          "Keep its parameters in float32 and use Autocast.");
    if (grad.layout() == at::kSparse) grad = grad._values();
    Grads& here = devices[grad.device().str()];
    if (!here.found_inf.defined()) {
      here.found_inf = at::zeros({1}, found_inf.options().device(grad.device()));
      here.inverse = to_device(inverse, grad.device());
    }
    here.by_dtype[grad.scalar_type()].push_back(grad);
  }
  for (auto& [name, here] : devices) {
    for (auto& [dtype, grads] : here.by_dtype)
      at::_amp_foreach_non_finite_check_and_unscale_(grads, here.found_inf, here.inverse);
    found_inf = at::maximum(found_inf, to_device(here.found_inf, found_inf.device()));
  }
  if (world_.size() > 1) world_.all_reduce(found_inf, ReduceOp::kMax).wait();
  return found_inf;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  unscale_(&optimizer, parameters_of(optimizer));
}

void GradScaler::unscale_(const void* optimizer, const std::vector<at::Tensor>& params) {
  if (!options_.enabled) return;
  require_scale("unscale_()");
  PerOptimizer& state = optimizers_[optimizer];
  if (state.stage == Stage::kUnscaled)
    throw UsageError(kScaler,
                     "unscale_() was already called on this optimizer since the last update(). The "
                     "gradients would be divided twice. Call it once per step.");
  if (state.stage == Stage::kStepped)
    throw UsageError(kScaler,
                     "unscale_() was called after step(). The gradients are already unscaled and "
                     "used. Call update() first.");
  const torch::NoGradGuard no_grad;
  state.found_inf = check_and_unscale(params);
  state.stage = Stage::kUnscaled;
}

void GradScaler::record_step(const void* optimizer, bool skipped) {
  if (!options_.enabled) return;
  require_scale("record_step()");
  PerOptimizer& state = optimizers_[optimizer];
  if (state.stage != Stage::kReady)
    throw UsageError(kScaler,
                     "a step of this optimizer was already recorded since the last update(). Call "
                     "update() once per step, after all optimizers.");
  state = {Stage::kStepped, at::full({1}, skipped ? 1.0 : 0.0, scale_.options())};
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) return;
  require_scale("update()");
  const torch::NoGradGuard no_grad;
  if (new_scale) {
    if (!(*new_scale > 0) || !std::isfinite(*new_scale))
      throw UsageError(kScaler, "a new scale of {} is not a scale. Use a positive number.",
                       *new_scale);
    scale_.fill_(*new_scale);
  } else {
    at::Tensor found_inf;
    for (const auto& [optimizer, state] : optimizers_) {
      if (!state.found_inf.defined()) continue;
      found_inf = found_inf.defined() ? at::maximum(found_inf, state.found_inf) : state.found_inf;
    }
    if (!found_inf.defined())
      throw UsageError(kScaler,
                       "update() was called, but no gradient was checked since the last one. "
                       "Nothing says whether the scale is too large. Call step() or unscale_() "
                       "before it.");
    at::_amp_update_scale_(scale_, growth_tracker_, found_inf, options_.growth_factor,
                           options_.backoff_factor, options_.growth_interval);
  }
  optimizers_.clear();
}

at::Tensor GradScaler::found_inf(const void* optimizer) const {
  const auto found = optimizers_.find(optimizer);
  return found == optimizers_.end() ? at::Tensor() : found->second.found_inf;
}

double GradScaler::get_scale() const {
  if (!options_.enabled) return 1;
  return scale_.defined() ? scale_.item<double>() : options_.init_scale;
}

GradScalerState GradScaler::state_dict() const {
  return {get_scale(), options_.growth_factor, options_.backoff_factor, options_.growth_interval,
          growth_tracker_.defined() ? growth_tracker_.item<int>() : initial_tracker_};
}

void GradScaler::load_state_dict(const GradScalerState& state) {
  if (!options_.enabled) return;
  GradScalerOptions loaded = options_;
  loaded.init_scale = state.scale;
  loaded.growth_factor = state.growth_factor;
  loaded.backoff_factor = state.backoff_factor;
  loaded.growth_interval = state.growth_interval;
  check(loaded);
  options_ = loaded;
  initial_tracker_ = state.growth_tracker;
  if (scale_.defined()) {
    const torch::NoGradGuard no_grad;
    scale_.fill_(state.scale);
    growth_tracker_.fill_(state.growth_tracker);
  }
  optimizers_.clear();
}

// ---------------------------------------------------------------- Autocast

namespace {

void check(c10::Device device, c10::ScalarType dtype) {
  if (!device.is_cpu() && !device.is_cuda())
    throw UsageError("Autocast", "there is no autocasting for {} here. It works on cpu and cuda.",
                     device.str());
  if (dtype != at::kHalf && dtype != at::kBFloat16 && dtype != at::kFloat)
    throw UsageError("Autocast",
                     "{} is not a type to compute in. Use kBFloat16 or kHalf, or kFloat to switch "
                     "autocasting off.",
                     c10::toString(dtype));
}

}  // namespace

Autocast::Autocast(c10::Device device, c10::ScalarType dtype, bool cache_enabled)
    : type_(device.type()) {
  check(device, dtype);
  was_enabled_ = at::autocast::is_autocast_enabled(type_);
  was_dtype_ = at::autocast::get_autocast_dtype(type_);
  was_cached_ = at::autocast::is_autocast_cache_enabled();
  const bool on = dtype != at::kFloat;
  at::autocast::set_autocast_enabled(type_, on);
  if (on) at::autocast::set_autocast_dtype(type_, dtype);
  at::autocast::set_autocast_cache_enabled(cache_enabled);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(type_, was_enabled_);
  at::autocast::set_autocast_dtype(type_, was_dtype_);
  at::autocast::set_autocast_cache_enabled(was_cached_);
}

}  // namespace lockstep::optim
