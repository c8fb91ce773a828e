#include "lockstep/models/hugging_face.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/map_reader.h"

namespace lockstep::models {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMost = std::int64_t{1} << 40;
constexpr double kLarge = 1e12;

// ---------------------------------------------------------------- reading

[[noreturn]] void refuse_field(const Node& value, std::string_view field,
                               std::string_view supported) {
  throw UsageError("models", "{}: {} is {}, which is not supported. {}", value.location.text(),
                   field, to_json(value), supported);
}

// A field whose other values compute something else.
void expect(const Node& root, std::string_view field, bool wanted) {
  const Entry* entry = root.find(field);
  if (entry == nullptr || entry->value.is(NodeKind::kNull)) return;
  if (as_bool(entry->value, field) != wanted)
    refuse_field(entry->value, field, wanted ? "It must be true." : "It must be false.");
}

Activation activation_of(const Node& root, std::string_view field, std::string_view fallback) {
  const std::map<std::string, Activation, std::less<>> known{
      {"gelu_new", Activation::kGeluTanh}, {"gelu_pytorch_tanh", Activation::kGeluTanh},
      {"gelu", Activation::kGelu},         {"relu", Activation::kRelu},
      {"silu", Activation::kSilu},         {"swish", Activation::kSilu}};
  const Entry* entry = root.find(field);
  const std::string name{entry == nullptr ? fallback : as_string(entry->value, field)};
  const auto found = known.find(name);
  if (found == known.end())
    refuse_field(entry->value, field,
                 "Known are gelu_new, gelu_pytorch_tanh, gelu, relu, silu and swish.");
  return found->second;
}

std::vector<double> reals(const Node* node, const std::string& field, std::int64_t count) {
  if (node == nullptr || !node->is(NodeKind::kList))
    throw UsageError("models", "{} must be a list of {} numbers.", field, count);
  std::vector<double> values;
  for (const Node& item : node->items) values.push_back(as_real(item, field));
  if (static_cast<std::int64_t>(values.size()) != count)
    throw UsageError("models", "{}: {} has {} numbers, and half of the rotated width is {}.",
                     node->location.text(), field, values.size(), count);
  return values;
}

std::vector<std::int64_t> token_ids(const Node& root, std::string_view field) {
  std::vector<std::int64_t> ids;
  const Entry* entry = root.find(field);
  if (entry == nullptr || entry->value.is(NodeKind::kNull)) return ids;
  if (!entry->value.is(NodeKind::kList)) return {as_integer(entry->value, field)};
  for (const Node& item : entry->value.items) ids.push_back(as_integer(item, field));
  return ids;
}

// Two names of one size, as the attribute_map of transformers' GPT2Config has them. Where both are
// there, the second one counts, as it does there.
std::int64_t size_of(MapReader& keys, const char* name, const char* other, std::int64_t fallback,
                     std::int64_t min) {
  return keys.integer(keys.has(other) ? other : name, fallback, min, kMost);
}

GptConfig read_gpt(const Node& root) {
  for (const char* field :
       {"scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"})
    expect(root, field, false);
  expect(root, "scale_attn_weights", true);
  MapReader keys(root, "config");
  GptConfig c;
  c.n_layer = size_of(keys, "n_layer", "num_hidden_layers", c.n_layer, 0);
  c.n_head = size_of(keys, "n_head", "num_attention_heads", c.n_head, 1);
  c.n_embd = size_of(keys, "n_embd", "hidden_size", c.n_embd, 1);
  c.vocab_size = keys.integer("vocab_size", c.vocab_size, 1, kMost);
  c.n_positions = size_of(keys, "n_positions", "max_position_embeddings", c.n_positions, 1);
  c.n_inner = keys.integer("n_inner", 0, 1, kMost);
  c.activation_function = activation_of(root, "activation_function", "gelu_new");
  c.layer_norm_epsilon = keys.real("layer_norm_epsilon", c.layer_norm_epsilon, 0, 1);
  c.initializer_range = keys.real("initializer_range", c.initializer_range, 0, kLarge);
  c.embd_pdrop = keys.real("embd_pdrop", 0.1, 0, 1);
  c.attn_pdrop = keys.real("attn_pdrop", 0.1, 0, 1);
  c.resid_pdrop = keys.real("resid_pdrop", 0.1, 0, 1);
  c.tie_word_embeddings = keys.boolean("tie_word_embeddings", true);
  return c;
}

// `c` has its sizes already. Phi-3 keeps the length it was trained with outside of the map.
void read_rope(const Node& root, LlamaConfig& c, bool phi3) {
  RopeConfig& rope = c.rope;
  MapReader top(root, "config");
  const char* field = top.has("rope_scaling") ? "rope_scaling" : "rope_parameters";
  const Node nothing;
  const Node* map = top.node(field);
  MapReader keys(map != nullptr ? *map : nothing, field);
  rope.rope_theta = keys.real("rope_theta", top.real("rope_theta", 10'000, 1, kLarge), 1, kLarge);
  rope.type = keys.text("rope_type", keys.text("type", "default"));
  if (phi3 && (rope.type == "su" || rope.type == "yarn")) rope.type = "longrope";
  rope.partial_rotary_factor =
      keys.real("partial_rotary_factor", top.real("partial_rotary_factor", 1, 0, 1), 0, 1);
  if (!phi3 && rope.partial_rotary_factor != 1) {
    if (rope.type != "default")
      throw UsageError("models",
                       "{}: partial_rotary_factor {} with rope_type {} is not supported for "
                       "model_type llama, whose heads are rotated whole. Delete "
                       "partial_rotary_factor, or set rope_type to default.",
                       root.location.text(), rope.partial_rotary_factor, rope.type);
    rope.partial_rotary_factor = 1;  // LlamaModel of transformers does not read it then
  }
  const auto length = c.max_position_embeddings;
  const std::int64_t inside = keys.integer("original_max_position_embeddings", length, 1, kMost);
  rope.original_max_position_embeddings =
      top.integer("original_max_position_embeddings", phi3 ? 4096 : inside, 1, kMost);
  if (rope.type == "default") return;
  if (rope.type == "linear" || rope.type == "llama3") {
    rope.factor = keys.real("factor", 1, 1e-6, kLarge);
    rope.low_freq_factor = keys.real("low_freq_factor", 1, 1e-6, kLarge);
    rope.high_freq_factor = keys.real("high_freq_factor", 4, 1e-6, kLarge);
    return;
  }
  if (rope.type != "longrope") {
    const Node* type = keys.has("rope_type") ? keys.node("rope_type") : keys.node("type");
    refuse_field(*type, fmt::format("{}.rope_type", field),
                 "Known are default, linear, llama3 and longrope.");
  }
  const auto pairs =
      static_cast<std::int64_t>(static_cast<double>(c.head_width()) * rope.partial_rotary_factor) /
      2;
  const std::string prefix = std::string(field) + ".";
  rope.short_factor = reals(keys.node("short_factor"), prefix + "short_factor", pairs);
  rope.long_factor = reals(keys.node("long_factor"), prefix + "long_factor", pairs);
  const auto original = static_cast<double>(rope.original_max_position_embeddings);
  const double factor = keys.real("factor", static_cast<double>(length) / original, 1e-6, kLarge);
  const double suggested = factor <= 1 ? 1 : std::sqrt(1 + std::log(factor) / std::log(original));
  rope.attention_factor = keys.real("attention_factor", suggested, 0, kLarge);
}

LlamaConfig read_llama(const Node& root, bool phi3) {
  MapReader keys(root, "config");
  LlamaConfig c;
  c.fused_projections = phi3;
  c.vocab_size = keys.integer("vocab_size", phi3 ? 32064 : 32000, 1, kMost);
  c.hidden_size = keys.integer("hidden_size", phi3 ? 3072 : 4096, 1, kMost);
  c.intermediate_size = keys.integer("intermediate_size", phi3 ? 8192 : 11008, 1, kMost);
  c.num_hidden_layers = keys.integer("num_hidden_layers", 32, 0, kMost);
  c.num_attention_heads = keys.integer("num_attention_heads", 32, 1, kMost);
  c.num_key_value_heads = keys.integer("num_key_value_heads", 0, 1, kMost);
  c.head_dim = keys.integer("head_dim", 0, 1, kMost);
  c.max_position_embeddings = keys.integer("max_position_embeddings", phi3 ? 4096 : 2048, 1, kMost);
  c.pad_token_id = keys.integer("pad_token_id", phi3 ? 32000 : -1, -1, kMost);
  c.hidden_act = activation_of(root, "hidden_act", "silu");
  c.rms_norm_eps = keys.real("rms_norm_eps", phi3 ? 1e-5 : 1e-6, 0, 1);
  c.initializer_range = keys.real("initializer_range", 0.02, 0, kLarge);
  c.attention_dropout = keys.real("attention_dropout", 0, 0, 1);
  c.tie_word_embeddings = keys.boolean("tie_word_embeddings", false);
  if (const Entry* pad = root.find("pad_token_id");
      pad != nullptr && pad->value.is(NodeKind::kNull))
    c.pad_token_id = -1;
  if (phi3) {
    c.sliding_window = keys.integer("sliding_window", 0, 1, kMost);
    // With a cache transformers keeps all tokens then, and generates another text than without.
    if (c.sliding_window == 1)
      refuse_field(*keys.node("sliding_window"), "sliding_window",
                   "A token that sees itself alone has no context. Give 2 or more, or null.");
    c.resid_pdrop = keys.real("resid_pdrop", 0, 0, 1);
    expect(root, "attention_bias", false);
    expect(root, "mlp_bias", false);
  } else {
    c.attention_bias = keys.boolean("attention_bias", false);
    c.mlp_bias = keys.boolean("mlp_bias", false);
  }
  check_sizes(c);
  read_rope(root, c, phi3);
  return c;
}

// The family, from model_type or from the class.
std::string family_of(const Node& root) {
  const std::map<std::string, std::string> known{
      {"GPT2LMHeadModel", "gpt2"}, {"GPT2Model", "gpt2"},       {"LlamaForCausalLM", "llama"},
      {"LlamaModel", "llama"},     {"Phi3ForCausalLM", "phi3"}, {"Phi3Model", "phi3"}};
  constexpr const char* kKnown =
      "Known are GPT2LMHeadModel (model_type gpt2), LlamaForCausalLM (llama) and Phi3ForCausalLM "
      "(phi3).";
  std::string family;
  const Entry* classes = root.find("architectures");
  if (classes != nullptr && classes->value.is(NodeKind::kList) && !classes->value.items.empty()) {
    const auto found = known.find(as_string(classes->value.items.front(), "architectures"));
    if (found == known.end()) refuse_field(classes->value, "architectures", kKnown);
    family = found->second;
  }
  const Entry* type = root.find("model_type");
  if (type == nullptr && family.empty())
    throw UsageError("models", "{}: there is neither model_type nor architectures. {}",
                     root.location.text(), kKnown);
  if (type == nullptr) return family;
  const std::string name = as_string(type->value, "model_type");
  const bool right = name == "gpt2" || name == "llama" || name == "phi3";
  if (!right || (!family.empty() && name != family))
    refuse_field(type->value, "model_type", kKnown);
  return name;
}

// ---------------------------------------------------------------- writing

const char* name_of(Activation activation) {
  switch (activation) {
    case Activation::kGeluTanh:
      return "gelu_new";
    case Activation::kGelu:
      return "gelu";
    case Activation::kRelu:
      return "relu";
    case Activation::kSilu:
      break;
  }
  return "silu";
}

void set(Node& map, const std::string& key, Node value) {
  const auto there = std::ranges::find(map.entries, key, &Entry::key);
  if (there != map.entries.end())
    there->value = std::move(value);
  else
    map.entries.push_back({key, {}, std::move(value)});
}

Node ids_node(const std::vector<std::int64_t>& ids) {
  if (ids.empty()) return {};
  if (ids.size() == 1) return integer_node(ids.front());
  std::vector<Node> items;
  for (const std::int64_t id : ids) items.push_back(integer_node(id));
  return list_node(std::move(items));
}

Node reals_node(const std::vector<double>& values) {
  std::vector<Node> items;
  for (const double value : values) items.push_back(real_node(value));
  return list_node(std::move(items));
}

Node source_of(const GptConfig& c) {
  Node all = map_node({});
  set(all, "architectures", texts_node({"GPT2LMHeadModel"}));
  set(all, "model_type", text_node("gpt2"));
  set(all, "n_layer", integer_node(c.n_layer));
  set(all, "n_head", integer_node(c.n_head));
  set(all, "n_embd", integer_node(c.n_embd));
  set(all, "n_inner", c.n_inner > 0 ? integer_node(c.n_inner) : Node{});
  set(all, "vocab_size", integer_node(c.vocab_size));
  set(all, "n_positions", integer_node(c.n_positions));
  set(all, "n_ctx", integer_node(c.n_positions));
  set(all, "activation_function", text_node(name_of(c.activation_function)));
  set(all, "layer_norm_epsilon", real_node(c.layer_norm_epsilon));
  set(all, "resid_pdrop", real_node(c.resid_pdrop));
  set(all, "embd_pdrop", real_node(c.embd_pdrop));
  set(all, "attn_pdrop", real_node(c.attn_pdrop));
  set(all, "initializer_range", real_node(c.initializer_range));
  set(all, "scale_attn_weights", bool_node(true));
  set(all, "tie_word_embeddings", bool_node(c.tie_word_embeddings));
  return all;
}

Node rope_node(const RopeConfig& rope) {
  Node map = map_node({});
  set(map, "rope_type", text_node(rope.type));
  set(map, "rope_theta", real_node(rope.rope_theta));
  if (rope.partial_rotary_factor != 1)
    set(map, "partial_rotary_factor", real_node(rope.partial_rotary_factor));
  if (rope.type == "linear" || rope.type == "llama3") set(map, "factor", real_node(rope.factor));
  if (rope.type == "llama3") {
    set(map, "low_freq_factor", real_node(rope.low_freq_factor));
    set(map, "high_freq_factor", real_node(rope.high_freq_factor));
  }
  if (rope.type == "longrope") {
    set(map, "short_factor", reals_node(rope.short_factor));
    set(map, "long_factor", reals_node(rope.long_factor));
    set(map, "attention_factor", real_node(rope.attention_factor));
  }
  if (rope.type == "llama3" || rope.type == "longrope")
    set(map, "original_max_position_embeddings",
        integer_node(rope.original_max_position_embeddings));
  return map;
}

Node source_of(const LlamaConfig& c) {
  const bool phi3 = c.fused_projections;
  Node all = map_node({});
  set(all, "architectures", texts_node({phi3 ? "Phi3ForCausalLM" : "LlamaForCausalLM"}));
  set(all, "model_type", text_node(phi3 ? "phi3" : "llama"));
  set(all, "vocab_size", integer_node(c.vocab_size));
  set(all, "hidden_size", integer_node(c.hidden_size));
  set(all, "intermediate_size", integer_node(c.intermediate_size));
  set(all, "num_hidden_layers", integer_node(c.num_hidden_layers));
  set(all, "num_attention_heads", integer_node(c.num_attention_heads));
  set(all, "num_key_value_heads", integer_node(c.key_value_heads()));
  set(all, "head_dim", integer_node(c.head_width()));
  set(all, "max_position_embeddings", integer_node(c.max_position_embeddings));
  set(all, "hidden_act", text_node(name_of(c.hidden_act)));
  set(all, "rms_norm_eps", real_node(c.rms_norm_eps));
  set(all, "initializer_range", real_node(c.initializer_range));
  set(all, "attention_dropout", real_node(c.attention_dropout));
  set(all, "tie_word_embeddings", bool_node(c.tie_word_embeddings));
  set(all, "pad_token_id", c.pad_token_id >= 0 ? integer_node(c.pad_token_id) : Node{});
  set(all, "rope_parameters", rope_node(c.rope));
  if (phi3) {
    set(all, "resid_pdrop", real_node(c.resid_pdrop));
    set(all, "sliding_window", c.sliding_window > 0 ? integer_node(c.sliding_window) : Node{});
    if (c.rope.original_max_position_embeddings > 0)
      set(all, "original_max_position_embeddings",
          integer_node(c.rope.original_max_position_embeddings));
  } else {
    set(all, "attention_bias", bool_node(c.attention_bias));
    set(all, "mlp_bias", bool_node(c.mlp_bias));
  }
  return all;
}

// ---------------------------------------------------------------- weights

// Buffers that earlier versions of transformers saved and later ones compute.
bool is_skipped(const std::string& name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name.ends_with(".rotary_emb.inv_freq");
}

bool is_floating(io::DType dtype) {
  return dtype == io::DType::kF32 || dtype == io::DType::kF16 || dtype == io::DType::kBF16 ||
         dtype == io::DType::kF64;
}

}  // namespace

std::int64_t CausalLmConfig::vocab_size() const {
  return gpt() != nullptr ? gpt()->vocab_size : llama()->vocab_size;
}

std::int64_t CausalLmConfig::layers() const {
  return gpt() != nullptr ? gpt()->n_layer : llama()->num_hidden_layers;
}

std::int64_t CausalLmConfig::max_positions() const {
  return gpt() != nullptr ? gpt()->n_positions : llama()->max_position_embeddings;
}

bool CausalLmConfig::tied() const {
  return gpt() != nullptr ? gpt()->tie_word_embeddings : llama()->tie_word_embeddings;
}

CausalLmConfig parse_config(std::string_view json, const std::string& name) {
  CausalLmConfig config;
  config.source = parse_json(json, name);
  const Node& root = as_map(config.source, name);
  if (const Entry* entry = root.find("quantization_config");
      entry != nullptr && !entry->value.is(NodeKind::kNull))
    refuse_field(entry->value, "quantization_config", "Give weights that are not quantized.");
  expect(root, "is_encoder_decoder", false);
  // To transformers null is false, too: every token would see those after it.
  if (const Entry* entry = root.find("is_causal");
      entry != nullptr && !(entry->value.is(NodeKind::kBool) && entry->value.boolean))
    refuse_field(entry->value, "is_causal",
                 "It must be true: a model that sees the next token cannot learn to predict it.");
  const std::string family = family_of(root);
  if (family == "gpt2")
    config.model = read_gpt(root);
  else
    config.model = read_llama(root, family == "phi3");
  check_sizes(config);
  config.eos_token_ids = token_ids(root, "eos_token_id");
  return config;
}

CausalLmConfig read_config(const std::string& folder_or_file) {
  std::error_code ignored;
  const bool folder = fs::is_directory(folder_or_file, ignored);
  const std::string path = folder ? folder_or_file + "/config.json" : folder_or_file;
  if (!fs::exists(path, ignored))
    throw UsageError("models",
                     "there is no {}. Give the folder of a Hugging Face model, or its config.json. "
                     "Relative paths begin at {}.",
                     path, fs::current_path(ignored).string());
  CausalLmConfig config = parse_config(read_file(path), path);
  const std::string generation = folder_or_file + "/generation_config.json";
  if (!folder || !fs::exists(generation, ignored)) return config;
  auto ids = token_ids(parse_json(read_file(generation), generation), "eos_token_id");
  if (!ids.empty()) config.eos_token_ids = std::move(ids);
  return config;
}

std::string config_json(const CausalLmConfig& config, std::string_view dtype) {
  Node all = config.source;
  if (all.is(NodeKind::kNull)) {
    all = std::visit([](const auto& model) { return source_of(model); }, config.model);
    const bool gpt_with_one = config.gpt() != nullptr && config.eos_token_ids.size() == 1;
    set(all, "bos_token_id", gpt_with_one ? ids_node(config.eos_token_ids) : Node{});
    set(all, "eos_token_id", ids_node(config.eos_token_ids));
  }
  // transformers reads the older name in all versions and writes the newer one since version 5.
  set(all, all.find("dtype") != nullptr ? "dtype" : "torch_dtype", text_node(dtype));
  return to_json(all) + "\n";
}

std::string hugging_face_config(const GptConfig& c, std::optional<std::int64_t> end_of_text) {
  CausalLmConfig config{.model = c};
  if (end_of_text) config.eos_token_ids = {*end_of_text};
  return config_json(config);
}

void check_sizes(const CausalLmConfig& config) {
  std::visit([](const auto& model) { check_sizes(model); }, config.model);
}

std::vector<io::TensorShape> tensors_of(const CausalLmConfig& config) {
  return std::visit([](const auto& model) { return tensors_of(model); }, config.model);
}

std::vector<FoundWeight> find_weights(const std::string& folder, const io::SafetensorsSet& files,
                                      const CausalLmConfig& config) {
  const std::string base = config.gpt() != nullptr ? "transformer." : "model.";
  std::set<std::string> used;
  std::vector<std::string> wrong;
  std::vector<FoundWeight> all;
  for (const io::TensorShape& tensor : tensors_of(config)) {
    std::string name = tensor.name;
    auto found = files.find(name);
    if (found.entry == nullptr && name.starts_with(base)) {
      name.erase(0, base.size());
      found = files.find(name);
    }
    if (found.entry == nullptr) {
      wrong.push_back(fmt::format("'{}' is missing", tensor.name));
      continue;
    }
    used.insert(name);
    if (found.entry->shape != tensor.shape)
      wrong.push_back(fmt::format("'{}' is [{}] instead of [{}]", name,
                                  fmt::join(found.entry->shape, ", "),
                                  fmt::join(tensor.shape, ", ")));
    else if (!is_floating(found.entry->dtype))
      wrong.push_back(fmt::format("'{}' is of type {}", name, io::dtype_name(found.entry->dtype)));
    all.push_back({tensor.name, found});
  }
  for (const std::string& name : files.names()) {
    const bool tied_head = config.tied() && name == "lm_head.weight";
    if (!used.contains(name) && !tied_head && !is_skipped(name))
      wrong.push_back(fmt::format("'{}' is not the model's", name));
  }
  if (wrong.empty()) return all;
  constexpr std::size_t kNamed = 10;
  const std::size_t count = wrong.size();
  wrong.resize(std::min(count, kNamed));
  throw UsageError("models",
                   "the weights in {} do not fit its config.json in {} tensors: {}{}. They were "
                   "probably written for another model. Compare config.json with the weights.",
                   folder, count, fmt::join(wrong, ", "), count > kNamed ? ", ..." : "");
}

}  // namespace lockstep::models
