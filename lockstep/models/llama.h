// Llama and Phi-3, under Hugging Face's names: RMSNorm, rotary positions, a gated perceptron, and
// heads of keys and values that several attention heads share.
//
//   lockstep::models::Llama llama{lockstep::models::LlamaConfig{
//       .hidden_size = 256, .intermediate_size = 688, .num_hidden_layers = 4,
//       .num_attention_heads = 8, .num_key_value_heads = 2}};
//   auto logits = llama(ids);                                   // [batch, time, vocab_size]
//
// Norms compute in float32 whatever the weights are, as transformers does. Phi-3 is this model with
// queries, keys and values in one projection, and gate and up in one. One thread at a time.
#pragma once

#include <torch/nn/pimpl.h>

#include <memory>

#include "lockstep/models/causal_lm.h"
#include "lockstep/models/linear.h"

namespace lockstep::models {

class LlamaModel;

class LlamaImpl : public CausalLm {
 public:
  // Throws UsageError when the sizes do not fit together.
  explicit LlamaImpl(const LlamaConfig& config) : LlamaImpl(CausalLmConfig{.model = config}, {}) {}
  // `config` is of this family. Of ParameterOptions, type and device apply where nothing is drawn.
  LlamaImpl(CausalLmConfig config, const ParameterOptions& options);

 protected:
  at::Tensor run(const at::Tensor& ids, KvCache* cache, const BlockRunner& runner) override;
  at::Tensor run_fused(const at::Tensor& ids, const BlockRunner& runner,
                       bool residual_in_fp32) override;
  at::Tensor head(const at::Tensor& hidden_states) override;
  const at::Tensor* head_weight() const override;

 private:
  std::shared_ptr<LlamaModel> model_;
  Linear lm_head_{nullptr};
};
TORCH_MODULE(Llama);

}  // namespace lockstep::models
