// Gradient checkpointing: keep a block's inputs instead of its activations, and run it again in
// backward.
//
//   auto y = lockstep::checkpoint([&](const auto& in) { return block(in[0]); }, {x});
//
// The second run sees the same random numbers and autocast state as the first. It runs inside a
// nested backward, which is announced to reducers, so it works under every option of
// DistributedDataParallel. A parameter used in two checkpointed blocks needs static_graph.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace lockstep {

using CheckpointBlock = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

at::Tensor checkpoint(CheckpointBlock block, std::vector<at::Tensor> inputs);

}  // namespace lockstep
