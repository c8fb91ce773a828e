// Mistral: Llama with a window on every block, which later models do without.
#include "lockstep/models/families/shared.h"

namespace lockstep::models::families {

const Family& mistral() {
  static const Family family{
      .type = "mistral",
      .classes = {"MistralForCausalLM", "MistralModel"},
      .options = rms_options({{"intermediate_size", std::int64_t{14336}, 1},
                              count_option("num_key_value_heads", 8),
                              {"max_position_embeddings", std::int64_t{131072}, 1},
                              window_option(4096)}),
      .describe = [](const Options& o) { return rms_decoder("mistral", o); },
      .rope = RopeRules{},
  };
  return family;
}

}  // namespace lockstep::models::families
