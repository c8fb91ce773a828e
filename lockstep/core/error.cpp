#include "lockstep/core/error.h"

#include <cstring>

namespace lockstep {

namespace {

// The cause ends the first sentence; what to try follows it.
std::string with_cause(std::string_view text, const char* cause) {
  std::size_t end = text.find(". ");
  if (end == text.npos && text.ends_with('.')) end = text.size() - 1;
  if (end == text.npos) return fmt::format("{}: {}", text, cause);
  return fmt::format("{}: {}{}", text.substr(0, end), cause, text.substr(end));
}

}  // namespace

SystemError::SystemError(std::string_view component, std::string_view text, int error_number)
    : Error(component, with_cause(text, std::strerror(error_number))),
      error_number_(error_number) {}

SystemError SystemError::described(std::string_view component, std::string_view text,
                                   int error_number) {
  return {Error(component, text), error_number};
}

namespace detail {

void assertion_failed(const char* expression, const char* file, int line) {
  const char* base = std::strstr(file, "lockstep/");
  throw InternalError("internal",
                      fmt::format("assertion `{}` failed at {}:{}. This is a bug in Lockstep; "
                                  "please report it with this message.",
                                  expression, base != nullptr ? base : file, line));
}

}  // namespace detail
}  // namespace lockstep
