// A ShardedOptimizer as a Stepper, for loops that hold either kind.
//
//   auto stepper = lockstep::sharded(std::make_unique<ShardedOptimizer>(model, rule));
//   stepper->step({.max_grad_norm = 1.0, .scaler = &scaler});
//
// Clipping and loss scaling become the optimizer's own options for that step, because the gradients
// are this rank's own until then.
#pragma once

#include <memory>

#include "lockstep/optim/stepper.h"
#include "lockstep/parallel/sharded_optimizer.h"

namespace lockstep {

// Takes the optimizer over. Call the stepper on all ranks identically; one thread at a time.
std::unique_ptr<optim::Stepper> sharded(std::unique_ptr<ShardedOptimizer> optimizer);

}  // namespace lockstep
