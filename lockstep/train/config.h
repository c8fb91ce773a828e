// Resolves TrainingArguments from their sources: defaults < preset < file < environment
// (LOCKSTEP_<KEY>) < flags (--key value).
//
// The winner is recorded. Each value keeps its location (file:line:column, variable or flag) and
// those that it overrides, so that "why is the batch 4?" has an answer. The mistakes of all sources
// are reported together. ACCELERATE_MIXED_PRECISION and ACCELERATE_USE_CPU, set by `accelerate
// launch`, rank just above the presets, as in Hugging Face.
//
//   Config config = load_config("train.yaml", {"--learning_rate=1e-4", "--bf16"});
//   for (const std::string& note : config.notes) std::cerr << note << "\n";
//   lockstep::Trainer trainer{world, task, config.arguments};
//
// Functions without state; call from any thread.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/problems.h"
#include "lockstep/train/arguments.h"
#include "lockstep/train/config_keys.h"

namespace lockstep::train {

enum class Origin { kDefault, kPreset, kLauncher, kFile, kEnvironment, kFlag };

struct Setting {
  const KeySpec* key = nullptr;
  Origin origin = Origin::kDefault;
  std::string where;  // "default", "preset fast", "train.yaml:3:1", "LOCKSTEP_SEED", "--seed"
  Node value;
  std::vector<std::string> beaten{};  // "train.yaml:3:1 (5e-05)", strongest first
};

struct Config {
  TrainingArguments arguments;
  std::vector<Setting> settings;   // one for each key, in the table's order
  std::vector<std::string> notes;  // older spellings, values without effect
  const Setting& setting(std::string_view key) const;
};

using Environment = std::map<std::string, std::string>;

struct ConfigSources {
  std::optional<Node> file{};  // as load_document() gives it
  Problems problems{};         // those that load_document() found in the file
  Environment environment{};
  std::vector<std::string> flags{};  // "--key value", "--key=value", "--key" and "--no_key"
  // Keys of the launcher's file (launch::launcher_keys()): a message says that a key belongs there.
  std::vector<std::string> launcher_keys{};
};

// Throws UsageError with every mistake on a line of its own.
Config resolve_config(const ConfigSources& sources);
// The same with the file at `path` ("": none) and this process's environment. With `problems` the
// mistakes are added there, and a wrong value becomes the key's default.
Config load_config(const std::string& path, const std::vector<std::string>& flags = {},
                   const std::vector<std::string>& launcher_keys = {},
                   Problems* problems = nullptr);

// Removes the words of a command line that are neither flags nor their values, such as the file's
// name, from `words` and returns them. A flag that needs no value takes the next word as its value
// only if that can be one, such as `false`.
std::vector<std::string> take_names(std::vector<std::string>& words);

// The variables that affect the configuration: LOCKSTEP_* and ACCELERATE_*.
Environment process_environment();

// One line per key: value and winner. Without `all`, the defaults are skipped.
std::string config_text(const Config& config, bool all);
// {"settings": {"seed": {"value": 42, "from": "default"}, ...}, "notes": [...]} on one line.
std::string config_json(const Config& config);

// "standard" and "fast": the keys they set.
std::vector<std::string> preset_names();
std::vector<Entry> preset_entries(std::string_view preset);

}  // namespace lockstep::train
