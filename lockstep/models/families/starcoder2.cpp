// Starcoder2: Llama's names around LayerNorm and a perceptron without a gate. One field gives every
// projection of a block its bias.
#include "lockstep/models/families/shared.h"

namespace lockstep::models::families {
namespace {

DecoderSpec describe_starcoder2(const Options& o) {
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
  for (Projection* one : {&b.attention.out, &b.mlp.in.front(), &b.mlp.out}) one->bias = bias;
  b.dropout = o.real("residual_dropout");
  s.embedding_dropout = o.real("embedding_dropout");
  return s;
}

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
      .describe = describe_starcoder2,
      .rope = RopeRules{},
  };
  return family;
}

}  // namespace lockstep::models::families
