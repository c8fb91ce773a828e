#include "lockstep/core/error.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
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

// Applies to every call that needs a descriptor, so it is added here.
std::string with_limit_of_files(std::string_view text) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const auto number = [](rlim_t value) { return static_cast<unsigned long long>(value); };
  std::string result = with_cause(
      text, fmt::format("{} (at most {})", std::strerror(EMFILE), number(limit.rlim_cur)).c_str());
  if (text.find("ulimit -n") != text.npos) return result;
  constexpr rlim_t kUsual = 1024;
  if (!result.ends_with('.')) result += '.';
  result += fmt::format(" Raise the limit with `ulimit -n {}`",
                        std::max(kUsual, std::min(limit.rlim_max, 4 * limit.rlim_cur)));
  if (limit.rlim_max < kUsual)
    result += fmt::format(
        "; its hard limit is {}, which only root, the container or the service can raise",
        number(limit.rlim_max));
  return result + '.';
}

std::string description(std::string_view text, int error_number) {
  return error_number == EMFILE ? with_limit_of_files(text)
                                : with_cause(text, std::strerror(error_number));
}

}  // namespace

SystemError::SystemError(std::string_view component, std::string_view text, int error_number)
    : Error(component, description(text, error_number)), error_number_(error_number) {}

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

// ---------------------------------------------------------------- locations

SourceLocation::SourceLocation() = default;
SourceLocation::SourceLocation(std::shared_ptr<const std::string> in, int at_line, int at_column)
    : file(std::move(in)), line(at_line), column(at_column) {}
SourceLocation::SourceLocation(const SourceLocation& other) = default;
SourceLocation::SourceLocation(SourceLocation&& other) noexcept = default;
SourceLocation& SourceLocation::operator=(const SourceLocation& other) = default;
SourceLocation& SourceLocation::operator=(SourceLocation&& other) noexcept = default;
SourceLocation::~SourceLocation() = default;

std::string SourceLocation::text() const {
  const std::string name = file ? *file : "";
  return line == 0 ? name : fmt::format("{}:{}:{}", name, line, column);
}

SourceLocation location_named(std::string name) {
  return {std::make_shared<const std::string>(std::move(name)), 0, 0};
}

}  // namespace lockstep
