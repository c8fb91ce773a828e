// Llama: what rms_decoder() describes, with biases as options.
#include "lockstep/models/families/shared.h"

namespace lockstep::models::families {

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

}  // namespace lockstep::models::families
