// Adam in one pass over memory, bit for bit what Python's torch.optim.Adam(fused=True) does.
//
//   lockstep::optim::Adam optimizer{model.parameters(), {.lr = 1e-3}};
//
// Weight decay is added to the gradient, so it passes through the moments; AdamW (adamw.h) shrinks
// the parameter instead. Everything else is shared by the two. See optimizer.h.
#pragma once

#include "lockstep/optim/optimizer.h"
#include "lockstep/optim/options.h"

namespace lockstep::optim {

using Adam = OptimizerOf<AdamOptions>;

}  // namespace lockstep::optim
