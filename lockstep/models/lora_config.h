// LoraConfig: low-rank adapters (LoRA) as PEFT describes them, without torch. A training file's
// `lora` and an adapter_config.json are parsed to the same values, and layers get adapters by their
// names alone, as in PEFT.
//
//   const LoraConfig config{.r = 16, .lora_alpha = 32, .target_modules = {"c_attn", "c_proj"}};
//   for (const std::string& name : LoraTargets(config).select(linear_layers)) ...
//
// lora.h attaches the adapters. Values; call from any thread.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/document.h"
#include "lockstep/models/spec.h"

namespace lockstep::models {

// Modules by the ends of their names ({"q_proj", "mlp.c_proj"}), or by one regular expression that
// the whole dotted name matches.
struct ModuleNames {
  ModuleNames() = default;
  ModuleNames(std::initializer_list<std::string> names) : suffixes(names) {}
  ModuleNames(std::vector<std::string> names) : suffixes(std::move(names)) {}
  ModuleNames(std::string pattern) : regex(std::move(pattern)) {}
  ModuleNames(const char* pattern) : regex(pattern) {}

  std::vector<std::string> suffixes{};
  std::string regex{};
  bool empty() const { return suffixes.empty() && regex.empty(); }
  bool operator==(const ModuleNames&) const = default;
};

inline constexpr const char* kAllLinear = "all-linear";

enum class LoraBias { kNone, kAll, kLoraOnly };
// kDefault: A as torch.nn.Linear begins, B zero. kGaussian: A normal with deviation 1/r, B zero.
// kRandom: both as torch.nn.Linear begins, so that the adapter changes the model at once.
enum class LoraInit { kDefault, kGaussian, kRandom };

// PEFT's names and defaults. fan_in_fan_out is not among them: a layer knows how it stores its
// weight.
struct LoraConfig {
  std::int64_t r = 8;
  double lora_alpha = 8;
  double lora_dropout = 0;
  // "all-linear": every linear layer but the output head.
  ModuleNames target_modules{};
  ModuleNames exclude_modules{};
  // By the end of a name, or a regular expression for it; the first that matches counts.
  std::vector<std::pair<std::string, std::int64_t>> rank_pattern{};
  std::vector<std::pair<std::string, double>> alpha_pattern{};
  LoraBias bias = LoraBias::kNone;
  bool use_rslora = false;  // scale by alpha / sqrt(r) instead of alpha / r
  LoraInit init_lora_weights = LoraInit::kDefault;
  std::vector<std::string> modules_to_save{};  // trained whole, and saved with the adapters
  // Only these blocks of a list of them, with target_modules by suffix; empty: all.
  std::vector<std::int64_t> layers_to_transform{};
  std::vector<std::string> layers_pattern{};  // names of that list: "h", "layers"
  // Task information that adapter_config.json carries unchanged.
  std::string base_model_name_or_path{};
  std::string task_type = "CAUSAL_LM";
  bool operator==(const LoraConfig&) const = default;
};

// Parses the map of a training file (`what` names it in errors: "lora"). Adds to `problems`, with
// its location, every key that is unknown or not supported and every wrong value.
LoraConfig read_lora_config(const Node& map, const std::string& what, Problems& problems);
// Parses an adapter_config.json. Fields of unsupported features (use_dora, lora_bias, ...) must
// turn these off; otherwise they are refused by name.
LoraConfig parse_adapter_config(std::string_view text, const std::string& file);
std::string adapter_config_text(const LoraConfig& config, bool fan_in_fan_out);

// The adapters' and their base's computation beside the weights (base: "" or
// function_text(net->config())), as JSON. For ModelFiles::function (lockstep/train/task.h).
std::string function_text(const LoraConfig& config, const std::string& base,
                          bool load_in_4bit = false);

// Throws UsageError for values that make no adapter.
void check_lora_config(const LoraConfig& config);

// Matches module names. Throws UsageError for an invalid regular expression.
class LoraTargets {
 public:
  explicit LoraTargets(LoraConfig config);

  // Whether the module of this full name gets an adapter, if it is a linear layer.
  bool matches(const std::string& name) const;
  // The names that match. UsageError when there is none, listing those that are there.
  std::vector<std::string> select(const std::vector<std::string>& linear_layers) const;
  // Selects from a language model's linear layers, after refuse_experts().
  std::vector<std::string> select(const DecoderSpec& spec) const;
  // UsageError where a router or an expert matches: PEFT adapts all experts' weights together, also
  // with "all-linear", which is not supported here.
  void refuse_experts(const DecoderSpec& spec) const;
  // UsageError where modules_to_save names one of these layers, whose weights are in 4 bits.
  void refuse_saved_whole(const std::vector<std::string>& in_4_bits) const;
  // UsageError where the rank of a chosen layer is above its inputs or outputs: such an adapter
  // trains more than the layer has, and computes nothing that a lower rank does not.
  void check_ranks(const std::vector<std::string>& chosen, const DecoderSpec& spec) const;
  std::int64_t rank(const std::string& name) const;
  double scaling(const std::string& name) const;
  // Whether the module is one of modules_to_save, or inside one.
  bool is_saved_whole(const std::string& name) const;

 private:
  bool in_layers(const std::string& name) const;

  struct Patterns;  // <regex> is slow to compile
  LoraConfig config_;
  std::shared_ptr<const Patterns> patterns_;
};

// The size of the tensors in the adapter_model.safetensors of such a model, in bytes.
std::uint64_t adapter_bytes(const LoraConfig& config, const DecoderSpec& spec);

// The name of a parameter in adapter_model.safetensors. `adapted`: its module has an adapter.
std::string adapter_key(const std::string& parameter, bool adapted);

}  // namespace lockstep::models
