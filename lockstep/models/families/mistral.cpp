// Mistral: Llama with a window on every block, which later models do without. With layer_types the
// field says which blocks have it: AutoModelForCausalLM of transformers then makes a Ministral.
#include "lockstep/models/families/shared.h"

namespace lockstep::models::families {
namespace {

DecoderSpec describe_mistral(const Options& o) {
  DecoderSpec s = rms_decoder("mistral", o);
  set_windows(s, o, [](std::int64_t) { return true; });
  return s;
}

}  // namespace

const Family& mistral() {
  static const Family family{
      .type = "mistral",
      .classes = {"MistralForCausalLM", "MistralModel"},
      .options = rms_options({{"intermediate_size", std::int64_t{14336}, 1},
                              count_option("num_key_value_heads", 8),
                              {"max_position_embeddings", std::int64_t{131072}, 1},
                              window_option(4096)}),
      .describe = describe_mistral,
      .rope = RopeRules{},
      .layer_types = true,
  };
  return family;
}

}  // namespace lockstep::models::families
