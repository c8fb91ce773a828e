// GPT-2: the language model that the tests and benchmarks train, under Hugging Face's names.
//
//   lockstep::models::Gpt gpt{lockstep::models::GptConfig{.n_layer = 4, .n_head = 4, .n_embd =
//   256}}; auto logits = gpt(ids);                                     // [batch, time, vocab_size]
//   auto loss = lockstep::models::next_token_loss(logits, targets);
//
// The shape of it: token and position embeddings are added; each block adds an attention over the
// tokens before, then a two-layer perceptron, both on layer-normalised input; a last layer norm,
// and the token embedding once more, transposed, gives the logits. That last use is why the output
// head has no weight of its own: lm_head is tied to transformer.wte.weight and is not listed twice.
//
// Parameters are named as in a GPT-2 checkpoint (transformer.h.0.attn.c_attn.weight, ...), and the
// projections are stored [in, out] as there ("Conv1D"). Initial weights are drawn as GPT-2's, from
// LibTorch's default generator. One thread at a time.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/models/shapes.h"

namespace lockstep::models {

// How to run a block on its input: call it (the default), or keep less and call it again in
// backward. lockstep::checkpoint has this type.
using Block = std::function<at::Tensor(const std::vector<at::Tensor>&)>;
using BlockRunner = std::function<at::Tensor(Block, std::vector<at::Tensor>)>;

class GptTransformer;

class GptImpl : public torch::nn::Module {
 public:
  // Throws UsageError when the sizes do not fit together.
  explicit GptImpl(const GptConfig& config);

  // ids: int64 [batch, time] with time <= n_positions. Returns logits [batch, time, vocab_size].
  at::Tensor forward(const at::Tensor& ids);

  // net->run_blocks_with(lockstep::checkpoint) trades memory for a second forward.
  void run_blocks_with(BlockRunner runner);

  const GptConfig& config() const { return config_; }
  std::int64_t parameter_count() const;

 private:
  GptConfig config_;
  std::shared_ptr<GptTransformer> transformer_;
  BlockRunner runner_;
};
TORCH_MODULE(Gpt);

// The config.json of Hugging Face's GPT2LMHeadModel that computes what this model does, for a
// folder with its weights as model.safetensors: from_pretrained(folder) reads both. `end_of_text`
// is the token that ends a text, where there is one.
std::string hugging_face_config(const GptConfig& config,
                                std::optional<std::int64_t> end_of_text = std::nullopt);

// Mean cross entropy of logits [batch, time, vocab] against the ids that come next [batch, time].
at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace lockstep::models
