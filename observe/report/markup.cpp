#include "observe/report/markup.h"

#include <fmt/format.h>

#include <cmath>
#include <ctime>

#include "lockstep/core/text.h"
#include "lockstep/io/file.h"

namespace lockstep::report {
namespace {

// With a comma before each three digits.
std::string grouped(double value) {
  std::string text = fmt::format("{:.0f}", value);
  const std::size_t first = text.starts_with('-') ? 1 : 0;
  for (std::size_t at = text.size(); at > first + 3;) text.insert(at -= 3, 1, ',');
  return text;
}

}  // namespace

std::string escape(std::string_view text) {
  std::string storage;
  const std::string_view valid = valid_utf8(text, storage);
  std::string out;
  for (std::size_t at = 0; at < valid.size();) {
    const char32_t c = next_character(valid, at);
    const bool control = (c < 0x20 && c != '\t' && c != '\n') || c == 0x7f;
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else if (c == '\'') {
      out += "&#39;";
    } else {
      append_utf8(out, control || c == 0xfffe || c == 0xffff ? 0xfffd : c);
    }
  }
  return out;
}

std::string shortened(std::string_view text, std::size_t characters) {
  std::string storage;
  const std::string_view valid = valid_utf8(text, storage);
  if (character_count(valid) <= characters) return std::string(valid);
  std::size_t at = 0;
  for (std::size_t i = 0; i + 1 < characters; ++i) next_character(valid, at);
  return std::string(valid.substr(0, at)) + "\u2026";
}

std::string number_text(double value) {
  if (std::isnan(value)) return "not a number";
  if (std::isinf(value)) return value > 0 ? "infinite" : "-infinite";
  const double size = std::abs(value);
  if (size >= 1e12) return fmt::format("{:.4g}", value);
  if (size >= 999.95) return grouped(value);
  return fmt::format("{:.4g}", value);
}

std::string percent_text(double share) {
  return fmt::format("{:.1f} %", 100 * share);
}

std::string duration_text(double seconds) {
  if (!(seconds < 1e15)) return number_text(seconds) + " s";
  if (seconds < 60) return fmt::format("{:.3g} s", seconds);
  const auto whole = static_cast<std::int64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return fmt::format("{} h {} min", whole / 3600, whole % 3600 / 60);
}

std::string time_text(double unix_time_s) {
  if (!(unix_time_s > 0 && unix_time_s < 1e11)) return "";
  const auto whole = static_cast<std::time_t>(unix_time_s);
  std::tm parts{};
  ::gmtime_r(&whole, &parts);
  char text[64];
  const std::size_t size = std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &parts);
  return {text, size};
}

std::string bytes_text(std::uint64_t bytes) {
  return io::size_text(bytes);
}

}  // namespace lockstep::report
