// For programs that launch CUDA graphs with collectives in them; CapturedStep is one.
#pragma once

#include "lockstep/comm/world.h"

namespace lockstep {

// What is started on the world's device now goes into a graph.
bool recording(const World& world);

// Ends when the current stream reaches it, so that a graph has a deadline and a line in the ledger,
// as a collective has. All ranks call it.
Work after_stream(World& world, const char* name);

}  // namespace lockstep
