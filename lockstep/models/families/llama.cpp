// Llama and the families after it, each as what differs from rms_decoder().
#include <cmath>

#include "lockstep/core/error.h"
#include "lockstep/models/families/shared.h"

namespace lockstep::models::families {

// The model of rms_decoder(), with biases as options.
const Family& llama() {
  static const Family family{
      .type = "llama",
      .classes = {"LlamaForCausalLM", "LlamaModel"},
      .options = rms_options({{"attention_bias", false}, {"mlp_bias", false}}),
      .describe = [](const Options& o) { return rms_decoder("llama", o); },
      .rope = RopeRules{},
  };
  return family;
}

Options options_of(const LlamaConfig& c) {
  Options o;
  const bool whole = c.num_attention_heads > 0 && c.hidden_size % c.num_attention_heads == 0;
  o.set("vocab_size", c.vocab_size);
  o.set("hidden_size", c.hidden_size);
  o.set("intermediate_size", c.intermediate_size);
  o.set("num_hidden_layers", c.num_hidden_layers);
  o.set("num_attention_heads", c.num_attention_heads);
  o.set("num_key_value_heads", c.key_value_heads());
  o.set("head_dim", whole ? c.head_width() : c.head_dim);
  o.set("max_position_embeddings", c.max_position_embeddings);
  o.set("hidden_act", c.hidden_act);
  o.set("rms_norm_eps", c.rms_norm_eps);
  o.set("initializer_range", c.initializer_range);
  o.set("attention_dropout", c.attention_dropout);
  o.set("tie_word_embeddings", c.tie_word_embeddings);
  o.set("pad_token_id", c.pad_token_id);
  o.set("attention_bias", c.attention_bias);
  o.set("mlp_bias", c.mlp_bias);
  o.set("sliding_window", c.sliding_window);
  o.set("resid_pdrop", c.resid_pdrop);
  o.rope = c.rope;
  return o;
}

// Mistral: Llama with a window on every block (later models have none). With layer_types the field
// says which blocks have it: AutoModelForCausalLM of transformers then makes a Ministral.
const Family& mistral() {
  static const Family family{
      .type = "mistral",
      .classes = {"MistralForCausalLM", "MistralModel"},
      .options = rms_options({{"intermediate_size", std::int64_t{14336}, 1},
                              count_option("num_key_value_heads", 8),
                              {"max_position_embeddings", std::int64_t{131072}, 1},
                              window_option(4096)}),
      .describe =
          [](const Options& o) {
            DecoderSpec s = rms_decoder("mistral", o);
            set_windows(s, o, [](std::int64_t) { return true; });
            return s;
          },
      .rope = RopeRules{},
      .layer_types = true,
  };
  return family;
}

// Mixtral: Mistral with several perceptrons in a block; a router chooses two for each token.
const Family& mixtral() {
  static const Family family{
      .type = "mixtral",
      .classes = {"MixtralForCausalLM", "MixtralModel"},
      .options = rms_options({{"intermediate_size", std::int64_t{14336}, 1},
                              count_option("num_key_value_heads", 8),
                              {"max_position_embeddings", std::int64_t{131072}, 1},
                              {"rms_norm_eps", 1e-5, 0, 1},
                              window_option(0),
                              {"num_experts_per_tok", std::int64_t{2}, 1},
                              {.key = "num_local_experts",
                               .fallback = std::int64_t{8},
                               .least = 1,
                               .most = kMostExperts,
                               .other_name = "num_experts"},
                              {"output_router_logits", false},
                              {"router_aux_loss_coef", 0.001},
                              {"router_jitter_noise", 0.0, 0, 1}}),
      .describe =
          [](const Options& o) {
            const std::int64_t experts = o.integer("num_local_experts");
            const std::int64_t chosen = o.integer("num_experts_per_tok");
            if (experts < 1 || chosen < 1 || chosen > experts)
              throw UsageError(
                  "mixtral",
                  "num_experts_per_tok {} with num_local_experts {}. A token goes to between one "
                  "and all of the experts; check both fields.",
                  chosen, experts);
            constexpr std::int64_t kMostInAll = 100'000;  // ten times those of the largest models
            if (experts * o.integer("num_hidden_layers") > kMostInAll)
              throw UsageError(
                  "mixtral",
                  "num_local_experts {} in each of num_hidden_layers {} are more than {} "
                  "experts. Check both fields.",
                  experts, o.integer("num_hidden_layers"), kMostInAll);
            DecoderSpec s = rms_decoder("mixtral", o);
            MlpSpec& mlp = s.block.mlp;
            mlp.name = "block_sparse_moe";
            mlp.in[0].name = "w1";
            mlp.in[1].name = "w3";
            mlp.out.name = "w2";
            mlp.experts = ExpertsSpec{
                .router = {.name = "gate",
                           .in = s.width,
                           .parts = {experts},
                           .deviation = o.real("initializer_range")},
                .per_token = chosen,
                // As in transformers, the loss has this part only where the logits are returned.
                .load_balancing =
                    o.flag("output_router_logits") ? o.real("router_aux_loss_coef") : 0,
                .jitter = o.real("router_jitter_noise"),
            };
            return s;
          },
      .rope = RopeRules{.theta = 1e6},
  };
  return family;
}

// Qwen2 and Qwen2.5: biases on queries, keys and values alone; a window, where it is asked for,
// from a given block on.
namespace {

std::vector<Option> qwen_options(const std::vector<Option>& own) {
  const std::vector<Option> all = rms_options({{"vocab_size", std::int64_t{151936}, 1},
                                               {"intermediate_size", std::int64_t{22016}, 1},
                                               count_option("num_key_value_heads", 32),
                                               {"max_position_embeddings", std::int64_t{32768}, 1},
                                               {"use_sliding_window", false},
                                               window_option(4096),
                                               {"max_window_layers", std::int64_t{28}}});
  return with_options(all, own);
}

void set_qwen_windows(DecoderSpec& s, const Options& o) {
  if (!o.flag("use_sliding_window")) {
    s.windows.assign(s.windows.size(), 0);
    return;
  }
  set_windows(s, o, [&](std::int64_t layer) { return layer >= o.integer("max_window_layers"); });
}

}  // namespace

const Family& qwen2() {
  static const Family family{
      .type = "qwen2",
      .classes = {"Qwen2ForCausalLM", "Qwen2Model"},
      .options = qwen_options({}),
      .describe =
          [](const Options& o) {
            DecoderSpec s = rms_decoder("qwen2", o);
            for (Projection& one : s.block.attention.in) one.bias = true;
            set_qwen_windows(s, o);
            return s;
          },
      .rope = RopeRules{},
      .layer_types = true,
  };
  return family;
}

// Qwen3: queries and keys of each head are normalised before rotation, and a head has a width of
// its own.
const Family& qwen3() {
  static const Family family{
      .type = "qwen3",
      .classes = {"Qwen3ForCausalLM", "Qwen3Model"},
      .options = qwen_options({count_option("head_dim", 128), {"attention_bias", false}}),
      .describe =
          [](const Options& o) {
            DecoderSpec s = rms_decoder("qwen3", o);
            AttentionSpec& a = s.block.attention;
            a.query_norm =
                NormSpec{.name = "q_norm", .width = a.width, .epsilon = o.real("rms_norm_eps")};
            a.key_norm =
                NormSpec{.name = "k_norm", .width = a.width, .epsilon = o.real("rms_norm_eps")};
            set_qwen_windows(s, o);
            return s;
          },
      .rope = RopeRules{},
      .layer_types = true,
  };
  return family;
}

// Phi-3: one matrix for queries, keys and values, one for gate and up. Part of a head may be
// rotated, and long texts may use other frequencies.
const Family& phi3() {
  static const Family family{
      .type = "phi3",
      .classes = {"Phi3ForCausalLM", "Phi3Model"},
      .options = rms_options({{"vocab_size", std::int64_t{32064}, 1},
                              {"hidden_size", std::int64_t{3072}, 1},
                              {"intermediate_size", std::int64_t{8192}, 1},
                              {"max_position_embeddings", std::int64_t{4096}, 1},
                              {"rms_norm_eps", 1e-5, 0, 1},
                              {.key = "pad_token_id",
                               .fallback = std::int64_t{32000},
                               .least = -1,
                               .null = std::int64_t{-1}},
                              {"resid_pdrop", 0.0, 0, 1},
                              window_option(0),
                              must_be("attention_bias", false),
                              must_be("mlp_bias", false)}),
      .describe =
          [](const Options& o) {
            DecoderSpec s = rms_decoder("phi3", o);
            pack(s.block.attention.in, "qkv_proj");
            pack(s.block.mlp.in, "gate_up_proj");
            if (o.rope.type == "longrope") s.cache_limit = o.rope.original_max_position_embeddings;
            return s;
          },
      .rope = RopeRules{.partial = true, .original_length = 4096, .longrope_names = {"su", "yarn"}},
  };
  return family;
}

// Gemma 2: norms that multiply with 1 + weight, also after attention and perceptron; soft caps of
// scores and logits; scaled embeddings; a window on every second block.
namespace {

Option cap_option(std::string_view key, double fallback) {
  return {.key = key, .fallback = fallback, .least = 1e-6, .null = 0.0};
}

}  // namespace

const Family& gemma2() {
  static const Family family{
      .type = "gemma2",
      .classes = {"Gemma2ForCausalLM", "Gemma2Model"},
      .options = rms_options(
          {{"vocab_size", std::int64_t{256000}, 1},
           {"hidden_size", std::int64_t{2304}, 1},
           {"intermediate_size", std::int64_t{9216}, 1},
           layers_option(26),
           {"num_attention_heads", std::int64_t{8}, 1},
           count_option("num_key_value_heads", 4),
           count_option("head_dim", 256),
           {"max_position_embeddings", std::int64_t{8192}, 1},
           {"tie_word_embeddings", true},
           {.key = "pad_token_id",
            .fallback = std::int64_t{0},
            .least = -1,
            .null = std::int64_t{-1}},
           {"attention_bias", false},
           {"hidden_activation", Activation::kGeluTanh},
           {"query_pre_attn_scalar", std::int64_t{256}, 1},
           window_option(4096),
           cap_option("attn_logit_softcapping", 50),
           cap_option("final_logit_softcapping", 30),
           {.key = "use_bidirectional_attention",
            .fallback = false,
            .refused = true,
            .remedy = "It must be false: a model that sees the next token cannot learn to predict "
                      "it."}}),
      .describe =
          [](const Options& o) {
            DecoderSpec s = rms_decoder("gemma2", o);
            BlockSpec& b = s.block;
            const auto norm = [&](const char* name) {
              return NormSpec{.name = name,
                              .kind = NormKind::kRmsPlusOne,
                              .width = s.width,
                              .epsilon = o.real("rms_norm_eps")};
            };
            b.attention_norm = norm("input_layernorm");
            b.attention_after = norm("post_attention_layernorm");
            b.mlp_norm = norm("pre_feedforward_layernorm");
            b.mlp_after = norm("post_feedforward_layernorm");
            s.last = norm("norm");
            b.mlp.activation = o.activation("hidden_activation");
            b.attention.scale =
                1 / std::sqrt(static_cast<double>(o.integer("query_pre_attn_scalar")));
            b.attention.soft_cap = o.real("attn_logit_softcapping");
            s.logit_soft_cap = o.real("final_logit_softcapping");
            s.embedding_scale = std::sqrt(static_cast<double>(s.width));
            set_windows(s, o, [](std::int64_t layer) { return layer % 2 == 0; });
            return s;
          },
      .rope = RopeRules{},
      .layer_types = true,
  };
  return family;
}

// Starcoder2: Llama's names around LayerNorm and a perceptron without a gate. One field gives every
// projection of a block its bias.
namespace {

std::vector<Option> starcoder2_options() {
  std::vector<Option> all = rms_options({{"vocab_size", std::int64_t{49152}, 1},
                                         {"hidden_size", std::int64_t{3072}, 1},
                                         {"intermediate_size", std::int64_t{12288}, 1},
                                         layers_option(30),
                                         {"num_attention_heads", std::int64_t{24}, 1},
                                         count_option("num_key_value_heads", 2),
                                         {"max_position_embeddings", std::int64_t{4096}, 1},
                                         {"hidden_act", Activation::kGeluTanh},
                                         {"norm_epsilon", 1e-5, 0, 1},
                                         {"initializer_range", 0.018042},
                                         {"tie_word_embeddings", true},
                                         {"residual_dropout", 0.0, 0, 1},
                                         {"embedding_dropout", 0.0, 0, 1},
                                         {"use_bias", true},
                                         window_option(0)});
  // The norms have a field of their own.
  std::erase_if(all, [](const Option& option) { return option.key == "rms_norm_eps"; });
  return all;
}

}  // namespace

const Family& starcoder2() {
  static const Family family{
      .type = "starcoder2",
      .classes = {"Starcoder2ForCausalLM", "Starcoder2Model"},
      .options = starcoder2_options(),
      .describe =
          [](const Options& o) {
            DecoderSpec s = rms_decoder("starcoder2", o);
            BlockSpec& b = s.block;
            for (NormSpec* norm : {&b.attention_norm, &b.mlp_norm, &s.last}) {
              norm->kind = NormKind::kLayer;
              norm->epsilon = o.real("norm_epsilon");
            }
            b.mlp.in = {b.mlp.in.back()};
            b.mlp.in.front().name = "c_fc";
            b.mlp.out.name = "c_proj";
            const bool bias = o.flag("use_bias");
            for (Projection& one : b.attention.in) one.bias = bias;
            for (Projection* one : {&b.attention.out, &b.mlp.in.front(), &b.mlp.out})
              one->bias = bias;
            b.dropout = o.real("residual_dropout");
            s.embedding_dropout = o.real("embedding_dropout");
            return s;
          },
      .rope = RopeRules{},
  };
  return family;
}

}  // namespace lockstep::models::families
