// The folder of a model, or of an adapter and the model that it belongs to, for the commands that
// read one: `lockstep generate` and `lockstep checkpoint merge`.
#pragma once

#include <string>

#include "lockstep/models/pretrained.h"

namespace lockstep::cli {

// A Hugging Face folder or a checkpoint as it is; an output_dir stands for its newest checkpoint.
std::string model_folder(const std::string& folder);

struct LoadedModel {
  models::CausalLmPtr model;
  std::string folder;  // the model's own; for an adapter, that of its base
};

// `base` names the base model of an adapter where adapter_config.json does not.
LoadedModel load_model(const std::string& folder, const std::string& base,
                       const models::PretrainedOptions& options);

// The folder of an adapter's base model. UsageError when it is not a folder here.
std::string base_folder(const std::string& adapter_folder, const std::string& base);

}  // namespace lockstep::cli
