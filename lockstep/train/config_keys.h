// The table of configuration keys: each key's name, member of TrainingArguments, accepted values
// and meaning. Everything that reads, checks or explains configuration uses this table.
//
//   for (const KeySpec& key : key_table())
//     fmt::print("{} = {}\n", key.name, to_json(value_of(arguments, key)));
//
// Tables without state; call from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/core/document.h"
#include "lockstep/train/arguments.h"

namespace lockstep::train {

using NodePtr = std::shared_ptr<const Node>;
template <typename Type>
using Of = Type TrainingArguments::*;
using Member =
    std::variant<Of<bool>, Of<std::int64_t>, Of<double>, Of<std::string>, Of<std::optional<bool>>,
                 Of<std::optional<std::int64_t>>, Of<std::optional<double>>,
                 Of<std::optional<std::string>>, Of<Number>, Of<std::optional<Number>>,
                 Of<std::vector<std::string>>, Of<NodePtr>, Of<GradientCheckpointing>>;

// An upper bound for steps (and tokens of a step), far above any run, far below overflow.
inline constexpr double kStepLimit = 1e12;

// The condition on a number, as a test and as the text after "must be". Every numeric key has
// one.
struct Check {
  bool (*holds)(double value);
  std::string_view range;
};

// The rules of a key, besides its name, member and help text.
struct KeyRules {
  const Check* check = nullptr;   // for numbers
  std::string_view choices = {};  // "no|steps|epoch": for strings and lists of strings
  std::string_view unset = {};    // what happens without a value, where that is possible
  bool ours = false;              // not one of Hugging Face's
  bool path = false;              // for text: `~` at the start is a home directory
};

struct KeySpec : KeyRules {
  std::string_view name;
  Member member;
  std::string_view help;

  bool optional() const;         // may be unset with null
  std::string type() const;      // "integer", "boolean", "no, steps or epoch", ...
  std::string variable() const;  // "LOCKSTEP_LEARNING_RATE"
};

std::span<const KeySpec> key_table();
const KeySpec* find_key(std::string_view name);  // nullptr without one
std::vector<std::string> key_names();
std::vector<std::string> training_keys();  // all that a training file may have: old_keys() too

// A key's name in earlier releases; still accepted, with a line that says so.
struct OldKey {
  std::string_view name;
  std::string_view now;   // the key that takes the value; empty: the value has no effect any more
  std::string_view line;  // the line shown to the user
};
std::span<const OldKey> old_keys();

// A key of the maps `model` and `data` of `lockstep train`, as `lockstep config keys` prints it and
// docs/configuration.md lists it.
struct SectionKey {
  std::string_view map{};
  std::string_view of{};  // the values of `name` that have it
  std::string_view name{};
  std::string_view accepts{};
  std::string_view fallback{};
  std::string_view help{};
  std::string_view example{};  // what the map may be, for who writes the key at the top level

  std::string full_name() const { return std::string(map) + "." + std::string(name); }
};
std::span<const SectionKey> section_keys();

// A key of another program (Hugging Face's, TRL's, DeepSpeed's, torchrun's) and what to write here.
struct KeyHint {
  std::string_view name{};
  std::string_view section{};  // "model", "data" or "lora"; empty: `use` is a key of the top level
  std::string_view use{};      // with a section: what to write there; empty: `now`'s example
  std::string_view now{};      // its name in the section, where that is another one
  std::string_view why{};      // why it has no meaning here, where that is so
  std::string_view of{};       // whose key it is then
};
std::span<const KeyHint> key_hints();
// What to write instead of a key that is none of the top level; empty: nothing is known of it.
std::string hint_for_key(std::string_view key);
// Adds to `problems` the keys of other programs in the map `name` ("model"), whose own name is
// `kind` ("gpt").
void add_words_of_others(MapReader& keys, const Node& map, std::string_view name,
                         std::string_view kind, Problems& problems);
// Whether a key in the maps `model` and `data` is the path of a file or a folder.
bool is_path_of_section(std::string_view name);

// Sets one member. Throws UsageError with the node's location for a wrong type, choice or range.
void assign(TrainingArguments& arguments, const KeySpec& key, const Node& value);
// Converts the text of a flag or a variable to a node of the key's type: strings stay strings,
// lists are split at commas, 1 and 0 are booleans, "none" unsets an optional key.
Node node_from_text(const KeySpec& key, const std::string& text, const SourceLocation& location);
// The member as a node without a location; null when it is unset.
Node value_of(const TrainingArguments& arguments, const KeySpec& key);
// All keys with their values, by name.
Node arguments_node(const TrainingArguments& arguments);

// For `lockstep config keys` (keys with `part` in their name) and docs/configuration.md.
std::string keys_help(std::string_view part = {});
std::string keys_markdown();

// The settings that `fsdp` and `fsdp_config` of a training file request, in Hugging Face's words.
//
//   fsdp: full_shard auto_wrap                 # or [full_shard, auto_wrap]
//   fsdp_config:
//     reshard_after_forward: true
//     mixed_precision_policy: {param_dtype: bfloat16, reduce_dtype: float32}
struct FsdpPlan {
  bool on = false;
  bool hybrid = false;  // divided inside a host, copied between hosts
  bool reshard_after_forward = true;
  bool activation_checkpointing = false;
  bool cpu_offload = false;  // rows, their gradients and the state in the host's memory
  std::string param_dtype{}, reduce_dtype{};  // "bfloat16", "float16", "float32"; empty: their own
  // The keys that were given of PyTorch's first FSDP, each with why it has no effect.
  std::vector<std::pair<std::string, std::string_view>> idle{};
};

// Throws UsageError with every key or word that is not supported.
FsdpPlan fsdp_plan(const TrainingArguments& arguments);
// The same, but adds the mistakes to `problems`.
FsdpPlan fsdp_plan(const TrainingArguments& arguments, Problems& problems);

// `fsdp` as one text, from a text or a list of words.
std::string fsdp_words(const Node& node);

// Whether gradient_checkpointing, or fsdp_config's activation_checkpointing, is set.
bool checkpoints_activations(const TrainingArguments& arguments);

}  // namespace lockstep::train
