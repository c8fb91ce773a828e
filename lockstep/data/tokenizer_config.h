// The files beside a tokenizer.json: tokenizer_config.json, special_tokens_map.json,
// chat_template.jinja, and the kind of model from config.json. Private to this layer.
//
//   const TokenizerConfig config = read_tokenizer_config("Phi-3-mini-4k-instruct/tokenizer.json");
//   const TokenizerParts parts = read_tokenizer_file(path, config);
//
// Read as transformers' AutoTokenizer does: special tokens that tokenizer.json lacks are added to
// it, and GPT-2's class has its own rule for spaces.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/data/tokenizer_parts.h"

namespace lockstep::data {

struct TokenizerConfig {
  std::string bos{};
  std::string eos{};
  std::string chat_template{};
  std::string chat_template_file{};
  // Added to the file's tokens in this order. The listed ones replace existing ones.
  std::vector<AddedToken> listed{};  // added_tokens_decoder
  std::vector<AddedToken> named{};   // bos_token, pad_token, ...: special wherever they are
  std::vector<AddedToken> extra{};   // additional_special_tokens
  // Set for GPT2Tokenizer, which takes vocabulary and merges from tokenizer.json and little else.
  std::optional<bool> gpt2_prefix_space{};
};

// UsageError for files that are not JSON, and for split_special_tokens.
TokenizerConfig read_tokenizer_config(const std::string& tokenizer_file);

// UsageError `[tokenizer] FILE: FIELD is VALUE, ...` for what is not supported.
TokenizerParts read_tokenizer_file(const std::string& path, const TokenizerConfig& config = {});

}  // namespace lockstep::data
