#include "lockstep/data/byte_tokenizer.h"

#include "lockstep/core/error.h"

namespace lockstep::data {

Tokens ByteTokenizer::encode(std::string_view text) const {
  Tokens tokens(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) tokens[i] = static_cast<unsigned char>(text[i]);
  return tokens;
}

std::string ByteTokenizer::decode(std::span<const std::int32_t> tokens) const {
  std::string text;
  text.reserve(tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] == kEndOfText) continue;
    if (tokens[i] < 0 || tokens[i] > 255)
      throw UsageError("tokenizer",
                       "token {} at position {} is not a byte. It was probably made by another "
                       "tokenizer.",
                       tokens[i], i);
    text.push_back(static_cast<char>(tokens[i]));
  }
  return text;
}

}  // namespace lockstep::data
