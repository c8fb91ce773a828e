// AdamW in one pass over memory, bit for bit what Python's torch.optim.AdamW(fused=True) does.
//
//   lockstep::optim::AdamW optimizer{model.parameters(), {.lr = 3e-4}};
//   loss.backward();
//   optimizer.step();
//   optimizer.zero_grad();
//
// A torch::optim::Optimizer: parameter groups, schedulers, and torch::save and torch::load work as
// with the stock ones. The stock C++ AdamW rounds differently from both of Python's variants, so a
// run could not be compared with one in Python.
//
// Owns its state; shares the parameters with the model. One thread at a time.
#pragma once

#include <torch/optim/optimizer.h>

#include <string_view>
#include <utility>

#include "lockstep/optim/adam.h"

namespace lockstep::optim {

struct AdamWOptions {
  static constexpr std::string_view kName = "AdamW";
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
};

using AdamWState = AdamState;

class AdamW : public FusedAdam<AdamWOptions> {
 public:
  using FusedAdam::FusedAdam;
};

void check(const AdamWOptions& options);
void read(torch::serialize::InputArchive& archive, AdamWOptions& options);
void write(torch::serialize::OutputArchive& archive, const AdamWOptions& options);

}  // namespace lockstep::optim
