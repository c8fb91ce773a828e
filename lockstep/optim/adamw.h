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

#include "lockstep/optim/adam.h"
#include "lockstep/optim/options.h"

namespace lockstep::optim {

using AdamWState = AdamState;

class AdamW : public detail::FusedAdam<AdamWOptions> {
 public:
  using FusedAdam::FusedAdam;
};

}  // namespace lockstep::optim
