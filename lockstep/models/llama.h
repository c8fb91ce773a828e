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

#include "lockstep/models/causal_lm.h"

namespace lockstep::models {

class LlamaImpl : public CausalLm {
 public:
  // Throws UsageError when the sizes do not fit together.
  explicit LlamaImpl(const LlamaConfig& config) : CausalLm(CausalLmConfig{.model = config}) {}
};
TORCH_MODULE(Llama);

}  // namespace lockstep::models
