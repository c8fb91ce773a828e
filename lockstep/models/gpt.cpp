#include "lockstep/models/gpt.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <cmath>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/models/linear.h"

namespace lockstep::models {
namespace {

constexpr double kInitialDeviation = 0.02;

// "Conv1D" of a GPT-2 checkpoint: the weight is stored [in, out].
Linear conv1d(std::int64_t in, std::int64_t out, double deviation) {
  return Linear(LinearOptions(in, out).layout(WeightLayout::kInOut).deviation(deviation));
}

// What a block adds to the residual stream starts smaller in a deeper model, so that the stream's
// size does not grow with depth.
double residual_deviation(const GptConfig& config) {
  return kInitialDeviation / std::sqrt(2.0 * static_cast<double>(config.n_layer));
}

class Attention : public torch::nn::Module {
 public:
  explicit Attention(const GptConfig& c) : heads_(c.n_head) {
    project_in_ = register_module("c_attn", conv1d(c.n_embd, 3 * c.n_embd, kInitialDeviation));
    project_out_ = register_module("c_proj", conv1d(c.n_embd, c.n_embd, residual_deviation(c)));
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto batch = x.size(0), time = x.size(1), width = x.size(2);
    const auto parts = project_in_->forward(x).split(width, 2);
    const auto by_head = [&](const at::Tensor& part) {
      return part.view({batch, time, heads_, width / heads_}).transpose(1, 2);
    };
    const auto y =
        torch::scaled_dot_product_attention(by_head(parts[0]), by_head(parts[1]), by_head(parts[2]),
                                            /*attn_mask=*/{}, /*dropout_p=*/0, /*is_causal=*/true);
    return project_out_->forward(y.transpose(1, 2).reshape({batch, time, width}));
  }

 private:
  std::int64_t heads_;
  Linear project_in_{nullptr};
  Linear project_out_{nullptr};
};

class Perceptron : public torch::nn::Module {
 public:
  explicit Perceptron(const GptConfig& c) {
    widen_ = register_module("c_fc", conv1d(c.n_embd, 4 * c.n_embd, kInitialDeviation));
    narrow_ = register_module("c_proj", conv1d(4 * c.n_embd, c.n_embd, residual_deviation(c)));
  }

  at::Tensor forward(const at::Tensor& x) {
    return narrow_->forward(torch::gelu(widen_->forward(x), "tanh"));
  }

 private:
  Linear widen_{nullptr};
  Linear narrow_{nullptr};
};

torch::nn::LayerNorm layer_norm(const GptConfig& config) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.n_embd}).eps(1e-5));
}

class TransformerBlock : public torch::nn::Module {
 public:
  explicit TransformerBlock(const GptConfig& config) {
    norm_1_ = register_module("ln_1", layer_norm(config));
    attention_ = register_module("attn", std::make_shared<Attention>(config));
    norm_2_ = register_module("ln_2", layer_norm(config));
    perceptron_ = register_module("mlp", std::make_shared<Perceptron>(config));
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto y = x + attention_->forward(norm_1_->forward(x));
    return y + perceptron_->forward(norm_2_->forward(y));
  }

 private:
  torch::nn::LayerNorm norm_1_{nullptr};
  std::shared_ptr<Attention> attention_;
  torch::nn::LayerNorm norm_2_{nullptr};
  std::shared_ptr<Perceptron> perceptron_;
};

GptConfig checked(const GptConfig& c) {
  if (c.n_layer < 0 || c.n_head < 1 || c.n_embd < 1 || c.vocab_size < 1 || c.n_positions < 1) {
    throw UsageError("gpt",
                     "sizes must be positive (n_layer {}, n_head {}, n_embd {}, vocab_size {}, "
                     "n_positions {}). Check the configuration.",
                     c.n_layer, c.n_head, c.n_embd, c.vocab_size, c.n_positions);
  }
  if (c.n_embd % c.n_head != 0) {
    throw UsageError("gpt",
                     "n_embd {} does not divide into {} heads of equal width. Choose n_embd as a "
                     "multiple of n_head.",
                     c.n_embd, c.n_head);
  }
  return c;
}

}  // namespace

// Everything but the output head, under the name that checkpoints use for it.
class GptTransformer : public torch::nn::Module {
 public:
  explicit GptTransformer(const GptConfig& c) {
    tokens_ = register_module("wte", torch::nn::Embedding(c.vocab_size, c.n_embd));
    positions_ = register_module("wpe", torch::nn::Embedding(c.n_positions, c.n_embd));
    blocks_ = register_module("h", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < c.n_layer; ++i) {
      blocks_->push_back(std::make_shared<TransformerBlock>(c));
    }
    last_norm_ = register_module("ln_f", layer_norm(c));
    const torch::NoGradGuard no_grad;
    tokens_->weight.normal_(0, kInitialDeviation);
    positions_->weight.normal_(0, kInitialDeviation);
  }

  at::Tensor forward(const at::Tensor& ids, const BlockRunner& runner) {
    const auto places = torch::arange(ids.size(1), ids.options());
    auto x = tokens_->forward(ids) + positions_->forward(places);
    for (const auto& module : *blocks_) {
      auto block = std::static_pointer_cast<TransformerBlock>(module);
      if (runner) {
        x = runner([block](const std::vector<at::Tensor>& in) { return block->forward(in.at(0)); },
                   {x});
      } else {
        x = block->forward(x);
      }
    }
    return last_norm_->forward(x);
  }

  const at::Tensor& token_weight() const { return tokens_->weight; }

 private:
  torch::nn::Embedding tokens_{nullptr};
  torch::nn::Embedding positions_{nullptr};
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm last_norm_{nullptr};
};

GptImpl::GptImpl(const GptConfig& config)
    : config_(checked(config)),
      transformer_(register_module("transformer", std::make_shared<GptTransformer>(config_))) {}

at::Tensor GptImpl::forward(const at::Tensor& ids) {
  if (ids.dim() != 2 || ids.scalar_type() != at::kLong || ids.size(1) > config_.n_positions) {
    throw UsageError(
        "gpt",
        "input of shape [{}] and type {}. Token ids are int64 [batch, time], with time "
        "at most n_positions = {}.",
        fmt::join(ids.sizes(), ", "), c10::toString(ids.scalar_type()), config_.n_positions);
  }
  return torch::linear(transformer_->forward(ids, runner_), transformer_->token_weight());
}

void GptImpl::run_blocks_with(BlockRunner runner) {
  runner_ = std::move(runner);
}

std::int64_t GptImpl::parameter_count() const {
  std::int64_t count = 0;
  for (const auto& parameter : parameters()) count += parameter.numel();
  return count;
}

std::string hugging_face_config(const GptConfig& c, std::optional<std::int64_t> end_of_text) {
  const std::string end = end_of_text ? fmt::format("{}", *end_of_text) : "null";
  return fmt::format(
      R"({{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": {}, )"
      R"("n_head": {}, "n_embd": {}, "n_inner": null, "vocab_size": {}, "n_positions": {}, )"
      R"("n_ctx": {}, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, )"
      R"("resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": {}, )"
      R"("scale_attn_weights": true, "tie_word_embeddings": true, "bos_token_id": {}, )"
      R"("eos_token_id": {}, "torch_dtype": "float32"}})"
      "\n",
      c.n_layer, c.n_head, c.n_embd, c.vocab_size, c.n_positions, c.n_positions, kInitialDeviation,
      end, end);
}

at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& targets) {
  return torch::cross_entropy_loss(logits.view({-1, logits.size(-1)}), targets.view({-1}));
}

}  // namespace lockstep::models
