// A perceptron with hidden layers, batch norm and dropout: the smallest model with everything that
// makes training hard to repeat (statistics that forward changes, random numbers in forward).
//
//   lockstep::models::Mlp net{lockstep::models::MlpConfig{.inputs = 20, .outputs = 10}};
//   auto logits = net(x);                                  // [batch, outputs]
//
// Initial weights are drawn from LibTorch's default generator. One thread at a time.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include "lockstep/models/shapes.h"

namespace lockstep::models {

class MlpImpl : public torch::nn::Module {
 public:
  // Throws UsageError for sizes below 1 and a dropout outside of [0, 1).
  explicit MlpImpl(const MlpConfig& config);
  at::Tensor forward(const at::Tensor& x) { return net_->forward(x); }

 private:
  torch::nn::Sequential net_;
};
TORCH_MODULE(Mlp);

}  // namespace lockstep::models
