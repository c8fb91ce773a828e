#include "lockstep/models/families/shared.h"

#include <algorithm>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::models::families {
namespace {

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

}  // namespace

Option count_option(std::string_view key, std::int64_t fallback) {
  return {.key = key, .fallback = fallback, .least = 1, .null = std::int64_t{0}};
}

Option must_be(std::string_view key, bool value) {
  return {.key = key,
          .fallback = value,
          .refused = !value,
          .remedy = value ? "It must be true." : "It must be false."};
}

Option layers_option(std::int64_t fallback) {
  return {.key = "num_hidden_layers", .fallback = fallback, .most = kMostLayers};
}

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

void set_windows(DecoderSpec& spec, const Options& o,
                 const std::function<bool(std::int64_t layer)>& slides) {
  for (std::int64_t i = 0; i < spec.layers(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    const bool has_window = o.sliding.empty() ? slides(i) : o.sliding[at];
    spec.windows[at] = has_window ? o.integer("sliding_window") : 0;
  }
}

void pack(std::vector<Projection>& projections, std::string_view name) {
  Projection one = projections.front();
  one.name = name;
  one.parts.clear();
  for (const Projection& projection : projections)
    one.parts.insert(one.parts.end(), projection.parts.begin(), projection.parts.end());
  projections = {std::move(one)};
}

}  // namespace lockstep::models::families

namespace lockstep::models {

const std::vector<const Family*>& known_families() {
  static const std::vector<const Family*> all{
      &families::gpt2(),    &families::llama(),  &families::phi3(),
      &families::qwen2(),   &families::qwen3(),  &families::mistral(),
      &families::mixtral(), &families::gemma2(), &families::starcoder2(),
  };
  return all;
}

FamilyConfig::FamilyConfig(const GptConfig& c)
    : FamilyConfig(families::gpt2(), families::options_of(c)) {}

FamilyConfig::FamilyConfig(const LlamaConfig& c)
    : FamilyConfig(c.fused_projections ? families::phi3() : families::llama(),
                   families::options_of(c)) {}

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
