#include "lockstep/core/kernel_files.h"

#include <algorithm>
#include <charconv>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep {
namespace {

std::string_view without_blanks(std::string_view text) {
  return text.substr(std::min(text.find_first_not_of(" \t"), text.size()));
}

}  // namespace

std::string text_or_empty(const std::string& path) {
  try {
    return read_file(path, 16u << 20);
  } catch (const Error&) {
    return "";
  }
}

std::optional<std::uint64_t> leading_number(std::string_view text) {
  text = without_blanks(text);
  std::uint64_t value = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc())
    return std::nullopt;
  return value;
}

std::string_view text_after(std::string_view text, std::string_view key) {
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    if (line.size() > key.size() && line.starts_with(key) &&
        (line[key.size()] == ':' || line[key.size()] == ' '))
      return without_blanks(line.substr(key.size() + 1));
    begin = end + 1;
  }
  return {};
}

std::optional<std::uint64_t> number_after(std::string_view text, std::string_view key) {
  return leading_number(text_after(text, key));
}

std::vector<std::string_view> stat_fields(std::string_view text) {
  std::vector<std::string_view> fields(3);
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string_view::npos) return {};
  for (std::size_t begin = name_end + 1; begin < text.size();) {
    const std::size_t end = std::min(text.find_first_of(" \n", begin), text.size());
    if (end > begin) fields.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return fields;
}

}  // namespace lockstep
