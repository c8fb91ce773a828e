#include "lockstep/models/device_map.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>

#include "lockstep/core/error.h"
#include "lockstep/core/text.h"

namespace lockstep::models {
namespace {

bool is_below(std::string_view name, std::string_view above) {
  return above.empty() || name == above ||
         (name.starts_with(above) && name.size() > above.size() && name[above.size()] == '.');
}

// The whole text as a number that is not negative.
std::optional<std::int64_t> number_of(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size() && value >= 0;
  return whole ? std::optional(value) : std::nullopt;
}

std::string device_text(const Node& node, const std::string& key) {
  constexpr std::int64_t kLast = 127;  // LibTorch counts devices in 8 bits
  const std::string text = as_string(node, key);
  const std::size_t colon = text.find(':');
  const std::string_view kind = std::string_view(text).substr(0, colon);
  const bool plain = number_of(text).has_value();
  const auto index =
      number_of(colon == text.npos ? text : std::string_view(text).substr(colon + 1));
  const bool named = kind == "cuda" || kind == "cpu";
  const bool right = index ? (plain || named) && *index <= kLast : named && colon == text.npos;
  if (!right) refuse_value(node, key, "a device", "Write the number of a GPU, cuda:0 or cpu.");
  if (plain) return fmt::format("cuda:{}", *index);
  return text == "cuda" ? "cuda:0" : text;
}

struct Rule {
  std::string name;
  std::string device;
};

// "model.layers.0-15" is short for its blocks.
std::vector<Rule> rules_of(const Entry& entry, const std::string& device) {
  const std::string& key = entry.key;
  const std::size_t dot = key.rfind('.'), dash = key.rfind('-');
  if (dash == key.npos || dot == key.npos || dash < dot) return {{key, device}};
  const auto first = number_of(std::string_view(key).substr(dot + 1, dash - dot - 1));
  const auto last = number_of(std::string_view(key).substr(dash + 1));
  if (!first || !last) return {{key, device}};
  constexpr std::int64_t kMost = 100'000;
  if (*last < *first || *last > kMost)
    throw UsageError("config", "{}: device_map: '{}' is not a range. Write the first and the last.",
                     entry.location.text(), key);
  std::vector<Rule> rules;
  for (std::int64_t i = *first; i <= *last; ++i)
    rules.push_back({fmt::format("{}{}", key.substr(0, dot + 1), i), device});
  return rules;
}

void check_name(const Entry& entry, const std::string& name,
                const std::vector<std::string>& parts) {
  // Has no tensors in our models, but transformers' maps name it.
  if (name == "model.rotary_emb") return;
  for (const std::string& part : parts) {
    if (is_below(part, name)) return;
    if (is_below(name, part))
      throw UsageError("config",
                       "{}: device_map: {} is inside of {}, which stays whole on one device. Name "
                       "{} instead.",
                       entry.location.text(), name, part, part);
  }
  throw UsageError("config",
                   "{}: device_map: the model has no part '{}'.{} Its parts are {} to {}, {} and "
                   "{}.",
                   entry.location.text(), name, did_you_mean(name, parts), parts.front(),
                   parts[parts.size() - 3], parts[parts.size() - 2], parts.back());
}

std::vector<Rule> read_rules(const Node& node, const std::vector<std::string>& parts) {
  std::vector<Rule> all;
  for (const Entry& entry : node.entries) {
    const std::string device = device_text(entry.value, fmt::format("device_map.{}", entry.key));
    for (Rule& rule : rules_of(entry, device)) {
      check_name(entry, rule.name, parts);
      if (std::ranges::find(all, rule.name, &Rule::name) != all.end())
        throw UsageError("config", "{}: device_map names {} twice. Leave it out of the range.",
                         entry.location.text(), rule.name);
      all.push_back(std::move(rule));
    }
  }
  return all;
}

std::string device_of_part(const std::string& part, const std::vector<Rule>& rules) {
  const Rule* longest = nullptr;
  for (const Rule& rule : rules)
    if (is_below(part, rule.name) &&
        (longest == nullptr || rule.name.size() > longest->name.size()))
      longest = &rule;
  return longest == nullptr ? "" : longest->device;
}

void check_embeddings(const DeviceMap& map, const CausalLmConfig& config, const Node& node) {
  const std::string& tokens = map.parts.front().device;
  const DeviceMap::Part& head = map.parts.back();
  if (config.tied() && head.device != tokens)
    throw UsageError("config",
                     "{}: device_map: lm_head is on {}, and its weight is {}'s, on {} "
                     "(tie_word_embeddings). Put both on one device.",
                     node.location.text(), head.device, map.parts.front().name, tokens);
  for (std::size_t i = 1; i < embedding_names(config.spec()).size(); ++i)
    if (map.parts[i].device != tokens)
      throw UsageError("config",
                       "{}: device_map: {} is on {} and {} on {}, and the two are added. Put both "
                       "on one device.",
                       node.location.text(), map.parts[i].name, map.parts[i].device,
                       map.parts.front().name, tokens);
}

// Bytes of a part's tensors; a head that shares its weight has none.
std::uint64_t part_bytes(const std::string& part, const std::vector<io::TensorShape>& tensors) {
  std::uint64_t bytes = 0;
  for (const io::TensorShape& tensor : tensors)
    if (is_below(tensor.name, part))
      bytes += io::tensor_bytes(tensor.dtype, tensor.shape).value_or(0);
  return bytes;
}

}  // namespace

std::vector<std::string> DeviceMap::devices() const {
  std::vector<std::string> all;
  for (const Part& part : parts)
    if (std::find(all.begin(), all.end(), part.device) == all.end()) all.push_back(part.device);
  return all;
}

DeviceMap read_device_map(const Node& node, const CausalLmConfig& config,
                          const std::vector<std::string>& devices) {
  if (!node.is(NodeKind::kMap)) {
    const std::string kind = as_string(node, "device_map");
    if (kind == "auto" || kind == "balanced") return balanced_device_map(config, devices);
    refuse_value(node, "device_map", "auto, balanced or a map of names to devices",
                 "Write {\"\": 0} for all of the model on one GPU.");
  }
  const std::vector<std::string> names = part_names(config.spec());
  const std::vector<Rule> rules = read_rules(node, names);
  DeviceMap map;
  std::vector<std::string> missing;
  for (const std::string& name : names) {
    std::string device = device_of_part(name, rules);
    if (device.empty() && name == names.back() && config.tied() && !map.parts.empty())
      device = map.parts.front().device;
    if (device.empty()) missing.push_back(name);
    map.parts.push_back({name, std::move(device)});
  }
  if (!missing.empty())
    throw UsageError("config",
                     "{}: device_map has no device for {} of the model's {} parts: {}{}. Add them; "
                     "the name \"\" stands for all that is not named.",
                     node.location.text(), missing.size(), names.size(),
                     fmt::join(missing.begin(),
                               missing.begin() + static_cast<std::ptrdiff_t>(
                                                     std::min<std::size_t>(missing.size(), 3)),
                               ", "),
                     missing.size() > 3 ? ", ..." : "");
  check_embeddings(map, config, node);
  return map;
}

DeviceMap balanced_device_map(const CausalLmConfig& config,
                              const std::vector<std::string>& devices) {
  if (devices.empty())
    throw UsageError("models", "a device map names no device. Name at least one.");
  const std::vector<io::TensorShape> tensors = tensors_of(config);
  const std::vector<std::string> names = part_names(config.spec());
  std::vector<std::uint64_t> bytes;
  std::uint64_t total = 0;
  for (const std::string& name : names) {
    bytes.push_back(part_bytes(name, tensors));
    total += bytes.back();
  }
  const std::size_t embeddings = embedding_names(config.spec()).size();
  DeviceMap map;
  std::uint64_t before = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    // Chooses by the position of the part's middle among all bytes of the model.
    const double middle = static_cast<double>(before) + static_cast<double>(bytes[i]) / 2;
    const double share = middle / static_cast<double>(std::max<std::uint64_t>(total, 1));
    const auto index = static_cast<std::size_t>(share * static_cast<double>(devices.size()));
    before += bytes[i];
    const bool with_tokens = (i > 0 && i < embeddings) || (i + 1 == names.size() && config.tied());
    map.parts.push_back({names[i], with_tokens ? map.parts.front().device
                                               : devices[std::min(index, devices.size() - 1)]});
  }
  return map;
}

}  // namespace lockstep::models
