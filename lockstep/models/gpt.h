// GPT-2, under Hugging Face's names.
//
//   lockstep::models::Gpt gpt{lockstep::models::GptConfig{.n_layer = 4, .n_head = 4, .n_embd =
//   256}}; auto logits = gpt(ids);                                     // [batch, time, vocab_size]
//   auto loss = lockstep::models::next_token_loss(logits, targets);
//
// The shape of it: token and position embeddings are added; each block adds an attention over the
// tokens before, then a two-layer perceptron, both on layer-normalised input; a last layer norm,
// and the token embedding once more, transposed, gives the logits. That last use is why the output
// head has no weight of its own: lm_head is tied to transformer.wte.weight and is not listed twice
// (with tie_word_embeddings off it has one).
//
// Parameters are named as in a GPT-2 checkpoint (transformer.h.0.attn.c_attn.weight, ...), and the
// projections are stored [in, out] as there ("Conv1D"). Initial weights are drawn as GPT-2's, from
// LibTorch's default generator. One thread at a time.
#pragma once

#include <torch/nn/pimpl.h>

#include "lockstep/models/causal_lm.h"

namespace lockstep::models {

class GptImpl : public CausalLm {
 public:
  // Throws UsageError when the sizes do not fit together.
  explicit GptImpl(const GptConfig& config) : CausalLm(CausalLmConfig{.model = config}) {}
};
TORCH_MODULE(Gpt);

}  // namespace lockstep::models
