#include "lockstep/models/hugging_face.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"

namespace lockstep::models {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMost = 1 << 24;  // of a size: far above every model's
constexpr double kLarge = 1e12;

// ---------------------------------------------------------------- reading

[[noreturn]] void refuse_field(const Node& value, std::string_view field,
                               std::string_view supported) {
  throw UsageError("models", "{}: {} is {}, which is not supported. {}", value.location.text(),
                   field, to_json(value), supported);
}

const std::map<std::string, Activation, std::less<>>& activations() {
  static const std::map<std::string, Activation, std::less<>> known{
      {"gelu_new", Activation::kGeluTanh}, {"gelu_pytorch_tanh", Activation::kGeluTanh},
      {"gelu", Activation::kGelu},         {"relu", Activation::kRelu},
      {"silu", Activation::kSilu},         {"swish", Activation::kSilu}};
  return known;
}

// By the type of its fallback.
OptionValue read_value(const Option& option, std::string_view key, const Node& node) {
  const std::string name = fmt::format("config.{}", key);
  const auto check = [&](double value) {
    const double most = std::min(option.most, static_cast<double>(kMost));
    if (value >= option.least && value <= most) return;
    refuse_at(node.location, "{} must be from {} to {}, and {} is not.", name, option.least, most,
              to_json(node));
  };
  if (std::holds_alternative<bool>(option.fallback)) return as_bool(node, name);
  if (std::holds_alternative<std::int64_t>(option.fallback)) {
    const std::int64_t value = as_integer(node, name);
    check(static_cast<double>(value));
    return value;
  }
  if (std::holds_alternative<double>(option.fallback)) {
    const double value = as_real(node, name);
    check(value);
    return value;
  }
  const auto found = activations().find(as_string(node, name));
  if (found == activations().end())
    refuse_field(node, key, "Known are gelu_new, gelu_pytorch_tanh, gelu, relu, silu and swish.");
  return found->second;
}

OptionValue read_option(const Option& option, MapReader& keys, const Node& root) {
  const std::string_view key =
      !option.other_name.empty() && keys.has(option.other_name) ? option.other_name : option.key;
  const Node* node = keys.node(key);
  if (node == nullptr) {
    const bool is_null = root.find(key) != nullptr;
    return is_null ? option.null.value_or(option.fallback) : option.fallback;
  }
  const OptionValue value = read_value(option, key, *node);
  if (option.refused && value == *option.refused) refuse_field(*node, key, option.remedy);
  return value;
}

// Which blocks have the window.
std::vector<bool> read_layer_types(const Node& root, std::int64_t layers) {
  const Node* types = MapReader(root, "config").node("layer_types");
  if (types == nullptr) return {};
  std::vector<bool> all;
  for (const Node& item : types->items) {
    const std::string type = as_string(item, "layer_types");
    if (type != "sliding_attention" && type != "full_attention")
      refuse_field(item, "layer_types", "Known are full_attention and sliding_attention.");
    all.push_back(type == "sliding_attention");
  }
  if (static_cast<std::int64_t>(all.size()) != layers)
    throw UsageError("models", "{}: layer_types has {} names, and the model {} layers.",
                     types->location.text(), all.size(), layers);
  return all;
}

std::vector<double> reals(const Node& node, const std::string& field, std::int64_t count) {
  if (!node.is(NodeKind::kList))
    throw UsageError("models", "{}: {} must be a list of {} numbers.", node.location.text(), field,
                     count);
  std::vector<double> values;
  for (const Node& item : node.items) values.push_back(as_real(item, field));
  if (static_cast<std::int64_t>(values.size()) != count)
    throw UsageError("models", "{}: {} has {} numbers, and half of the rotated width is {}.",
                     node.location.text(), field, values.size(), count);
  return values;
}

std::vector<std::int64_t> token_ids(const Node& root, std::string_view field) {
  const Entry* entry = root.find(field);
  if (entry == nullptr || entry->value.is(NodeKind::kNull)) return {};
  if (!entry->value.is(NodeKind::kList)) return {as_integer(entry->value, field)};
  std::vector<std::int64_t> ids;
  for (const Node& item : entry->value.items) ids.push_back(as_integer(item, field));
  return ids;
}

// The types of scaling, and the keys without which transformers refuses them, too.
const std::map<std::string, std::vector<std::string>, std::less<>>& scalings() {
  static const std::map<std::string, std::vector<std::string>, std::less<>> known{
      {"linear", {"factor"}},
      {"llama3", {"factor", "low_freq_factor", "high_freq_factor"}},
      {"longrope", {"short_factor", "long_factor"}},
      {"yarn", {"factor"}}};
  return known;
}

void require_keys(const Node& map, const std::string& field, const RopeConfig& rope) {
  for (const std::string& key : scalings().at(rope.type)) {
    const Entry* entry = map.find(key);
    // As null the factor of yarn is the ratio of the two lengths.
    if (entry != nullptr && (rope.type == "yarn" || !entry->value.is(NodeKind::kNull))) continue;
    throw UsageError("models",
                     "{}: {}.{} is missing, and rope_type {} needs it. Take its value from the "
                     "model's original config.json.",
                     map.location.text(), field, key, rope.type);
  }
}

// As in transformers, zero means the same as a missing field.
void read_yarn(MapReader& keys, double length, RopeConfig& rope) {
  const auto positive = [&](const char* key, double fallback) {
    const double value = keys.real(key, fallback, 0, kLarge);
    return value > 0 ? value : fallback;
  };
  rope.factor = keys.real(
      "factor", length / static_cast<double>(rope.original_max_position_embeddings), 1e-6, kLarge);
  rope.beta_fast = positive("beta_fast", 32);
  rope.beta_slow = positive("beta_slow", 1);
  rope.truncate = keys.boolean("truncate", true);
  const auto scale = [&](double share) {
    return rope.factor <= 1 ? 1 : 0.1 * share * std::log(rope.factor) + 1;
  };
  const double mscale = keys.real("mscale", 0, -kLarge, kLarge);
  const double all = keys.real("mscale_all_dim", 0, -kLarge, kLarge);
  const double suggested = mscale != 0 && all != 0 ? scale(mscale) / scale(all) : scale(1);
  rope.attention_factor = keys.real("attention_factor", suggested, 0, kLarge);
}

void read_longrope(MapReader& keys, const std::string& field, const Options& o, RopeConfig& rope) {
  // Without a head_dim the sizes are checked again where the model is described.
  const std::int64_t heads = std::max<std::int64_t>(o.integer("num_attention_heads"), 1);
  const std::int64_t own = o.integer("head_dim");
  const std::int64_t width = own > 0 ? own : o.integer("hidden_size") / heads;
  const auto pairs =
      static_cast<std::int64_t>(static_cast<double>(width) * rope.partial_rotary_factor) / 2;
  rope.short_factor = reals(*keys.node("short_factor"), field + ".short_factor", pairs);
  rope.long_factor = reals(*keys.node("long_factor"), field + ".long_factor", pairs);
  const auto length = static_cast<double>(o.integer("max_position_embeddings"));
  const auto original = static_cast<double>(rope.original_max_position_embeddings);
  const double factor = keys.real("factor", length / original, 1e-6, kLarge);
  const double suggested = factor <= 1 ? 1 : std::sqrt(1 + std::log(factor) / std::log(original));
  rope.attention_factor = keys.real("attention_factor", suggested, 0, kLarge);
}

void read_scaling(MapReader& keys, const std::string& field, const Options& o, RopeConfig& rope) {
  if (rope.type == "longrope") return read_longrope(keys, field, o, rope);
  if (rope.type == "yarn")
    return read_yarn(keys, static_cast<double>(o.integer("max_position_embeddings")), rope);
  rope.factor = keys.real("factor", 1, 1e-6, kLarge);
  if (rope.type == "linear") return;
  rope.low_freq_factor = keys.real("low_freq_factor", 1, 1e-6, kLarge);
  rope.high_freq_factor = keys.real("high_freq_factor", 4, 1e-6, kLarge);
}

// `o` has its sizes already.
RopeConfig read_rope(const Node& root, const Options& o, const Family& family) {
  const RopeRules& rules = *family.rope;
  RopeConfig rope;
  MapReader top(root, "config");
  const std::string field = top.has("rope_scaling") ? "rope_scaling" : "rope_parameters";
  const Node nothing;
  const Node* given = top.node(field);
  const Node& map = given != nullptr ? *given : nothing;
  MapReader keys(map, field);
  rope.rope_theta =
      keys.real("rope_theta", top.real("rope_theta", rules.theta, 1, kLarge), 1, kLarge);
  rope.type = keys.text("rope_type", keys.text("type", "default"));
  if (std::ranges::find(rules.longrope_names, rope.type) != rules.longrope_names.end())
    rope.type = "longrope";
  rope.partial_rotary_factor =
      keys.real("partial_rotary_factor", top.real("partial_rotary_factor", 1, 0, 1), 0, 1);
  if (!rules.partial && rope.partial_rotary_factor != 1) {
    if (rope.type != "default")
      throw UsageError("models",
                       "{}: partial_rotary_factor {} with rope_type {} is not supported for "
                       "model_type {}, whose heads are rotated whole. Delete "
                       "partial_rotary_factor, or set rope_type to default.",
                       root.location.text(), rope.partial_rotary_factor, rope.type, family.type);
    rope.partial_rotary_factor = 1;  // transformers does not read it then
  }
  const std::int64_t inside = keys.integer("original_max_position_embeddings",
                                           o.integer("max_position_embeddings"), 1, kMost);
  rope.original_max_position_embeddings =
      top.integer("original_max_position_embeddings",
                  rules.original_length > 0 ? rules.original_length : inside, 1, kMost);
  if (scalings().contains(rope.type)) {
    require_keys(map, field, rope);
    read_scaling(keys, field, o, rope);
  } else if (rope.type != "default") {
    const Node* type = keys.has("rope_type") ? keys.node("rope_type") : keys.node("type");
    refuse_field(*type, field + ".rope_type",
                 "Known are default, linear, llama3, longrope and yarn.");
  }
  keys.has("finetuned");  // published models have it, and it says nothing about frequencies
  keys.finish();
  return rope;
}

FamilyConfig read_model(const Node& root, const Family& family) {
  MapReader keys(root, "config");
  Options options;
  for (const Option& option : family.options)
    options.set(option.key, read_option(option, keys, root));
  if (family.layer_types)
    options.sliding = read_layer_types(root, options.integer("num_hidden_layers"));
  if (family.rope) {
    family.describe(options);  // sizes that do not fit are refused before what depends on them
    options.rope = read_rope(root, options, family);
  }
  return {family, std::move(options)};
}

[[noreturn]] void refuse_family(const Node& value, std::string_view field, std::string_view name,
                                bool by_class) {
  std::vector<std::string> known, names;
  for (const Family* family : known_families()) {
    known.push_back(fmt::format("{} (model_type {})", family->classes.front(), family->type));
    names.emplace_back(by_class ? family->classes.front() : family->type);
  }
  auto near = nearest(name, names);
  if (!near) near = nearest(name.substr(0, name.find('_')), names);  // qwen3_moe
  refuse_field(value, field,
               fmt::format("{}Known are {}. docs/extending.md describes how a family is added.",
                           near ? fmt::format("The nearest known one is {}. ", *near) : "",
                           fmt::join(known, ", ")));
}

// From the class, from model_type, or from both.
const Family& family_of(const Node& root) {
  const Family* found = nullptr;
  const Entry* classes = root.find("architectures");
  if (classes != nullptr && classes->value.is(NodeKind::kList) && !classes->value.items.empty()) {
    const std::string name = as_string(classes->value.items.front(), "architectures");
    for (const Family* family : known_families())
      if (std::ranges::find(family->classes, name) != family->classes.end()) found = family;
    if (found == nullptr) refuse_family(classes->value, "architectures", name, /*by_class=*/true);
  }
  const Entry* type = root.find("model_type");
  if (type == nullptr && found == nullptr)
    throw UsageError("models",
                     "{}: there is neither model_type nor architectures. One of them says which "
                     "family the model is of.",
                     root.location.text());
  if (type == nullptr) return *found;
  const std::string name = as_string(type->value, "model_type");
  if (find_family(name) == nullptr || (found != nullptr && found->type != name))
    refuse_family(type->value, "model_type", name, /*by_class=*/false);
  return *find_family(name);
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

Node rope_node(const RopeConfig& rope) {
  Node map = map_node({});
  set(map, "rope_type", text_node(rope.type));
  set(map, "rope_theta", real_node(rope.rope_theta));
  if (rope.partial_rotary_factor != 1)
    set(map, "partial_rotary_factor", real_node(rope.partial_rotary_factor));
  const bool llama3 = rope.type == "llama3", longrope = rope.type == "longrope";
  const bool yarn = rope.type == "yarn";
  const auto put = [&](bool has, const char* key, Node value) {
    if (has) set(map, key, std::move(value));
  };
  put(rope.type == "linear" || llama3 || yarn, "factor", real_node(rope.factor));
  put(llama3, "low_freq_factor", real_node(rope.low_freq_factor));
  put(llama3, "high_freq_factor", real_node(rope.high_freq_factor));
  put(longrope, "short_factor", reals_node(rope.short_factor));
  put(longrope, "long_factor", reals_node(rope.long_factor));
  put(longrope || yarn, "attention_factor", real_node(rope.attention_factor));
  put(yarn, "beta_fast", real_node(rope.beta_fast));
  put(yarn, "beta_slow", real_node(rope.beta_slow));
  put(yarn, "truncate", bool_node(rope.truncate));
  put(llama3 || longrope || yarn, "original_max_position_embeddings",
      integer_node(rope.original_max_position_embeddings));
  return map;
}

Node option_node(const Option& option, const OptionValue& value) {
  if (option.null && value == *option.null) return {};
  if (const auto* flag = std::get_if<bool>(&value)) return bool_node(*flag);
  if (const auto* integer = std::get_if<std::int64_t>(&value)) return integer_node(*integer);
  if (const auto* real = std::get_if<double>(&value)) return real_node(*real);
  return text_node(name_of(std::get<Activation>(value)));
}

Node source_of(const FamilyConfig& model) {
  const Family& family = model.family();
  const RopeConfig& rope = model.options().rope;
  Node all = map_node({});
  set(all, "architectures", texts_node({std::string(family.classes.front())}));
  set(all, "model_type", text_node(family.type));
  for (const Option& option : family.options)
    if (const OptionValue* value = model.options().find(option.key))
      set(all, std::string(option.key), option_node(option, *value));
  if (family.rope) set(all, "rope_parameters", rope_node(rope));
  if (family.rope && family.rope->original_length > 0 && rope.original_max_position_embeddings > 0)
    set(all, "original_max_position_embeddings",
        integer_node(rope.original_max_position_embeddings));
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

// The field of config.json whose other value would give this tensor, and most others, the shapes in
// the files; as a sentence. Empty where no single field explains them.
std::string field_that_differs(const CausalLmConfig& config, const io::TensorShape& wanted,
                               const std::vector<FoundWeight>& weights) {
  std::map<std::string_view, const std::vector<std::int64_t>*> found;
  for (const FoundWeight& weight : weights) found[weight.name] = &weight.file.entry->shape;
  const std::vector<std::int64_t>& there = *found.at(wanted.name);
  if (there.size() != wanted.shape.size()) return "";
  const auto [want, have] = std::ranges::mismatch(wanted.shape, there);
  const FamilyConfig& model = config.model;
  std::string text;
  std::size_t most = 0;
  for (const Option& option : model.family().options) {
    const OptionValue* const given = model.options().find(option.key);
    const auto* const value = given == nullptr ? nullptr : std::get_if<std::int64_t>(given);
    if (value == nullptr || *value * *have % *want != 0) continue;
    Options changed = model.options();
    changed.set(option.key, *value * *have / *want);
    std::size_t fitting = 0;
    bool fits = false;
    try {
      for (const io::TensorShape& tensor : tensors_of(FamilyConfig(model.family(), changed))) {
        const auto at = found.find(tensor.name);
        if (at == found.end() || *at->second != tensor.shape) continue;
        ++fitting;
        fits |= tensor.name == wanted.name;
      }
    } catch (const UsageError&) {  // sizes that no model has together
    }
    if (!fits || fitting <= most) continue;
    most = fitting;
    text = fmt::format(" {} is {} in config.json, and '{}' was written with {}.", option.key,
                       *value, wanted.name, *value * *have / *want);
  }
  return text;
}

}  // namespace

CausalLmConfig parse_config(std::string_view json, const std::string& name) {
  CausalLmConfig config;
  config.source = parse_json(json, name);
  const Node& root = as_map(config.source, name);
  MapReader keys(root, "config");
  if (const Node* given = keys.node("quantization_config"))
    refuse_field(*given, "quantization_config", "Give weights that are not quantized.");
  if (const Node* given = keys.node("is_encoder_decoder");
      given != nullptr && as_bool(*given, "is_encoder_decoder"))
    refuse_field(*given, "is_encoder_decoder", "It must be false.");
  // transformers takes null as false: every token would see those after it.
  if (const Entry* entry = root.find("is_causal");
      entry != nullptr && !(entry->value.is(NodeKind::kBool) && entry->value.boolean))
    refuse_field(entry->value, "is_causal",
                 "It must be true: a model that sees the next token cannot learn to predict it.");
  config.model = read_model(root, family_of(root));
  config.eos_token_ids = token_ids(root, "eos_token_id");
  return config;
}

CausalLmConfig read_config(const std::string& folder_or_file) {
  std::error_code ignored;
  const bool folder = fs::is_directory(folder_or_file, ignored);
  const std::string path = folder ? folder_or_file + "/config.json" : folder_or_file;
  if (!fs::exists(path, ignored)) {
    const std::string link = link_advice(path);
    throw UsageError("models",
                     "there is no {}. Give the folder of a Hugging Face model, or its config.json. "
                     "Relative paths begin at {}.{}",
                     path, fs::current_path(ignored).string(),
                     link.empty() ? hub_advice(folder_or_file) : link);
  }
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
    all = source_of(config.model);
    const bool same = config.model.family().bos_is_eos && config.eos_token_ids.size() == 1;
    set(all, "bos_token_id", same ? ids_node(config.eos_token_ids) : Node{});
    set(all, "eos_token_id", ids_node(config.eos_token_ids));
  }
  // transformers reads the older name in all versions and writes the newer one since version 5.
  set(all, all.find("dtype") != nullptr ? "dtype" : "torch_dtype", text_node(dtype));
  return to_json(all) + "\n";
}

std::string function_text(const CausalLmConfig& config) {
  // Fields for training only, fields that shapes determine, and aliases of fields that are set
  // below.
  static const std::set<std::string_view> left_out{"initializer_range",
                                                   "embd_pdrop",
                                                   "attn_pdrop",
                                                   "resid_pdrop",
                                                   "attention_dropout",
                                                   "embedding_dropout",
                                                   "residual_dropout",
                                                   "pad_token_id",
                                                   "output_router_logits",
                                                   "router_aux_loss_coef",
                                                   "router_jitter_noise",
                                                   "vocab_size",
                                                   "n_inner",
                                                   "max_position_embeddings",
                                                   "use_sliding_window",
                                                   "max_window_layers"};
  const FamilyConfig& model = config.model;
  const DecoderSpec& spec = config.spec();
  Node all = map_node({});
  set(all, "model_type", text_node(model.family().type));
  for (const Option& option : model.family().options)
    if (const OptionValue* value = model.options().find(option.key);
        value != nullptr && !left_out.contains(option.key))
      set(all, std::string(option.key), option_node(option, *value));
  const AttentionSpec& attention = spec.block.attention;
  set(all, "num_key_value_heads", integer_node(attention.key_value_heads));
  set(all, "head_dim", integer_node(attention.width));
  std::vector<Node> windows;
  for (const std::int64_t window : spec.windows) windows.push_back(integer_node(window));
  const bool alike =
      std::ranges::adjacent_find(spec.windows, std::not_equal_to()) == spec.windows.end();
  set(all, "sliding_window",
      alike && !windows.empty() ? windows.front() : list_node(std::move(windows)));
  if (model.family().rope) set(all, "rope_parameters", rope_node(model.options().rope));
  return to_json(all) + "\n";
}

std::vector<io::TensorShape> tensors_of(const CausalLmConfig& config) {
  return tensors_of(config.spec());
}

std::vector<FoundWeight> find_weights(const std::string& folder, const io::SafetensorsSet& files,
                                      const CausalLmConfig& config) {
  const std::string base = config.spec().prefix + ".";
  std::set<std::string> used;
  std::vector<std::string> wrong;
  std::vector<FoundWeight> all;
  std::optional<io::TensorShape> first;  // that has another shape
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
    if (found.entry->shape != tensor.shape) {
      wrong.push_back(fmt::format("'{}' is [{}] instead of [{}]", name,
                                  fmt::join(found.entry->shape, ", "),
                                  fmt::join(tensor.shape, ", ")));
      if (!first) first = tensor;
    } else if (!is_floating(found.entry->dtype)) {
      wrong.push_back(fmt::format("'{}' is of type {}", name, io::dtype_name(found.entry->dtype)));
    }
    all.push_back({tensor.name, found});
  }
  for (const std::string& name : files.names()) {
    const bool tied_head = config.tied() && name == config.spec().head.name + ".weight";
    if (!used.contains(name) && !tied_head && !is_skipped(name))
      wrong.push_back(fmt::format("'{}' is not the model's", name));
  }
  if (wrong.empty()) return all;
  constexpr std::size_t kNamed = 10;
  const std::size_t count = wrong.size();
  wrong.resize(std::min(count, kNamed));
  const std::string field = first ? field_that_differs(config, *first, all) : "";
  throw UsageError("models",
                   "the weights in {} do not fit its config.json in {} tensors: {}{}.{} They were "
                   "probably written for another model. Compare config.json with the weights.",
                   folder, count, fmt::join(wrong, ", "), count > kNamed ? ", ..." : "", field);
}

}  // namespace lockstep::models
