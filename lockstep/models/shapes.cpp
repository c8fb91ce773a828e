#include "lockstep/models/shapes.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::models {
namespace {

using Shapes = std::vector<io::TensorShape>;

// A weight and its bias; for norms both are as wide as what they normalise.
void add_pair(Shapes& all, const std::string& name, std::vector<std::int64_t> weight,
              std::int64_t bias) {
  all.push_back({.name = name + ".weight", .shape = std::move(weight)});
  all.push_back({.name = name + ".bias", .shape = {bias}});
}

// Of a batch norm.
void add_statistics(Shapes& buffers, const std::string& norm, std::int64_t width) {
  buffers.push_back({.name = norm + ".running_mean", .shape = {width}});
  buffers.push_back({.name = norm + ".running_var", .shape = {width}});
  buffers.push_back({.name = norm + ".num_batches_tracked", .dtype = io::DType::kI64, .shape = {}});
}

// A matrix [out, in] and, where there is one, its bias.
void add_linear(Shapes& all, const std::string& name, std::int64_t in, std::int64_t out,
                bool bias) {
  all.push_back({.name = name + ".weight", .shape = {out, in}});
  if (bias) all.push_back({.name = name + ".bias", .shape = {out}});
}

// A convolution without bias and the batch norm after it, whose statistics are buffers.
void add_convolution(Shapes& all, Shapes& buffers, const std::string& convolution,
                     const std::string& norm, std::vector<std::int64_t> shape) {
  const std::int64_t width = shape.front();
  all.push_back({.name = convolution + ".weight", .shape = std::move(shape)});
  add_pair(all, norm, {width}, width);
  add_statistics(buffers, norm, width);
}

}  // namespace

void check_sizes(const GptConfig& c) {
  if (c.n_layer < 0 || c.n_head < 1 || c.n_embd < 1 || c.vocab_size < 1 || c.n_positions < 1 ||
      c.n_inner < 0) {
    throw UsageError("gpt",
                     "sizes must be positive (n_layer {}, n_head {}, n_embd {}, vocab_size {}, "
                     "n_positions {}, n_inner {}). Check the configuration.",
                     c.n_layer, c.n_head, c.n_embd, c.vocab_size, c.n_positions, c.n_inner);
  }
  if (c.n_embd % c.n_head != 0) {
    throw UsageError("gpt",
                     "n_embd {} does not divide into {} heads of equal width. Choose n_embd as a "
                     "multiple of n_head.",
                     c.n_embd, c.n_head);
  }
}

void check_sizes(const LlamaConfig& c) {
  if (c.vocab_size < 1 || c.hidden_size < 1 || c.intermediate_size < 1 || c.num_hidden_layers < 0 ||
      c.num_attention_heads < 1 || c.num_key_value_heads < 0 || c.head_dim < 0) {
    throw UsageError("llama",
                     "sizes must be positive (vocab_size {}, hidden_size {}, intermediate_size {}, "
                     "num_hidden_layers {}, num_attention_heads {}, num_key_value_heads {}, "
                     "head_dim {}). Check the configuration.",
                     c.vocab_size, c.hidden_size, c.intermediate_size, c.num_hidden_layers,
                     c.num_attention_heads, c.num_key_value_heads, c.head_dim);
  }
  if (c.head_dim == 0 && c.hidden_size % c.num_attention_heads != 0) {
    throw UsageError("llama",
                     "hidden_size {} does not divide into {} heads of equal width. Choose it as a "
                     "multiple of num_attention_heads, or set head_dim.",
                     c.hidden_size, c.num_attention_heads);
  }
  if (c.num_attention_heads % c.key_value_heads() != 0) {
    throw UsageError("llama",
                     "{} attention heads cannot share {} heads of keys and values equally. Choose "
                     "num_attention_heads as a multiple of num_key_value_heads.",
                     c.num_attention_heads, c.key_value_heads());
  }
}

Shapes tensors_of(const GptConfig& c) {
  const std::int64_t width = c.n_embd;
  const std::int64_t inner = c.inner_width();
  Shapes all;
  all.push_back({.name = "transformer.wte.weight", .shape = {c.vocab_size, width}});
  all.push_back({.name = "transformer.wpe.weight", .shape = {c.n_positions, width}});
  for (std::int64_t i = 0; i < c.n_layer; ++i) {
    const std::string block = fmt::format("transformer.h.{}.", i);
    add_pair(all, block + "ln_1", {width}, width);
    add_pair(all, block + "attn.c_attn", {width, 3 * width}, 3 * width);
    add_pair(all, block + "attn.c_proj", {width, width}, width);
    add_pair(all, block + "ln_2", {width}, width);
    add_pair(all, block + "mlp.c_fc", {width, inner}, inner);
    add_pair(all, block + "mlp.c_proj", {inner, width}, width);
  }
  add_pair(all, "transformer.ln_f", {width}, width);
  if (!c.tie_word_embeddings) add_linear(all, "lm_head", width, c.vocab_size, false);
  return all;
}

Shapes tensors_of(const LlamaConfig& c) {
  const std::int64_t width = c.hidden_size;
  const std::int64_t queries = c.num_attention_heads * c.head_width();
  const std::int64_t keys = c.key_value_heads() * c.head_width();
  const std::int64_t inner = c.intermediate_size;
  Shapes all;
  all.push_back({.name = "model.embed_tokens.weight", .shape = {c.vocab_size, width}});
  for (std::int64_t i = 0; i < c.num_hidden_layers; ++i) {
    const std::string block = fmt::format("model.layers.{}.", i);
    const std::string attention = block + "self_attn.";
    if (c.fused_projections) {
      add_linear(all, attention + "qkv_proj", width, queries + 2 * keys, c.attention_bias);
    } else {
      add_linear(all, attention + "q_proj", width, queries, c.attention_bias);
      add_linear(all, attention + "k_proj", width, keys, c.attention_bias);
      add_linear(all, attention + "v_proj", width, keys, c.attention_bias);
    }
    add_linear(all, attention + "o_proj", queries, width, c.attention_bias);
    if (c.fused_projections) {
      add_linear(all, block + "mlp.gate_up_proj", width, 2 * inner, c.mlp_bias);
    } else {
      add_linear(all, block + "mlp.gate_proj", width, inner, c.mlp_bias);
      add_linear(all, block + "mlp.up_proj", width, inner, c.mlp_bias);
    }
    add_linear(all, block + "mlp.down_proj", inner, width, c.mlp_bias);
    all.push_back({.name = block + "input_layernorm.weight", .shape = {width}});
    all.push_back({.name = block + "post_attention_layernorm.weight", .shape = {width}});
  }
  all.push_back({.name = "model.norm.weight", .shape = {width}});
  if (!c.tie_word_embeddings) add_linear(all, "lm_head", width, c.vocab_size, false);
  return all;
}

Shapes tensors_of(const MlpConfig& c) {
  Shapes all;
  Shapes buffers;
  std::int64_t width = c.inputs;
  std::int64_t place = 0;  // in the sequence, where what has no tensors counts too
  for (std::int64_t layer = 0; layer < c.layers; ++layer) {
    add_pair(all, fmt::format("net.{}", place++), {c.hidden, width}, c.hidden);
    if (c.batch_norm) {
      const std::string norm = fmt::format("net.{}", place++);
      add_pair(all, norm, {c.hidden}, c.hidden);
      add_statistics(buffers, norm, c.hidden);
    }
    place += c.dropout > 0 ? 2 : 1;
    width = c.hidden;
  }
  add_pair(all, fmt::format("net.{}", place), {c.outputs, width}, c.outputs);
  all.insert(all.end(), buffers.begin(), buffers.end());
  return all;
}

std::vector<std::int64_t> ResNetConfig::blocks() const {
  switch (depth) {
    case 18:
      return {2, 2, 2, 2};
    case 34:
    case 50:
      return {3, 4, 6, 3};
    case 101:
      return {3, 4, 23, 3};
    case 152:
      return {3, 8, 36, 3};
    default:
      return {};
  }
}

Shapes tensors_of(const ResNetConfig& c) {
  Shapes all;
  Shapes buffers;
  add_convolution(all, buffers, "conv1", "bn1", {64, 3, 7, 7});
  std::int64_t in = 64;
  std::int64_t width = 64;
  const auto stages = c.blocks();
  for (std::size_t stage = 0; stage < stages.size(); ++stage, width *= 2) {
    const std::int64_t out = width * c.expansion();
    for (std::int64_t i = 0; i < stages[stage]; ++i, in = out) {
      const std::string block = fmt::format("layer{}.{}.", stage + 1, i);
      const auto add = [&](int number, std::int64_t from, std::int64_t to, std::int64_t size) {
        add_convolution(all, buffers, fmt::format("{}conv{}", block, number),
                        fmt::format("{}bn{}", block, number), {to, from, size, size});
      };
      if (c.expansion() == 1) {
        add(1, in, width, 3);
        add(2, width, width, 3);
      } else {
        add(1, in, width, 1);
        add(2, width, width, 3);
        add(3, width, out, 1);
      }
      if (i == 0 && (stage > 0 || in != out))
        add_convolution(all, buffers, block + "downsample.0", block + "downsample.1",
                        {out, in, 1, 1});
    }
  }
  add_linear(all, "fc", in, c.num_classes, true);
  all.insert(all.end(), buffers.begin(), buffers.end());
  return all;
}

}  // namespace lockstep::models
