// The module of a language model that a DecoderSpec describes: embeddings, blocks, the last norm.
// There is one forward; each operation chooses between ATen's and lockstep::nn's by the Pass and by
// its own abilities. Internal; programs use causal_lm.h.
#pragma once

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/models/linear.h"
#include "lockstep/models/model_options.h"
#include "lockstep/models/pass.h"
#include "lockstep/nn/block.h"

namespace lockstep::models::detail {

// The residual stream between blocks. In the fused path the next norm adds a block's last output.
struct Stream {
  at::Tensor sum;
  at::Tensor delta{};          // undefined: nothing is left to add
  at::Tensor delta_bias{};     // of the layer that made delta; optional
  at::Tensor router_logits{};  // of the last block, where the pass asks for them

  // The residual with everything added.
  at::Tensor total() const;
};

// A norm of any kind. Its module belongs to `parent`, under the spec's name.
class Norm {
 public:
  Norm() = default;
  // `of_heads`: normalises each head. Where a TensorGroup divides heads, ranks sum its gradient.
  Norm(torch::nn::Module& parent, const NormSpec& spec, bool of_heads = false);

  explicit operator bool() const { return layer_ || rms_ != nullptr; }
  NormKind kind() const { return kind_; }
  at::Tensor forward(const at::Tensor& x, const Pass& pass) const;
  // Normalises the stream, after adding `delta` to it. In the fused path `amax` is set as by
  // lockstep::nn.
  at::Tensor forward(Stream& x, const Pass& pass, at::Tensor* amax = nullptr) const;
  // The same for a linear layer.
  nn::Fp8Input input(Stream& x, const Pass& pass) const;

 private:
  at::Tensor plain(const at::Tensor& x, const Pass& pass) const;
  at::Tensor weight(const Pass& pass) const;
  at::Tensor bias(const Pass& pass) const;  // of layer_
  at::Tensor rms_weight(const Pass& pass) const;

  bool of_heads_ = false;
  NormKind kind_ = NormKind::kRms;
  double epsilon_ = 0;
  torch::nn::LayerNorm layer_{nullptr};
  std::shared_ptr<torch::nn::Module> rms_;
  at::Tensor weight_;  // of rms_
};

class DecoderAttention;
class DecoderMlp;
class Experts;

// One block of the model; FullyShard gathers it as a unit.
class DecoderBlock : public torch::nn::Module, public nn::Block, public nn::Sliced {
 public:
  DecoderBlock(const DecoderSpec& spec, std::size_t layer, const ParameterOptions& parameters);

  void forward(Stream& x, const Pass& pass);
  // Names the cuts; whether the block divides by this number of ranks is checked by the model.
  std::vector<Cut> cuts(int ranks) const override;
  std::vector<std::vector<at::Tensor>> products() const override;

  // Set by place() where another stage of a device map begins: the device to which the decoder
  // copies the input, and the output of the last block.
  std::optional<c10::Device> copy_input_to;
  std::optional<c10::Device> copy_output_to;

 private:
  using Branch = std::function<at::Tensor(const nn::Fp8Input& x, const Pass& pass)>;
  // What a branch makes of the norm of the stream. `segment`: backward runs the branch again.
  static at::Tensor branch(Stream& x, const Norm& norm, const Pass& pass, bool segment,
                           const Branch& body);
  void add(Stream& x, const at::Tensor& y, const at::Tensor& bias, const Norm& after,
           const Pass& pass) const;
  // Whether the bias of a branch's last layer is added by the next norm instead.
  bool defers_bias(const Norm& after, const Pass& pass) const;

  std::vector<TensorCut> cuts_;
  double dropout_;
  Norm attention_norm_, attention_after_, mlp_norm_, mlp_after_;
  std::shared_ptr<DecoderAttention> attention_;
  std::shared_ptr<DecoderMlp> mlp_;  // or experts_
  std::shared_ptr<Experts> experts_;
};

class Decoder : public torch::nn::Module {
 public:
  Decoder(const DecoderSpec& spec, const ParameterOptions& parameters);

  struct Run {
    KvCache* cache = nullptr;
    const BlockRunner* runner = nullptr;
    BlockParts parts{};  // what the runner runs; none: whole blocks
    bool fused = false;
    bool residual_in_fp32 = false;
    std::vector<at::Tensor>* router_logits = nullptr;  // of each block, if they are wanted
    const nn::Staged::Stage* stage = nullptr;          // null: all of it
    nn::TensorGroupPtr tensor{};                       // null: parameters are whole
    std::int64_t sequence = 0;                         // as in Pass
  };
  // Hidden states [batch, time, width] after the last norm, or after the last block of a stage that
  // is not the last. With run.sequence this rank's part of time.
  at::Tensor forward(const at::Tensor& ids, const Run& run);

  const at::Tensor& token_weight() const { return tokens_->weight; }
  nn::Staged::Parts parts() const;

 private:
  Pass begin(const at::Tensor& ids, const Run& run, at::ScalarType table_type);
  at::Tensor embedded(const at::Tensor& ids, const Run& run, at::ScalarType residual);
  Stream through_blocks(Stream x, Pass pass, const Run& run, const nn::Staged::Stage& stage);

  DecoderSpec spec_;
  std::optional<RotaryAngles> angles_;
  torch::nn::Embedding tokens_{nullptr};
  torch::nn::Embedding positions_{nullptr};
  torch::nn::ModuleList blocks_;
  Norm last_norm_;
};

// A mixture of experts: perceptrons, a few of which a router chooses for each token.
//
//   Experts experts(spec.block.mlp, parameters);
//   const at::Tensor y = experts.forward(x, pass, &router_logits);
//
// Tokens are sorted by expert, and each expert computes its rows together (nn::grouped_linear).
// Every expert is part of the graph, also with no rows, so every parameter has a gradient in every
// step. One thread at a time.
class Experts : public torch::nn::Module {
 public:
  Experts(const MlpSpec& spec, const ParameterOptions& parameters);

  // x: [..., width]. The router's logits [..., experts] are stored in `router_logits`, unless that
  // is null. With slices (pass.tensor) every rank routes all tokens, x has been through
  // nn::enter(), and the result goes through nn::leave().
  at::Tensor forward(const at::Tensor& x, const Pass& pass, at::Tensor* router_logits);

 private:
  struct Routed {
    at::Tensor scores;  // float [tokens, experts of a token]; they add up to 1
    at::Tensor order;   // of [tokens * experts of a token], sorted by expert
    at::Tensor ends;    // where each expert's rows end then
  };
  at::Tensor router_logits_of(const at::Tensor& x, const Pass& pass) const;
  Routed route(const at::Tensor& logits) const;
  // The experts' results for rows that are sorted by expert.
  at::Tensor compute(const at::Tensor& rows, const at::Tensor& ends, bool owns_memory) const;

  MlpSpec spec_;
  Linear router_{nullptr};
  std::vector<std::vector<at::Tensor>> in_;  // weights: of each projection, of each expert
  std::vector<at::Tensor> out_;
};

// transformers' load_balancing_loss_func: minimal when all experts get equally many tokens, and
// then 1 for each expert of a token. `router_logits` has one tensor for each block.
at::Tensor load_balancing_loss(const std::vector<at::Tensor>& router_logits,
                               const ExpertsSpec& spec);

}  // namespace lockstep::models::detail
