// The models that are not language models: residual networks for images, and a perceptron.
//
//   lockstep::models::ResNet net{lockstep::models::ResNetConfig{.depth = 50, .num_classes = 1000}};
//   auto logits = net(images);                    // [batch, 3, height, width] -> [batch, classes]
//   lockstep::models::Mlp small{lockstep::models::MlpConfig{.inputs = 20, .outputs = 10}};
//
// Initial weights are drawn from LibTorch's default generator. One thread at a time.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "lockstep/models/shapes.h"

namespace lockstep::models {

// ResNet-18, 34, 50, 101 and 152, with torchvision's parameter names and initial weights. Blocks of
// 50 and more layers stride in their 3 by 3 convolution, as torchvision's do.
class ResNetImpl : public torch::nn::Module {
 public:
  // Throws UsageError for another depth and for fewer than one class.
  explicit ResNetImpl(const ResNetConfig& config);
  at::Tensor forward(const at::Tensor& images);

 private:
  torch::nn::Conv2d stem_{nullptr};
  torch::nn::BatchNorm2d stem_norm_{nullptr};
  torch::nn::Sequential stages_[4];
  torch::nn::Linear head_{nullptr};
};
TORCH_MODULE(ResNet);

// A perceptron with hidden layers, batch norm and dropout: the smallest model with everything that
// makes training hard to repeat (statistics that forward changes, random numbers in forward).
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
