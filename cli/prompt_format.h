// prompt_format.json, beside the weights of a checkpoint: how the texts that the model was trained
// on were made, so that `lockstep generate` asks it in the same way.
//
//   const PromptFormat format = read_prompt_format(folder + "/" + kPromptFormat);
//
// Functions without state; call from any thread.
#pragma once

#include <string>

#include "lockstep/data/instruction_file.h"

namespace lockstep::cli {

inline constexpr const char* kPromptFormat = "prompt_format.json";

struct PromptFormat {
  data::RecordKind kind = data::RecordKind::kInstruction;
  data::PromptTemplate texts{};  // for instructions
  std::string tokenizer{};       // the absolute path of a tokenizer.json; empty: bytes
};

std::string prompt_format_text(const PromptFormat& format);
// UsageError for a file of another kind, SystemError for one that cannot be read.
PromptFormat read_prompt_format(const std::string& path);

}  // namespace lockstep::cli
