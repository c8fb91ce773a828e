// How a language model is made, and how its blocks are run.
//
//   auto model = lockstep::models::make_causal_lm(config, {.dtype = torch::kBFloat16});
//   model->run_blocks_with(lockstep::checkpoint);
//
// Values.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <functional>
#include <vector>

namespace lockstep::models {

// How to run a block on its input: call it (the default), or keep less and call it again in
// backward. lockstep::checkpoint has this type.
using Block = std::function<at::Tensor(const std::vector<at::Tensor>&)>;
using BlockRunner = std::function<at::Tensor(Block, std::vector<at::Tensor>)>;

// How a model's parameters are made.
struct ParameterOptions {
  c10::ScalarType dtype = c10::kFloat;
  c10::Device device = c10::kCPU;
  // Initial weights are drawn on the CPU in float32, from LibTorch's default generator, and are the
  // same on every device. False: nothing is drawn, because the weights are loaded.
  bool draw = true;
};

}  // namespace lockstep::models
