// The sizes of the bundled models and the shapes of their tensors, without torch, so that a file
// can be checked against a model, and a checkpoint's size computed, before either exists.
//
//   for (const io::TensorShape& tensor : tensors_of(ResNetConfig{.depth = 18}))
//     fmt::print("{} [{}]\n", tensor.name, fmt::join(tensor.shape, ", "));
//
// Fields have Hugging Face's names; hugging_face.h reads them from a config.json, and family.h has
// the tensors of language models. gpt_test.cpp compares the tensors with the modules themselves.
// Values and functions without state.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/io/safetensors.h"

namespace lockstep::models {

enum class Activation { kGeluTanh, kGelu, kRelu, kSilu };  // "gelu_new", "gelu", "relu", "silu"

// Which activations of a block backward computes again instead of keeping them: the product of a
// gated perceptron and the outputs of the norms before attention and perceptron, which cost little,
// and all that the perceptron or attention would keep. Results have the same bits.
struct BlockParts {
  bool swiglu = false;
  bool norm = false;
  bool mlp = false;
  bool attention = false;

  bool any() const { return swiglu || norm || mlp || attention; }
  bool operator==(const BlockParts&) const = default;
};
BlockParts block_parts(const std::vector<std::string>& names);  // by these names
std::string names_of(const BlockParts& parts);                  // "swiglu, norm"

// The defaults are the model of 124 million parameters, without dropout.
struct GptConfig {
  std::int64_t n_layer = 12;
  std::int64_t n_head = 12;
  std::int64_t n_embd = 768;
  std::int64_t vocab_size = 50257;
  std::int64_t n_positions = 1024;  // the longest sequence
  std::int64_t n_inner = 0;         // width of the perceptron; 0: 4 * n_embd
  Activation activation_function = Activation::kGeluTanh;
  double layer_norm_epsilon = 1e-5;
  double initializer_range = 0.02;  // standard deviation of the initial weights
  double embd_pdrop = 0;
  double attn_pdrop = 0;
  double resid_pdrop = 0;
  bool tie_word_embeddings = true;
};

// The mapping of positions to angles. `type` is Hugging Face's rope_type.
struct RopeConfig {
  std::string type = "default";  // or linear, llama3, longrope, yarn
  double rope_theta = 10'000;
  double partial_rotary_factor = 1;  // the part of a head that is rotated
  double factor = 1;                 // linear, llama3, yarn
  double low_freq_factor = 1;        // llama3
  double high_freq_factor = 4;
  std::int64_t original_max_position_embeddings = 0;  // llama3, longrope, yarn
  double attention_factor = 1;                        // longrope, yarn: of cosine and sine
  // yarn: what turns more than beta_fast times in the original positions keeps its frequency, and
  // below beta_slow times it is divided by `factor`. truncate: the bounds are whole pairs.
  double beta_fast = 32;
  double beta_slow = 1;
  bool truncate = true;
  std::vector<double> short_factor{};  // longrope: one for each pair of a head
  std::vector<double> long_factor{};   // for sequences beyond original_max_position_embeddings
  bool operator==(const RopeConfig&) const = default;
};

// Llama, and with fused_projections Phi-3. The defaults are Llama 2 of 7 billion parameters.
struct LlamaConfig {
  std::int64_t vocab_size = 32000;
  std::int64_t hidden_size = 4096;
  std::int64_t intermediate_size = 11008;
  std::int64_t num_hidden_layers = 32;
  std::int64_t num_attention_heads = 32;
  std::int64_t num_key_value_heads = 0;  // 0: as many as attention heads
  std::int64_t head_dim = 0;             // 0: hidden_size / num_attention_heads
  std::int64_t max_position_embeddings = 4096;
  std::int64_t sliding_window = 0;  // tokens that a token sees, itself included; 0: all before it
  std::int64_t pad_token_id = -1;   // its embedding gets no gradient; -1: there is none
  Activation hidden_act = Activation::kSilu;
  RopeConfig rope{};
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  double attention_dropout = 0;
  double resid_pdrop = 0;
  bool attention_bias = false;
  bool mlp_bias = false;
  bool tie_word_embeddings = false;
  bool fused_projections = false;  // Phi-3: qkv_proj and gate_up_proj are one matrix each

  std::int64_t key_value_heads() const {
    return num_key_value_heads > 0 ? num_key_value_heads : num_attention_heads;
  }
  std::int64_t head_width() const {
    return head_dim > 0 ? head_dim : hidden_size / num_attention_heads;
  }
};

struct MlpConfig {
  std::int64_t inputs = 20;
  std::int64_t hidden = 64;
  std::int64_t layers = 1;  // hidden ones
  std::int64_t outputs = 10;
  double dropout = 0;
  bool batch_norm = false;
};

struct ResNetConfig {
  std::int64_t depth = 50;  // 18, 34, 50, 101 or 152 layers
  std::int64_t num_classes = 1000;

  // From 50 layers on a block narrows, convolves and widens by this factor.
  std::int64_t expansion() const { return depth >= 50 ? 4 : 1; }
  // Blocks of the four stages; empty for another depth.
  std::vector<std::int64_t> blocks() const;
};

// Parameters, then buffers, each in the module's order.
std::vector<io::TensorShape> tensors_of(const MlpConfig& config);
std::vector<io::TensorShape> tensors_of(const ResNetConfig& config);

}  // namespace lockstep::models
