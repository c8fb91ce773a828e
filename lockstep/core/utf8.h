// UTF-8: what is well-formed, one character at a time, and back. No tables, no library.
//
//   std::string storage;
//   const std::string_view text = valid_utf8(bytes, storage);
//   for (std::size_t at = 0; at < text.size();) use(next_character(text, at));
//
// Functions without state; call from any thread.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

// How many bytes the character at the front has; 0 when they are not well-formed UTF-8.
std::size_t utf8_size(std::string_view text);
// The offset of the first byte that is not well-formed UTF-8.
std::optional<std::size_t> invalid_utf8(std::string_view text);
// The text itself, or a copy in `storage` in which U+FFFD stands for each part that is not UTF-8
// (the longest beginning of a character, or one byte: as Unicode recommends and Python does).
std::string_view valid_utf8(std::string_view text, std::string& storage);
// As much of the beginning as fits into `max_bytes` without cutting a character.
std::string_view utf8_prefix(std::string_view text, std::size_t max_bytes);
std::size_t character_count(std::string_view text);

// The character at `at`, which moves past it. The text must be valid.
char32_t next_character(std::string_view text, std::size_t& at);
// The character that ends at `at`, which moves to its beginning.
char32_t previous_character(std::string_view text, std::size_t& at);
// Bytes of the character that begins with this byte.
std::size_t character_size(char first);

void append_utf8(std::string& out, char32_t character);

// Unicode's White_Space, which is also what Rust and Oniguruma call white space.
bool is_white_space(char32_t character);

}  // namespace lockstep
