// Language models whose configuration a program writes itself: GPT-2 and Llama, with the parameter
// names of Hugging Face's checkpoints (transformer.h.0.attn.c_attn.weight,
// model.layers.0.self_attn.q_proj.weight, ...).
//
//   lockstep::models::Gpt gpt{lockstep::models::GptConfig{.n_head = 4, .n_embd = 64}};
//   auto logits = gpt(ids);                                     // [batch, time, vocab_size]
//   auto loss = lockstep::models::next_token_loss(logits, targets);
//   lockstep::models::Llama llama{lockstep::models::LlamaConfig{
//       .hidden_size = 256, .intermediate_size = 688, .num_hidden_layers = 4,
//       .num_attention_heads = 8, .num_key_value_heads = 2}};
//
// Initial weights are drawn from LibTorch's default generator. One thread at a time.
#pragma once

#include <torch/nn/pimpl.h>

#include "lockstep/models/causal_lm.h"

namespace lockstep::models {

// The output head has no weight of its own: lm_head is tied to transformer.wte.weight and is not
// listed twice (with tie_word_embeddings off it has one). Projections are stored [in, out], as in
// GPT-2's checkpoints ("Conv1D"). UsageError when the sizes do not fit together.
class GptImpl : public CausalLm {
 public:
  explicit GptImpl(const GptConfig& config) : CausalLm(CausalLmConfig{.model = config}) {}
};
TORCH_MODULE(Gpt);

// Norms compute in float32 whatever the weights are, as transformers does. Phi-3 is this model with
// queries, keys and values in one projection, and gate and up in one.
class LlamaImpl : public CausalLm {
 public:
  explicit LlamaImpl(const LlamaConfig& config) : CausalLm(CausalLmConfig{.model = config}) {}
};
TORCH_MODULE(Llama);

}  // namespace lockstep::models
