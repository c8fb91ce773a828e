#include "lockstep/core/text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

namespace lockstep {

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> lines = split(text, '\n');
  if (lines.back().empty()) lines.pop_back();
  return lines;
}

std::string trim(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n\v\f";
  const auto first = text.find_first_not_of(kSpace);
  if (first == text.npos) return "";
  return std::string(text.substr(first, text.find_last_not_of(kSpace) - first + 1));
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return out;
}

std::string listed(std::span<const std::string> names, std::string_view word) {
  if (names.size() < 2) return names.empty() ? "" : names.front();
  return fmt::format("{} {} {}", fmt::join(names.first(names.size() - 1), ", "), word,
                     names.back());
}

std::string ranges_text(std::span<const int> numbers, std::string_view separator) {
  std::string text;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    text += fmt::format("{}{}", text.empty() ? "" : separator, numbers[i]);
    if (end - i > 1) text += fmt::format("-{}", numbers[end - 1]);
    i = end;
  }
  return text;
}

std::string first_numbers(std::span<const int> numbers) {
  constexpr std::size_t kMost = 16;
  const auto shown = numbers.first(std::min(numbers.size(), kMost));
  std::string text = fmt::format("{}", fmt::join(shown, ", "));
  if (shown.size() < numbers.size())
    text += fmt::format(" and {} more", numbers.size() - shown.size());
  return text;
}

// ---------------------------------------------------------------- spelling

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before_last;
  std::vector<std::size_t> last(b.size() + 1);
  std::iota(last.begin(), last.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::vector<std::size_t> row(b.size() + 1, i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t change = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({change, last[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before_last[j - 2] + 1);
    }
    before_last = std::exchange(last, std::move(row));
  }
  return last[b.size()];
}

std::optional<std::string> nearest(std::string_view word, std::span<const std::string> candidates) {
  // Comparing a very long word with every name would cost more than it is worth.
  constexpr std::size_t kLongest = 200;
  if (word.size() > kLongest) return std::nullopt;
  const std::string* best = nullptr;
  std::size_t best_distance = std::max<std::size_t>(2, word.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best = &candidate;
      best_distance = distance;
    }
  }
  if (best == nullptr) return std::nullopt;
  return *best;
}

std::string did_you_mean(std::string_view word, std::span<const std::string> candidates,
                         std::string_view prefix) {
  const auto near = nearest(word, candidates);
  return near ? fmt::format(" Did you mean {}{}?", prefix, *near) : "";
}

// ---------------------------------------------------------------- text for a terminal

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

// ---------------------------------------------------------------- UTF-8

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

// The position of the first byte that is not ASCII, from `at` on.
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
