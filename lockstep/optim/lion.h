// Lion (Chen et al., 2023) moves every weight by lr, against the sign of an average of gradients.
// One tensor of state for each parameter, half of AdamW's. The usual learning rate is a third to a
// tenth of AdamW's, and weight decay is larger by the same factor.
//
//   lockstep::optim::Lion optimizer{model.parameters(), {.lr = 1e-4, .weight_decay = 0.1}};
#pragma once

#include "lockstep/optim/optimizer.h"

namespace lockstep::optim {

using Lion = OptimizerOf<LionOptions>;

}  // namespace lockstep::optim
