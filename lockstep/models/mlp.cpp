#include "lockstep/models/mlp.h"

#include <torch/torch.h>

#include "lockstep/core/error.h"

namespace lockstep::models {

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
