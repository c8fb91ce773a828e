// GPT-2: LayerNorm, learned positions, a perceptron without a gate, matrices stored [in, out].
#include <cmath>

#include "lockstep/core/error.h"
#include "lockstep/models/families/shared.h"

namespace lockstep::models::families {
namespace {

void check_gpt_sizes(const Options& o) {
  const auto size = [&](const char* key) { return o.integer(key); };
  const std::int64_t width = size("n_embd"), heads = size("n_head");
  if (size("n_layer") < 0 || heads < 1 || width < 1 || size("vocab_size") < 1 ||
      size("n_positions") < 1 || size("n_inner") < 0) {
    throw UsageError("gpt2",
                     "sizes must be positive (n_layer {}, n_head {}, n_embd {}, vocab_size {}, "
                     "n_positions {}, n_inner {}). Check the configuration.",
                     size("n_layer"), heads, width, size("vocab_size"), size("n_positions"),
                     size("n_inner"));
  }
  if (width % heads != 0) {
    throw UsageError("gpt2",
                     "n_embd {} does not divide into {} heads of equal width. Choose n_embd as a "
                     "multiple of n_head.",
                     width, heads);
  }
}

DecoderSpec describe_gpt2(const Options& o) {
  check_gpt_sizes(o);
  const std::int64_t width = o.integer("n_embd"), layers = o.integer("n_layer");
  const std::int64_t inner = o.integer("n_inner") > 0 ? o.integer("n_inner") : 4 * width;
  const double deviation = o.real("initializer_range");
  // A block's output projections start smaller in a deeper model, so that the residual stream does
  // not grow with depth.
  const double smaller = deviation / std::sqrt(2.0 * static_cast<double>(layers));
  const auto project = [](const char* name, std::int64_t in, std::vector<std::int64_t> parts,
                          double drawn) {
    return Projection{.name = name,
                      .in = in,
                      .parts = std::move(parts),
                      .bias = true,
                      .layout = WeightLayout::kInOut,
                      .deviation = drawn};
  };
  const auto norm = [&](const char* name) {
    return NormSpec{.name = name,
                    .kind = NormKind::kLayer,
                    .width = width,
                    .epsilon = o.real("layer_norm_epsilon")};
  };
  DecoderSpec s{
      .family = "gpt2",
      .prefix = "transformer",
      .blocks = "h",
      .embedding = "wte",
      .positions = "wpe",
      .vocabulary = o.integer("vocab_size"),
      .width = width,
      .max_positions = o.integer("n_positions"),
      .tied = o.flag("tie_word_embeddings"),
      .embeddings_drawn_last = true,
      .deviation = deviation,
      .embedding_dropout = o.real("embd_pdrop"),
      .windows = std::vector<std::int64_t>(static_cast<std::size_t>(layers), 0),
      .last = norm("ln_f"),
      .head = {.name = "lm_head",
               .in = width,
               .parts = {o.integer("vocab_size")},
               .deviation = deviation},
  };
  s.block = {
      .attention_norm = norm("ln_1"),
      .mlp_norm = norm("ln_2"),
      .attention = {.name = "attn",
                    .heads = o.integer("n_head"),
                    .key_value_heads = o.integer("n_head"),
                    .width = width / o.integer("n_head"),
                    .in = {project("c_attn", width, {width, width, width}, deviation)},
                    .out = project("c_proj", width, {width}, smaller),
                    .dropout = o.real("attn_pdrop")},
      .mlp = {.name = "mlp",
              .in = {project("c_fc", width, {inner}, deviation)},
              .out = project("c_proj", inner, {width}, smaller),
              .activation = o.activation("activation_function")},
      .dropout = o.real("resid_pdrop"),
      .norms_first = true,
  };
  return s;
}

Option size_option(std::string_view key, std::int64_t fallback, double least,
                   std::string_view other_name = {}) {
  return {.key = key, .fallback = fallback, .least = least, .other_name = other_name};
}

}  // namespace

const Family& gpt2() {
  // The second names are those of the attribute_map of transformers' GPT2Config.
  static const Family family{
      .type = "gpt2",
      .classes = {"GPT2LMHeadModel", "GPT2Model"},
      .options =
          {
              {.key = "n_layer",
               .fallback = std::int64_t{12},
               .most = kMostLayers,
               .other_name = "num_hidden_layers"},
              size_option("n_head", 12, 1, "num_attention_heads"),
              size_option("n_embd", 768, 1, "hidden_size"),
              count_option("n_inner", 0),
              size_option("vocab_size", 50257, 1),
              size_option("n_positions", 1024, 1, "max_position_embeddings"),
              size_option("n_ctx", 1024, 1),  // n_positions once more, for other programs
              {"activation_function", Activation::kGeluTanh},
              {"layer_norm_epsilon", 1e-5, 0, 1},
              {"resid_pdrop", 0.1, 0, 1},
              {"embd_pdrop", 0.1, 0, 1},
              {"attn_pdrop", 0.1, 0, 1},
              {"initializer_range", 0.02},
              must_be("scale_attn_weights", true),
              {"tie_word_embeddings", true},
              must_be("scale_attn_by_inverse_layer_idx", false),
              must_be("reorder_and_upcast_attn", false),
              must_be("add_cross_attention", false),
          },
      .describe = describe_gpt2,
      .bos_is_eos = true,
  };
  return family;
}

Options options_of(const GptConfig& c) {
  Options o = gpt2().defaults();
  o.set("n_layer", c.n_layer);
  o.set("n_head", c.n_head);
  o.set("n_embd", c.n_embd);
  o.set("n_inner", c.n_inner);
  o.set("vocab_size", c.vocab_size);
  o.set("n_positions", c.n_positions);
  o.set("n_ctx", c.n_positions);
  o.set("activation_function", c.activation_function);
  o.set("layer_norm_epsilon", c.layer_norm_epsilon);
  o.set("resid_pdrop", c.resid_pdrop);
  o.set("embd_pdrop", c.embd_pdrop);
  o.set("attn_pdrop", c.attn_pdrop);
  o.set("initializer_range", c.initializer_range);
  o.set("tie_word_embeddings", c.tie_word_embeddings);
  return o;
}

}  // namespace lockstep::models::families
