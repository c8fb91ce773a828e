// Sources become candidates, candidates become settings: see config.h for the order.
#include "lockstep/train/config.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <set>
#include <sstream>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/problems.h"
#include "lockstep/core/text.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/config_keys.h"

namespace lockstep::train {
namespace {

struct Candidate {
  Origin origin;
  std::string where;
  Node value;
};

struct Preset {
  std::string_view name;
  std::int64_t batch;
  std::int64_t accumulation;
  std::int64_t logging_steps;
  std::int64_t save_total_limit;
};
constexpr Preset kPresets[] = {{"standard", 4, 2, 5, 1}, {"fast", 8, 1, 10, 1}};

const OldKey* find_old(std::string_view name) {
  const auto table = old_keys();
  const auto found =
      std::find_if(table.begin(), table.end(), [&](const OldKey& old) { return old.name == name; });
  return found == table.end() ? nullptr : &*found;
}

// The nearest key by letters may be the evaluation one where training is meant
// (per_device_batch_size): a word without "eval" means training.
std::string did_you_mean_key(const std::string& word) {
  auto near = nearest(word, key_names());
  if (!near) return "";
  const std::size_t eval = near->find("eval");
  if (eval != near->npos && word.find("eval") == word.npos) {
    const std::string training = std::string(*near).replace(eval, 4, "train");
    if (find_key(training) != nullptr) near = training;
  }
  return fmt::format(" Did you mean {}?", *near);
}

// A flag of it needs no value.
bool is_switch(const KeySpec& key) {
  return std::holds_alternative<Of<bool>>(key.member) ||
         std::holds_alternative<Of<GradientCheckpointing>>(key.member) ||
         std::holds_alternative<Of<std::optional<bool>>>(key.member) ||
         key.choices.ends_with("|true|false");
}

// "--save-steps=5" is the flag of save_steps.
std::string key_of_flag(const std::string& flag) {
  std::string name = flag.substr(2, flag.find('=') == flag.npos ? flag.npos : flag.find('=') - 2);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

// Whether the word after a flag is its value.
bool takes(const std::string& flag, const std::string& next) {
  if (flag.find('=') != flag.npos || next.starts_with("--")) return false;
  const std::string name = key_of_flag(flag);
  const OldKey* old = find_old(name);
  const KeySpec* key = find_key(old != nullptr ? old->now : name);
  const KeySpec* negated = name.starts_with("no_") ? find_key(name.substr(3)) : nullptr;
  if (key == nullptr && negated != nullptr && is_switch(*negated)) return false;
  if (old != nullptr ? key != nullptr && !is_switch(*key) : key == nullptr || !is_switch(*key))
    return true;
  std::vector<std::string> values = split(key != nullptr ? key->choices : "", '|');
  values.insert(values.end(), {"true", "false", "1", "0", "none", "null"});
  return next.starts_with("{") ||
         std::find(values.begin(), values.end(), lower(next)) != values.end();
}

class Resolver {
 public:
  explicit Resolver(const ConfigSources& sources)
      : sources_(sources), problems_(sources.problems) {}

  Config run(Problems* found) {
    if (sources_.file) read_file();
    read_environment();
    read_flags();
    add_presets();
    add_launcher();
    add_precision();
    decide();
    const Where where = [this](std::string_view key) { return config_.setting(key).where; };
    for (std::string& text : contradictions(config_.arguments, where))
      problems_.add(std::move(text));
    if (found != nullptr)
      found->add(problems_);
    else
      problems_.raise();
    for (std::string& text : advice(config_.arguments, where))
      config_.notes.push_back(std::move(text));
    forget_wrong_fsdp();
    return std::move(config_);
  }

 private:
  // Its mistakes have been found above. Whoever reads it next would find them again.
  void forget_wrong_fsdp() {
    TrainingArguments& a = config_.arguments;
    const auto wrong = [&] {
      Problems problems;
      fsdp_plan(a, problems);
      return !problems.empty();
    };
    if (wrong()) a.fsdp_config.reset();
    if (wrong()) a.fsdp.reset();
  }

  void add(const KeySpec& key, Origin origin, std::string where, Node value) {
    candidates_[key.name].push_back({origin, std::move(where), std::move(value)});
  }

  // ---------------------------------------------------------------- the file

  void read_file() {
    const Node& root = *sources_.file;
    if (root.is(NodeKind::kNull)) return;
    if (!root.is(NodeKind::kMap)) {
      problems_.attempt([&] {
        refuse_value(root, "the file", "a map",
                     "Write `key: value` lines, with a space after the colon.");
      });
      return;
    }
    for (const Entry& entry : root.entries) {
      if (problems_.full()) return;
      const std::string location = entry.location.text();
      if (const KeySpec* key = find_key(entry.key)) {
        add(*key, Origin::kFile, location, entry.value);
      } else if (const OldKey* old = find_old(entry.key)) {
        if (root.find(old->now) != nullptr) {
          problems_.add(
              fmt::format("{}: {} is an older spelling of {}, which is here too. Delete "
                          "{}.",
                          location, old->name, old->now, old->name));
        } else {
          add_old(*old, Origin::kFile, location, entry.value);
        }
      } else {
        problems_.add(fmt::format("{}: {}", location, unknown(entry.key, &entry.value)));
      }
    }
  }

  void add_old(const OldKey& old, Origin origin, const std::string& where, const Node& value) {
    if (old.name == "save_safetensors" && value.is(NodeKind::kBool) && !value.boolean) {
      problems_.add(
          fmt::format("{}: save_safetensors cannot be false: pickle is never written. "
                      "Delete it.",
                      where));
      return;
    }
    if (old.name == "warmup_ratio") {
      const bool good = problems_.attempt([&] {
        const double ratio = as_real(value, old.name);
        if (!(ratio >= 0 && ratio < 1)) {
          throw UsageError("config", "{}: warmup_ratio must be from 0 to below 1, and {} is not.",
                           value.location.text(), value.text);
        }
      });
      if (!good) return;
    }
    config_.notes.push_back(
        fmt::format("{}: {} is an older spelling: {}.", where, old.name, old.line));
    if (!old.now.empty()) add(*find_key(old.now), origin, where, value);
  }

  // Why a key is refused, and where it belongs or what was meant.
  std::string unknown(const std::string& key, const Node* value) const {
    const auto& others = sources_.launcher_keys;
    if (std::find(others.begin(), others.end(), key) != others.end()) {
      return fmt::format(
          "{} belongs in the launcher's file (Accelerate's, `lockstep run "
          "--config-file`), not in the training file. Move it there.",
          key);
    }
    if (std::string hint = hint_for_key(key); !hint.empty()) return hint;
    if (value != nullptr && value->is(NodeKind::kMap)) {
      for (const Entry& inner : value->entries) {
        if (find_key(inner.key) != nullptr) {
          return fmt::format(
              "there is no section '{}'. Write its keys ({}, ...) at the top level, "
              "without indentation.",
              key, inner.key);
        }
      }
    }
    if (const std::string meant = did_you_mean_key(key); !meant.empty())
      return fmt::format("there is no key '{}'.{}", key, meant);
    if (const auto near = nearest(key, others)) {
      return fmt::format(
          "there is no key '{}'. Did you mean {}? That belongs in the launcher's "
          "file (Accelerate's).",
          key, *near);
    }
    return fmt::format("there is no key '{}'. Delete it; `lockstep config keys` lists them all.",
                       key);
  }

  // ---------------------------------------------------------------- the environment

  void read_environment() {
    std::set<std::string> known;
    for (const KeySpec& key : key_table()) {
      const std::string name = key.variable();
      known.insert(name);
      const auto found = sources_.environment.find(name);
      if (found == sources_.environment.end() || found->second.empty()) continue;
      problems_.attempt([&, &key = key] {
        add(key, Origin::kEnvironment, name,
            node_from_text(key, found->second, location_named(name)));
      });
    }
    // LOCKSTEP_ variables have other readers too, so a near miss is a note and no mistake.
    const std::vector<std::string> names(known.begin(), known.end());
    constexpr std::size_t kShortest = 15;
    for (const auto& [name, text] : sources_.environment) {
      if (known.count(name) != 0 || name.rfind("LOCKSTEP_", 0) != 0 || name.size() < kShortest)
        continue;
      for (const std::string& other : names) {
        if (edit_distance(name, other) <= 2)
          config_.notes.push_back(fmt::format("{} is not read. Did you mean {}?", name, other));
      }
    }
  }

  // What `accelerate launch` sets. Any other setting of the precision overrides it.
  void add_launcher() {
    const auto text = [&](const char* name) {
      const auto found = sources_.environment.find(name);
      return found == sources_.environment.end() ? std::string() : found->second;
    };
    const char* kPrecision = "ACCELERATE_MIXED_PRECISION";
    const std::string precision = text(kPrecision);
    const bool said = candidates_.count("bf16") != 0 || candidates_.count("fp16") != 0 ||
                      candidates_.count("mixed_precision") != 0;
    if (!said && (precision == "bf16" || precision == "fp16"))
      insert(*find_key(precision), Origin::kLauncher, kPrecision, bool_node(true));
    if (!said && precision == "fp8")
      insert(*find_key("mixed_precision"), Origin::kLauncher, kPrecision, text_node(precision));
    const char* kCpu = "ACCELERATE_USE_CPU";
    const std::string cpu = text(kCpu);
    if (cpu == "true" || cpu == "True" || cpu == "1")
      insert(*find_key("use_cpu"), Origin::kLauncher, kCpu, bool_node(true));
    const std::string fsdp = text("ACCELERATE_USE_FSDP");
    if (candidates_.count("fsdp") == 0 && (fsdp == "true" || fsdp == "True" || fsdp == "1"))
      add_fsdp(text);
  }

  // A training file that says `fsdp` has its own fsdp_config, or none.
  template <typename Text>
  void add_fsdp(const Text& text) {
    const auto is = [&](const char* name, const char* expected) {
      std::string value = text(name);
      std::ranges::transform(value, value.begin(),
                             [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
      return value == expected;
    };
    const char* kReshard = "FSDP_RESHARD_AFTER_FORWARD";
    insert(*find_key("fsdp"), Origin::kLauncher, "ACCELERATE_USE_FSDP",
           text_node(is(kReshard, "false") ? "shard_grad_op" : "full_shard"));
    const std::string version = text("FSDP_VERSION");
    if (!version.empty() && version != "2")
      problems_.add(fmt::format(
          "FSDP_VERSION: {} is not supported. Write fsdp_version: 2 into Accelerate's file.",
          version));
    NodeMembers members{{"version", integer_node(2)}};
    for (const auto& [key, name] :
         {std::pair("activation_checkpointing", "FSDP_ACTIVATION_CHECKPOINTING"),
          std::pair("cpu_offload", "FSDP_OFFLOAD_PARAMS")})
      if (is(name, "true")) members.emplace_back(key, bool_node(true));
    std::istringstream layers(text("FSDP_TRANSFORMER_CLS_TO_WRAP"));
    std::vector<Node> names;
    for (std::string layer; std::getline(layers, layer, ',');) names.push_back(text_node(layer));
    if (!names.empty())
      members.emplace_back("transformer_layer_cls_to_wrap", list_node(std::move(names)));
    insert(*find_key("fsdp_config"), Origin::kLauncher, "ACCELERATE_USE_FSDP",
           map_node(std::move(members)));
  }

  // mixed_precision sets bf16 or fp16; what they are given beside it is compared later.
  void add_precision() {
    const auto found = candidates_.find("mixed_precision");
    if (found == candidates_.end()) return;
    const std::string word = found->second.back().value.text;
    const bool bf16 = word == "bf16" || word == "fp8";
    if (bf16 || word == "fp16")
      insert(*find_key(bf16 ? "bf16" : "fp16"), Origin::kPreset, "mixed_precision",
             bool_node(true));
  }

  // Inserts below everything that has been given.
  void insert(const KeySpec& key, Origin origin, std::string where, Node value) {
    auto& list = candidates_[key.name];
    const auto location = std::find_if(list.begin(), list.end(), [&](const Candidate& candidate) {
      return candidate.origin > origin;
    });
    list.insert(location, {origin, std::move(where), std::move(value)});
  }

  // ---------------------------------------------------------------- flags

  void read_flags() {
    const auto& flags = sources_.flags;
    for (std::size_t i = 0; i < flags.size();) {
      const std::string& word = flags[i++];
      if (word.rfind("--", 0) != 0 || word.size() == 2) {
        problems_.add(fmt::format("'{}' is not a flag. Write --key value or --key=value.", word));
        continue;
      }
      const std::size_t equals = word.find('=');
      std::optional<std::string> value;
      if (equals != word.npos) {
        value = word.substr(equals + 1);
      } else if (i < flags.size() && takes(word, flags[i])) {
        value = flags[i++];
      }
      problems_.attempt([&] { read_flag(key_of_flag(word), value); });
    }
  }

  void read_flag(const std::string& name, std::optional<std::string> value) {
    const std::string flag = "--" + name;
    const SourceLocation location = location_named(flag);
    if (const OldKey* old = find_old(name)) {
      const KeySpec* now = find_key(old->now);
      add_old(*old, Origin::kFlag, flag,
              now != nullptr ? node_from_text(*now, value.value_or("true"), location)
                             : plain_scalar(value.value_or("true"), location));
      return;
    }
    const KeySpec* key = find_key(name);
    const bool negated = key == nullptr && name.rfind("no_", 0) == 0 && !value;
    if (negated) key = find_key(name.substr(3));
    if (key == nullptr || (negated && !is_switch(*key)))
      throw UsageError("config", "{}: {}", flag, unknown(name, nullptr));
    if (!value && !is_switch(*key))
      throw UsageError("config", "{} needs a value. Write {}=VALUE.", flag, flag);
    add(*key, Origin::kFlag, flag,
        node_from_text(*key, value.value_or(negated ? "false" : "true"), location));
  }

  // ---------------------------------------------------------------- the decision

  void add_presets() {
    const auto found = candidates_.find("preset");
    if (found == candidates_.end()) return;
    TrainingArguments scratch;
    // A wrong name is reported when all candidates are tried.
    Problems ignored;
    ignored.attempt([&] { assign(scratch, *find_key("preset"), found->second.back().value); });
    if (!scratch.preset) return;
    for (Entry& entry : preset_entries(*scratch.preset)) {
      insert(*find_key(entry.key), Origin::kPreset, fmt::format("preset {}", *scratch.preset),
             std::move(entry.value));
    }
  }

  void decide() {
    for (const KeySpec& key : key_table()) {
      Setting setting;
      setting.key = &key;
      setting.where = "default";
      for (const Candidate& candidate : candidates_[key.name]) {
        // Overridden candidates too: a mistake in the file is reported even if a flag replaces it.
        if (!problems_.attempt([&] { assign(config_.arguments, key, candidate.value); })) continue;
        if (setting.origin != Origin::kDefault) {
          setting.beaten.insert(setting.beaten.begin(),
                                fmt::format("{} ({})", setting.where, plain_text(setting.value)));
        }
        setting.origin = candidate.origin;
        setting.where = candidate.where;
        setting.value = value_of(config_.arguments, key);
      }
      setting.value = value_of(config_.arguments, key);
      config_.settings.push_back(std::move(setting));
    }
  }

  const ConfigSources& sources_;
  std::map<std::string_view, std::vector<Candidate>> candidates_;
  Problems problems_;
  Config config_;
};

}  // namespace

const Setting& Config::setting(std::string_view key) const {
  const auto found = std::find_if(settings.begin(), settings.end(),
                                  [&](const Setting& setting) { return setting.key->name == key; });
  LOCKSTEP_ASSERT(found != settings.end());
  return *found;
}

Config resolve_config(const ConfigSources& sources) {
  return Resolver(sources).run(nullptr);
}

Config load_config(const std::string& path, const std::vector<std::string>& flags,
                   const std::vector<std::string>& launcher_keys, Problems* problems) {
  ConfigSources sources{
      .environment = process_environment(), .flags = flags, .launcher_keys = launcher_keys};
  if (!path.empty()) sources.file = load_document(path, {}, &sources.problems);
  return Resolver(sources).run(problems);
}

std::vector<std::string> take_names(std::vector<std::string>& words) {
  std::vector<std::string> names, flags;
  for (std::size_t i = 0; i < words.size(); ++i) {
    (words[i].starts_with("--") ? flags : names).push_back(words[i]);
    if (words[i].starts_with("--") && i + 1 < words.size() && takes(words[i], words[i + 1]))
      flags.push_back(words[++i]);
  }
  words = std::move(flags);
  return names;
}

Environment process_environment() {
  Environment found;
  for (char** entry = ::environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    if (equals == text.npos) continue;
    if (text.rfind("LOCKSTEP_", 0) == 0 || text.rfind("ACCELERATE_", 0) == 0 ||
        text.rfind("FSDP_", 0) == 0)
      found.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return found;
}

std::string config_text(const Config& config, bool all) {
  std::string text;
  for (const Setting& setting : config.settings) {
    if (!all && setting.origin == Origin::kDefault) continue;
    Node value = setting.value;
    if (value.is(NodeKind::kReal) && std::holds_alternative<Of<Number>>(setting.key->member) &&
        std::floor(value.real) == value.real)  // 60 steps, not 60.0
      value = integer_node(static_cast<std::int64_t>(value.real));
    text += fmt::format("{:<30} {:<21} {}", setting.key->name,
                        value.is(NodeKind::kNull) ? "(unset)" : plain_text(value), setting.where);
    if (!setting.beaten.empty()) text += fmt::format(", beats {}", fmt::join(setting.beaten, ", "));
    text += '\n';
  }
  return text;
}

std::string config_json(const Config& config) {
  NodeMembers settings;
  for (const Setting& setting : config.settings) {
    NodeMembers one{{"value", setting.value}, {"from", text_node(setting.where)}};
    if (!setting.beaten.empty()) one.emplace_back("beats", texts_node(setting.beaten));
    settings.emplace_back(setting.key->name, map_node(std::move(one)));
  }
  return to_json(
      map_node({{"settings", map_node(std::move(settings))}, {"notes", texts_node(config.notes)}}));
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : kPresets) names.emplace_back(preset.name);
  return names;
}

std::vector<Entry> preset_entries(std::string_view preset) {
  std::vector<Entry> entries;
  for (const Preset& one : kPresets) {
    if (one.name != preset) continue;
    entries.push_back({"per_device_train_batch_size", {}, integer_node(one.batch)});
    entries.push_back({"gradient_accumulation_steps", {}, integer_node(one.accumulation)});
    entries.push_back({"logging_steps", {}, integer_node(one.logging_steps)});
    entries.push_back({"save_total_limit", {}, integer_node(one.save_total_limit)});
  }
  return entries;
}

}  // namespace lockstep::train
