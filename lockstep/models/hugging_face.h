// Hugging Face's folders without torch: parses config.json, and matches a folder's tensors to the
// model's parameters, for every family of family.h.
//
//   const CausalLmConfig config = read_config("Llama-3.2-1B");       // a folder or a config.json
//   const io::SafetensorsSet files("Llama-3.2-1B");
//   for (const FoundWeight& weight : find_weights("Llama-3.2-1B", files, config))
//     use(weight.name, weight.file.bytes());
//
// What the models do not compute is refused, with the field's name, value and line.
// Values and functions that only read; call from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/document.h"
#include "lockstep/io/safetensors.h"
#include "lockstep/models/family.h"

namespace lockstep::models {

// A language model: its family, the values of its fields, and other data of its config.json.
struct CausalLmConfig {
  FamilyConfig model{};
  std::vector<std::int64_t> eos_token_ids{};  // each of them ends a text
  Node source{};  // the config.json that it was read from; null: it was not read

  const DecoderSpec& spec() const { return model.spec(); }
  std::int64_t vocab_size() const { return spec().vocabulary; }
  std::int64_t layers() const { return spec().layers(); }
  // The longest sequence: a limit for learned positions, otherwise the training length.
  std::int64_t max_positions() const { return spec().max_positions; }
  bool tied() const { return spec().tied; }  // the head's weight is the token embedding's
};

// UsageError for a field that is not supported or does not fit the others, SystemError for a file
// that cannot be read. In a folder, the ids that end a text are those of generation_config.json
// where there is one.
CausalLmConfig read_config(const std::string& folder_or_file);
CausalLmConfig parse_config(std::string_view json, const std::string& name);

// Writes the config.json that transformers reads. Fields that were read are preserved, also unused
// ones; `dtype` is that of the weights beside it.
std::string config_json(const CausalLmConfig& config, std::string_view dtype = "float32");

// The computation that shapes do not determine, as JSON: the fields of config.json, defaults
// included, except sizes and settings of training alone. For ModelFiles::function
// (lockstep/train/task.h).
std::string function_text(const CausalLmConfig& config);

std::vector<io::TensorShape> tensors_of(const CausalLmConfig& config);

struct FoundWeight {
  std::string name;  // the model's
  io::SafetensorsSet::Found file;
};

// Every tensor of the model, in the model's order. As in transformers, names may lack the prefix of
// the headless model ("transformer." of GPT-2, "model." of Llama), a tied head may be present or
// not, and buffers of earlier versions (causal masks, rotary frequencies) are skipped. UsageError
// names missing and unexpected tensors, other shapes and types that are not floating point.
std::vector<FoundWeight> find_weights(const std::string& folder, const io::SafetensorsSet& files,
                                      const CausalLmConfig& config);

}  // namespace lockstep::models
