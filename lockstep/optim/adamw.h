// AdamW in one pass over memory, bit for bit what Python's torch.optim.AdamW(fused=True) does.
//
//   lockstep::optim::AdamW optimizer{model.parameters(), {.lr = 3e-4}};
//   loss.backward();
//   optimizer.step();
//   optimizer.zero_grad();
//
// A torch::optim::Optimizer: parameter groups, schedulers, and torch::save and torch::load work as
// with the stock ones. Adam without weight decay is weight_decay = 0. The stock C++ AdamW rounds
// differently from both of Python's variants, so a run could not be compared with one in Python.
//
// Owns its state; shares the parameters with the model. One thread at a time.
#pragma once

#include <torch/optim/optimizer.h>

#include <string_view>
#include <utility>

#include "lockstep/optim/group.h"

namespace lockstep::optim {

struct AdamWOptions {
  static constexpr std::string_view kName = "AdamW";
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
};

// Per parameter, made at its first step. Undefined before.
struct AdamWState : torch::optim::OptimizerCloneableParamState<AdamWState> {
  at::Tensor step;  // float, on the parameter's device: the fused kernel reads it there
  at::Tensor exp_avg;
  at::Tensor exp_avg_sq;

  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

class AdamW : public FusedOptimizer<AdamWOptions> {
 public:
  using FusedOptimizer::FusedOptimizer;

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void step_batch(const detail::Batch& batch, const AdamWOptions& options) override;
};

void check(const AdamWOptions& options);
void read(torch::serialize::InputArchive& archive, AdamWOptions& options);
void write(torch::serialize::OutputArchive& archive, const AdamWOptions& options);

}  // namespace lockstep::optim
