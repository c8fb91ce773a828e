// Gemma 2: norms that multiply with 1 + weight, also after attention and perceptron; soft caps of
// scores and logits; scaled embeddings; a window on every second block.
#include <cmath>

#include "lockstep/models/families/shared.h"

namespace lockstep::models::families {
namespace {

DecoderSpec describe_gemma2(const Options& o) {
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
  b.attention.scale = 1 / std::sqrt(static_cast<double>(o.integer("query_pre_attn_scalar")));
  b.attention.soft_cap = o.real("attn_logit_softcapping");
  s.logit_soft_cap = o.real("final_logit_softcapping");
  s.embedding_scale = std::sqrt(static_cast<double>(s.width));
  set_windows(s, o, [](std::int64_t layer) { return layer % 2 == 0; });
  return s;
}

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
      .describe = describe_gemma2,
      .rope = RopeRules{},
      .layer_types = true,
  };
  return family;
}

}  // namespace lockstep::models::families
