// The families of language models, each declared by a function (family.h). known_families() at the
// end lists them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/models/family.h"

namespace lockstep::models {
namespace {

// ---------------------------------------------------------------- what families share

// An upper bound, far above every real model.
constexpr double kMostLayers = 1000;
constexpr double kMostExperts = 1000;  // of a layer

void check_rms_sizes(std::string_view family, const Options& o) {
  const auto size = [&](const char* key) { return o.integer(key); };
  const std::int64_t width = size("hidden_size"), heads = size("num_attention_heads");
  const std::int64_t shared = size("num_key_value_heads");
  if (size("vocab_size") < 1 || width < 1 || size("intermediate_size") < 1 ||
      size("num_hidden_layers") < 0 || heads < 1 || shared < 0 || size("head_dim") < 0) {
    throw UsageError(family,
                     "sizes must be positive (vocab_size {}, hidden_size {}, intermediate_size {}, "
                     "num_hidden_layers {}, num_attention_heads {}, num_key_value_heads {}, "
                     "head_dim {}). Check the configuration.",
                     size("vocab_size"), width, size("intermediate_size"),
                     size("num_hidden_layers"), heads, shared, size("head_dim"));
  }
  if (size("head_dim") == 0 && width % heads != 0) {
    throw UsageError(family,
                     "hidden_size {} does not divide into {} heads of equal width. Choose it as a "
                     "multiple of num_attention_heads, or set head_dim.",
                     width, heads);
  }
  if (shared > 0 && heads % shared != 0) {
    throw UsageError(family,
                     "{} attention heads cannot share {} heads of keys and values equally. Choose "
                     "num_attention_heads as a multiple of num_key_value_heads.",
                     heads, shared);
  }
}

// A count that config.json may leave null, which means that it follows from other fields.
Option count_option(std::string_view key, std::int64_t fallback) {
  return {.key = key, .fallback = fallback, .least = 1, .null = std::int64_t{0}};
}

// A field with a value that the models here do not compute.
Option must_be(std::string_view key, bool value) {
  return {.key = key,
          .fallback = value,
          .refused = !value,
          .remedy = value ? "It must be true." : "It must be false."};
}

// num_hidden_layers.
Option layers_option(std::int64_t fallback) {
  return {.key = "num_hidden_layers", .fallback = fallback, .most = kMostLayers};
}

// The size of the attention window in tokens; null: all previous tokens.
Option window_option(std::int64_t fallback) {
  // Refused at 1: with a cache transformers then keeps all tokens, and generates another text than
  // without.
  return {.key = "sliding_window",
          .fallback = fallback,
          .least = 1,
          .null = std::int64_t{0},
          .refused = std::int64_t{1},
          .remedy = "A token that sees itself alone has no context. Give 2 or more, or null."};
}

// `own` replaces options of the same key in `all`; other options are appended.
std::vector<Option> with_options(std::vector<Option> all, const std::vector<Option>& own) {
  for (const Option& option : own) {
    const auto same = std::ranges::find(all, option.key, &Option::key);
    if (same == all.end())
      all.push_back(option);
    else
      *same = option;
  }
  return all;
}

// The fields that most families since Llama have in common, with those in `own`.
std::vector<Option> rms_options(const std::vector<Option>& own) {
  const std::vector<Option> all{
      {"vocab_size", std::int64_t{32000}, 1},
      {"hidden_size", std::int64_t{4096}, 1},
      {"intermediate_size", std::int64_t{11008}, 1},
      layers_option(32),
      {"num_attention_heads", std::int64_t{32}, 1},
      count_option("num_key_value_heads", 0),
      count_option("head_dim", 0),
      {"max_position_embeddings", std::int64_t{2048}, 1},
      {"hidden_act", Activation::kSilu},
      {"rms_norm_eps", 1e-6, 0, 1},
      {"initializer_range", 0.02},
      {"attention_dropout", 0.0, 0, 1},
      {"tie_word_embeddings", false},
      {.key = "pad_token_id", .fallback = std::int64_t{-1}, .least = -1, .null = std::int64_t{-1}},
  };
  return with_options(all, own);
}

// The model that these fields describe: RMSNorm before attention and a gated perceptron, separate
// projections, rotary positions of the whole head. attention_bias, mlp_bias, sliding_window (of all
// blocks) and resid_pdrop apply if the family has them.
DecoderSpec rms_decoder(std::string_view family, const Options& o) {
  check_rms_sizes(family, o);
  const std::int64_t width = o.integer("hidden_size"), heads = o.integer("num_attention_heads");
  const std::int64_t inner = o.integer("intermediate_size");
  const double deviation = o.real("initializer_range");
  const auto or_else = [](std::int64_t value, std::int64_t other) {
    return value > 0 ? value : other;
  };
  const auto project = [&](const char* name, std::int64_t in, std::int64_t out, bool bias) {
    return Projection{.name = name, .in = in, .parts = {out}, .bias = bias, .deviation = deviation};
  };
  const auto norm = [&](const char* name) {
    return NormSpec{.name = name, .width = width, .epsilon = o.real("rms_norm_eps")};
  };
  DecoderSpec s{
      .family = std::string(family),
      .prefix = "model",
      .blocks = "layers",
      .embedding = "embed_tokens",
      .vocabulary = o.integer("vocab_size"),
      .width = width,
      .max_positions = o.integer("max_position_embeddings"),
      .padding_id = o.integer("pad_token_id"),
      .tied = o.flag("tie_word_embeddings"),
      .deviation = deviation,
      .last = norm("norm"),
      .head = project("lm_head", width, o.integer("vocab_size"), false),
  };
  BlockSpec& b = s.block;
  b.attention_norm = norm("input_layernorm");
  b.mlp_norm = norm("post_attention_layernorm");
  b.dropout = o.real("resid_pdrop");
  AttentionSpec& a = b.attention;
  a.name = "self_attn";
  a.heads = heads;
  a.key_value_heads = or_else(o.integer("num_key_value_heads"), heads);
  a.width = or_else(o.integer("head_dim"), width / heads);
  a.dropout = o.real("attention_dropout");
  const bool bias = o.flag("attention_bias");
  a.in = {project("q_proj", width, a.queries(), bias), project("k_proj", width, a.keys(), bias),
          project("v_proj", width, a.keys(), bias)};
  a.out = project("o_proj", a.queries(), width, bias);
  const bool mlp_bias = o.flag("mlp_bias");
  b.mlp = {.name = "mlp",
           .in = {project("gate_proj", width, inner, mlp_bias),
                  project("up_proj", width, inner, mlp_bias)},
           .out = project("down_proj", inner, width, mlp_bias),
           .activation = o.activation("hidden_act")};
  s.rotary = Rotary{.scaling = o.rope,
                    .width = static_cast<std::int64_t>(static_cast<double>(a.width) *
                                                       o.rope.partial_rotary_factor)};
  s.windows.assign(static_cast<std::size_t>(o.integer("num_hidden_layers")),
                   o.integer("sliding_window"));
  return s;
}

// layer_types names the blocks with the window; without that field, `slides` does.
void set_windows(DecoderSpec& spec, const Options& o,
                 const std::function<bool(std::int64_t layer)>& slides) {
  for (std::int64_t i = 0; i < spec.layers(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    const bool has_window = o.sliding.empty() ? slides(i) : o.sliding[at];
    spec.windows[at] = has_window ? o.integer("sliding_window") : 0;
  }
}

// Replaces several projections by one packed matrix, under that module's name.
void pack(std::vector<Projection>& projections, std::string_view name) {
  Projection one = projections.front();
  one.name = name;
  one.parts.clear();
  for (const Projection& projection : projections)
    one.parts.insert(one.parts.end(), projection.parts.begin(), projection.parts.end());
  projections = {std::move(one)};
}

// ---------------------------------------------------------------- GPT-2
//
// LayerNorm, learned positions, a perceptron without a gate, matrices stored [in, out].

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

// ---------------------------------------------------------------- Llama and its successors
//
// Each declares what differs from rms_decoder().

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
Option cap_option(std::string_view key, double fallback) {
  return {.key = key, .fallback = fallback, .least = 1e-6, .null = 0.0};
}

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

}  // namespace

const std::vector<const Family*>& known_families() {
  static const std::vector<const Family*> all{
      &gpt2(),    &llama(),   &phi3(),   &qwen2(),      &qwen3(),
      &mistral(), &mixtral(), &gemma2(), &starcoder2(),
  };
  return all;
}

FamilyConfig::FamilyConfig(const GptConfig& c) : FamilyConfig(gpt2(), options_of(c)) {}

FamilyConfig::FamilyConfig(const LlamaConfig& c)
    : FamilyConfig(c.fused_projections ? phi3() : llama(), options_of(c)) {}

const Family* find_family(std::string_view type) {
  const auto found = std::ranges::find(known_families(), type, &Family::type);
  return found == known_families().end() ? nullptr : *found;
}

const OptionValue* Options::find(std::string_view key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

Options Family::defaults() const {
  Options all;
  for (const Option& option : options) all.set(option.key, option.fallback);
  if (rope) all.rope.rope_theta = rope->theta;
  return all;
}

FamilyConfig::FamilyConfig(const Family& family, Options options)
    : family_(&family), options_(std::move(options)), spec_(family.describe(options_)) {}

std::vector<io::TensorShape> tensors_of(const FamilyConfig& config) {
  return tensors_of(config.spec());
}

}  // namespace lockstep::models
