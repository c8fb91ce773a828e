// The cache with which a language model continues a text.
//
//   lockstep::models::KvCache cache;
//   auto first = model->forward(prompt, &cache);
//   auto next = model->forward(token, &cache);                 // reads what `first` has left there
//
// One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace lockstep::models {

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
