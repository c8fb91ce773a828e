// Qwen2 and Qwen2.5: biases on queries, keys and values alone; a window, where it is asked for,
// from a given block on.
#include "lockstep/models/families/shared.h"

namespace lockstep::models::families {
namespace {

DecoderSpec describe_qwen2(const Options& o) {
  DecoderSpec s = rms_decoder("qwen2", o);
  for (Projection& one : s.block.attention.in) one.bias = true;
  set_qwen_windows(s, o);
  return s;
}

}  // namespace

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

const Family& qwen2() {
  static const Family family{
      .type = "qwen2",
      .classes = {"Qwen2ForCausalLM", "Qwen2Model"},
      .options = qwen_options({}),
      .describe = describe_qwen2,
      .rope = RopeRules{},
      .layer_types = true,
  };
  return family;
}

}  // namespace lockstep::models::families
