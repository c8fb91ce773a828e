// A language model of any family: token ids in, logits of the next token out.
//
//   auto model = lockstep::models::make_causal_lm(lockstep::models::read_config("gpt2"));
//   auto logits = model->forward(ids);                          // [batch, time, vocab_size]
//   auto loss = lockstep::models::next_token_loss(logits, targets);
//
// pretrained.h builds it with its weights, generate.h continues a text. Every projection of every
// family is a Linear (linear.h) under Hugging Face's name. In training mode the configuration's
// dropout applies; forward never waits for the device. One thread at a time.
#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/models/hugging_face.h"

namespace lockstep::models {

// How to run a block on its input: call it (the default), or keep less and call it again in
// backward. lockstep::checkpoint has this type.
using Block = std::function<at::Tensor(const std::vector<at::Tensor>&)>;
using BlockRunner = std::function<at::Tensor(Block, std::vector<at::Tensor>)>;

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

class CausalLm;
struct DeviceMap;
void place(CausalLm& model, const DeviceMap& map);

class CausalLm : public torch::nn::Module {
 public:
  // ids: int64 [batch, time]. With a cache they continue what it holds, and are added to it.
  // UsageError for another shape or type, and for more tokens than GPT-2 has positions.
  at::Tensor forward(const at::Tensor& ids, KvCache* cache = nullptr) {
    return logits(hidden_states(ids, cache));
  }
  // The two halves of forward, for losses that never hold all logits: [batch, time, width] after
  // the last norm, and the head.
  at::Tensor hidden_states(const at::Tensor& ids, KvCache* cache = nullptr);
  at::Tensor logits(const at::Tensor& hidden_states);
  // The mean cross entropy against the ids that come next [batch, time]; those that are -100 do not
  // count. On a GPU head and loss are one, and the logits of all tokens never exist at once.
  at::Tensor loss(const at::Tensor& ids, const at::Tensor& targets);

  // Whether blocks run by lockstep::nn (fused norms, activations, loss; docs/kernels.md) or by
  // ATen's operations alone. Unset: on a GPU with our kernels. Never with a cache.
  void use_fused(std::optional<bool> on) { fused_ = on; }

  // The sum that blocks add to is bfloat16 in the fused path under bf16 autocasting. True: float,
  // as with ATen's operations; more memory and a little slower. Under fp16 it is always float.
  void use_fp32_residual(bool on) { residual_in_fp32_ = on; }

  // model->run_blocks_with(lockstep::checkpoint) trades memory for a second forward. Not used with
  // a cache.
  void run_blocks_with(BlockRunner runner) { runner_ = std::move(runner); }

  // A model that place() has split over devices stays where it is; its type is converted.
  using torch::nn::Module::to;
  void to(c10::Device device, c10::ScalarType dtype, bool non_blocking = false) override;
  void to(c10::Device device, bool non_blocking = false) override;

  const CausalLmConfig& config() const { return config_; }
  std::int64_t parameter_count() const;

 protected:
  explicit CausalLm(CausalLmConfig config) : config_(std::move(config)) {}
  virtual at::Tensor run(const at::Tensor& ids, KvCache* cache, const BlockRunner& runner) = 0;
  virtual at::Tensor run_fused(const at::Tensor& ids, const BlockRunner& runner,
                               bool residual_in_fp32) = 0;
  virtual at::Tensor head(const at::Tensor& hidden_states) = 0;
  // [vocabulary, width]; null where the head is more than a product with it.
  virtual const at::Tensor* head_weight() const = 0;

 private:
  bool fused_on(c10::Device device) const;

  friend void place(CausalLm& model, const DeviceMap& map);
  struct Placement {
    c10::Device input;                          // of the embeddings
    std::optional<c10::Device> copy_to_head{};  // where the head is on another device than the norm
  };

  std::optional<bool> fused_;
  bool residual_in_fp32_ = false;
  CausalLmConfig config_;
  BlockRunner runner_;
  std::optional<Placement> placement_;
};
using CausalLmPtr = std::shared_ptr<CausalLm>;

// How a model's parameters are made.
struct ParameterOptions {
  c10::ScalarType dtype = c10::kFloat;
  c10::Device device = c10::kCPU;
  // Initial weights are drawn on the CPU in float32, from LibTorch's default generator, and are the
  // same on every device. False: nothing is drawn, because the weights are loaded.
  bool draw = true;
};

// Mean cross entropy of logits [batch, time, vocab] against the ids that come next [batch, time],
// which may be on another device.
at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace lockstep::models
