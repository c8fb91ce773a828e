// A language model of any family: token ids in, logits of the next token out.
//
//   auto model = lockstep::models::make_causal_lm(lockstep::models::read_config("gpt2"));
//   auto logits = model->forward(ids);                          // [batch, time, vocab_size]
//   auto loss = lockstep::models::next_token_loss(logits, targets);
//
// pretrained.h builds it with its weights, generate() continues a text. Every projection of every
// family is a Linear (linear.h) under Hugging Face's name. In training mode the configuration's
// dropout applies; forward never waits for the device. One thread at a time.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/models/hugging_face.h"
#include "lockstep/models/model_options.h"
#include "lockstep/nn/block.h"
#include "lockstep/nn/tensor_group.h"

namespace lockstep::models {

namespace detail {
class Decoder;
}
class LinearImpl;
struct DeviceMap;

class CausalLm : public torch::nn::Module, public nn::Staged, public nn::Sliced {
 public:
  // `options` sets type and device where nothing is drawn; otherwise make_causal_lm() converts.
  explicit CausalLm(CausalLmConfig config, const ParameterOptions& options = {});

  // ids: int64 [batch, time]. With a cache they continue what it holds, and are added to it.
  // UsageError for another shape or type, and for more tokens than GPT-2 has positions.
  at::Tensor forward(const at::Tensor& ids, KvCache* cache = nullptr) {
    const at::Tensor hidden = hidden_states(ids, cache);
    return stage().last ? logits(hidden) : hidden;
  }
  // The two halves of forward, for losses that never hold all logits: the hidden states [batch,
  // time, width] after the last norm, and the head.
  at::Tensor hidden_states(const at::Tensor& ids, KvCache* cache = nullptr);
  at::Tensor logits(const at::Tensor& hidden_states);
  // The mean cross entropy against the next ids [batch, time]; targets of -100 do not count. On a
  // GPU head and loss are fused, and the logits of all tokens never exist at once. In a mixture of
  // experts with output_router_logits in its configuration, router_aux_loss_coef times the load
  // balancing loss is added, as in transformers. `all_logits` also returns the logits, for metrics;
  // they then exist.
  at::Tensor loss(const at::Tensor& ids, const at::Tensor& targets,
                  at::Tensor* all_logits = nullptr);

  // Whether blocks use the operations of lockstep::nn (fused norms, activations, loss;
  // docs/optimisation.md) or ATen's alone. Unset: on a GPU with our kernels. Never with a cache.
  void use_fused(std::optional<bool> on) { fused_ = on; }

  // In the fused path under bf16 autocasting the residual stream is bfloat16, unless this is true:
  // then it is float, as with ATen's operations, which takes more memory and is a little slower.
  // Under fp16 it is always float.
  void use_fp32_residual(bool on) { residual_in_fp32_ = on; }

  // model->run_blocks_with(lockstep::checkpoint) trades memory for a second forward, and
  // model->run_blocks_with(lockstep::checkpoint, {.swiglu = true, .norm = true}) less memory for
  // less work; these two are of the fused operations. UsageError for a part that the family's
  // blocks do not have. Not used with a cache.
  void run_blocks_with(BlockRunner runner, const BlockParts& parts = {});

  // For Pipeline: as a stage, forward() and loss() return the input of the next stage.
  Parts parts() const override;
  // For TensorParallel: with slices of its weights forward() and loss() return the same values on
  // every rank, and loss() holds only a slice of the logits. use_sequence_parallel(true) also
  // divides the activations; with fewer tokens than ranks, or with a cache, every rank has the
  // whole sequence.
  std::vector<Cut> cuts(int ranks) const override;

  // A model that place() has split over devices is not moved; only its type is converted.
  using torch::nn::Module::to;
  void to(c10::Device device, c10::ScalarType dtype, bool non_blocking = false) override;
  void to(c10::Device device, bool non_blocking = false) override;

  const CausalLmConfig& config() const { return config_; }
  std::int64_t parameter_count() const;

 private:
  bool fused_on(c10::Device device) const;
  // Returns this rank's part of the sequence.
  at::Tensor decode(const at::Tensor& ids, KvCache* cache, std::vector<at::Tensor>* router_logits);
  // The length of the sequence that ranks divide; 0: each rank has all of it.
  std::int64_t sequence_of(const at::Tensor& ids, const KvCache* cache = nullptr) const;
  at::Tensor cross_entropy(const at::Tensor& hidden, const at::Tensor& targets,
                           std::int64_t sequence);
  // The head's product with this rank's weight, or slice of the weight.
  at::Tensor own_logits(const at::Tensor& hidden);
  // [vocabulary, width]; null where the head has an adapter.
  const at::Tensor* head_weight() const;

  friend void place(CausalLm& model, const DeviceMap& map);
  struct Placement {
    c10::Device input;                          // of the embeddings
    std::optional<c10::Device> copy_to_head{};  // where the head is on another device than the norm
  };

  std::optional<bool> fused_;
  bool residual_in_fp32_ = false;
  CausalLmConfig config_;
  std::shared_ptr<detail::Decoder> decoder_;
  std::shared_ptr<LinearImpl> head_;  // null where it shares the embedding's weight
  BlockRunner runner_;
  BlockParts parts_;  // that it runs; none: whole blocks
  std::optional<Placement> placement_;
};
using CausalLmPtr = std::shared_ptr<CausalLm>;

// The device of a part of a device map: "cpu:1" is the CPU. UsageError for a GPU that the process
// does not have.
c10::Device device_of(const std::string& device);

// Splits a model over devices: moves its parts where the map puts them, and copies activations and
// gradients where one device's blocks end and another's begin. The devices work one after the
// other, so this is for models that do not fit one of them. Names, checkpoints and, on one kind of
// device, results are those of the undivided model.
//
//   place(*model, balanced_device_map(model->config(), {"cuda:0", "cuda:1"}));
//
// Call it before optimizers are made; adapters may be added before or after. A later
// model.to(device) does not move the parts. Throws UsageError for a map of another model.
void place(CausalLm& model, const DeviceMap& map);

// Mean cross entropy of logits [batch, time, vocab] against the ids that come next [batch, time],
// which may be on another device.
at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& targets);

// Continues a text, token by token, with a cache of keys and values.
//
//   auto model = lockstep::models::load_pretrained("gpt2");
//   auto next = lockstep::models::generate(*model, {464, 3290}, {.max_new_tokens = 10});
//
// Temperature 0 takes the likeliest token each time, as transformers' generate(do_sample=False)
// does. The options have transformers' names and meanings, and are applied in its order: penalty,
// temperature, top_k, top_p. One thread at a time.
struct GenerateOptions {
  std::int64_t max_new_tokens = 20;
  double temperature = 0;
  std::int64_t top_k = 0;  // samples among this many of the likeliest tokens; 0: all
  double top_p = 1;        // samples among the likeliest tokens whose probabilities sum to it
  // Divides the positive logits of tokens already in the text, and multiplies negative ones.
  double repetition_penalty = 1;
  std::uint64_t seed = 0;           // the same seed gives the same tokens
  std::vector<std::int64_t> eos{};  // tokens that end the text; they are part of the result
  // Called with the new tokens after each of them; true ends the text. For stop_strings.
  std::function<bool(const std::vector<std::int64_t>& made)> stop{};
};

// Returns the new tokens. Computes without gradients and in evaluation mode, and restores the
// model's mode. UsageError for no ids, ids outside of the vocabulary, and more tokens than GPT-2
// has positions.
std::vector<std::int64_t> generate(CausalLm& model, const std::vector<std::int64_t>& ids,
                                   const GenerateOptions& options = {});

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
//
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
