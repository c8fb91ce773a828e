// Gradient checkpointing: keep a block's inputs instead of its activations, and run it again in
// backward.
//
//   auto y = lockstep::checkpoint([&](const auto& in) { return block(in[0]); }, {x});
//
// The second run sees the same random numbers and autocast state as the first. It runs inside a
// nested backward, which is announced to reducers, so it works under every option of
// DistributedDataParallel. A parameter used in two checkpointed blocks needs static_graph. Its
// backward is always a whole one, so create_graph is a UsageError, and so are (as with PyTorch's
// reentrant checkpoint) torch::autograd::grad and backward with a list of inputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

namespace lockstep {

using CheckpointBlock = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

at::Tensor checkpoint(CheckpointBlock block, std::vector<at::Tensor> inputs);

// Blocks that run one after the other, cut into `segments` of about equal length. Each but the last
// is checkpointed, so the activations of one segment and the borders of the others are stored; the
// last one is not, because backward would compute it again at once. With n blocks, about sqrt(n)
// segments need the least memory. Throws UsageError for no blocks or fewer blocks than segments.
//
//   x = lockstep::checkpoint_sequential(blocks, 4, x);
using SequentialBlock = std::function<at::Tensor(const at::Tensor&)>;
at::Tensor checkpoint_sequential(const std::vector<SequentialBlock>& blocks, std::size_t segments,
                                 at::Tensor input);

// The modules of a torch::nn::Sequential, or anything that iterates over modules with
// forward(tensor): holders, shared pointers, AnyModule.
template <typename Modules>
std::vector<SequentialBlock> blocks_of(Modules& modules) {
  std::vector<SequentialBlock> blocks;
  for (auto& module : modules) {
    if constexpr (requires { module->forward(at::Tensor()); }) {
      blocks.push_back([module](const at::Tensor& x) mutable { return module->forward(x); });
    } else {
      blocks.push_back([&module](const at::Tensor& x) { return module.forward(x); });
    }
  }
  return blocks;
}

}  // namespace lockstep
