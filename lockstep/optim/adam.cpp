// Adam and AdamW: the same state and archive, two kernels.
#include "lockstep/optim/adam.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/serialize.h>
#include <torch/utils.h>

#include <memory>
#include <optional>
#include <type_traits>

#include "lockstep/optim/cpu_step.h"

namespace lockstep::optim {

void AdamState::serialize(torch::serialize::InputArchive& archive) {
  archive.read("step", step);
  archive.read("exp_avg", exp_avg);
  archive.read("exp_avg_sq", exp_avg_sq);
}

void AdamState::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("step", step);
  archive.write("exp_avg", exp_avg);
  archive.write("exp_avg_sq", exp_avg_sq);
}

namespace detail {
namespace {

std::unique_ptr<AdamState> fresh_state(const at::Tensor& param) {
  auto fresh = std::make_unique<AdamState>();
  fresh->step = at::zeros({}, param.options().dtype(at::kFloat).requires_grad(false));
  fresh->exp_avg = at::zeros_like(param);
  fresh->exp_avg_sq = at::zeros_like(param);
  return fresh;
}

template <typename Options>
void check_adam(const Options& options) {
  constexpr std::string_view kName = Options::kName;
  const auto [beta1, beta2] = options.betas;
  check_option(options.lr >= 0, kName, "lr", options.lr);
  check_option(options.eps >= 0, kName, "eps", options.eps);
  check_option(beta1 >= 0 && beta1 < 1, kName, "betas.first", beta1);
  check_option(beta2 >= 0 && beta2 < 1, kName, "betas.second", beta2);
  check_option(options.weight_decay >= 0, kName, "weight_decay", options.weight_decay);
}

template <typename Options>
void read_adam(torch::serialize::InputArchive& archive, Options& options) {
  c10::IValue value;
  archive.read("lr", value);
  options.lr = value.toDouble();
  archive.read("beta1", value);
  options.betas.first = value.toDouble();
  archive.read("beta2", value);
  options.betas.second = value.toDouble();
  archive.read("eps", value);
  options.eps = value.toDouble();
  archive.read("weight_decay", value);
  options.weight_decay = value.toDouble();
}

template <typename Options>
void write_adam(torch::serialize::OutputArchive& archive, const Options& options) {
  archive.write("lr", c10::IValue(options.lr));
  archive.write("beta1", c10::IValue(options.betas.first));
  archive.write("beta2", c10::IValue(options.betas.second));
  archive.write("eps", c10::IValue(options.eps));
  archive.write("weight_decay", c10::IValue(options.weight_decay));
}

// What ATen's kernels step.
struct AtenCall {
  std::vector<at::Tensor> params, grads, exp_avgs, exp_avg_sqs, steps;
};

template <typename Options>
void step_with_aten(const AtenCall& call, const at::Tensor& skipped, const Options& options) {
  const std::optional<at::Tensor> found_inf =
      skipped.defined() ? std::optional(skipped) : std::nullopt;
  at::_foreach_add_(call.steps, 1);
  const auto kernel = [&](auto&& fused) {
    fused(call.params, call.grads, call.exp_avgs, call.exp_avg_sqs, std::vector<at::Tensor>{},
          call.steps, options.lr, options.betas.first, options.betas.second, options.weight_decay,
          options.eps, /*amsgrad=*/false, /*maximize=*/false, std::optional<at::Tensor>{},
          found_inf);
  };
  if constexpr (std::is_same_v<Options, AdamWOptions>) {
    kernel([](auto&&... args) { at::_fused_adamw_(args...); });
  } else {
    kernel([](auto&&... args) { at::_fused_adam_(args...); });
  }
  // A step that was skipped does not count.
  if (found_inf)
    at::_foreach_sub_(call.steps, std::vector<at::Tensor>(call.steps.size(), *found_inf));
}

// As fresh_state() makes it; an archive may hold another.
bool is_counter(const at::Tensor& step) {
  return step.is_cpu() && step.scalar_type() == at::kFloat && step.numel() == 1;
}

}  // namespace

void check(const AdamOptions& options) {
  check_adam(options);
}
void check(const AdamWOptions& options) {
  check_adam(options);
}
void read(torch::serialize::InputArchive& archive, AdamOptions& options) {
  read_adam(archive, options);
}
void read(torch::serialize::InputArchive& archive, AdamWOptions& options) {
  read_adam(archive, options);
}
void write(torch::serialize::OutputArchive& archive, const AdamOptions& options) {
  write_adam(archive, options);
}
void write(torch::serialize::OutputArchive& archive, const AdamWOptions& options) {
  write_adam(archive, options);
}

template <typename Options>
void FusedAdam<Options>::step_batch(const Batch& batch, const Options& options) {
  std::vector<CpuItem> here;
  AtenCall rest;
  const bool skipped = detail::skipped(batch);
  for (std::size_t i = 0; i < batch.params.size(); ++i) {
    const auto& param = batch.params[i];
    const AdamState& state = ensure_state(param);
    if (skipped) continue;
    if (is_counter(state.step) &&
        covered({param, batch.grads[i], state.exp_avg, state.exp_avg_sq})) {
      const double steps = ++*state.step.template mutable_data_ptr<float>();
      here.push_back({param, batch.grads[i], state.exp_avg, state.exp_avg_sq, steps});
    } else {
      rest.params.push_back(param);
      rest.grads.push_back(batch.grads[i]);
      rest.exp_avgs.push_back(state.exp_avg);
      rest.exp_avg_sqs.push_back(state.exp_avg_sq);
      rest.steps.push_back(state.step);
    }
  }
  step_on_cpu(here, options);
  if (!rest.params.empty()) step_with_aten(rest, batch.found_inf, options);
  if (!skipped) count_versions(batch);
}

template <typename Options>
const AdamState& FusedAdam<Options>::ensure_state(const at::Tensor& param) {
  auto& slot = this->state_[param.unsafeGetTensorImpl()];
  if (!slot) slot = fresh_state(param);
  return static_cast<const AdamState&>(*slot);
}

template <typename Options>
typename FusedAdam<Options>::State FusedAdam<Options>::state_of(
    const at::Tensor& param, torch::optim::OptimizerParamGroup&) {
  const auto slot = this->state_.find(param.unsafeGetTensorImpl());
  if (slot == this->state_.end()) {
    const at::Tensor zeros = at::zeros(param.sizes(), param.options().device(at::kCPU));
    return {at::zeros({}, at::kDouble), {{"exp_avg", zeros}, {"exp_avg_sq", zeros.clone()}}};
  }
  const auto& state = static_cast<const AdamState&>(*slot->second);
  return {state.step.to(at::kDouble).reshape({}),
          {{"exp_avg", state.exp_avg}, {"exp_avg_sq", state.exp_avg_sq}}};
}

template <typename Options>
void FusedAdam<Options>::set_state(const at::Tensor& param, State state) {
  const auto steps = state.step.template item<double>();
  if (steps == 0 && !param.is_cuda()) {
    this->state_.erase(param.unsafeGetTensorImpl());
    return;
  }
  // In place: a CUDA graph may read it there.
  AdamState held = ensure_state(param);
  held.step.fill_(steps);
  held.exp_avg.copy_(state.tensors[0].second);
  held.exp_avg_sq.copy_(state.tensors[1].second);
}

template <typename Options>
void FusedAdam<Options>::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<AdamState, GroupOptions<Options>>(archive, *this);
}

template <typename Options>
void FusedAdam<Options>::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<AdamState, GroupOptions<Options>>(archive, *this);
  for (const auto& group : this->param_groups_) {
    for (const auto& param : group.params()) {
      const auto slot = this->state_.find(param.unsafeGetTensorImpl());
      if (slot == this->state_.end()) continue;
      const auto& state = static_cast<const AdamState&>(*slot->second);
      check_loaded(Options::kName, param, state.exp_avg);
      check_loaded(Options::kName, param, state.exp_avg_sq);
    }
  }
}

template class FusedAdam<AdamOptions>;
template class FusedAdam<AdamWOptions>;

}  // namespace detail
}  // namespace lockstep::optim
