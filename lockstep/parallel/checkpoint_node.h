// Lets the reducer see whether a backward will run checkpointed blocks.
#pragma once

#include <torch/csrc/autograd/function.h>

namespace lockstep::parallel {

bool is_checkpoint_node(const torch::autograd::Node& node);

}  // namespace lockstep::parallel
