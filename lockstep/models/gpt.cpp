#include "lockstep/models/gpt.h"

#include <torch/torch.h>

#include <cmath>
#include <utility>

#include "lockstep/models/decoder.h"
#include "lockstep/nn/functional.h"

namespace lockstep::models {
namespace {

using detail::Pass;

Linear conv1d(std::int64_t in, std::int64_t out, double deviation,
              const ParameterOptions& parameters) {
  return detail::make_linear(
      LinearOptions(in, out).layout(WeightLayout::kInOut).deviation(deviation), parameters);
}

// What a block adds to the residual stream starts smaller in a deeper model, so that the stream's
// size does not grow with depth.
double residual_deviation(const GptConfig& config) {
  return config.initializer_range / std::sqrt(2.0 * static_cast<double>(config.n_layer));
}

class GptAttention : public torch::nn::Module {
 public:
  GptAttention(const GptConfig& c, std::size_t layer, const ParameterOptions& parameters)
      : heads_(c.n_head), layer_(layer), dropout_(c.attn_pdrop) {
    project_in_ =
        register_module("c_attn", conv1d(c.n_embd, 3 * c.n_embd, c.initializer_range, parameters));
    project_out_ =
        register_module("c_proj", conv1d(c.n_embd, c.n_embd, residual_deviation(c), parameters));
  }

  at::Tensor forward(const at::Tensor& x, const Pass& pass) {
    const auto parts = project_in_->forward(x).split(x.size(2), 2);
    const auto y = detail::attend(
        detail::by_head(parts[0], heads_), detail::by_head(parts[1], heads_),
        detail::by_head(parts[2], heads_), pass, layer_, is_training() ? dropout_ : 0);
    return project_out_->forward(y);
  }

  // Without the bias of the last layer.
  at::Tensor forward_fused(const at::Tensor& x, const Pass& pass) {
    const auto parts = project_in_->forward_fused(x).split(x.size(2), 2);
    const auto y =
        detail::attend_fused(detail::by_head(parts[0], heads_), detail::by_head(parts[1], heads_),
                             detail::by_head(parts[2], heads_), pass, is_training() ? dropout_ : 0);
    return project_out_->forward_fused(y, /*with_bias=*/false);
  }
  const at::Tensor& last_bias() const { return project_out_->bias; }

 private:
  std::int64_t heads_;
  std::size_t layer_;
  double dropout_;
  Linear project_in_{nullptr};
  Linear project_out_{nullptr};
};

class GptPerceptron : public torch::nn::Module {
 public:
  GptPerceptron(const GptConfig& c, const ParameterOptions& parameters)
      : activation_(c.activation_function) {
    widen_ =
        register_module("c_fc", conv1d(c.n_embd, c.inner_width(), c.initializer_range, parameters));
    narrow_ = register_module("c_proj",
                              conv1d(c.inner_width(), c.n_embd, residual_deviation(c), parameters));
  }

  at::Tensor forward(const at::Tensor& x) {
    return narrow_->forward(detail::activate(activation_, widen_->forward(x)));
  }

  // Without the bias of the last layer.
  at::Tensor forward_fused(const at::Tensor& x) {
    if (activation_ != Activation::kGeluTanh || widen_->has_lora() || narrow_->has_lora())
      return narrow_->forward_fused(detail::activate(activation_, widen_->forward_fused(x)),
                                    /*with_bias=*/false);
    return nn::gelu_mlp(x, widen_->out_in(), widen_->bias, narrow_->out_in(), {});
  }
  const at::Tensor& last_bias() const { return narrow_->bias; }

 private:
  Activation activation_;
  Linear widen_{nullptr};
  Linear narrow_{nullptr};
};

torch::nn::LayerNorm layer_norm(const GptConfig& config) {
  return torch::nn::LayerNorm(
      torch::nn::LayerNormOptions({config.n_embd}).eps(config.layer_norm_epsilon));
}

// The norm of the stream with what is left to add to it.
at::Tensor add_norm(detail::Residual& x, const torch::nn::LayerNorm& norm, at::ScalarType type) {
  const double epsilon = norm->options.eps();
  if (!x.delta.defined()) return nn::layer_norm(x.sum, norm->weight, norm->bias, epsilon, type);
  auto [sum, normed] =
      nn::add_layer_norm(x.sum, x.delta, x.delta_bias, norm->weight, norm->bias, epsilon);
  x = {.sum = sum};
  return normed;
}

class GptBlock : public detail::DecoderBlock {
 public:
  GptBlock(const GptConfig& config, std::size_t layer, const ParameterOptions& parameters)
      : dropout_(config.resid_pdrop) {
    norm_1_ = register_module("ln_1", layer_norm(config));
    attention_ = register_module("attn", std::make_shared<GptAttention>(config, layer, parameters));
    norm_2_ = register_module("ln_2", layer_norm(config));
    perceptron_ = register_module("mlp", std::make_shared<GptPerceptron>(config, parameters));
  }

  at::Tensor forward(const at::Tensor& x, const Pass& pass) override {
    const auto y = x + dropped(attention_->forward(norm_1_->forward(x), pass));
    return y + dropped(perceptron_->forward(norm_2_->forward(y)));
  }

  void forward_fused(detail::Residual& x, const Pass& pass) override {
    leave(x, attention_->forward_fused(add_norm(x, norm_1_, pass.type), pass),
          attention_->last_bias());
    leave(x, perceptron_->forward_fused(add_norm(x, norm_2_, pass.type)), perceptron_->last_bias());
  }

 private:
  // Dropout is of the sum of both, so there is nothing to fuse then.
  void leave(detail::Residual& x, const at::Tensor& delta, const at::Tensor& bias) const {
    const bool drops = dropout_ > 0 && is_training();
    x.delta = drops ? dropped(delta + bias.to(delta.scalar_type())) : delta;
    x.delta_bias = drops ? at::Tensor() : bias;
  }

  at::Tensor dropped(const at::Tensor& x) const {
    return dropout_ > 0 ? torch::dropout(x, dropout_, is_training()) : x;
  }

  double dropout_;
  torch::nn::LayerNorm norm_1_{nullptr};
  std::shared_ptr<GptAttention> attention_;
  torch::nn::LayerNorm norm_2_{nullptr};
  std::shared_ptr<GptPerceptron> perceptron_;
};

}  // namespace

// Everything but the output head, under the name that checkpoints use for it.
class GptTransformer : public torch::nn::Module {
 public:
  GptTransformer(const GptConfig& c, const ParameterOptions& parameters) : dropout_(c.embd_pdrop) {
    tokens_ = register_module("wte", detail::make_embedding(c.vocab_size, c.n_embd, parameters));
    positions_ =
        register_module("wpe", detail::make_embedding(c.n_positions, c.n_embd, parameters));
    blocks_ = register_module("h", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < c.n_layer; ++i)
      blocks_->push_back(std::make_shared<GptBlock>(c, static_cast<std::size_t>(i), parameters));
    last_norm_ = register_module("ln_f", layer_norm(c));
    if (!parameters.draw) return;
    detail::draw(tokens_->weight, c.initializer_range);
    detail::draw(positions_->weight, c.initializer_range);
  }

  at::Tensor forward_fused(const at::Tensor& ids, const BlockRunner& runner,
                           bool residual_in_fp32) {
    const detail::FusedTypes types =
        detail::fused_types(ids.device(), tokens_->weight, residual_in_fp32);
    auto x = nn::embedding(ids, tokens_->weight, positions_->weight, {.dtype = types.residual});
    if (dropout_ > 0) x = torch::dropout(x, dropout_, is_training());
    Pass pass = detail::begin_pass(ids, nullptr, /*window=*/0);
    pass.type = types.compute;
    detail::Residual residual = detail::run_blocks_fused(*blocks_, x, pass, runner);
    return add_norm(residual, last_norm_, types.compute);
  }

  at::Tensor forward(const at::Tensor& ids, KvCache* cache, const BlockRunner& runner) {
    const std::int64_t past = cache != nullptr ? cache->length() : 0;
    const auto places = torch::arange(past, past + ids.size(1), ids.options());
    auto x = tokens_->forward(ids) + positions_->forward(places);
    if (dropout_ > 0) x = torch::dropout(x, dropout_, is_training());
    const Pass pass = detail::begin_pass(ids, cache, /*window=*/0);
    return last_norm_->forward(detail::run_blocks(*blocks_, x, pass, runner));
  }

  const at::Tensor& token_weight() const { return tokens_->weight; }

 private:
  double dropout_;
  torch::nn::Embedding tokens_{nullptr};
  torch::nn::Embedding positions_{nullptr};
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm last_norm_{nullptr};
};

GptImpl::GptImpl(CausalLmConfig whole, const ParameterOptions& options)
    : CausalLm(std::move(whole)) {
  check_sizes(config());
  const GptConfig& c = std::get<GptConfig>(config().model);
  transformer_ = register_module("transformer", std::make_shared<GptTransformer>(c, options));
  if (c.tie_word_embeddings) return;
  lm_head_ = register_module(
      "lm_head",
      detail::make_linear(
          LinearOptions(c.n_embd, c.vocab_size).bias(false).deviation(c.initializer_range),
          options));
  if (options.draw) detail::draw(lm_head_->weight, c.initializer_range);
}

at::Tensor GptImpl::run_fused(const at::Tensor& ids, const BlockRunner& runner,
                              bool residual_in_fp32) {
  return transformer_->forward_fused(ids, runner, residual_in_fp32);
}

const at::Tensor* GptImpl::head_weight() const {
  if (!lm_head_) return &transformer_->token_weight();
  return lm_head_->has_lora() ? nullptr : &lm_head_->weight;
}

at::Tensor GptImpl::run(const at::Tensor& ids, KvCache* cache, const BlockRunner& runner) {
  return transformer_->forward(ids, cache, runner);
}

at::Tensor GptImpl::head(const at::Tensor& hidden_states) {
  return lm_head_ ? lm_head_->forward(hidden_states)
                  : torch::linear(hidden_states, transformer_->token_weight());
}

}  // namespace lockstep::models
