// Members of TrainingArguments by their row of the table: set, read, described.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <type_traits>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"
#include "lockstep/train/config_keys.h"

namespace lockstep::train {
namespace {

// The table writes the accepted values as "no|steps|epoch".
std::vector<std::string> split_choices(std::string_view choices) {
  return choices.empty() ? std::vector<std::string>() : split(choices, '|');
}

// "no, steps or epoch"
std::string choices_text(std::string_view choices) {
  return listed(split_choices(choices));
}

template <typename... Args>
[[noreturn]] void refuse(const Node& node, fmt::format_string<Args...> format, Args&&... args) {
  const std::string location = node.location.text();
  throw UsageError("config", "{}{}{}", location, location.empty() ? "" : ": ",
                   fmt::format(format, std::forward<Args>(args)...));
}

// "train.yaml:3:7: output_dir", or the name alone for arguments that were set in a program.
std::string label(const Node& node, std::string_view name) {
  const std::string location = node.location.text();
  return fmt::format("{}{}{}", location, location.empty() ? "" : ": ", name);
}

template <typename Type>
struct IsOptional : std::false_type {};
template <typename Type>
struct IsOptional<std::optional<Type>> : std::true_type {};

// The type of the member that a pointer points to.
template <typename Type>
Type member_type(Type TrainingArguments::*);

void check_number(const KeySpec& key, const Node& node, double value) {
  if (key.check == nullptr || key.check->holds(value)) return;
  refuse(node, "{} must be {}, and {} is not.", key.name, key.check->range, node.text);
}

void check_choice(const KeySpec& key, const Node& node, const std::string& word) {
  const std::vector<std::string> choices = split_choices(key.choices);
  if (choices.empty() || std::find(choices.begin(), choices.end(), word) != choices.end()) return;
  const std::string_view curve = std::string_view(word).substr(0, word.find("_with_warmup"));
  if (key.name == "lr_scheduler_type" && curve != word &&
      std::ranges::find(choices, curve) != choices.end())
    refuse(node, "there is no {} '{}'. Write {}, and warmup_steps beside it.", key.name, word,
           curve);
  // The other services that Hugging Face knows read one of the two.
  const char* more =
      key.name == "report_to"
          ? " Event files of TensorBoard are what is supported, beside metrics.jsonl, "
            "which every run writes."
          : "";
  refuse(node, "{} must be {}, and '{}' is {}.{}{}", key.name, choices_text(key.choices), word,
         choices.size() == 2 ? "neither" : "none of them", did_you_mean(word, choices), more);
}

// One overload for each type of the table.
void read(bool& out, const KeySpec& key, const Node& node) {
  out = as_bool(node, key.name);
}
void read(std::int64_t& out, const KeySpec& key, const Node& node) {
  if (node.is(NodeKind::kReal)) check_number(key, node, node.real);  // 1e300: name the range
  const std::int64_t value = as_integer(node, key.name);
  check_number(key, node, static_cast<double>(value));
  out = value;
}
template <typename Real>
  requires std::same_as<Real, double> || std::same_as<Real, Number>
void read(Real& out, const KeySpec& key, const Node& node) {
  const double value = as_real(node, key.name);
  check_number(key, node, value);
  out = value;
}
void read(std::string& out, const KeySpec& key, const Node& node) {
  if (key.name == "fsdp") {  // empty as in Hugging Face: it is off
    out = fsdp_words(node);
    return;
  }
  if (key.name == "resume_from_checkpoint" && node.is(NodeKind::kBool)) {
    out = node.boolean ? "auto" : "never";
    return;
  }
  if (node.is(NodeKind::kBool) && !node.boolean && key.choices.starts_with("no|"))
    refuse_value(node, key.name, choices_text(key.choices), "Write no.");
  // `true` and `false` among the choices are booleans in YAML.
  const bool flag = node.is(NodeKind::kBool) && key.choices.ends_with("|true|false");
  std::string value =
      flag ? std::string(node.boolean ? "true" : "false") : as_string(node, key.name);
  check_choice(key, node, value);
  if (value.empty()) refuse(node, "{} must not be empty.", key.name);
  if (key.name == "optim" && value.rfind("adamw_", 0) == 0) value = "adamw";
  if (key.name == "optim" && value == "lion_32bit") value = "lion";
  if (key.path) value = expand_home(value, label(node, key.name));
  out = std::move(value);
}
void read(std::vector<std::string>& out, const KeySpec& key, const Node& node) {
  std::vector<std::string> values;
  const std::vector<Node> one{node};
  for (const Node& item : node.is(NodeKind::kList) ? node.items : one) {
    values.push_back(as_string(item, key.name));
    check_choice(key, item, values.back());
  }
  if (values.empty()) values.push_back("none");
  out = std::move(values);
}
void read(NodePtr& out, const KeySpec& key, const Node& node) {
  const std::string_view example = key.name == "lr_scheduler_kwargs" ? "{num_cycles: 1}"
                                   : key.name == "fsdp_config"       ? "{version: 2}"
                                   : key.name == "fp8"               ? "{recipe: rowwise}"
                                   : key.name == "lora"
                                       ? "{r: 16, lora_alpha: 32, target_modules: [c_attn]}"
                                       : "";
  if (!example.empty() || !node.is(NodeKind::kString)) {
    if (!node.is(NodeKind::kMap)) {
      refuse_value(node, key.name, example.empty() ? "a name or a map" : "a map",
                   example.empty() ? std::string()
                                   : fmt::format("Write {} or `key: value` lines.", example));
    }
  }
  Node copy = node;
  for (Entry& entry : copy.entries) {
    Node& inner = entry.value;
    if (is_path_of_section(entry.key) && inner.is(NodeKind::kString))
      inner.text = expand_home(inner.text, label(inner, fmt::format("{}.{}", key.name, entry.key)));
  }
  out = std::make_shared<const Node>(std::move(copy));
}
void read(GradientCheckpointing& out, const KeySpec& key, const Node& node) {
  if (!node.is(NodeKind::kMap)) {
    out = as_bool(node, key.name);
    return;
  }
  MapReader keys(node, std::string(key.name));
  GradientCheckpointing given = true;
  if (const Node* const parts = keys.node("parts")) read(given.parts, key, *parts);
  keys.finish();
  if (given.parts.empty() || given.parts.front() == "none")
    refuse(node, "{} names no parts. Write {{parts: [{}]}}, or true for whole blocks.", key.name,
           fmt::join(split_choices(key.choices), ", "));
  out = std::move(given);
}
template <typename Type>
void read(std::optional<Type>& out, const KeySpec& key, const Node& node) {
  Type value{};
  read(value, key, node);
  out = std::move(value);
}

template <typename Type>
void unset(Type&) {}
template <typename Type>
void unset(std::optional<Type>& out) {
  out.reset();
}
void unset(NodePtr& out) {
  out.reset();
}

Node write(bool value, const KeySpec&) {
  return bool_node(value);
}
Node write(std::int64_t value, const KeySpec&) {
  return integer_node(value);
}
Node write(double value, const KeySpec&) {
  return real_node(value);
}
Node write(const std::string& value, const KeySpec&) {
  return text_node(value);
}
Node write(const std::vector<std::string>& value, const KeySpec&) {
  return texts_node(value);
}
Node write(const GradientCheckpointing& value, const KeySpec&) {
  if (value.parts.empty()) return bool_node(value.on);
  return map_node({{"parts", texts_node(value.parts)}});
}
Node write(const NodePtr& value, const KeySpec&) {
  return value ? *value : Node{};
}
template <typename Type>
Node write(const std::optional<Type>& value, const KeySpec& key) {
  return value ? write(*value, key) : Node{};
}

std::string_view type_name(const bool&) {
  return "boolean";
}
std::string_view type_name(const std::int64_t&) {
  return "integer";
}
std::string_view type_name(const double&) {
  return "number";
}
std::string_view type_name(const std::string&) {
  return "text";
}
std::string_view type_name(const std::vector<std::string>&) {
  return "list";
}
std::string_view type_name(const GradientCheckpointing&) {
  return "list";
}
std::string_view type_name(const NodePtr&) {
  return "name or map";
}
template <typename Type>
std::string_view type_name(const std::optional<Type>&) {
  return type_name(Type{});
}

std::string default_text(const KeySpec& key) {
  const Node value = value_of(TrainingArguments{}, key);
  if (value.is(NodeKind::kNull)) return fmt::format("unset: {}", key.unset);
  if (value.is(NodeKind::kString)) return value.text;
  if (value.is(NodeKind::kList) && value.items.size() == 1) return value.items.front().text;
  return to_json(value);
}

}  // namespace

bool KeySpec::optional() const {
  return std::visit(
      [](auto pointer) {
        using Type = decltype(member_type(pointer));
        return IsOptional<Type>::value || std::is_same_v<Type, NodePtr>;
      },
      member);
}

std::string KeySpec::type() const {
  if (name == "lr_scheduler_kwargs" || name == "fsdp_config" || name == "fp8") return "map";
  if (name == "gradient_checkpointing")
    return "boolean, or a map with parts, a list of " + choices_text(choices);
  const TrainingArguments defaults;
  std::string text(std::visit([&](auto pointer) { return type_name(defaults.*pointer); }, member));
  if (!choices.empty()) text = (text == "list" ? "list of " : "") + choices_text(choices);
  if (check != nullptr) text += fmt::format(", {}", check->range);
  return text;
}

std::string KeySpec::variable() const {
  // LOCKSTEP_PRESET belongs to the build: it selects the CMake preset that ./dev uses.
  std::string text = name == "preset" ? "CONFIG_PRESET" : std::string(name);
  std::transform(text.begin(), text.end(), text.begin(), [](char c) {
    return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  });
  return "LOCKSTEP_" + text;
}

void assign(TrainingArguments& arguments, const KeySpec& key, const Node& value) {
  std::visit(
      [&](auto pointer) {
        if (!value.is(NodeKind::kNull)) {
          read(arguments.*pointer, key, value);
        } else if (key.optional()) {
          unset(arguments.*pointer);
        } else {
          refuse(value, "{} cannot be unset. Delete the line for its default ({}).", key.name,
                 default_text(key));
        }
      },
      key.member);
}

Node value_of(const TrainingArguments& arguments, const KeySpec& key) {
  return std::visit([&](auto pointer) { return write(arguments.*pointer, key); }, key.member);
}

Node arguments_node(const TrainingArguments& arguments) {
  NodeMembers members;
  for (const KeySpec& key : key_table())
    members.emplace_back(std::string(key.name), value_of(arguments, key));
  return map_node(std::move(members));
}

Node node_from_text(const KeySpec& key, const std::string& text, const SourceLocation& location) {
  const auto holds = [&](auto sample) {
    using Type = decltype(sample);
    return std::holds_alternative<Of<Type>>(key.member) ||
           std::holds_alternative<Of<std::optional<Type>>>(key.member);
  };
  const bool checkpoints = std::holds_alternative<Of<GradientCheckpointing>>(key.member);
  Node node = text_node(text);
  node.location = location;
  if (key.optional() && (text == "none" || text == "null")) {
    node.kind = NodeKind::kNull;
  } else if (holds(false) && (text == "1" || text == "0")) {
    node = plain_scalar(text == "1" ? "true" : "false", location);
  } else if (holds(false) || holds(std::int64_t{}) || holds(double{}) || holds(Number{}) ||
             key.name == "resume_from_checkpoint") {
    node = plain_scalar(text, location);
  } else if (std::holds_alternative<Of<std::vector<std::string>>>(key.member)) {
    node.kind = NodeKind::kList;
    for (std::size_t start = 0; start <= text.size();) {
      const std::size_t end = std::min(text.find(',', start), text.size());
      Node item = text_node(text.substr(start, end - start));
      item.location = location;
      node.items.push_back(std::move(item));
      start = end + 1;
    }
  } else if ((std::holds_alternative<Of<NodePtr>>(key.member) || checkpoints) &&
             text.starts_with('{')) {
    node = parse_yaml(text, location.text());
  } else if (checkpoints) {
    node = plain_scalar(text == "1" ? "true" : text == "0" ? "false" : text, location);
  }
  return node;
}

std::string keys_help(std::string_view part) {
  std::string text;
  for (const KeySpec& key : key_table()) {
    if (key.name.find(part) == key.name.npos) continue;
    text += fmt::format("  --{:<31}{}\n{:36}[{}; {}]\n", key.name, key.help, "", key.type(),
                        default_text(key));
  }
  return text;
}

std::string keys_markdown() {
  std::string text = "| key | accepted | default | meaning |\n|---|---|---|---|\n";
  for (const KeySpec& key : key_table()) {
    text += fmt::format("| `{}`{} | {} | {} | {} |\n", key.name, key.ours ? " (ours)" : "",
                        key.type(), default_text(key), key.help);
  }
  text += "\n| older spelling | what happens |\n|---|---|\n";
  for (const OldKey& old : old_keys()) text += fmt::format("| `{}` | {} |\n", old.name, old.line);
  return text;
}

}  // namespace lockstep::train
