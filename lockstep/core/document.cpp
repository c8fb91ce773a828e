// The tree: scalars by YAML's core schema, JSON text, types with their messages, files, and maps
// that are read key by key.

#include "lockstep/core/document.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/json.h"
#include "lockstep/core/problems.h"
#include "lockstep/core/text.h"

namespace lockstep {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Every whole number up to this one is exactly a double.
constexpr double kExactIntegers = 9007199254740992.0;

bool all_of(std::string_view text, std::string_view alphabet) {
  return !text.empty() && text.find_first_not_of(alphabet) == text.npos;
}

// The schema spells its keywords in three ways: "true", "True" and "TRUE".
bool is_word(std::string_view text, std::string_view word) {
  if (text.size() != word.size()) return false;
  std::string title(word);
  title[0] = static_cast<char>(title[0] - 'a' + 'A');
  if (text == word || text == title) return true;
  return lower(text) == word &&
         std::none_of(text.begin(), text.end(), [](char c) { return c >= 'a' && c <= 'z'; });
}

bool set_integer(Node& node, std::string_view digits, int base, bool negative) {
  std::uint64_t value = 0;
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, value, base);
  const std::uint64_t limit = static_cast<std::uint64_t>(INT64_MAX) + (negative ? 1 : 0);
  if (error != std::errc() || stop != end || value > limit) return false;
  node.kind = NodeKind::kInteger;
  node.integer = static_cast<std::int64_t>(negative ? 0 - value : value);
  node.real = static_cast<double>(node.integer);
  return true;
}

bool set_number(Node& node, std::string_view text) {
  const bool negative = text[0] == '-';
  const std::string_view body =
      text.substr(negative || text[0] == '+' ? 1 : 0);  // from_chars knows no plus
  if (all_of(body, "0123456789")) {
    // A leading zero is octal to some readers and decimal to others: left a string.
    if (body.size() > 1 && body[0] == '0') return false;
    if (set_integer(node, body, 10, negative)) return true;
  }
  if (body == text && body.substr(0, 2) == "0x" && body.size() > 2)
    return set_integer(node, body.substr(2), 16, false);
  if (body == text && body.substr(0, 2) == "0o" && body.size() > 2)
    return set_integer(node, body.substr(2), 8, false);
  double value = 0;
  if (is_word(body, ".inf") || body == ".Inf") {
    value = kInfinity;
  } else if (text == ".nan" || text == ".NaN" || text == ".NAN") {
    value = std::numeric_limits<double>::quiet_NaN();
  } else {
    // C's decimal numbers, without the words and the hexadecimals that it has as well.
    const auto [stop, error] = std::from_chars(body.data(), body.data() + body.size(), value);
    if (!all_of(body, "0123456789.eE+-") || body[0] == '-' || body[0] == '+' ||
        error == std::errc::invalid_argument || stop != body.data() + body.size())
      return false;
    // Out of range is too large, unless the exponent is negative: then it is nearly nothing.
    if (error == std::errc::result_out_of_range)
      value = body.find("e-") != body.npos || body.find("E-") != body.npos ? 0 : kInfinity;
  }
  node.kind = NodeKind::kReal;
  node.real = negative ? -value : value;
  return true;
}

void append_json(std::string& out, const Node& node) {
  const char* separator = "";
  switch (node.kind) {
    case NodeKind::kNull:
      out += "null";
      return;
    case NodeKind::kBool:
      out += node.boolean ? "true" : "false";
      return;
    case NodeKind::kInteger:
      out += std::to_string(node.integer);
      return;
    case NodeKind::kReal:
      if (std::isfinite(node.real)) {
        out += real_text(node.real);
      } else {
        out += json_quote(real_text(node.real));
      }
      return;
    case NodeKind::kString:
      out += json_quote(node.text);
      return;
    case NodeKind::kList:
      out += '[';
      for (const Node& item : node.items) {
        out += std::exchange(separator, ",");
        append_json(out, item);
      }
      out += ']';
      return;
    case NodeKind::kMap:
      out += '{';
      for (const Entry& entry : node.entries) {
        out += std::exchange(separator, ",");
        out += json_quote(entry.key);
        out += ':';
        append_json(out, entry.value);
      }
      out += '}';
      return;
  }
}

// Long values are cut, at the end of a character.
std::string shortened(const std::string& text) {
  constexpr std::size_t kLongest = 60;
  if (text.size() <= kLongest) return text;
  return std::string(utf8_prefix(text, kLongest)) + "...";
}

bool is_number(const Node& node) {
  return node.is(NodeKind::kInteger) || node.is(NodeKind::kReal);
}

// A hint about a text in place of a number.
std::string number_hint(const Node& node) {
  const std::string& text = node.text;
  if (!node.is(NodeKind::kString)) return "";
  const auto reads = [](const std::string& other) {
    return !other.empty() && is_number(plain_scalar(other, {}));
  };
  if (node.quoted && reads(text)) return fmt::format("Write {}, without quotes.", text);
  if (all_of(text, "0123456789") && text[0] == '0') {
    const std::string decimal = text.substr(std::min(text.find_first_not_of('0'), text.size() - 1));
    const Node octal = plain_scalar("0o" + decimal, {});
    if (!octal.is(NodeKind::kInteger)) return fmt::format("Write {}.", decimal);
    return fmt::format(
        "With its leading zero it is {} to some readers and {} to others. Write {} "
        "or 0o{}.",
        octal.integer, decimal, decimal, decimal);
  }
  std::string plain;
  for (const char c : text)
    if (c != '_' && c != ' ') plain += c;
  if (plain != text && reads(plain)) return fmt::format("Write {}.", plain);
  std::replace(plain.begin(), plain.end(), ',', '.');
  if (plain != text && reads(plain)) return fmt::format("Write {}.", plain);
  return "";
}

std::string bool_hint(const Node& node) {
  const std::string word = lower(node.text);
  for (const auto& [meaning, aliases] :
       {std::pair{"true", "|true|yes|on|y|1|t|"}, std::pair{"false", "|false|no|off|n|0|f|"}}) {
    if (!word.empty() && std::string_view(aliases).find("|" + word + "|") != std::string_view::npos)
      return fmt::format("Write {}{}.", meaning,
                         node.quoted && word == meaning ? ", without quotes" : "");
  }
  return "Write true or false.";
}

}  // namespace

// ------------------------------------------------------------------ nodes

const Entry* Node::find(std::string_view key) const {
  const auto found = std::find_if(entries.begin(), entries.end(),
                                  [&](const Entry& entry) { return entry.key == key; });
  return found == entries.end() ? nullptr : &*found;
}

const Node& Node::at(std::string_view key) const {
  const Entry* entry = find(key);
  if (entry == nullptr) refuse_at(location, "there is no {}. Add it.", key);
  return entry->value;
}

const Node& Node::get(std::string_view key) const {
  static const Node none;
  const Entry* entry = find(key);
  return entry == nullptr ? none : entry->value;
}

Node plain_scalar(std::string_view text, SourceLocation location) {
  Node node;
  node.location = std::move(location);
  node.text = text;
  node.kind = NodeKind::kString;
  if (text.empty() || text == "~" || is_word(text, "null")) {
    node.kind = NodeKind::kNull;
  } else if (is_word(text, "true") || is_word(text, "false")) {
    node.kind = NodeKind::kBool;
    node.boolean = is_word(text, "true");
  } else {
    set_number(node, text);
  }
  return node;
}

Node text_node(std::string_view text) {
  Node node;
  node.kind = NodeKind::kString;
  node.text = text;
  return node;
}

Node bool_node(bool value) {
  return plain_scalar(value ? "true" : "false", {});
}

Node integer_node(std::int64_t value) {
  return plain_scalar(std::to_string(value), {});
}

Node real_node(double value) {
  return plain_scalar(real_text(value), {});
}

Node list_node(std::vector<Node> items) {
  Node node;
  node.kind = NodeKind::kList;
  node.items = std::move(items);
  return node;
}

Node texts_node(const std::vector<std::string>& texts) {
  std::vector<Node> items;
  for (const std::string& text : texts) items.push_back(text_node(text));
  return list_node(std::move(items));
}

Node map_node(NodeMembers members) {
  Node node;
  node.kind = NodeKind::kMap;
  for (auto& [key, value] : members) node.entries.push_back({std::move(key), {}, std::move(value)});
  return node;
}

std::string real_text(double value) {
  if (std::isnan(value)) return ".nan";
  if (std::isinf(value)) return value > 0 ? ".inf" : "-.inf";
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".e") == text.npos) text += ".0";
  return text;
}

std::string to_json(const Node& node) {
  std::string out;
  append_json(out, node);
  return out;
}

std::string plain_text(const Node& node) {
  return node.is(NodeKind::kString) ? node.text : to_json(node);
}

bool same_value(const Node& a, const Node& b) {
  if (a.kind != b.kind) return false;
  switch (a.kind) {
    case NodeKind::kNull:
      return true;
    case NodeKind::kBool:
      return a.boolean == b.boolean;
    case NodeKind::kInteger:
      return a.integer == b.integer;
    case NodeKind::kReal:
      return a.real == b.real || (std::isnan(a.real) && std::isnan(b.real));
    case NodeKind::kString:
      return a.text == b.text;
    case NodeKind::kList:
      return std::equal(a.items.begin(), a.items.end(), b.items.begin(), b.items.end(), same_value);
    case NodeKind::kMap:
      break;
  }
  return a.entries.size() == b.entries.size() &&
         std::all_of(a.entries.begin(), a.entries.end(), [&](const Entry& entry) {
           const Entry* other = b.find(entry.key);
           return other != nullptr && same_value(entry.value, other->value);
         });
}

// ------------------------------------------------------------------ types

void refuse_value(const Node& node, std::string_view key, std::string_view wanted,
                  std::string_view hint) {
  const std::string text = shortened(node.text);
  std::string there;
  switch (node.kind) {
    case NodeKind::kNull:
      there = "but there is nothing here";
      break;
    case NodeKind::kList:
      there = "but this is a list";
      break;
    case NodeKind::kMap:
      there = "but this is a map";
      break;
    case NodeKind::kBool:
      there = fmt::format("and {} is a boolean", text);
      break;
    case NodeKind::kInteger:
    case NodeKind::kReal:
      there = fmt::format("and {} is a number", text);
      break;
    case NodeKind::kString:
      // Older readers of YAML take these four for booleans.
      const bool word = lower(text) == "yes" || lower(text) == "no" || lower(text) == "on" ||
                        lower(text) == "off";
      there = fmt::format("and '{}' is a string{}", text, word && !node.quoted ? " here" : "");
      break;
  }
  refuse_at(node.location, "{} must be {}, {}.{}{}", key, wanted, there, hint.empty() ? "" : " ",
            hint);
}

bool as_bool(const Node& node, std::string_view key) {
  if (!node.is(NodeKind::kBool)) refuse_value(node, key, "true or false", bool_hint(node));
  return node.boolean;
}

std::int64_t as_integer(const Node& node, std::string_view key) {
  if (node.is(NodeKind::kInteger)) return node.integer;
  if (node.is(NodeKind::kReal)) {
    if (std::abs(node.real) <= kExactIntegers && std::floor(node.real) == node.real)
      return static_cast<std::int64_t>(node.real);
    refuse_at(node.location, "{} must be a whole number, and {} is not one that fits.", key,
              shortened(node.text));
  }
  refuse_value(node, key, "a whole number", number_hint(node));
}

double as_real(const Node& node, std::string_view key) {
  if (!is_number(node)) refuse_value(node, key, "a number", number_hint(node));
  return node.real;
}

std::string as_string(const Node& node, std::string_view key) {
  if (node.is(NodeKind::kString) || is_number(node)) return node.text;
  refuse_value(node, key, "a string",
               node.is(NodeKind::kBool) ? fmt::format("Quote it: \"{}\".", node.text) : "");
}

const Node& as_map(const Node& node, std::string_view key) {
  if (!node.is(NodeKind::kMap)) refuse_value(node, key, "a map", "Write `key: value` lines.");
  return node;
}

// ------------------------------------------------------------------ files

Node load_document(const std::string& path, const DocumentLimits& limits, Problems* problems) {
  const auto ends_with = [&](std::string_view ending) {
    return path.size() > ending.size() && lower(path.substr(path.size() - ending.size())) == ending;
  };
  if (ends_with(".toml")) {
    throw UsageError("config", "{}: TOML is not read. Write YAML (.yaml) or JSON (.json).", path);
  }
  std::string text;
  try {
    text = read_file(path, limits.bytes);
  } catch (const SystemError& error) {
    throw UsageError("config", "{} cannot be read: {}. Check the path.", path,
                     std::strerror(error.error_number()));
  } catch (const UsageError& error) {  // too large, or not a file
    Problems refused;
    refused.add(error.what());
    refused.raise();
  }
  Node root = ends_with(".json") ? parse_json(text, path, limits, problems)
                                 : parse_yaml(text, path, limits, problems);
  if (root.is(NodeKind::kNull)) {
    throw UsageError(
        "config",
        "{} has no keys: it is empty or holds only comments. Write `key: value` lines, "
        "or name another file.",
        path);
  }
  return root;
}

// ---------------------------------------------------------------- maps

MapReader::MapReader(const Node& map, std::string what, Problems* problems)
    : map_(map), what_(std::move(what)), problems_(problems) {
  if (!map_.is(NodeKind::kNull)) as_map(map_, what_);
}

std::string MapReader::full_name(std::string_view key) const {
  return what_.empty() ? std::string(key) : fmt::format("{}.{}", what_, key);
}

const Node* MapReader::node(std::string_view key) {
  asked_.emplace_back(key);
  const Entry* entry = map_.find(key);
  return entry == nullptr || entry->value.is(NodeKind::kNull) ? nullptr : &entry->value;
}

template <typename Value, typename Read>
Value MapReader::read_or(std::string_view key, Value fallback, const Read& read) {
  const Node* found = node(key);
  if (found == nullptr) return fallback;
  if (problems_ == nullptr) return read(*found);
  Value value = fallback;
  return problems_->attempt([&] { value = read(*found); }) ? value : fallback;
}

bool MapReader::has(std::string_view key) {
  return node(key) != nullptr;
}

bool MapReader::boolean(std::string_view key, bool fallback) {
  return read_or(key, fallback, [&](const Node& found) { return as_bool(found, full_name(key)); });
}

std::int64_t MapReader::integer(std::string_view key, std::int64_t fallback, std::int64_t min,
                                std::int64_t max) {
  return read_or(key, fallback, [&](const Node& found) {
    const std::int64_t value = as_integer(found, full_name(key));
    if (value < min || value > max)
      refuse_at(found.location, "{} must be from {} to {}, and {} is not.", full_name(key), min,
                max, value);
    return value;
  });
}

double MapReader::real(std::string_view key, double fallback, double min, double max) {
  return read_or(key, fallback, [&](const Node& found) {
    const double value = as_real(found, full_name(key));
    if (!(value >= min && value <= max))
      refuse_at(found.location, "{} must be from {} to {}, and {} is not.", full_name(key), min,
                max, real_text(value));
    return value;
  });
}

std::string MapReader::text(std::string_view key, std::string fallback) {
  return read_or(key, std::move(fallback),
                 [&](const Node& found) { return as_string(found, full_name(key)); });
}

std::string MapReader::choice(std::string_view key, std::string fallback,
                              std::initializer_list<std::string_view> choices) {
  return read_or(key, std::move(fallback), [&](const Node& found) {
    const std::string value = as_string(found, full_name(key));
    const std::vector<std::string> names(choices.begin(), choices.end());
    if (std::find(names.begin(), names.end(), value) == names.end())
      refuse_at(found.location, "{} must be {}, and '{}' is {}.{}", full_name(key), listed(names),
                value, names.size() == 2 ? "neither" : "none of them", did_you_mean(value, names));
    return value;
  });
}

void MapReader::finish() const {
  Problems problems;
  for (const Entry& entry : map_.entries) {
    if (std::find(asked_.begin(), asked_.end(), entry.key) != asked_.end()) continue;
    if (problems.full()) break;
    problems.add(fmt::format("{}: {} has no key '{}'.{}", entry.location.text(), what_, entry.key,
                             did_you_mean(entry.key, asked_)));
  }
  if (problems_ != nullptr)
    problems_->add(problems);
  else
    problems.raise();
}

}  // namespace lockstep
