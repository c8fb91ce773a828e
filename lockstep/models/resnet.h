// Residual networks for images, under torchvision's parameter names: resnet18, 34, 50, 101, 152.
//
//   lockstep::models::ResNet net{lockstep::models::ResNetConfig{.depth = 50, .num_classes = 1000}};
//   auto logits = net(images);                    // [batch, 3, height, width] -> [batch, classes]
//
// A stem halves the image twice; four stages of blocks follow, each adding to its own input, the
// stages from the second on at half the size and twice the channels; a mean over the image and a
// linear layer give the logits. Blocks of 50 and more layers stride in their 3 by 3 convolution, as
// torchvision's do. Initial weights are drawn as there, from LibTorch's default generator. One
// thread at a time.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "lockstep/models/shapes.h"

namespace lockstep::models {

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

}  // namespace lockstep::models
