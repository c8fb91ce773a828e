// AdamW in one pass over memory, bit for bit what Python's torch.optim.AdamW(fused=True) does.
//
//   lockstep::optim::AdamW optimizer{model.parameters(), {.lr = 3e-4}};
//   loss.backward();
//   optimizer.step();
//   optimizer.zero_grad();
//
// The stock C++ AdamW rounds differently from both of Python's variants, so a run could not be
// compared with one in Python. See optimizer.h for groups, state and archives.
#pragma once

#include "lockstep/optim/optimizer.h"
#include "lockstep/optim/options.h"

namespace lockstep::optim {

using AdamW = OptimizerOf<AdamWOptions>;

}  // namespace lockstep::optim
