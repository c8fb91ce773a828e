// Families of language models: the fields of config.json that each reads, with defaults, ranges and
// refused values, and the model that the fields describe. Without torch.
//
//   const FamilyConfig model{LlamaConfig{.hidden_size = 256, .intermediate_size = 688}};
//   model.spec().block.attention.heads;
//
// A family is a function in families.cpp and a line in known_families(): docs/extending.md.
// Values and functions without state; call from any thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "lockstep/models/shapes.h"
#include "lockstep/models/spec.h"

namespace lockstep::models {

using OptionValue = std::variant<bool, std::int64_t, double, Activation>;

// A field of config.json. The type is that of `fallback`, the value without the field.
struct Option {
  static constexpr double kMost = 1ull << 40;

  std::string_view key;
  OptionValue fallback;
  double least = 0;  // of numbers
  double most = kMost;
  std::optional<OptionValue> null{};     // the value that null stands for; default: the fallback
  std::optional<OptionValue> refused{};  // a value that the models here do not compute
  std::string_view remedy{};             // what the refusal says about it
  std::string_view other_name{};         // an alias, which wins where both are there
};

// Values by key.
class Options {
 public:
  // 0 or false where there is no such option.
  std::int64_t integer(std::string_view key) const { return get<std::int64_t>(key); }
  double real(std::string_view key) const { return get<double>(key); }
  bool flag(std::string_view key) const { return get<bool>(key); }
  Activation activation(std::string_view key) const { return get<Activation>(key); }
  const OptionValue* find(std::string_view key) const;
  void set(std::string_view key, OptionValue value) { values_[std::string(key)] = value; }

  RopeConfig rope{};
  std::vector<bool> sliding{};  // layer_types: whether a block has the window; empty: not given

 private:
  template <typename Value>
  Value get(std::string_view key) const {
    const OptionValue* value = find(key);
    return value == nullptr ? Value{} : std::get<Value>(*value);
  }
  std::map<std::string, OptionValue, std::less<>> values_;
};

// The rules for reading a family's fields of rotary positions.
struct RopeRules {
  double theta = 10'000;  // without the field
  bool partial = false;   // partial_rotary_factor counts
  // The sequence length from which longrope switches frequencies is a field outside of the rope
  // map, with this default. 0: it is inside the map, and defaults to max_position_embeddings.
  std::int64_t original_length = 0;
  std::vector<std::string_view> longrope_names{};  // further ones
};

struct Family {
  std::string_view type;                  // model_type
  std::vector<std::string_view> classes;  // architectures; the first one is written
  std::vector<Option> options;            // in the order in which they are written
  // UsageError when sizes do not fit together.
  DecoderSpec (*describe)(const Options&) = nullptr;
  std::optional<RopeRules> rope{};
  bool layer_types = false;  // the field says which blocks have the window
  bool bos_is_eos = false;   // one token stands between texts

  Options defaults() const;
};

const std::vector<const Family*>& known_families();
const Family* find_family(std::string_view type);  // nullptr without one

// A model of a family.
class FamilyConfig {
 public:
  FamilyConfig() : FamilyConfig(GptConfig{}) {}
  FamilyConfig(const GptConfig& config);    // NOLINT(google-explicit-constructor)
  FamilyConfig(const LlamaConfig& config);  // NOLINT(google-explicit-constructor)
  FamilyConfig(const Family& family, Options options);

  const Family& family() const { return *family_; }
  const Options& options() const { return options_; }
  const DecoderSpec& spec() const { return spec_; }

 private:
  const Family* family_;
  Options options_;
  DecoderSpec spec_;
};

std::vector<io::TensorShape> tensors_of(const FamilyConfig& config);

}  // namespace lockstep::models
