// LoRA: a frozen model with small trained adapters beside its linear layers, in PEFT's files.
//
//   lockstep::models::LoraConfig config{.r = 16, .lora_alpha = 32, .target_modules = {"c_attn"}};
//   lockstep::models::add_lora(*gpt, config);               // before it is wrapped
//   ...                                                     // train: the adapters alone learn
//   lockstep::models::save_adapter(*gpt, config, "adapter");   // PeftModel.from_pretrained reads
//   it
//
// Everything else in the module stops requiring gradients, so that DistributedDataParallel puts
// the adapters alone into buckets and the optimizer has state for them alone. Layers compute
// W x + scaling * B (A x) and never the sum of W and B A, unless it is merged for inference.
//
// An adapter belongs to a lockstep::models::Linear, so modules of your own can have some, too. One
// thread at a time per module.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

#include "lockstep/models/lora_config.h"
#include "lockstep/nn/fp8.h"

namespace lockstep::models {

inline constexpr const char* kAdapterStem = "adapter_model";  // .safetensors
inline constexpr const char* kAdapterConfig = "adapter_config.json";

// Attaches adapters to the linear layers that target_modules names, and freezes the rest but what
// `bias` and modules_to_save say. Returns the names of the layers. Draws from LibTorch's default
// generator. UsageError, with the names of the linear layers, when none of them matches.
std::vector<std::string> add_lora(torch::nn::Module& module, const LoraConfig& config);

// Converts the weights of linear layers that are not trained, bf16 for half of the memory. Under
// autocast in that type the results stay the same to the bit.
void convert_frozen_weights(torch::nn::Module& module, at::ScalarType type);
// Stores the frozen weights that adapters belong to in fp8 for training under nn::Fp8Autocast.
// Evaluation without it and merge_lora() compute with what fp8 has kept of them; save the base
// before. Move the module to its device first.
void store_frozen_fp8(torch::nn::Module& module, nn::Fp8Recipe recipe);

// Between W and W + scaling * B A in all layers. unmerge_lora() restores W to the bit; until then
// each layer holds a copy of it. unload_lora() merges and removes the adapters: what is left has
// the base model's names, to be saved as one.
void merge_lora(torch::nn::Module& module);
void unmerge_lora(torch::nn::Module& module);
void unload_lora(torch::nn::Module& module);

// What an adapter's file holds: the trained parameters under PEFT's names, sharing the module's
// memory.
std::vector<std::pair<std::string, at::Tensor>> lora_tensors(const torch::nn::Module& module,
                                                             const LoraConfig& config);
// adapter_config.json of a module that has the adapters.
std::string adapter_config_text(const torch::nn::Module& module, const LoraConfig& config);

// adapter_config.json and adapter_model.safetensors, durable on return. Takes the place of a folder
// with an adapter and nothing else; UsageError for a name that is taken otherwise.
void save_adapter(const torch::nn::Module& module, const LoraConfig& config,
                  const std::string& folder);
// Reads such a folder, whoever wrote it, into a module without adapters or with the same ones.
// UsageError names fields that are not supported and tensors that do not fit.
LoraConfig load_adapter(torch::nn::Module& module, const std::string& folder);

}  // namespace lockstep::models
