// Adafactor (Shazeer and Stern, 2018) as transformers.Adafactor has it: only the means of the
// second moments over rows and over columns are stored, so a matrix has almost no state.
//
//   lockstep::optim::Adafactor optimizer{model.parameters(), {.lr = 1e-3}};
//
// As in Hugging Face's Trainer, with an explicit learning rate: relative steps and scaling by the
// parameter are off unless asked for. Half types are computed in float.
#pragma once

#include "lockstep/optim/optimizer.h"

namespace lockstep::optim {

using Adafactor = OptimizerOf<AdafactorOptions>;

}  // namespace lockstep::optim
