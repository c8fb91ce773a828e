// Adam in one pass over memory, bit for bit what Python's torch.optim.Adam(fused=True) does.
//
//   lockstep::optim::Adam optimizer{model.parameters(), {.lr = 1e-3}};
//   loss.backward();
//   optimizer.step();
//
// Weight decay is added to the gradient, so it passes through the moments; AdamW
// (adamw.h) shrinks the parameter instead. Everything else is shared by the two.
//
// A torch::optim::Optimizer: parameter groups, schedulers, and torch::save and torch::load work as
// with the stock ones. Owns its state; shares the parameters with the model. One thread at a time.
#pragma once

#include <torch/optim/optimizer.h>

#include "lockstep/optim/group.h"
#include "lockstep/optim/options.h"

namespace lockstep::optim {

// Per parameter, made at its first step. Undefined before.
struct AdamState : torch::optim::OptimizerCloneableParamState<AdamState> {
  at::Tensor step;  // float, on the parameter's device: the fused kernel reads it there
  at::Tensor exp_avg;
  at::Tensor exp_avg_sq;

  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

namespace detail {

// What Adam and AdamW share; they differ in the kernel that `Options` chooses.
template <typename Options>
class FusedAdam : public FusedOptimizer<Options> {
 public:
  using FusedOptimizer<Options>::FusedOptimizer;

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // The state of a parameter, made where there is none; it stays where it is when one is loaded.
  const AdamState& ensure_state(const at::Tensor& param);

 private:
  using State = FusedBase::State;
  State state_of(const at::Tensor& param, torch::optim::OptimizerParamGroup& group) override;
  void set_state(const at::Tensor& param, State state) override;
  void step_batch(const Batch& batch, const Options& options) override;
};

}  // namespace detail

class Adam : public detail::FusedAdam<AdamOptions> {
 public:
  using FusedAdam::FusedAdam;
};

}  // namespace lockstep::optim
