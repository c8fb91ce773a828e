// SGD with momentum in one pass over memory, bit for bit what Python's torch.optim.SGD(fused=True)
// does.
//
//   lockstep::optim::SGD optimizer{model.parameters(), {.lr = 0.1, .momentum = 0.9}};
//
// A parameter whose first gradient comes later than the others' starts its momentum then; Python's
// fused SGD fails there. See optimizer.h for groups, state and archives.
#pragma once

#include "lockstep/optim/optimizer.h"
#include "lockstep/optim/options.h"

namespace lockstep::optim {

using SGD = OptimizerOf<SGDOptions>;

}  // namespace lockstep::optim
