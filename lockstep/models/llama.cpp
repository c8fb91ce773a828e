#include "lockstep/models/llama.h"

#include <torch/torch.h>

#include <tuple>
#include <utility>

#include "lockstep/models/decoder.h"
#include "lockstep/models/rotary.h"
#include "lockstep/nn/functional.h"

namespace lockstep::models {
namespace {

using detail::Pass;

// ---------------------------------------------------------------- positions

// Pairs are an element of the first half of what is rotated and its counterpart in the second.
at::Tensor rotated(const at::Tensor& x, const Pass& pass) {
  const std::int64_t width = pass.cos.size(1), rest = x.size(3) - width;
  const at::Tensor turned = rest > 0 ? x.narrow(3, 0, width) : x;
  const at::Tensor first = turned.narrow(3, 0, width / 2);
  const at::Tensor second = turned.narrow(3, width / 2, width / 2);
  const at::Tensor y = turned * pass.cos + torch::cat({-second, first}, 3) * pass.sin;
  return rest > 0 ? torch::cat({y, x.narrow(3, width, rest)}, 3) : y;
}

// ---------------------------------------------------------------- blocks

class RmsNorm : public torch::nn::Module {
 public:
  RmsNorm(std::int64_t width, double epsilon)
      : epsilon_(epsilon), weight_(register_parameter("weight", torch::ones({width}))) {}

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor wide = x.to(at::kFloat);
    const at::Tensor variance = wide.pow(2).mean(-1, /*keepdim=*/true);
    return weight_ * (wide * torch::rsqrt(variance + epsilon_)).to(x.scalar_type());
  }

  // The norm of the stream with what is left to add to it.
  at::Tensor forward_fused(detail::Residual& x, at::ScalarType type) {
    // The kernels take a weight that is float or has the norm's type.
    const bool fits = weight_.scalar_type() == at::kFloat || weight_.scalar_type() == type;
    const at::Tensor weight = fits ? weight_ : weight_.to(type);
    if (!x.delta.defined()) return nn::rms_norm(x.sum, weight, epsilon_, type);
    auto [sum, normed] = nn::add_rms_norm(x.sum, x.delta, x.delta_bias, weight, epsilon_);
    x = {.sum = sum};
    return normed;
  }

 private:
  double epsilon_;
  at::Tensor weight_;
};

class LlamaAttention : public torch::nn::Module {
 public:
  LlamaAttention(const LlamaConfig& c, std::size_t layer, const ParameterOptions& parameters)
      : heads_(c.num_attention_heads),
        shared_heads_(c.key_value_heads()),
        width_(c.head_width()),
        layer_(layer),
        dropout_(c.attention_dropout) {
    const auto project = [&](const char* name, std::int64_t in, std::int64_t out) {
      return register_module(
          name, detail::make_linear(
                    LinearOptions(in, out).bias(c.attention_bias).deviation(c.initializer_range),
                    parameters));
    };
    const std::int64_t queries = heads_ * width_, keys = shared_heads_ * width_;
    if (c.fused_projections) {
      qkv_ = project("qkv_proj", c.hidden_size, queries + 2 * keys);
    } else {
      q_ = project("q_proj", c.hidden_size, queries);
      k_ = project("k_proj", c.hidden_size, keys);
      v_ = project("v_proj", c.hidden_size, keys);
    }
    o_ = project("o_proj", queries, c.hidden_size);
  }

  at::Tensor forward(const at::Tensor& x, const Pass& pass) {
    at::Tensor q, k, v;
    if (qkv_) {
      const std::int64_t keys = shared_heads_ * width_;
      const auto parts = qkv_->forward(x).split_with_sizes({heads_ * width_, keys, keys}, 2);
      q = parts[0], k = parts[1], v = parts[2];
    } else {
      q = q_->forward(x), k = k_->forward(x), v = v_->forward(x);
    }
    return o_->forward(detail::attend(
        rotated(detail::by_head(q, heads_), pass), rotated(detail::by_head(k, shared_heads_), pass),
        detail::by_head(v, shared_heads_), pass, layer_, is_training() ? dropout_ : 0));
  }

  at::Tensor forward_fused(const at::Tensor& x, const Pass& pass) {
    at::Tensor q, k, v;
    if (qkv_) {
      const std::int64_t keys = shared_heads_ * width_;
      const auto parts = qkv_->forward_fused(x).split_with_sizes({heads_ * width_, keys, keys}, 2);
      q = parts[0], k = parts[1], v = parts[2];
    } else {
      q = q_->forward_fused(x), k = k_->forward_fused(x), v = v_->forward_fused(x);
    }
    const auto [turned_q, turned_k] =
        nn::rope(detail::by_head(q, heads_), detail::by_head(k, shared_heads_), pass.cos, pass.sin);
    return o_->forward_fused(detail::attend_fused(
        turned_q, turned_k, detail::by_head(v, shared_heads_), pass, is_training() ? dropout_ : 0));
  }

 private:
  std::int64_t heads_;
  std::int64_t shared_heads_;
  std::int64_t width_;
  std::size_t layer_;
  double dropout_;
  Linear q_{nullptr}, k_{nullptr}, v_{nullptr}, qkv_{nullptr}, o_{nullptr};
};

class LlamaPerceptron : public torch::nn::Module {
 public:
  LlamaPerceptron(const LlamaConfig& c, const ParameterOptions& parameters)
      : activation_(c.hidden_act) {
    const auto project = [&](const char* name, std::int64_t in, std::int64_t out) {
      return register_module(
          name,
          detail::make_linear(
              LinearOptions(in, out).bias(c.mlp_bias).deviation(c.initializer_range), parameters));
    };
    if (c.fused_projections) {
      gate_up_ = project("gate_up_proj", c.hidden_size, 2 * c.intermediate_size);
    } else {
      gate_ = project("gate_proj", c.hidden_size, c.intermediate_size);
      up_ = project("up_proj", c.hidden_size, c.intermediate_size);
    }
    down_ = project("down_proj", c.intermediate_size, c.hidden_size);
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor gate, up;
    if (gate_up_) {
      const auto parts = gate_up_->forward(x).chunk(2, -1);
      gate = parts[0], up = parts[1];
    } else {
      gate = gate_->forward(x), up = up_->forward(x);
    }
    return down_->forward(detail::activate(activation_, gate) * up);
  }

  at::Tensor forward_fused(const at::Tensor& x) {
    if (gate_up_ && activation_ == Activation::kSilu)
      return down_->forward_fused(nn::swiglu(gate_up_->forward_fused(x)));
    at::Tensor gate, up;
    if (gate_up_) {
      const auto parts = gate_up_->forward_fused(x).chunk(2, -1);
      gate = parts[0], up = parts[1];
    } else {
      gate = gate_->forward_fused(x), up = up_->forward_fused(x);
    }
    return down_->forward_fused(detail::activate(activation_, gate) * up);
  }

 private:
  Activation activation_;
  Linear gate_{nullptr}, up_{nullptr}, gate_up_{nullptr}, down_{nullptr};
};

class LlamaBlock : public detail::DecoderBlock {
 public:
  LlamaBlock(const LlamaConfig& c, std::size_t layer, const ParameterOptions& parameters)
      : dropout_(c.resid_pdrop) {
    attention_ =
        register_module("self_attn", std::make_shared<LlamaAttention>(c, layer, parameters));
    perceptron_ = register_module("mlp", std::make_shared<LlamaPerceptron>(c, parameters));
    norm_1_ = register_module("input_layernorm",
                              std::make_shared<RmsNorm>(c.hidden_size, c.rms_norm_eps));
    norm_2_ = register_module("post_attention_layernorm",
                              std::make_shared<RmsNorm>(c.hidden_size, c.rms_norm_eps));
  }

  at::Tensor forward(const at::Tensor& x, const Pass& pass) override {
    const auto y = x + dropped(attention_->forward(norm_1_->forward(x), pass));
    return y + dropped(perceptron_->forward(norm_2_->forward(y)));
  }

  void forward_fused(detail::Residual& x, const Pass& pass) override {
    x.delta = dropped(attention_->forward_fused(norm_1_->forward_fused(x, pass.type), pass));
    x.delta = dropped(perceptron_->forward_fused(norm_2_->forward_fused(x, pass.type)));
  }

 private:
  at::Tensor dropped(const at::Tensor& x) const {
    return dropout_ > 0 ? torch::dropout(x, dropout_, is_training()) : x;
  }

  double dropout_;
  std::shared_ptr<LlamaAttention> attention_;
  std::shared_ptr<LlamaPerceptron> perceptron_;
  std::shared_ptr<RmsNorm> norm_1_;
  std::shared_ptr<RmsNorm> norm_2_;
};

}  // namespace

// Everything but the output head, under the name that checkpoints use for it.
class LlamaModel : public torch::nn::Module {
 public:
  LlamaModel(const LlamaConfig& c, const ParameterOptions& parameters)
      : angles_(c), window_(c.sliding_window), padding_(c.pad_token_id) {
    tokens_ = register_module("embed_tokens",
                              detail::make_embedding(c.vocab_size, c.hidden_size, parameters));
    if (parameters.draw) detail::draw(tokens_->weight, c.initializer_range);
    blocks_ = register_module("layers", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < c.num_hidden_layers; ++i)
      blocks_->push_back(std::make_shared<LlamaBlock>(c, static_cast<std::size_t>(i), parameters));
    last_norm_ = register_module("norm", std::make_shared<RmsNorm>(c.hidden_size, c.rms_norm_eps));
  }

  at::Tensor forward_fused(const at::Tensor& ids, const BlockRunner& runner,
                           bool residual_in_fp32) {
    const detail::FusedTypes types =
        detail::fused_types(ids.device(), tokens_->weight, residual_in_fp32);
    const at::Tensor x = nn::embedding(ids, tokens_->weight, {},
                                       {.dtype = types.residual, .padding_index = padding_});
    Pass pass = detail::begin_pass(ids, nullptr, window_);
    pass.type = types.compute;
    std::tie(pass.cos, pass.sin) = angles_.find(
        {.time = ids.size(1), .like = ids.options().dtype(at::kFloat), .halves = true});
    detail::Residual residual = detail::run_blocks_fused(*blocks_, x, pass, runner);
    return last_norm_->forward_fused(residual, types.compute);
  }

  at::Tensor forward(const at::Tensor& ids, KvCache* cache, const BlockRunner& runner) {
    const at::Tensor x = torch::embedding(tokens_->weight, ids, padding_);
    const std::int64_t past = cache != nullptr ? cache->length() : 0;
    Pass pass = detail::begin_pass(ids, cache, window_);
    std::tie(pass.cos, pass.sin) =
        angles_.find({.past = past, .time = ids.size(1), .like = x.options()});
    return last_norm_->forward(detail::run_blocks(*blocks_, x, pass, runner));
  }

  const at::Tensor& token_weight() const { return tokens_->weight; }

 private:
  detail::RotaryAngles angles_;
  std::int64_t window_;
  std::int64_t padding_;
  torch::nn::Embedding tokens_{nullptr};
  torch::nn::ModuleList blocks_;
  std::shared_ptr<RmsNorm> last_norm_;
};

LlamaImpl::LlamaImpl(CausalLmConfig whole, const ParameterOptions& options)
    : CausalLm(std::move(whole)) {
  check_sizes(config());
  const LlamaConfig& c = std::get<LlamaConfig>(config().model);
  model_ = register_module("model", std::make_shared<LlamaModel>(c, options));
  if (c.tie_word_embeddings) return;
  lm_head_ = register_module(
      "lm_head",
      detail::make_linear(
          LinearOptions(c.hidden_size, c.vocab_size).bias(false).deviation(c.initializer_range),
          options));
  if (options.draw) detail::draw(lm_head_->weight, c.initializer_range);
}

at::Tensor LlamaImpl::run_fused(const at::Tensor& ids, const BlockRunner& runner,
                                bool residual_in_fp32) {
  return model_->forward_fused(ids, runner, residual_in_fp32);
}

const at::Tensor* LlamaImpl::head_weight() const {
  if (!lm_head_) return &model_->token_weight();
  return lm_head_->has_lora() ? nullptr : &lm_head_->weight;
}

at::Tensor LlamaImpl::run(const at::Tensor& ids, KvCache* cache, const BlockRunner& runner) {
  return model_->forward(ids, cache, runner);
}

at::Tensor LlamaImpl::head(const at::Tensor& hidden_states) {
  return lm_head_ ? lm_head_->forward(hidden_states)
                  : torch::linear(hidden_states, model_->token_weight());
}

}  // namespace lockstep::models
