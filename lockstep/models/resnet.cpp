#include "lockstep/models/resnet.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include "lockstep/core/error.h"

namespace lockstep::models {
namespace {

// Without bias; the initial weights keep the variance of gradients through a ReLU.
torch::nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t size,
                              std::int64_t stride) {
  torch::nn::Conv2d made(
      torch::nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false));
  torch::nn::init::kaiming_normal_(made->weight, 0, torch::kFanOut, torch::kReLU);
  return made;
}

class ResidualBlock : public torch::nn::Module {
 public:
  ResidualBlock(std::int64_t in, std::int64_t width, std::int64_t expansion, std::int64_t stride) {
    const std::int64_t out = width * expansion;
    if (expansion == 1) {
      add(in, width, 3, stride);
      add(width, width, 3, 1);
    } else {
      add(in, width, 1, 1);
      add(width, width, 3, stride);
      add(width, out, 1, 1);
    }
    if (stride != 1 || in != out)
      shortcut_ = register_module(
          "downsample",
          torch::nn::Sequential(convolution(in, out, 1, stride), torch::nn::BatchNorm2d(out)));
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (std::size_t i = 0; i < convolutions_.size(); ++i) {
      y = norms_[i]->forward(convolutions_[i]->forward(y));
      if (i + 1 < convolutions_.size()) y = torch::relu(y);
    }
    return torch::relu(y + (shortcut_.is_empty() ? x : shortcut_->forward(x)));
  }

 private:
  void add(std::int64_t in, std::int64_t out, std::int64_t size, std::int64_t stride) {
    const std::size_t number = convolutions_.size() + 1;
    convolutions_.push_back(
        register_module(fmt::format("conv{}", number), convolution(in, out, size, stride)));
    norms_.push_back(register_module(fmt::format("bn{}", number), torch::nn::BatchNorm2d(out)));
  }

  std::vector<torch::nn::Conv2d> convolutions_;
  std::vector<torch::nn::BatchNorm2d> norms_;
  torch::nn::Sequential shortcut_{nullptr};
};

}  // namespace

ResNetImpl::ResNetImpl(const ResNetConfig& config) {
  const auto blocks = config.blocks();
  if (blocks.empty() || config.num_classes < 1)
    throw UsageError("resnet",
                     "depth {} with {} classes. Depths are 18, 34, 50, 101 and 152, and there is "
                     "one class at least.",
                     config.depth, config.num_classes);
  stem_ = register_module("conv1", convolution(3, 64, 7, 2));
  stem_norm_ = register_module("bn1", torch::nn::BatchNorm2d(64));
  std::int64_t in = 64;
  std::int64_t width = 64;
  for (std::size_t stage = 0; stage < blocks.size(); ++stage, width *= 2) {
    for (std::int64_t i = 0; i < blocks[stage]; ++i) {
      const std::int64_t stride = stage > 0 && i == 0 ? 2 : 1;
      stages_[stage]->push_back(
          std::make_shared<ResidualBlock>(in, width, config.expansion(), stride));
      in = width * config.expansion();
    }
    register_module(fmt::format("layer{}", stage + 1), stages_[stage]);
  }
  head_ = register_module("fc", torch::nn::Linear(in, config.num_classes));
}

at::Tensor ResNetImpl::forward(const at::Tensor& images) {
  if (images.dim() != 4 || images.size(1) != 3)
    throw UsageError("resnet", "input of {} dimensions. Images are [batch, 3, height, width].",
                     images.dim());
  at::Tensor x = torch::relu(stem_norm_->forward(stem_->forward(images)));
  x = torch::max_pool2d(x, 3, 2, 1);
  for (auto& stage : stages_) x = stage->forward(x);
  return head_->forward(x.mean({2, 3}));
}

MlpImpl::MlpImpl(const MlpConfig& config) {
  if (config.inputs < 1 || config.hidden < 1 || config.layers < 0 || config.outputs < 1)
    throw UsageError("mlp",
                     "sizes {} -> {} x {} -> {} do not make a network. Each must be positive.",
                     config.inputs, config.layers, config.hidden, config.outputs);
  if (!(config.dropout >= 0 && config.dropout < 1))
    throw UsageError("mlp", "dropout {} must be at least 0 and below 1.", config.dropout);
  std::int64_t width = config.inputs;
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    net_->push_back(torch::nn::Linear(width, config.hidden));
    if (config.batch_norm) net_->push_back(torch::nn::BatchNorm1d(config.hidden));
    net_->push_back(torch::nn::ReLU());
    if (config.dropout > 0) net_->push_back(torch::nn::Dropout(config.dropout));
    width = config.hidden;
  }
  net_->push_back(torch::nn::Linear(width, config.outputs));
  register_module("net", net_);
}

}  // namespace lockstep::models
