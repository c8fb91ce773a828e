// Text as bytes: a tokenizer that needs no file and refuses no text. Token b is byte b; 256 ends a
// document.
//
//   ByteTokenizer tokenizer;
//   tokenizer.decode(tokenizer.encode("grüße")) == "grüße"
//
// No torch, no state; any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::data {

using Tokens = std::vector<std::int32_t>;

struct ByteTokenizer {
  static constexpr std::int32_t kEndOfText = 256;
  static constexpr std::int64_t kVocabSize = 257;

  Tokens encode(std::string_view text) const;
  // End-of-text tokens give nothing. UsageError for a token outside of the vocabulary.
  std::string decode(std::span<const std::int32_t> tokens) const;
};

// What instruction data needs from any tokenizer.
struct TextEncoder {
  std::function<Tokens(std::string_view)> encode = [](std::string_view text) {
    return ByteTokenizer{}.encode(text);
  };
  std::int32_t end_of_text = ByteTokenizer::kEndOfText;  // ends an answer, and pads
};

}  // namespace lockstep::data
