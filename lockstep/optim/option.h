// The declarations of an update rule, without torch: its options by name, so that one list in the
// options struct serves range checks, the agreement of ranks, archives and a training file's
// optim_args; its state, which memory plans count; and the classification of parameters by name.
//
//   void each(const OptionVisitor& option) {
//     option("lr", lr);
//     option("momentum", momentum, {.below = 1});
//     option("nesterov", nesterov);
//   }
//   std::vector<StateSpec> state(Sizes sizes) const { return {{"exp_avg", copy_of(sizes)}}; }
#pragma once

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::optim {

inline constexpr double kNoLeast = -std::numeric_limits<double>::infinity();
struct Range {
  double least = 0;
  double below = std::numeric_limits<double>::infinity();
  bool contains(double value) const { return value >= least && value < below; }
};

// An option's name, value and range; flags and counts are passed as doubles too.
struct Option {
  enum class Kind { kReal, kCount, kFlag };
  std::string_view name;
  double& value;
  Range range;
  Kind kind = Kind::kReal;

  bool accepts(double number) const {
    if (kind == Kind::kFlag) return number == 0 || number == 1;
    return kind == Kind::kReal || (number == std::floor(number) && std::abs(number) < 1e15);
  }
};

class OptionVisitor {
 public:
  explicit OptionVisitor(std::function<void(const Option&)> body) : body_(std::move(body)) {}

  void operator()(std::string_view name, double& value, Range range = {}) const {
    body_({name, value, range, Option::Kind::kReal});
  }
  void operator()(std::string_view name, std::int64_t& value, Range range = {}) const {
    auto number = static_cast<double>(value);
    body_({name, number, range, Option::Kind::kCount});
    value = static_cast<std::int64_t>(number);
  }
  void operator()(std::string_view name, bool& value) const {
    double number = value ? 1 : 0;
    body_({name, number, {}, Option::Kind::kFlag});
    value = number != 0;
  }

 private:
  std::function<void(const Option&)> body_;
};

using Sizes = std::span<const std::int64_t>;  // of a parameter
inline std::vector<std::int64_t> copy_of(Sizes sizes) {
  return {sizes.begin(), sizes.end()};
}

// A tensor of state that a rule has for a parameter, zero at first.
struct StateSpec {
  std::string name;                 // key in checkpoints "<parameter>.<name>"; no dots, not "step"
  std::vector<std::int64_t> sizes;  // the parameter's, unless the rule takes whole tensors
  bool at_least_float = false;      // float for a parameter of a half type, else its dtype
  bool bfloat16 = false;            // whatever the parameter's dtype
  std::int64_t numel() const {
    std::int64_t count = 1;
    for (const std::int64_t size : sizes) count *= size;
    return count;
  }
};

// ---------------------------------------------------------------- the names of parameters

// Classifies parameters by name, for an optimizer's groups (decay_groups, muon_groups) and for
// plans, which have no module.
//
//   is_named_as_norm_or_bias("h.0.ln_1.bias");   // true
//   is_named_as_embedding_or_head("transformer.wte.weight");   // true

// The names by which Hugging Face's Trainer excludes parameters from weight decay: "bias",
// "layernorm" or "rmsnorm" anywhere in the name, "norm" as a whole part of it, or "_norm" at the
// end of a part.
inline bool is_named_as_norm_or_bias(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const char* word : {"bias", "layernorm", "rmsnorm"})
    if (name.find(word) != std::string::npos) return true;
  std::istringstream parts(name);
  for (std::string part; std::getline(parts, part, '.');)
    if (part == "norm" || part.ends_with("_norm")) return true;
  return false;
}

// Names of embeddings and heads, which Muon does not step.
inline bool is_named_as_embedding_or_head(const std::string& name) {
  std::istringstream parts(name);
  for (std::string part; std::getline(parts, part, '.');) {
    if (part.find("embed") != std::string::npos) return true;
    for (const char* word : {"wte", "wpe", "lm_head", "head", "classifier", "score"})
      if (part == word) return true;
  }
  return false;
}

}  // namespace lockstep::optim
