#include "lockstep/models/lora.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/tensors.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/models/linear.h"
#include "lockstep/nn/divided.h"

namespace lockstep::models {
namespace {

namespace fs = std::filesystem;

using NamedLinears = std::vector<std::pair<std::string, LinearImpl*>>;

bool every(const LinearImpl&) {
  return true;
}

NamedLinears linears_of(torch::nn::Module& module, bool (*wanted)(const LinearImpl&) = every) {
  NamedLinears all;
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    if (auto* linear = item.value()->as<LinearImpl>(); linear != nullptr && wanted(*linear))
      all.emplace_back(item.key(), linear);
  return all;
}

NamedLinears adapted_of(torch::nn::Module& module) {
  return linears_of(module, [](const LinearImpl& linear) { return linear.has_lora(); });
}

void refuse_other_modules(torch::nn::Module& module, const LoraTargets& targets,
                          const LoraConfig& config) {
  if (config.target_modules.regex == kAllLinear) return;
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    if (item.value()->as<LinearImpl>() == nullptr && targets.matches(item.key()))
      throw UsageError("lora",
                       "target_modules matches {}, which is not a linear layer. Adapters for other "
                       "modules are not supported; name linear layers alone.",
                       item.key());
}

// PEFT trains a copy, which a head that shares the weight does not use.
void refuse_tied(torch::nn::Module& module, const LoraTargets& targets) {
  const auto* model = module.as<CausalLm>();
  if (model == nullptr || !model->config().tied()) return;
  const std::string name = embedding_names(model->config().spec()).front();
  if (targets.is_saved_whole(name))
    throw UsageError("lora",
                     "modules_to_save names {}, whose weight is the output head's, too "
                     "(tie_word_embeddings). PEFT would train a copy for the input alone, and "
                     "that is not supported. Delete it from modules_to_save.",
                     name);
}

void check_saved_whole(torch::nn::Module& module, const LoraConfig& config) {
  for (const std::string& saved : config.modules_to_save) {
    bool found = false;
    for (const auto& item : module.named_modules("", /*include_self=*/false))
      found |= item.key().ends_with(saved);
    if (!found)
      throw UsageError("lora",
                       "modules_to_save names '{}', and the model has no module with that name. "
                       "Check it against named_modules().",
                       saved);
  }
}

void initialise(LinearImpl& linear, LoraInit init, std::int64_t r) {
  const torch::NoGradGuard no_grad;  // lora_A is as torch.nn.Linear begins
  if (init == LoraInit::kGaussian) linear.lora_A->weight.normal_(0, 1.0 / static_cast<double>(r));
  if (init != LoraInit::kRandom) linear.lora_B->weight.zero_();
}

// The module and the name in it of a parameter.
std::pair<std::string, std::string> divided(const std::string& parameter) {
  const std::size_t dot = parameter.rfind('.');
  if (dot == parameter.npos) return {"", parameter};
  return {parameter.substr(0, dot), parameter.substr(dot + 1)};
}

// The parts of a module with adapters that are trained and saved.
class Trained {
 public:
  Trained(const torch::nn::Module& module, const LoraConfig& config)
      : bias_(config.bias), targets_(config) {
    for (const auto& item : module.named_modules("", /*include_self=*/false)) {
      const auto* linear = item.value()->as<LinearImpl>();
      if (linear != nullptr && linear->has_lora()) adapted_.insert(item.key());
    }
  }

  bool is_adapter(const std::string& module) const {
    const auto [layer, part] = divided(module);
    return (part == "lora_A" || part == "lora_B") && adapted_.contains(layer);
  }
  bool contains(const std::string& parameter) const {
    const auto [module, own] = divided(parameter);
    if (is_adapter(module) || targets_.is_saved_whole(module)) return true;
    if (own != "bias") return false;
    return bias_ == LoraBias::kAll || (bias_ == LoraBias::kLoraOnly && adapted_.contains(module));
  }
  std::string key(const std::string& parameter) const {
    return adapter_key(parameter, adapted_.contains(divided(parameter).first));
  }

 private:
  LoraBias bias_;
  LoraTargets targets_;
  std::set<std::string> adapted_;
};

// A folder that holds what save_adapter() wrote and nothing else.
bool holds_adapter_alone(const std::string& folder) {
  const std::set<std::string> own{kAdapterConfig, fmt::format("{}.safetensors", kAdapterStem),
                                  std::string(io::kManifestName)};
  std::error_code error;
  if (!fs::exists(fs::path(folder) / kAdapterConfig, error)) return false;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    if (!own.contains(at->path().filename().string())) return false;
  return !error;
}

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Beside an adapter of the output head PEFT writes the head's own weight.
NamedTensors base_weights(torch::nn::Module& module) {
  NamedTensors all;
  for (const auto& [name, linear] : adapted_of(module))
    all.emplace_back(adapter_key(name + ".weight", /*adapted=*/true), linear->weight.detach());
  return all;
}

// Copies the file's tensors. All of `required` must be there, and nothing that is in neither list.
void copy_tensors(const io::SafetensorsFile& file, const NamedTensors& required,
                  const NamedTensors& optional) {
  std::map<std::string, at::Tensor> known(optional.begin(), optional.end());
  std::vector<std::string> missing, unknown;
  for (const auto& [name, tensor] : required) {
    known[name] = tensor;
    if (file.find(name) == nullptr) missing.push_back(name);
  }
  for (const io::TensorEntry& entry : file.tensors()) {
    const auto found = known.find(entry.name);
    if (found == known.end()) {
      unknown.push_back(entry.name);
    } else if (entry.shape != found->second.sizes().vec()) {
      throw UsageError(
          "lora",
          "{}: '{}' is [{}] and the model's is [{}]. The adapter belongs to another model, or r "
          "and rank_pattern are others.",
          file.path(), entry.name, fmt::join(entry.shape, ", "),
          fmt::join(found->second.sizes(), ", "));
    }
  }
  if (!missing.empty() || !unknown.empty())
    throw UsageError("lora",
                     "{} does not fit the model: {} of its tensors are missing ({}), {} are not "
                     "the model's ({}). The adapter belongs to another model.",
                     file.path(), missing.size(), fmt::join(missing, ", "), unknown.size(),
                     fmt::join(unknown, ", "));
  const torch::NoGradGuard no_grad;
  for (const io::TensorEntry& entry : file.tensors())
    known[entry.name].copy_(io::tensor_of(file, entry));
}

}  // namespace

std::vector<std::string> add_lora(torch::nn::Module& module, const LoraConfig& config) {
  const LoraTargets targets(config);
  if (const NamedLinears before = adapted_of(module); !before.empty())
    throw UsageError("lora",
                     "{} has an adapter already. One at a time: merge it and remove it with "
                     "unload_lora() first.",
                     before.front().first);
  check_saved_whole(module, config);
  refuse_tied(module, targets);
  if (const auto* model = module.as<CausalLm>()) targets.refuse_experts(model->config().spec());
  refuse_other_modules(module, targets, config);
  const NamedLinears linears =
      linears_of(module, [](const LinearImpl& linear) { return linear.options.adaptable(); });
  std::vector<std::string> names, in_4_bits;
  for (const auto& [name, linear] : linears) {
    names.push_back(name);
    if (linear->options.nf4()) in_4_bits.push_back(name);
  }
  targets.refuse_saved_whole(in_4_bits);
  names = targets.select(names);
  const std::set<std::string> chosen(names.begin(), names.end());
  for (const auto& [name, linear] : linears) {
    if (!chosen.contains(name)) continue;
    const std::int64_t r = targets.rank(name);
    linear->attach_lora({.r = r, .scaling = targets.scaling(name), .dropout = config.lora_dropout});
    initialise(*linear, config.init_lora_weights, r);
  }
  const Trained trained(module, config);
  for (auto& item : module.named_parameters())
    item.value().requires_grad_(trained.contains(item.key()));
  return names;
}

void convert_frozen_weights(torch::nn::Module& module, at::ScalarType type) {
  for (const auto& [name, linear] : linears_of(module))
    if (!linear->weight.requires_grad() && !linear->stored_fp8() && !linear->options.nf4())
      linear->weight.set_data(linear->weight.detach().to(type));
}

void store_frozen_fp8(torch::nn::Module& module, nn::Fp8Recipe recipe) {
  for (const auto& [name, linear] : adapted_of(module))
    if (!linear->weight.requires_grad()) linear->store_fp8(recipe);
}

void merge_lora(torch::nn::Module& module) {
  for (const auto& [name, linear] : adapted_of(module)) linear->merge_lora();
}

void unmerge_lora(torch::nn::Module& module) {
  for (const auto& [name, linear] : adapted_of(module)) linear->unmerge_lora();
}

void unload_lora(torch::nn::Module& module) {
  merge_lora(module);
  for (const auto& [name, linear] : adapted_of(module)) linear->remove_lora();
}

NamedTensors lora_tensors(const torch::nn::Module& module, const LoraConfig& config) {
  const Trained trained(module, config);
  NamedTensors all;
  for (const auto& item : module.named_parameters())
    if (trained.contains(item.key()))
      all.emplace_back(trained.key(item.key()), item.value().detach());
  return all;
}

std::string adapter_config_text(const torch::nn::Module& module, const LoraConfig& config) {
  bool in_out = false;
  for (const auto& part : module.modules(/*include_self=*/false)) {
    const auto* linear = part->as<LinearImpl>();
    if (linear != nullptr && linear->has_lora())
      in_out |= linear->options.layout() == WeightLayout::kInOut;
  }
  return adapter_config_text(config, in_out);
}

void save_adapter(const torch::nn::Module& module, const LoraConfig& config,
                  const std::string& folder) {
  std::vector<at::Tensor> alive;
  std::vector<io::TensorBytes> all;
  for (const auto& [name, tensor] : lora_tensors(module, config)) {
    nn::check_whole(name, tensor);
    alive.push_back(tensor.to(at::kCPU).contiguous());
    all.push_back(io::bytes_of_tensor(name, alive.back()));
  }
  if (all.empty())
    throw UsageError("lora", "the module has no adapter to save. Call add_lora() first.");
  io::AtomicDir dir(folder, {.replace = holds_adapter_alone(folder)});
  dir.write(kAdapterConfig, adapter_config_text(module, config));
  dir.write(fmt::format("{}.safetensors", kAdapterStem),
            [&](io::FileWriter& out) { io::write_safetensors(out, all, {{"format", "pt"}}); });
  dir.commit();
}

LoraConfig load_adapter(torch::nn::Module& module, const std::string& folder) {
  const std::string config_file = fmt::format("{}/{}", folder, kAdapterConfig);
  const std::string file = fmt::format("{}/{}.safetensors", folder, kAdapterStem);
  std::error_code ignored;
  if (!fs::exists(config_file, ignored) || !fs::exists(file, ignored))
    throw UsageError("lora",
                     "{} is not a folder with an adapter: {} and {}.safetensors are expected in "
                     "it. A file adapter_model.bin has to be converted in Python first.",
                     folder, kAdapterConfig, kAdapterStem);
  const LoraConfig config = parse_adapter_config(read_file(config_file), config_file);
  if (adapted_of(module).empty()) add_lora(module, config);
  unmerge_lora(module);
  copy_tensors(io::SafetensorsFile(file), lora_tensors(module, config), base_weights(module));
  return config;
}

}  // namespace lockstep::models
