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

#include <cstddef>
#include <vector>

#include "lockstep/optim/group.h"

namespace lockstep::optim {

struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
};

// Per parameter, made at its first step with momentum.
struct SGDState : torch::optim::OptimizerCloneableParamState<SGDState> {
  at::Tensor momentum_buffer;

  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

class SGD : public torch::optim::Optimizer {
 public:
  explicit SGD(std::vector<at::Tensor> params, const SGDOptions& options = {});
  explicit SGD(const std::vector<torch::optim::OptimizerParamGroup>& groups,
               const SGDOptions& options = {});
  static torch::optim::OptimizerParamGroup group(std::vector<at::Tensor> params,
                                                 const SGDOptions& options);

  // A group's options, to read or to change between steps.
  SGDOptions& options(std::size_t group = 0);

  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void step_batch(const detail::Batch& batch, const SGDOptions& options);
};

void read(torch::serialize::InputArchive& archive, SGDOptions& options);
void write(torch::serialize::OutputArchive& archive, const SGDOptions& options);

}  // namespace lockstep::optim
