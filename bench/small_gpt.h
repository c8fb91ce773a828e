// The small language model of `lockstep bench train`: bench/peers/train_ddp.py has the same model,
// module for module, so that both sides compute the same numbers from the same weights.
//
//   auto net = std::make_shared<SmallGpt>(GptShape{});      // 7.4 million parameters
//   net->forward(ids, targets).backward();                  // the mean cross entropy
//
// lockstep::models::Gpt ties the output to the embedding; here it has a weight of its own, as in
// many scripts, which makes the optimizer's part of a step larger. One thread at a time.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>

namespace lockstep::bench {

struct GptShape {
  std::int64_t layers = 4;
  std::int64_t heads = 4;
  std::int64_t width = 256;
  std::int64_t vocab = 8192;
  std::int64_t tokens = 128;  // per sequence, always
};

class SmallGpt : public torch::nn::Module {
 public:
  explicit SmallGpt(const GptShape& shape);
  // Both int64 [batch, tokens].
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& targets);

 private:
  torch::nn::Embedding tokens_, positions_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_;
  torch::nn::Linear head_;
};

}  // namespace lockstep::bench
