#include "lockstep/models/llama.h"

#include <torch/torch.h>

#include <bit>
#include <map>
#include <numbers>
#include <tuple>
#include <utility>

#include "lockstep/models/decoder.h"
#include "lockstep/nn/functional.h"
#include "lockstep/nn/weight_copy.h"

namespace lockstep::models {
namespace {

using detail::Pass;

// ---------------------------------------------------------------- positions

// Frequencies that slow rotations are divided by `factor` with, fast ones keep theirs, and those
// between are interpolated.
at::Tensor llama3_frequencies(const at::Tensor& plain, const RopeConfig& rope) {
  const auto length = static_cast<double>(rope.original_max_position_embeddings);
  const double low = rope.low_freq_factor, high = rope.high_freq_factor;
  const at::Tensor waves = 2 * std::numbers::pi / plain;
  const at::Tensor scaled = torch::where(waves > length / low, plain / rope.factor, plain);
  const at::Tensor share = (length / waves - low) / (high - low);
  const at::Tensor between = (1 - share) * scaled / rope.factor + share * scaled;
  const at::Tensor is_between =
      (waves < length / high).logical_not().logical_and((waves > length / low).logical_not());
  return torch::where(is_between, between, scaled);
}

at::Tensor divisors(const std::vector<double>& values) {
  return torch::tensor(values, at::kDouble).to(at::kFloat);
}

// Angles of positions, in float32. Tensors without a name: they are neither saved nor converted.
class RotaryAngles {
 public:
  explicit RotaryAngles(const LlamaConfig& c) : rope_(c.rope) {
    const auto width = static_cast<std::int64_t>(static_cast<double>(c.head_width()) *
                                                 rope_.partial_rotary_factor);
    const at::Tensor powers = torch::pow(
        rope_.rope_theta, torch::arange(0, width, 2, at::kFloat) / static_cast<double>(width));
    frequencies_ = 1.0 / powers;
    if (rope_.type == "linear") frequencies_ = frequencies_ / rope_.factor;
    if (rope_.type == "llama3") frequencies_ = llama3_frequencies(frequencies_, rope_);
    if (rope_.type == "longrope") {
      frequencies_ = 1.0 / (divisors(rope_.short_factor) * powers);
      long_frequencies_ = 1.0 / (divisors(rope_.long_factor) * powers);
    }
  }

  // Cosine and sine of the positions from `past` on, [time, width] in the type of `like`. The last
  // ones are cached: in training they are the same in every step.
  void fill(Pass& pass, std::int64_t past, std::int64_t time, const at::Tensor& like) {
    const bool same = cos_.defined() && past == past_ && time == cos_.size(0) &&
                      cos_.scalar_type() == like.scalar_type() && cos_.device() == like.device();
    if (!same) {
      const torch::NoGradGuard no_grad;
      const bool beyond = past + time > rope_.original_max_position_embeddings;
      at::Tensor& chosen = long_frequencies_.defined() && beyond ? long_frequencies_ : frequencies_;
      chosen = chosen.to(like.device());
      const auto places = torch::arange(past, past + time, chosen.options());
      const at::Tensor angles = places.unsqueeze(1) * chosen;
      const at::Tensor both = torch::cat({angles, angles}, 1);
      cos_ = (both.cos() * rope_.attention_factor).to(like.scalar_type());
      sin_ = (both.sin() * rope_.attention_factor).to(like.scalar_type());
      past_ = past;
    }
    pass.cos = cos_;
    pass.sin = sin_;
  }
  // In float32 and once for the two halves, as nn::rope takes them.
  void fill_fused(Pass& pass, std::int64_t time, c10::Device device) {
    // Of lengths up to a power of two, which are few: a CUDA graph reads them in its replays.
    const bool beyond = time > rope_.original_max_position_embeddings;
    const auto length = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(time)));
    auto& [cos, sin] = halves_[{device.str(), length, beyond}];
    if (!cos.defined()) {
      const torch::NoGradGuard no_grad;
      const bool is_long = long_frequencies_.defined() && beyond;
      const at::Tensor chosen = (is_long ? long_frequencies_ : frequencies_).to(device);
      const at::Tensor angles = torch::arange(length, chosen.options()).unsqueeze(1) * chosen;
      cos = angles.cos() * rope_.attention_factor;
      sin = angles.sin() * rope_.attention_factor;
    }
    pass.cos = cos.narrow(0, 0, time);
    pass.sin = sin.narrow(0, 0, time);
  }

 private:
  RopeConfig rope_;
  at::Tensor frequencies_;
  at::Tensor long_frequencies_;  // of longrope
  at::Tensor cos_;
  at::Tensor sin_;
  // By device, length and whether it is beyond the original positions.
  std::map<std::tuple<std::string, std::int64_t, bool>, std::pair<at::Tensor, at::Tensor>> halves_;
  std::int64_t past_ = 0;
};

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
  at::Tensor forward_fused(detail::Residual& x) {
    // The kernels take a weight that is float or has the stream's type.
    const at::Tensor weight =
        weight_.scalar_type() == at::kFloat || weight_.scalar_type() == x.sum.scalar_type()
            ? weight_
            : weight_.to(x.sum.scalar_type());
    if (!x.delta.defined()) return nn::rms_norm(x.sum, weight, epsilon_);
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
    x.delta = dropped(attention_->forward_fused(norm_1_->forward_fused(x), pass));
    x.delta = dropped(perceptron_->forward_fused(norm_2_->forward_fused(x)));
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
    tokens_ = register_module(
        "embed_tokens",
        detail::make_embedding(parameters.padded(c.vocab_size), c.hidden_size, parameters));
    if (parameters.draw) detail::draw_rows(tokens_->weight, c.vocab_size, c.initializer_range);
    blocks_ = register_module("layers", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < c.num_hidden_layers; ++i)
      blocks_->push_back(std::make_shared<LlamaBlock>(c, static_cast<std::size_t>(i), parameters));
    last_norm_ = register_module("norm", std::make_shared<RmsNorm>(c.hidden_size, c.rms_norm_eps));
  }

  at::Tensor forward_fused(const at::Tensor& ids, const BlockRunner& runner) {
    const at::ScalarType type = detail::compute_type(ids.device(), tokens_->weight);
    const at::Tensor x = nn::embedding(ids, tokens_->weight, {},
                                       {.dtype = type,
                                        .padding_index = padding_,
                                        .tokens_copy = nn::weight_copy(tokens_->weight, type)});
    Pass pass = detail::begin_pass(ids, nullptr, window_);
    angles_.fill_fused(pass, ids.size(1), ids.device());
    detail::Residual residual = detail::run_blocks_fused(*blocks_, x, pass, runner);
    return last_norm_->forward_fused(residual);
  }

  at::Tensor forward(const at::Tensor& ids, KvCache* cache, const BlockRunner& runner) {
    const at::Tensor x = torch::embedding(tokens_->weight, ids, padding_);
    const std::int64_t past = cache != nullptr ? cache->length() : 0;
    Pass pass = detail::begin_pass(ids, cache, window_);
    angles_.fill(pass, past, ids.size(1), x);
    return last_norm_->forward(detail::run_blocks(*blocks_, x, pass, runner));
  }

  const at::Tensor& token_weight() const { return tokens_->weight; }

 private:
  RotaryAngles angles_;
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
      "lm_head", detail::make_linear(LinearOptions(c.hidden_size, options.padded(c.vocab_size))
                                         .bias(false)
                                         .deviation(c.initializer_range),
                                     options));
  if (options.draw) detail::draw_rows(lm_head_->weight, c.vocab_size, c.initializer_range);
}

at::Tensor LlamaImpl::run_fused(const at::Tensor& ids, const BlockRunner& runner) {
  return model_->forward_fused(ids, runner);
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
