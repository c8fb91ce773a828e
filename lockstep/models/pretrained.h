// Loads Hugging Face's folders as models, and saves models as such folders.
//
//   auto model = lockstep::models::load_pretrained("Phi-3-mini", {.dtype = torch::kBFloat16});
//   lockstep::models::save_pretrained(*model, "out", {.max_shard_bytes = 2'000'000'000});
//
// config.json, and model.safetensors or its shards with model.safetensors.index.json: transformers'
// from_pretrained() reads what save_pretrained() writes. Weights are copied from the mapped files
// into the model tensor by tensor, so the whole is in memory once. Functions on files; one thread
// per folder.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/models/causal_lm.h"

namespace lockstep::models {

// A model of any family. UsageError when the sizes do not fit together.
CausalLmPtr make_causal_lm(const CausalLmConfig& config, const ParameterOptions& options = {});

struct PretrainedOptions {
  c10::ScalarType dtype = c10::kFloat;  // weights of another type are converted
  c10::Device device = c10::kCPU;
  bool nf4 = false;  // ParameterOptions::nf4
};

// Returns the model in evaluation mode, as from_pretrained() does. UsageError for unsupported
// values in config.json or weights (hugging_face.h), SystemError for unreadable files.
CausalLmPtr load_pretrained(const std::string& folder, const PretrainedOptions& options = {});

struct SaveOptions {
  std::uint64_t max_shard_bytes = 5'000'000'000;
  // Further small files of the folder, as names and texts: a tokenizer.json.
  std::vector<std::pair<std::string, std::string>> texts{};
};

// Saves the model's tensors under the names of its configuration, each in its type. Durable on
// return; replaces a folder of that name.
void save_pretrained(const CausalLm& model, const std::string& folder,
                     const SaveOptions& options = {});

}  // namespace lockstep::models
