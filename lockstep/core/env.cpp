#include "lockstep/core/env.h"

#include <charconv>
#include <cstdlib>

#include "lockstep/core/error.h"
#include "lockstep/core/text.h"

namespace lockstep::env {

std::optional<std::string> get(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::int64_t parse_int(std::string_view text, std::string_view what, std::int64_t min,
                       std::int64_t max) {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  const bool too_long = error == std::errc::result_out_of_range && stop == end;
  if (!too_long && (error != std::errc() || stop != end || text.empty())) {
    throw UsageError("env", "{}='{}' is not an integer. Set it to a whole number.", what, text);
  }
  if (too_long || value < min || value > max) {
    throw UsageError("env", "{}={} is out of range ({} to {}). Correct it.", what, text, min, max);
  }
  return value;
}

bool parse_bool(std::string_view text, std::string_view what) {
  const std::string word = lower(text);
  if (word == "1" || word == "true" || word == "yes" || word == "on") return true;
  if (word == "0" || word == "false" || word == "no" || word == "off") return false;
  throw UsageError("env", "{}='{}' is neither true nor false. Use 1 or 0.", what, text);
}

std::optional<std::int64_t> get_int(const std::string& name, std::int64_t min, std::int64_t max) {
  const auto text = get(name);
  if (!text) return std::nullopt;
  return parse_int(*text, name, min, max);
}

std::optional<bool> get_bool(const std::string& name) {
  const auto text = get(name);
  if (!text) return std::nullopt;
  return parse_bool(*text, name);
}

}  // namespace lockstep::env
