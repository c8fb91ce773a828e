// SGD with momentum in one pass over memory, bit for bit what Python's torch.optim.SGD(fused=True)
// does.
//
//   lockstep::optim::SGD optimizer{model.parameters(), {.lr = 0.1, .momentum = 0.9}};
//   loss.backward();
//   optimizer.step();
//   optimizer.zero_grad();
//
// A torch::optim::Optimizer, as AdamW is. A parameter whose first gradient comes later than the
// others' starts its momentum then; Python's fused SGD fails there.
//
// Owns its state; shares the parameters with the model. One thread at a time.
#pragma once

#include <torch/optim/optimizer.h>

#include "lockstep/optim/group.h"
#include "lockstep/optim/options.h"

namespace lockstep::optim {

// Per parameter, made at its first step with momentum.
struct SGDState : torch::optim::OptimizerCloneableParamState<SGDState> {
  at::Tensor momentum_buffer;

  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

class SGD : public detail::FusedOptimizer<SGDOptions> {
 public:
  using FusedOptimizer::FusedOptimizer;

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  State state_of(const at::Tensor& param, torch::optim::OptimizerParamGroup& group) override;
  void set_state(const at::Tensor& param, State state) override;
  void step_batch(const detail::Batch& batch, const SGDOptions& options) override;
};

}  // namespace lockstep::optim
