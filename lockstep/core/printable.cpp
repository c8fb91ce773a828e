#include "lockstep/core/printable.h"

#include "lockstep/core/utf8.h"

namespace lockstep {

std::string printable(std::string_view text) {
  std::string storage;
  const std::string_view valid = valid_utf8(text, storage);
  std::string result;
  for (std::size_t at = 0; at < valid.size();) {
    const char32_t character = next_character(valid, at);
    const bool control = character < 0x20 || (character >= 0x7f && character < 0xa0);
    const bool reorders = (character >= 0x202a && character <= 0x202e) ||
                          (character >= 0x2066 && character <= 0x2069);
    append_utf8(result, character == '\t' ? U' ' : control || reorders ? U'\ufffd' : character);
  }
  return result;
}

}  // namespace lockstep
