#include "lockstep/optim/sgd.h"

#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/serialize.h>
#include <torch/utils.h>

#include <memory>
#include <optional>

#include "lockstep/optim/cpu_step.h"

namespace lockstep::optim {
namespace {

constexpr std::string_view kName = SGDOptions::kName;
using SgdGroup = detail::GroupOptions<SGDOptions>;

// What one call of ATen's kernel takes; it cannot mix first steps with later ones.
struct SgdCall {
  std::vector<at::Tensor> params, grads, momenta;
};

void step_with_aten(const SgdCall& call, const at::Tensor& skipped, const SGDOptions& options,
                    bool is_first_step) {
  if (call.params.empty()) return;
  const std::optional<at::Tensor> found_inf =
      skipped.defined() ? std::optional(skipped) : std::nullopt;
  at::_fused_sgd_(call.params, call.grads, call.momenta, options.weight_decay, options.momentum,
                  options.lr, options.dampening, options.nesterov, /*maximize=*/false,
                  is_first_step, /*grad_scale=*/{}, found_inf);
}

}  // namespace

namespace detail {

void check(const SGDOptions& options) {
  check_option(options.lr >= 0, kName, "lr", options.lr);
  check_option(options.momentum >= 0, kName, "momentum", options.momentum);
  check_option(options.weight_decay >= 0, kName, "weight_decay", options.weight_decay);
  if (options.nesterov && (options.momentum <= 0 || options.dampening != 0)) {
    throw UsageError(kName,
                     "nesterov with momentum {} and dampening {}. Nesterov momentum needs momentum "
                     "above 0 and dampening 0. Set them, or leave nesterov off.",
                     options.momentum, options.dampening);
  }
}

void read(torch::serialize::InputArchive& archive, SGDOptions& options) {
  c10::IValue value;
  archive.read("lr", value);
  options.lr = value.toDouble();
  archive.read("momentum", value);
  options.momentum = value.toDouble();
  archive.read("dampening", value);
  options.dampening = value.toDouble();
  archive.read("weight_decay", value);
  options.weight_decay = value.toDouble();
  archive.read("nesterov", value);
  options.nesterov = value.toBool();
}

void write(torch::serialize::OutputArchive& archive, const SGDOptions& options) {
  archive.write("lr", c10::IValue(options.lr));
  archive.write("momentum", c10::IValue(options.momentum));
  archive.write("dampening", c10::IValue(options.dampening));
  archive.write("weight_decay", c10::IValue(options.weight_decay));
  archive.write("nesterov", c10::IValue(options.nesterov));
}

}  // namespace detail

void SGD::step_batch(const detail::Batch& batch, const SGDOptions& options) {
  if (detail::skipped(batch)) return;
  const bool keeps_momentum = options.momentum != 0;
  // Momentum begins with the first gradient, undamped. When that step is skipped on the device,
  // the buffer stays zero, and the next step's `momentum * 0 + gradient` is the same; only with
  // dampening it is not, and then the host must know.
  if (keeps_momentum && batch.found_inf.defined() && options.dampening != 0 &&
      batch.found_inf.item<float>() != 0)
    return;
  std::vector<detail::CpuItem> here;
  SgdCall first, later;
  for (std::size_t i = 0; i < batch.params.size(); ++i) {
    const auto& param = batch.params[i];
    const auto& grad = batch.grads[i];
    bool is_first = false;
    at::Tensor momentum;
    if (keeps_momentum) {
      auto& slot = state_[param.unsafeGetTensorImpl()];
      is_first = slot == nullptr;
      if (is_first) {
        auto fresh = std::make_unique<SGDState>();
        fresh->momentum_buffer = at::zeros_like(param);
        slot = std::move(fresh);
      }
      momentum = static_cast<const SGDState&>(*slot).momentum_buffer;
    }
    if (detail::covered({param, grad, keeps_momentum ? momentum : param})) {
      here.push_back({param, grad, momentum, {}, is_first ? 1.0 : 2.0});
      continue;
    }
    SgdCall& call = is_first ? first : later;
    call.params.push_back(param);
    call.grads.push_back(grad);
    if (keeps_momentum) call.momenta.push_back(momentum);
  }
  detail::step_on_cpu(here, options);
  step_with_aten(first, batch.found_inf, options, /*is_first_step=*/true);
  step_with_aten(later, batch.found_inf, options, /*is_first_step=*/false);
  detail::count_versions(batch);
}

SGD::State SGD::state_of(const at::Tensor& param, torch::optim::OptimizerParamGroup& group) {
  const auto slot = state_.find(param.unsafeGetTensorImpl());
  const bool stepped = slot != state_.end();
  State state{at::scalar_tensor(stepped ? 1.0 : 0.0, at::kDouble), {}};
  if (detail::values_of<SGDOptions>(kName, group).momentum == 0) return state;
  state.tensors.emplace_back("momentum_buffer",
                             stepped ? static_cast<const SGDState&>(*slot->second).momentum_buffer
                                     : at::zeros(param.sizes(), param.options().device(at::kCPU)));
  return state;
}

void SGD::set_state(const at::Tensor& param, State state) {
  if (state.tensors.empty() || state.step.item<double>() == 0) {
    state_.erase(param.unsafeGetTensorImpl());
    return;
  }
  auto fresh = std::make_unique<SGDState>();
  fresh->momentum_buffer = at::empty_like(param).copy_(state.tensors[0].second);
  state_[param.unsafeGetTensorImpl()] = std::move(fresh);
}

void SGD::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<SGDState, SgdGroup>(archive, *this);
}

void SGD::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<SGDState, SgdGroup>(archive, *this);
  for (const auto& group : param_groups_) {
    for (const auto& param : group.params()) {
      const auto slot = state_.find(param.unsafeGetTensorImpl());
      if (slot == state_.end()) continue;
      detail::check_loaded(kName, param,
                           static_cast<const SGDState&>(*slot->second).momentum_buffer);
    }
  }
}

void SGDState::serialize(torch::serialize::InputArchive& archive) {
  archive.read("momentum_buffer", momentum_buffer);
}

void SGDState::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("momentum_buffer", momentum_buffer);
}

}  // namespace lockstep::optim
