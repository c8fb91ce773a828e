#include "cli/base_model.h"

#include <filesystem>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/io/directory.h"
#include "lockstep/models/lora.h"

namespace lockstep::cli {

namespace fs = std::filesystem;

std::string model_folder(const std::string& folder) {
  if (!fs::is_directory(folder))
    throw UsageError("model", "{} is not a folder. Give a Hugging Face folder or a checkpoint.{}",
                     folder, hub_advice(folder));
  const auto holds = [&](const char* name) { return fs::exists(fs::path(folder) / name); };
  if (holds("config.json") || holds(models::kAdapterConfig)) return folder;
  const auto checkpoints = io::list_numbered(folder, "checkpoint-");
  if (checkpoints.empty())
    throw UsageError("model",
                     "{} has neither a config.json nor an adapter_config.json, and no "
                     "checkpoint-<step> in it.",
                     folder);
  return checkpoints.front().path;  // highest first
}

std::string base_folder(const std::string& adapter_folder, const std::string& base) {
  const std::string config = fs::path(adapter_folder) / models::kAdapterConfig;
  std::string named = base;
  if (named.empty())
    named = models::parse_adapter_config(read_file(config), config).base_model_name_or_path;
  if (named.empty() || !fs::is_directory(named))
    throw UsageError("model",
                     "{} holds an adapter of the model '{}', which is not a folder here. Name the "
                     "base model's folder with --base.",
                     adapter_folder, named);
  return named;
}

LoadedModel load_model(const std::string& folder, const std::string& base,
                       const models::PretrainedOptions& options) {
  if (!fs::exists(fs::path(folder) / models::kAdapterConfig))
    return {models::load_pretrained(folder, options), folder};
  const std::string named = base_folder(folder, base);
  LoadedModel loaded{models::load_pretrained(named, options), named};
  models::load_adapter(*loaded.model, folder);
  loaded.model->to(options.device);
  loaded.model->eval();
  return loaded;
}

}  // namespace lockstep::cli
