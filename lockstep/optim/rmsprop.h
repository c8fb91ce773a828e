// RMSprop (Hinton, 2012) divides every gradient by the root of an average of its squares. Bit for
// bit what Python's torch.optim.RMSprop does without `centered`. One tensor of state for each
// parameter, and one more with momentum.
//
//   lockstep::optim::RMSprop optimizer{model.parameters(), {.lr = 1e-3, .momentum = 0.9}};
#pragma once

#include "lockstep/optim/optimizer.h"
#include "lockstep/optim/rmsprop_options.h"

namespace lockstep::optim {

using RMSprop = OptimizerOf<RMSpropOptions>;

}  // namespace lockstep::optim
