// Qwen3: queries and keys of each head are normalised before rotation, and a head has a width of
// its own.
#include "lockstep/models/families/shared.h"

namespace lockstep::models::families {
namespace {

DecoderSpec describe_qwen3(const Options& o) {
  DecoderSpec s = rms_decoder("qwen3", o);
  AttentionSpec& a = s.block.attention;
  a.query_norm = NormSpec{.name = "q_norm", .width = a.width, .epsilon = o.real("rms_norm_eps")};
  a.key_norm = NormSpec{.name = "k_norm", .width = a.width, .epsilon = o.real("rms_norm_eps")};
  set_qwen_windows(s, o);
  return s;
}

}  // namespace

const Family& qwen3() {
  static const Family family{
      .type = "qwen3",
      .classes = {"Qwen3ForCausalLM", "Qwen3Model"},
      .options = qwen_options({count_option("head_dim", 128), {"attention_bias", false}}),
      .describe = describe_qwen3,
      .rope = RopeRules{},
      .layer_types = true,
  };
  return family;
}

}  // namespace lockstep::models::families
