#include "lockstep/core/printable.h"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/core/utf8.h"

namespace lockstep {
namespace {

bool is_space(char32_t c) {
  return c == '\n' || c == '\t';
}

bool is_plain(char32_t c) {
  if (c < 0x20) return is_space(c);
  const bool control = c >= 0x7f && c < 0xa0;
  const bool reorders =
      (c >= 0x200e && c <= 0x200f) || (c >= 0x2028 && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
  return !control && !reorders;
}

}  // namespace

std::string printable_lines(std::string_view text) {
  std::string result;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t begin = at;
    const std::size_t size = utf8_size(text.substr(at));
    const char32_t c = size == 0 ? 0 : next_character(text, at);
    if (size > 0 && is_plain(c)) {
      result += text.substr(begin, size);
    } else if (size > 1) {
      result += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[begin]));
      at = begin + 1;
    }
  }
  return result;
}

std::string printable(std::string_view text) {
  std::string result = printable_lines(text);
  std::replace_if(result.begin(), result.end(), is_space, ' ');
  return result;
}

}  // namespace lockstep
