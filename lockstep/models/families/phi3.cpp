// Phi-3: one matrix for queries, keys and values, one for gate and up; part of a head may be
// rotated, and a long text has other frequencies.
#include "lockstep/models/families/shared.h"

namespace lockstep::models::families {
namespace {

DecoderSpec describe_phi3(const Options& o) {
  DecoderSpec s = rms_decoder("phi3", o);
  pack(s.block.attention.in, "qkv_proj");
  pack(s.block.mlp.in, "gate_up_proj");
  if (o.rope.type == "longrope") s.cache_limit = o.rope.original_max_position_embeddings;
  return s;
}

Option without(std::string_view key) {
  return {.key = key, .fallback = false, .refused = true, .remedy = "It must be false."};
}

}  // namespace

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
                              without("attention_bias"),
                              without("mlp_bias")}),
      .describe = describe_phi3,
      .rope = RopeRules{.partial = true, .original_length = 4096, .longrope_names = {"su", "yarn"}},
  };
  return family;
}

}  // namespace lockstep::models::families
