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

// Converts frozen weights of linear layers, to bf16 for half of the memory. Under autocast in that
// type the results keep their bits.
void convert_frozen_weights(torch::nn::Module& module, at::ScalarType type);
// Stores the frozen weights of adapted layers in fp8, for training under nn::Fp8Autocast.
// Evaluation without it and merge_lora() compute with the rounded weights; save the base before.
// Move the module to its device first.
void store_frozen_fp8(torch::nn::Module& module, nn::Fp8Recipe recipe);

// Switches all layers between W and W + scaling * B A. unmerge_lora() restores W to the bit; until
// then each layer holds a copy of it. unload_lora() merges and removes the adapters: the result has
// the base model's names and can be saved as a base.
void merge_lora(torch::nn::Module& module);
void unmerge_lora(torch::nn::Module& module);
void unload_lora(torch::nn::Module& module);

// The contents of an adapter file: the trained parameters under PEFT's names, sharing the module's
// memory.
std::vector<std::pair<std::string, at::Tensor>> lora_tensors(const torch::nn::Module& module,
                                                             const LoraConfig& config);
// adapter_config.json of a module that has the adapters.
std::string adapter_config_text(const torch::nn::Module& module, const LoraConfig& config);

// Writes adapter_config.json and adapter_model.safetensors, durable on return. Replaces a folder
// that has an adapter and nothing else; UsageError when the name is taken otherwise.
void save_adapter(const torch::nn::Module& module, const LoraConfig& config,
                  const std::string& folder);
// Loads such a folder, written by any program, into a module without adapters or with the same
// ones. UsageError names fields that are not supported and tensors that do not fit.
LoraConfig load_adapter(torch::nn::Module& module, const std::string& folder);

}  // namespace lockstep::models
