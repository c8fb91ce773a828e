#include "lockstep/models/lora_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <regex>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/core/problems.h"
#include "lockstep/core/text.h"

namespace lockstep::models {
namespace {

constexpr const char* kOutputHead = "lm_head";

// ---------------------------------------------------------------- reading

std::vector<std::string> strings(const Node& node, const std::string& key) {
  std::vector<std::string> all;
  if (!node.is(NodeKind::kList)) refuse_value(node, key, "a list of names", "Write [a, b].");
  for (const Node& item : node.items) all.push_back(as_string(item, key));
  return all;
}

ModuleNames module_names(const Node& node, const std::string& key) {
  if (node.is(NodeKind::kList)) return strings(node, key);
  return as_string(node, key);
}

std::vector<std::int64_t> integers(const Node& node, const std::string& key) {
  if (!node.is(NodeKind::kList)) return {as_integer(node, key)};
  std::vector<std::int64_t> all;
  for (const Node& item : node.items) all.push_back(as_integer(item, key));
  return all;
}

LoraBias bias_of(const Node& node, const std::string& key) {
  const std::string text = as_string(node, key);
  if (text == "none") return LoraBias::kNone;
  if (text == "all") return LoraBias::kAll;
  if (text == "lora_only") return LoraBias::kLoraOnly;
  refuse_value(node, key, "none, all or lora_only");
}

LoraInit init_of(const Node& node, const std::string& key) {
  if (node.is(NodeKind::kBool)) return node.boolean ? LoraInit::kDefault : LoraInit::kRandom;
  if (node.is(NodeKind::kString) && node.text == "gaussian") return LoraInit::kGaussian;
  refuse_value(node, key, "true, false or gaussian", "Other initialisations are not supported.");
}

const std::vector<std::string>& lora_keys() {
  static const std::vector<std::string> all = split(
      "r lora_alpha lora_dropout target_modules exclude_modules rank_pattern alpha_pattern bias "
      "use_rslora init_lora_weights modules_to_save layers_to_transform layers_pattern "
      "base_model_name_or_path task_type",
      ' ');
  return all;
}

void set_key(LoraConfig& c, std::string_view key, const Node& n, const std::string& k) {
  if (key == "r") c.r = as_integer(n, k);
  if (key == "lora_alpha") c.lora_alpha = as_real(n, k);
  if (key == "lora_dropout") c.lora_dropout = as_real(n, k);
  if (key == "target_modules") c.target_modules = module_names(n, k);
  if (key == "exclude_modules") c.exclude_modules = module_names(n, k);
  if (key == "rank_pattern")
    for (const Entry& entry : as_map(n, k).entries)
      c.rank_pattern.emplace_back(entry.key, as_integer(entry.value, k));
  if (key == "alpha_pattern")
    for (const Entry& entry : as_map(n, k).entries)
      c.alpha_pattern.emplace_back(entry.key, as_real(entry.value, k));
  if (key == "bias") c.bias = bias_of(n, k);
  if (key == "use_rslora") c.use_rslora = as_bool(n, k);
  if (key == "init_lora_weights") c.init_lora_weights = init_of(n, k);
  if (key == "modules_to_save") c.modules_to_save = strings(n, k);
  if (key == "layers_to_transform") c.layers_to_transform = integers(n, k);
  if (key == "layers_pattern")
    c.layers_pattern = n.is(NodeKind::kList) ? strings(n, k) : std::vector{as_string(n, k)};
  if (key == "base_model_name_or_path") c.base_model_name_or_path = as_string(n, k);
  if (key == "task_type") c.task_type = as_string(n, k);
}

// Fields of an adapter_config.json that say nothing about what the adapter computes here.
constexpr std::string_view kWithoutEffect[] = {
    "peft_type",     "peft_version", "auto_mapping",   "inference_mode",    "fan_in_fan_out",
    "megatron_core", "revision",     "runtime_config", "qalora_group_size",
};

// null, false and empty values turn a field off.
bool is_off(const Node& node) {
  switch (node.kind) {
    case NodeKind::kNull:
      return true;
    case NodeKind::kBool:
      return !node.boolean;
    case NodeKind::kList:
      return node.items.empty();
    case NodeKind::kMap:
      return node.entries.empty();
    default:
      return false;
  }
}

[[noreturn]] void refuse_key(const Entry& entry, const std::string& what) {
  // Other programs have alpha and dropout, or lora_rank.
  const std::string longer = "lora_" + entry.key;
  const bool rank = entry.key.ends_with("rank") || entry.key == "lora_r";
  const bool known = std::ranges::find(lora_keys(), longer) != lora_keys().end();
  const std::string meant = rank ? "r" : known ? longer : "";
  throw UsageError("lora", "{}: {}.{} is not supported.{} Supported are {}.", entry.location.text(),
                   what, entry.key,
                   meant.empty() ? did_you_mean(entry.key, lora_keys())
                                 : fmt::format(" Did you mean {}?", meant),
                   fmt::join(lora_keys(), ", "));
}

void read_entry(LoraConfig& config, const Entry& entry, const std::string& what, bool of_peft) {
  if (std::ranges::find(lora_keys(), entry.key) != lora_keys().end()) {
    if (!entry.value.is(NodeKind::kNull))
      set_key(config, entry.key, entry.value, fmt::format("{}.{}", what, entry.key));
    return;
  }
  const bool ignored =
      of_peft && (is_off(entry.value) ||
                  std::ranges::find(kWithoutEffect, entry.key) != std::end(kWithoutEffect));
  if (!ignored) refuse_key(entry, what);
}

LoraConfig read_entries(const Node& map, const std::string& what, bool of_peft,
                        Problems& problems) {
  LoraConfig config;
  const std::size_t before = problems.size();
  for (const Entry& entry : as_map(map, what).entries)
    problems.attempt([&] { read_entry(config, entry, what, of_peft); });
  if (problems.size() == before) problems.attempt([&] { check_lora_config(config); });
  return config;
}

// ---------------------------------------------------------------- writing

Node names_node(const ModuleNames& names) {
  if (names.empty()) return {};
  return names.regex.empty() ? texts_node(names.suffixes) : text_node(names.regex);
}

Node number_node(double value) {
  const bool whole = std::floor(value) == value && std::abs(value) < 1e15;
  return whole ? integer_node(static_cast<std::int64_t>(value)) : real_node(value);
}

// A list, or null where there is none.
Node list_or_null(const std::vector<std::string>& names) {
  return names.empty() ? Node{} : texts_node(names);
}

template <typename Number>
Node pattern_node(const std::vector<std::pair<std::string, Number>>& pattern) {
  NodeMembers members;
  for (const auto& [name, value] : pattern)
    members.emplace_back(name, number_node(static_cast<double>(value)));
  return map_node(std::move(members));
}

Node init_node(LoraInit init) {
  return init == LoraInit::kGaussian ? text_node("gaussian")
                                     : bool_node(init == LoraInit::kDefault);
}

// ---------------------------------------------------------------- names

std::regex compile(const std::string& pattern, const char* field) {
  try {
    return std::regex(pattern, std::regex::ECMAScript | std::regex::optimize);
  } catch (const std::regex_error& error) {
    throw UsageError("lora",
                     "{}: '{}' is not a regular expression that can be used here ({}). Python's "
                     "named groups and look-behind are not supported.",
                     field, pattern, error.what());
  }
}

bool ends_with_name(const std::string& name, const std::string& suffix) {
  return name == suffix || name.ends_with("." + suffix);
}

bool by_suffix(const std::string& name, const std::vector<std::string>& suffixes) {
  return std::ranges::any_of(suffixes, [&](const auto& s) { return ends_with_name(name, s); });
}

std::string last_part(const std::string& name) {
  return name.substr(name.rfind('.') + 1);  // npos + 1 is 0
}

bool is_number(const std::string& part) {
  return !part.empty() && part.find_first_not_of("0123456789") == part.npos;
}

// A run selects the layers several times (file check, plan, adapters); each warning is given once.
void warn_once(const std::string& text) {
  static std::mutex mutex;
  static std::set<std::string> said;
  const std::lock_guard lock(mutex);
  if (said.insert(text).second) log::warning("lora", "{}", text);
}

// Blocks differ only in their numbers: one line names all of them.
std::set<std::string> without_numbers(const std::vector<std::string>& names) {
  std::set<std::string> all;
  for (const std::string& name : names) {
    std::vector<std::string> parts = split(name, '.');
    for (std::string& part : parts)
      if (is_number(part)) part = "*";
    all.insert(fmt::format("{}", fmt::join(parts, ".")));
  }
  return all;
}

}  // namespace

// ---------------------------------------------------------------- files

LoraConfig read_lora_config(const Node& map, const std::string& what, Problems& problems) {
  return read_entries(map, what, /*of_peft=*/false, problems);
}

LoraConfig parse_adapter_config(std::string_view text, const std::string& file) {
  const Node root = parse_json(text, file);
  const Entry* type = as_map(root, file).find("peft_type");
  const std::string name = type == nullptr ? "none" : as_string(type->value, "peft_type");
  if (name != "LORA")
    throw UsageError("lora", "{}: peft_type is {}, and only LORA is supported.", file, name);
  Problems problems;
  LoraConfig config = read_entries(root, "adapter_config", /*of_peft=*/true, problems);
  if (!problems.empty()) throw UsageError("lora", "{}", fmt::join(problems.texts(), "\n  "));
  return config;
}

std::string adapter_config_text(const LoraConfig& c, bool fan_in_fan_out) {
  const auto text = [](const std::string& value) {
    return value.empty() ? Node{} : text_node(value);
  };
  constexpr const char* kBiases[] = {"none", "all", "lora_only"};
  Node layers;
  if (!c.layers_to_transform.empty()) layers.kind = NodeKind::kList;
  for (const std::int64_t layer : c.layers_to_transform)
    layers.items.push_back(integer_node(layer));
  return to_json(map_node({
             {"alpha_pattern", pattern_node(c.alpha_pattern)},
             {"base_model_name_or_path", text(c.base_model_name_or_path)},
             {"bias", text_node(kBiases[static_cast<int>(c.bias)])},
             {"exclude_modules", names_node(c.exclude_modules)},
             {"fan_in_fan_out", bool_node(fan_in_fan_out)},
             {"inference_mode", bool_node(true)},
             {"init_lora_weights", init_node(c.init_lora_weights)},
             {"layers_pattern", list_or_null(c.layers_pattern)},
             {"layers_to_transform", layers},
             {"lora_alpha", number_node(c.lora_alpha)},
             {"lora_dropout", real_node(c.lora_dropout)},
             {"modules_to_save", list_or_null(c.modules_to_save)},
             {"peft_type", text_node("LORA")},
             {"r", integer_node(c.r)},
             {"rank_pattern", pattern_node(c.rank_pattern)},
             {"revision", Node{}},
             {"target_modules", names_node(c.target_modules)},
             {"task_type", text(c.task_type)},
             {"use_dora", bool_node(false)},
             {"use_rslora", bool_node(c.use_rslora)},
         })) +
         "\n";
}

std::string function_text(const LoraConfig& c, const std::string& base, bool load_in_4bit) {
  std::vector<Node> alphas;  // in their order: the first that matches counts
  for (const auto& [name, alpha] : c.alpha_pattern)
    alphas.push_back(list_node({text_node(name), real_node(alpha)}));
  Node root = base.empty() ? map_node({}) : parse_json(base, "the base model");
  root.entries.push_back({"lora",
                          {},
                          map_node({{"lora_alpha", real_node(c.lora_alpha)},
                                    {"use_rslora", bool_node(c.use_rslora)},
                                    {"alpha_pattern", list_node(std::move(alphas))}})});
  root.entries.push_back({"load_in_4bit", {}, bool_node(load_in_4bit)});
  return to_json(root) + "\n";
}

void check_lora_config(const LoraConfig& c) {
  const auto check_rank = [](std::int64_t rank, const std::string& field) {
    if (rank < 1)
      throw UsageError("lora", "{} is {}. The rank of an adapter is 1 or more.", field, rank);
  };
  check_rank(c.r, "r");
  for (const auto& [name, rank] : c.rank_pattern)
    check_rank(rank, fmt::format("rank_pattern['{}']", name));
  if (!(c.lora_dropout >= 0 && c.lora_dropout < 1))
    throw UsageError("lora", "lora_dropout {} must be at least 0 and below 1.", c.lora_dropout);
  if (!std::isfinite(c.lora_alpha))
    throw UsageError("lora", "lora_alpha is {}, and must be a number.", c.lora_alpha);
  if (!c.layers_to_transform.empty() && c.target_modules.suffixes.empty())
    throw UsageError("lora",
                     "layers_to_transform is for target_modules by name, and target_modules is "
                     "'{}'. Write the layers into the regular expression instead.",
                     c.target_modules.regex);
}

// ---------------------------------------------------------------- which layers

struct LoraTargets::Patterns {
  std::vector<std::regex> target{};   // one or none
  std::vector<std::regex> exclude{};  // one or none
  std::vector<std::regex> ranks{};
  std::vector<std::regex> alphas{};
};

LoraTargets::LoraTargets(LoraConfig config) : config_(std::move(config)) {
  check_lora_config(config_);
  Patterns all;
  const std::string& target = config_.target_modules.regex;
  if (!target.empty() && target != kAllLinear)
    all.target.push_back(compile(target, "target_modules"));
  const std::string& exclude = config_.exclude_modules.regex;
  if (!exclude.empty()) all.exclude.push_back(compile(exclude, "exclude_modules"));
  const auto ending = [](const std::string& pattern, const char* field) {
    return compile(fmt::format(R"((.*\.)?({}))", pattern), field);
  };
  for (const auto& [name, rank] : config_.rank_pattern)
    all.ranks.push_back(ending(name, "rank_pattern"));
  for (const auto& [name, alpha] : config_.alpha_pattern)
    all.alphas.push_back(ending(name, "alpha_pattern"));
  patterns_ = std::make_shared<const Patterns>(std::move(all));
}

bool LoraTargets::matches(const std::string& name) const {
  if (by_suffix(name, config_.exclude_modules.suffixes)) return false;
  const std::vector<std::regex>& exclude = patterns_->exclude;
  const std::vector<std::regex>& target = patterns_->target;
  if (!exclude.empty() && std::regex_match(name, exclude[0])) return false;
  if (is_saved_whole(name)) return false;
  if (!target.empty()) return std::regex_match(name, target[0]);
  if (config_.target_modules.regex == kAllLinear) return last_part(name) != kOutputHead;
  return by_suffix(name, config_.target_modules.suffixes) && in_layers(name);
}

// Checks the first number in the name that follows the name of a list of blocks.
bool LoraTargets::in_layers(const std::string& name) const {
  if (config_.layers_to_transform.empty()) return true;
  if (std::ranges::find(config_.target_modules.suffixes, name) !=
      config_.target_modules.suffixes.end())
    return true;
  const std::vector<std::string> parts = split(name, '.');
  const auto& lists = config_.layers_pattern;
  // Without a pattern, the list of blocks must itself be in a module, as in PEFT.
  for (std::size_t i = lists.empty() ? 2 : 1; i + 1 < parts.size(); ++i) {
    if (!is_number(parts[i])) continue;
    if (!lists.empty() && std::ranges::find(lists, parts[i - 1]) == lists.end()) continue;
    const auto& wanted = config_.layers_to_transform;
    return std::ranges::any_of(
        wanted, [&](std::int64_t layer) { return fmt::format("{}", layer) == parts[i]; });
  }
  return false;
}

bool LoraTargets::is_saved_whole(const std::string& name) const {
  // As in PEFT, a name matches by its end, at any character, and covers everything inside the
  // module.
  for (std::size_t end = name.find('.');; end = name.find('.', end + 1)) {
    const std::string_view module = std::string_view(name).substr(0, end);
    for (const std::string& saved : config_.modules_to_save)
      if (module.ends_with(saved)) return true;
    if (end == name.npos) return false;
  }
}

std::vector<std::string> LoraTargets::select(const std::vector<std::string>& linear) const {
  std::vector<std::string> chosen;
  std::ranges::copy_if(linear, std::back_inserter(chosen),
                       [&](const std::string& name) { return matches(name); });
  const ModuleNames& wanted = config_.target_modules;
  if (chosen.empty())
    throw UsageError(
        "lora",
        "{} matches no linear layer of the model. It has {}. Name the ends of these, one regular "
        "expression for the whole name, or {}.",
        wanted.empty() ? std::string("target_modules is not set, and so")
                       : "target_modules " + to_json(names_node(wanted)),
        fmt::join(without_numbers(linear), ", "), kAllLinear);
  for (const std::string& suffix : wanted.suffixes)
    if (std::ranges::none_of(chosen, [&](const auto& n) { return ends_with_name(n, suffix); }))
      warn_once(fmt::format("target_modules: no linear layer gets an adapter for '{}'", suffix));
  return chosen;
}

std::vector<std::string> LoraTargets::select(const DecoderSpec& spec) const {
  refuse_experts(spec);
  return select(linear_layers(spec));
}

void LoraTargets::refuse_experts(const DecoderSpec& spec) const {
  for (const std::string& name : routers_and_experts(spec)) {
    const bool whole = is_saved_whole(name);
    if (!whole && !matches(name)) continue;
    throw UsageError("lora",
                     "{} matches {}, which belongs to a mixture of experts. Adapters are attached "
                     "to the layers of attention alone in such a model. Name these, for example "
                     "target_modules [q_proj, k_proj, v_proj, o_proj].",
                     whole ? "modules_to_save" : "target_modules", name);
  }
}

void LoraTargets::refuse_saved_whole(const std::vector<std::string>& in_4_bits) const {
  for (const std::string& name : in_4_bits)
    if (is_saved_whole(name))
      throw UsageError("lora",
                       "modules_to_save names {}, whose weight is stored in 4 bits and cannot be "
                       "trained. Give it an adapter (target_modules), or delete load_in_4bit.",
                       name);
}

void LoraTargets::check_ranks(const std::vector<std::string>& chosen,
                              const DecoderSpec& spec) const {
  const std::set<std::string> adapted(chosen.begin(), chosen.end());
  constexpr std::string_view kWeight = ".weight";
  for (const io::TensorShape& tensor : tensors_of(spec)) {
    if (!tensor.name.ends_with(kWeight)) continue;
    const std::string layer = tensor.name.substr(0, tensor.name.size() - kWeight.size());
    if (!adapted.contains(layer)) continue;
    const std::int64_t most = std::ranges::min(tensor.shape), r = rank(layer);
    if (r > most)
      throw UsageError("lora",
                       "{} is {}, and the weight of {} is [{}]. The rank of its adapter can be {} "
                       "at most; rank_pattern sets that of some layers.",
                       r == config_.r ? "lora.r" : "lora.rank_pattern", r, layer,
                       fmt::join(tensor.shape, ", "), most);
  }
}

std::int64_t LoraTargets::rank(const std::string& name) const {
  const std::vector<std::regex>& patterns = patterns_->ranks;
  for (std::size_t i = 0; i < patterns.size(); ++i)
    if (std::regex_match(name, patterns[i])) return config_.rank_pattern[i].second;
  return config_.r;
}

double LoraTargets::scaling(const std::string& name) const {
  double alpha = config_.lora_alpha;
  const std::vector<std::regex>& patterns = patterns_->alphas;
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    if (!std::regex_match(name, patterns[i])) continue;
    alpha = config_.alpha_pattern[i].second;
    break;
  }
  const auto r = static_cast<double>(rank(name));
  return alpha / (config_.use_rslora ? std::sqrt(r) : r);
}

// ---------------------------------------------------------------- tensors

std::string adapter_key(const std::string& parameter, bool adapted) {
  if (!adapted) return "base_model.model." + parameter;
  const std::size_t dot = parameter.rfind('.') + 1;
  return "base_model.model." + parameter.substr(0, dot) + "base_layer." + parameter.substr(dot);
}

std::uint64_t adapter_bytes(const LoraConfig& config, const DecoderSpec& spec) {
  const LoraTargets targets(config);
  const std::vector<std::string> chosen = targets.select(spec);
  const std::set<std::string> adapted(chosen.begin(), chosen.end());
  std::uint64_t bytes = 0;
  for (const io::TensorShape& tensor : tensors_of(spec)) {
    const std::string own = last_part(tensor.name);
    const std::size_t dot = tensor.name.size() - own.size();
    const std::string module = tensor.name.substr(0, dot == 0 ? 0 : dot - 1);
    const bool has_adapter = adapted.contains(module);
    if (has_adapter && own == "weight")
      bytes +=
          static_cast<std::uint64_t>(targets.rank(module) * (tensor.shape[0] + tensor.shape[1])) *
          sizeof(float);
    const bool bias = own == "bias" && (config.bias == LoraBias::kAll ||
                                        (config.bias == LoraBias::kLoraOnly && has_adapter));
    if (bias || targets.is_saved_whole(module))
      bytes += io::tensor_bytes(tensor.dtype, tensor.shape).value_or(0);
  }
  return bytes;
}

}  // namespace lockstep::models
