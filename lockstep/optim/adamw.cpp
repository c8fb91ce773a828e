#include "lockstep/optim/adamw.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/serialize.h>
#include <torch/utils.h>

#include <memory>

namespace lockstep::optim {
namespace {

constexpr std::string_view kName = AdamWOptions::kName;
using Group = GroupOptions<AdamWOptions>;

}  // namespace

void check(const AdamWOptions& options) {
  const auto [beta1, beta2] = options.betas;
  detail::check_option(options.lr >= 0, kName, "lr", options.lr);
  detail::check_option(options.eps >= 0, kName, "eps", options.eps);
  detail::check_option(beta1 >= 0 && beta1 < 1, kName, "betas.first", beta1);
  detail::check_option(beta2 >= 0 && beta2 < 1, kName, "betas.second", beta2);
  detail::check_option(options.weight_decay >= 0, kName, "weight_decay", options.weight_decay);
}

void AdamW::step_batch(const detail::Batch& batch, const AdamWOptions& options) {
  std::vector<at::Tensor> exp_avgs, exp_avg_sqs, steps;
  for (const auto& param : batch.params) {
    auto& slot = state_[param.unsafeGetTensorImpl()];
    if (!slot) {
      auto fresh = std::make_unique<AdamWState>();
      fresh->step = at::zeros({}, param.options().dtype(at::kFloat));
      fresh->exp_avg = at::zeros_like(param);
      fresh->exp_avg_sq = at::zeros_like(param);
      slot = std::move(fresh);
    }
    const auto& state = static_cast<const AdamWState&>(*slot);
    exp_avgs.push_back(state.exp_avg);
    exp_avg_sqs.push_back(state.exp_avg_sq);
    steps.push_back(state.step);
  }
  at::_foreach_add_(steps, 1);
  at::_fused_adamw_(batch.params, batch.grads, exp_avgs, exp_avg_sqs, /*max_exp_avg_sqs=*/{}, steps,
                    options.lr, options.betas.first, options.betas.second, options.weight_decay,
                    options.eps, /*amsgrad=*/false, /*maximize=*/false);
}

void AdamW::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<AdamWState, Group>(archive, *this);
}

void AdamW::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<AdamWState, Group>(archive, *this);
  for (const auto& group : param_groups_) {
    for (const auto& param : group.params()) {
      const auto slot = state_.find(param.unsafeGetTensorImpl());
      if (slot == state_.end()) continue;
      const auto& state = static_cast<const AdamWState&>(*slot->second);
      detail::check_loaded(kName, param, state.exp_avg);
      detail::check_loaded(kName, param, state.exp_avg_sq);
    }
  }
}

void AdamWState::serialize(torch::serialize::InputArchive& archive) {
  archive.read("step", step);
  archive.read("exp_avg", exp_avg);
  archive.read("exp_avg_sq", exp_avg_sq);
}

void AdamWState::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("step", step);
  archive.write("exp_avg", exp_avg);
  archive.write("exp_avg_sq", exp_avg_sq);
}

void read(torch::serialize::InputArchive& archive, AdamWOptions& options) {
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

void write(torch::serialize::OutputArchive& archive, const AdamWOptions& options) {
  archive.write("lr", c10::IValue(options.lr));
  archive.write("beta1", c10::IValue(options.betas.first));
  archive.write("beta2", c10::IValue(options.betas.second));
  archive.write("eps", c10::IValue(options.eps));
  archive.write("weight_decay", c10::IValue(options.weight_decay));
}

}  // namespace lockstep::optim
