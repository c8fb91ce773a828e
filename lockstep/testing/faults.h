// Backends that misbehave on purpose, in a measured way.
//
//   testing::delay_all_reduce(world, std::chrono::milliseconds(10));   // on every rank
//
// From then on each all_reduce of CPU tensors completes that much later than it otherwise would,
// without blocking the caller or the network: the tool for showing that communication hides behind
// work.
#pragma once

#include <chrono>

#include "lockstep/comm/world.h"

namespace lockstep::testing {

// `world` must have at least two ranks and nothing under way.
void delay_all_reduce(World& world, std::chrono::milliseconds delay);

}  // namespace lockstep::testing
