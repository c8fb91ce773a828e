// Text: splitting and joining, spelling suggestions, escapes for a terminal, UTF-8, and a hash.
//
//   for (const std::string& part : split("0:3,1:1", ',')) read(trim(part));
//   listed({"a", "b", "c"});                     // "a, b or c"
//   ranges_text(std::vector{0, 2, 3, 4});        // "0, 2-4"
//   throw UsageError("config", "there is no key '{}'.{}", key, did_you_mean(key, known));
//   fmt::print("{}\n", printable(text_of_a_file));
//
// Free functions without state; call them from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// trim() and lower() handle ASCII only.
std::vector<std::string> split(std::string_view text, char separator);  // empty parts as well
std::vector<std::string> lines_of(std::string_view text);  // no empty one after the last newline
std::string trim(std::string_view text);                   // without white space around it
std::string lower(std::string_view text);

// "a, b or c", with another word before the last one.
std::string listed(std::span<const std::string> names, std::string_view word = "or");
// "0, 2-5" of numbers in ascending order.
std::string ranges_text(std::span<const int> numbers, std::string_view separator = ", ");
// "1, 2, 3 and 40 more": the first sixteen.
std::string first_numbers(std::span<const int> numbers);

// ---------------------------------------------------------------- spelling

// Edits are insertions, deletions, substitutions and swaps of neighbours.
std::size_t edit_distance(std::string_view a, std::string_view b);

// The candidate with the smallest distance, if it is close enough to be a misspelling: at most a
// third of the word's letters, or two for short words.
std::optional<std::string> nearest(std::string_view word, std::span<const std::string> candidates);

// " Did you mean warmup_steps?", or nothing. `prefix` is put before the candidate.
std::string did_you_mean(std::string_view word, std::span<const std::string> candidates,
                         std::string_view prefix = "");

// ---------------------------------------------------------------- text for a terminal

// Makes untrusted text safe for a terminal, where control characters could move the cursor or set
// the title to a command. Control characters, bytes that are not UTF-8 and marks that reorder text
// become escapes such as \x1b. Line breaks and tabs become spaces, so that no part of the text can
// pass for one of our own lines.
std::string printable(std::string_view text);
// The same, but keeps line breaks and tabs.
std::string printable_lines(std::string_view text);

// ---------------------------------------------------------------- UTF-8
//
//   std::string storage;
//   const std::string_view text = valid_utf8(bytes, storage);
//   for (std::size_t at = 0; at < text.size();) use(next_character(text, at));

// How many bytes the character at the front has; 0 when they are not well-formed UTF-8.
std::size_t utf8_size(std::string_view text);
// The offset of the first byte that is not well-formed UTF-8.
std::optional<std::size_t> invalid_utf8(std::string_view text);
// The text itself, or a copy in `storage` in which U+FFFD stands for each part that is not UTF-8
// (the longest beginning of a character, or one byte: as Unicode recommends and Python does).
std::string_view valid_utf8(std::string_view text, std::string& storage);
// The longest beginning that fits into `max_bytes` without cutting a character.
std::string_view utf8_prefix(std::string_view text, std::size_t max_bytes);
std::size_t character_count(std::string_view text);

// Returns the character at `at` and advances `at` past it. The text must be valid.
char32_t next_character(std::string_view text, std::size_t& at);
// Returns the character that ends at `at` and moves `at` to its beginning.
char32_t previous_character(std::string_view text, std::size_t& at);
// Bytes of the character that begins with this byte.
std::size_t character_size(char first);

void append_utf8(std::string& out, char32_t character);

// Unicode's White_Space, which is also what Rust and Oniguruma call white space.
bool is_white_space(char32_t character);

// ---------------------------------------------------------------- a hash

// A 64-bit hash of bytes in memory, to compare them with another rank's or an earlier one's. Fast,
// but not collision-resistant against an attacker; files have SHA-256.
//
//   if (fingerprint(order.data(), order.size() * sizeof order[0]) != saved) ...
inline std::uint64_t fingerprint(const void* data, std::size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  const auto mix = [](std::uint64_t hash, std::uint64_t word) {
    hash ^= word * 0x9e3779b97f4a7c15ull;
    hash = (hash << 29) | (hash >> 35);
    return hash * 0xd6e8feb86659fd93ull;
  };
  // Four lanes, so that the multiplications overlap.
  std::uint64_t lanes[4] = {1, 2, 3, bytes};
  std::uint64_t words[4];
  for (; bytes >= sizeof words; bytes -= sizeof words, p += sizeof words) {
    std::memcpy(words, p, sizeof words);
    for (int i = 0; i < 4; ++i) lanes[i] = mix(lanes[i], words[i]);
  }
  std::memset(words, 0, sizeof words);
  std::memcpy(words, p, bytes);
  for (int i = 0; i < 4; ++i) lanes[i] = mix(lanes[i], words[i]);
  return mix(mix(mix(lanes[0], lanes[1]), lanes[2]), lanes[3]);
}

}  // namespace lockstep
