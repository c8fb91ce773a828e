// SGD with momentum in one pass over memory, bit for bit what Python's torch.optim.SGD(fused=True)
// does. Parameters of 16 bits on a CPU are stepped by plain operations, in the order of Python's
// foreach=False: ATen's fused kernel leaves elements of them out (LibTorch 2.11).
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
