// YAML and JSON files, parsed strictly into a small tree; each node and key has its location.
//
// Nothing is guessed. A scalar has the type that YAML 1.2's core schema gives it (1e-4 is a number,
// yes, no and "true" in quotes are strings). Constructs that parsers treat differently are refused
// with their location and a remedy: duplicate keys, tabs as indentation, several documents, tags,
// merge keys, keys that are not strings. Size, depth and alias expansion are bounded, so a hostile
// file costs little.
//
//   const Node root = load_document("train.yaml");
//   if (const Entry* entry = root.find("seed")) use(as_integer(entry->value, "seed"));
//   else throw UsageError("config", "{}: there is no seed.", root.place.text());
//
// Plain values without locks or links: copy them, and read them from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"  // IWYU pragma: export

namespace lockstep {

class Problems;

enum class NodeKind { kNull, kBool, kInteger, kReal, kString, kList, kMap };

struct Entry;

struct Node {
  NodeKind kind = NodeKind::kNull;
  SourceLocation location{};
  std::string text{};   // a scalar as it was written, without its quotes
  bool quoted = false;  // a scalar in quotes or a block of text: always a string
  bool boolean = false;
  std::int64_t integer = 0;
  double real = 0;  // set for an integer too
  std::vector<Node> items{};
  std::vector<Entry> entries{};  // in the order of the file

  bool is(NodeKind other) const { return kind == other; }
  const Entry* find(std::string_view key) const;  // nullptr without one
  const Node& at(std::string_view key) const;     // the value; UsageError without one
  const Node& get(std::string_view key) const;    // the value; a null node without one
};

struct Entry {
  std::string key;
  SourceLocation location;  // of the key; the value has its own
  Node value;
};

struct DocumentLimits {
  std::size_t bytes = 1u << 20;
  int depth = 32;
  std::size_t nodes = 100'000;  // aliases count as often as they are used
};

// All three throw UsageError `[config] file:line:column: what is wrong. Remedy.` An empty document
// is a null node. `name` stands for the file in locations. With `problems`, duplicate keys are
// added to it instead of thrown, and the first value of a key counts.
Node parse_yaml(std::string_view text, const std::string& name, const DocumentLimits& limits = {},
                Problems* problems = nullptr);
Node parse_json(std::string_view text, const std::string& name, const DocumentLimits& limits = {},
                Problems* problems = nullptr);
// .json is JSON, .toml and files without a value are refused, everything else is YAML.
Node load_document(const std::string& path, const DocumentLimits& limits = {},
                   Problems* problems = nullptr);

// Parses a plain scalar by YAML's core schema; for values of flags and variables.
Node plain_scalar(std::string_view text, SourceLocation location);
Node text_node(std::string_view text);
Node bool_node(bool value);
Node integer_node(std::int64_t value);
Node real_node(double value);
Node list_node(std::vector<Node> items);
Node texts_node(const std::vector<std::string>& texts);
using NodeMembers = std::vector<std::pair<std::string, Node>>;
Node map_node(NodeMembers members);

// One line of JSON. Numbers that JSON cannot write (.inf, .nan) become strings, bytes that are not
// UTF-8 become U+FFFD.
std::string to_json(const Node& node);
// A string unchanged, every other value as JSON.
std::string plain_text(const Node& node);
// The shortest text that reads back as the same number, and as a real: "3.0", "5e-05".
std::string real_text(double value);
// Equal in kind and value; locations, quotes and the order of keys are ignored.
bool same_value(const Node& a, const Node& b);

// Converts the value, or throws UsageError naming location, key, actual and expected value.
bool as_bool(const Node& node, std::string_view key);
std::int64_t as_integer(const Node& node, std::string_view key);  // 1e4 is one, 1.5 is not
double as_real(const Node& node, std::string_view key);
std::string as_string(const Node& node, std::string_view key);  // a number is taken as written
const Node& as_map(const Node& node, std::string_view key);
// Throws in the same form for other rules: "k must be WANTED, and 'yes' is a string. HINT"
[[noreturn]] void refuse_value(const Node& node, std::string_view key, std::string_view wanted,
                               std::string_view hint = {});

// Reads a map key by key; finish() refuses every key that was not read.
//
//   MapReader model(entry->value, "model");
//   const int layers = model.integer("n_layer", 12, 1, 1000);
//   const std::string kind = model.choice("type", "gpt", {"gpt", "mlp"});
//   model.finish();    // UsageError with place and nearest name for every other key
//
// Used by one thread, on the stack. The node must outlive it. A null value counts as not given.
class MapReader {
 public:
  // Throws UsageError when the node is neither a map nor null. `what` names it in messages:
  // "model"; if empty, keys stand alone. With `problems`, which must outlive the reader, nothing
  // below throws: a mistake is added there, and the fallback is returned.
  MapReader(const Node& map, std::string what, Problems* problems = nullptr);

  bool has(std::string_view key);
  const Node* node(std::string_view key);  // nullptr when it is not given

  // Throw UsageError `file:line:column: model.n_layer ...` for the wrong type or range.
  bool boolean(std::string_view key, bool fallback);
  std::int64_t integer(std::string_view key, std::int64_t fallback, std::int64_t min = INT64_MIN,
                       std::int64_t max = INT64_MAX);
  double real(std::string_view key, double fallback, double min, double max);
  std::string text(std::string_view key, std::string fallback);
  std::string choice(std::string_view key, std::string fallback,
                     std::initializer_list<std::string_view> choices);

  void finish() const;

 private:
  std::string full_name(std::string_view key) const;
  // The value at the key, converted by `read`.
  template <typename Value, typename Read>
  Value read_or(std::string_view key, Value fallback, const Read& read);

  const Node& map_;
  std::string what_;
  Problems* problems_;
  std::vector<std::string> asked_;
};

}  // namespace lockstep
