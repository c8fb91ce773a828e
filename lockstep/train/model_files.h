// ModelFiles: how a checkpoint holds the model: all of it, or a part under names of its own, such
// as the adapters of a model whose base is in another folder.
//
//   parts.model_files = {.stem = lockstep::models::kAdapterStem,
//                        .config = lockstep::models::kAdapterConfig,
//                        .tensors = [&] { return lockstep::models::lora_tensors(*net, config); }};
//
// A value. The function is called on the thread that saves or loads.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

struct ModelFiles {
  std::string stem = "model";          // names <stem>.safetensors
  std::string config = "config.json";  // the file that has the model's configuration
  // The tensors by their names in the file, in the module's own memory, so that they can be read
  // back into it. Empty: every parameter and buffer of the module.
  std::function<std::vector<std::pair<std::string, at::Tensor>>()> tensors{};
  // JSON, a map: what the model computes beside its tensors, by the names of the settings that say
  // it, such as models::function_text(net->config()). The folder has it as model_function.json, and
  // a run with another value does not resume from it. Empty: no such file, and nothing is compared.
  std::string function{};
  // Further small files of the folder, by name, and their texts.
  std::vector<std::pair<std::string, std::string>> texts{};
};

}  // namespace lockstep
