#include "lockstep/core/utf8.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace lockstep {
namespace {

bool is_continuation(char byte) {
  return (static_cast<unsigned char>(byte) & 0xC0u) == 0x80u;
}

struct Part {
  std::size_t size;
  bool valid;
};

// The character at `at`, or the longest beginning of one (Unicode's table 3-7).
Part part_at(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) -> unsigned {
    return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0u;
  };
  const unsigned first = byte(0);
  if (first < 0x80) return {1, true};
  if (first < 0xC2 || first > 0xF4) return {1, false};
  const std::size_t size = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  const unsigned low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const unsigned high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  if (byte(1) < low || byte(1) > high) return {1, false};
  for (std::size_t i = 2; i < size; ++i)
    if (byte(i) < 0x80 || byte(i) > 0xBF) return {i, false};
  return {size, true};
}

// Where the first byte that is not ASCII stands, from `at` on.
std::size_t skip_ascii(std::string_view text, std::size_t at) {
  constexpr std::uint64_t kHighBits = 0x8080808080808080u;
  for (; at + 8 <= text.size(); at += 8) {
    std::uint64_t block;
    std::memcpy(&block, text.data() + at, 8);
    if ((block & kHighBits) != 0) break;
  }
  while (at < text.size() && static_cast<unsigned char>(text[at]) < 0x80) ++at;
  return at;
}

}  // namespace

std::size_t utf8_size(std::string_view text) {
  if (text.empty()) return 0;
  const Part part = part_at(text, 0);
  return part.valid ? part.size : 0;
}

std::optional<std::size_t> invalid_utf8(std::string_view text) {
  for (std::size_t at = skip_ascii(text, 0); at < text.size();) {
    const Part part = part_at(text, at);
    if (!part.valid) return at;
    at = skip_ascii(text, at + part.size);
  }
  return std::nullopt;
}

std::string_view valid_utf8(std::string_view text, std::string& storage) {
  std::size_t copied = 0;
  storage.clear();
  for (std::size_t at = skip_ascii(text, 0); at < text.size();) {
    const Part part = part_at(text, at);
    if (!part.valid) {
      storage.append(text.substr(copied, at - copied));
      append_utf8(storage, 0xFFFD);
      copied = at + part.size;
    }
    at = skip_ascii(text, at + part.size);
  }
  if (copied == 0) return text;
  storage.append(text.substr(copied));
  return storage;
}

std::string_view utf8_prefix(std::string_view text, std::size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  std::size_t end = max_bytes;
  while (end > 0 && is_continuation(text[end])) --end;
  return text.substr(0, end);
}

std::size_t character_count(std::string_view text) {
  return text.size() -
         static_cast<std::size_t>(std::count_if(text.begin(), text.end(), is_continuation));
}

std::size_t character_size(char first) {
  const auto byte = static_cast<unsigned char>(first);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

char32_t next_character(std::string_view text, std::size_t& at) {
  const auto byte = static_cast<unsigned char>(text[at]);
  const std::size_t size = character_size(text[at]);
  char32_t character = size == 1 ? byte : byte & (0xFFu >> (size + 1));
  for (std::size_t i = 1; i < size; ++i)
    character = character << 6 | (static_cast<unsigned char>(text[at + i]) & 0x3Fu);
  at += size;
  return character;
}

char32_t previous_character(std::string_view text, std::size_t& at) {
  do --at;
  while (is_continuation(text[at]));
  std::size_t forward = at;
  return next_character(text, forward);
}

void append_utf8(std::string& out, char32_t character) {
  const auto put = [&](char32_t byte) { out += static_cast<char>(byte); };
  if (character < 0x80) {
    put(character);
  } else if (character < 0x800) {
    put(0xC0 | character >> 6), put(0x80 | (character & 0x3F));
  } else if (character < 0x10000) {
    put(0xE0 | character >> 12), put(0x80 | (character >> 6 & 0x3F));
    put(0x80 | (character & 0x3F));
  } else {
    put(0xF0 | character >> 18), put(0x80 | (character >> 12 & 0x3F));
    put(0x80 | (character >> 6 & 0x3F)), put(0x80 | (character & 0x3F));
  }
}

bool is_white_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

}  // namespace lockstep
