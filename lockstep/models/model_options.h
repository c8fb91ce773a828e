// Options for making a language model (ParameterOptions), a hook that runs its blocks
// (BlockRunner), and its cache for generating a text (KvCache).
//
//   auto model = lockstep::models::make_causal_lm(config, {.dtype = torch::kBFloat16});
//   model->run_blocks_with(lockstep::checkpoint);
//
//   lockstep::models::KvCache cache;
//   auto first = model->forward(prompt, &cache);
//   auto next = model->forward(token, &cache);                 // reads what `first` has left there
//
// One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace lockstep::models {

// Runs a block on its input: calls it (the default), or stores less and calls it again in backward.
// lockstep::checkpoint has this type.
using Block = std::function<at::Tensor(const std::vector<at::Tensor>&)>;
using BlockRunner = std::function<at::Tensor(Block, std::vector<at::Tensor>)>;

// How a model's parameters are made.
struct ParameterOptions {
  c10::ScalarType dtype = c10::kFloat;
  c10::Device device = c10::kCPU;
  // Initial weights are drawn on the CPU in float32, from LibTorch's default generator, and are the
  // same on every device. False: nothing is drawn, because the weights are loaded.
  bool draw = true;
  // Linear layers of blocks store their weights in 4 bits (nn/nf4.h), each as soon as it is drawn
  // or loaded. For frozen models: the weights cannot be trained.
  bool nf4 = false;
};

// Keys and values of the tokens that a model has seen, so that the next token costs one column of
// attention instead of all. Belongs to one model and one batch; filled by forward. No gradient
// flows through it.
class KvCache {
 public:
  // `capacity`: how many tokens are expected. It grows when there are more.
  explicit KvCache(std::int64_t capacity = 64) : capacity_(capacity) {}

  std::int64_t length() const { return layers_.empty() ? 0 : layers_.front().length; }
  // Adds keys and values [batch, heads, time, width]; returns those of all tokens.
  std::pair<at::Tensor, at::Tensor> append(std::size_t layer, const at::Tensor& keys,
                                           const at::Tensor& values);

 private:
  struct Layer {
    at::Tensor keys;
    at::Tensor values;
    std::int64_t length = 0;
  };
  std::int64_t capacity_;
  std::vector<Layer> layers_;
};

}  // namespace lockstep::models
