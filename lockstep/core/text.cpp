#include "lockstep/core/text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

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

}  // namespace lockstep
