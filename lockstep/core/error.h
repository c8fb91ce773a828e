// The exceptions, and who throws what:
//
//   UsageError     the caller's mistake; thrown before any communication, so all ranks can recover
//   SystemError    the operating system refused: a file, a socket, memory; holds errno
//   CommError      the world failed: a peer died, a socket broke, ranks disagreed
//   TimeoutError   a CommError whose cause is a deadline
//   InternalError  our own bug; LOCKSTEP_ASSERT stays on in release builds
//
// A message reads `[component] what happened (values). Likely cause. What to try.`
//
//   throw UsageError("world", "device cuda:{} does not exist. Start fewer ranks.", index);
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep {

class Error : public std::runtime_error {
 public:
  Error(std::string_view component, std::string_view text)
      : std::runtime_error(fmt::format("[{}] {}", component, text)) {}
};

class UsageError : public Error {
 public:
  template <typename... Args>
  UsageError(std::string_view component, fmt::format_string<Args...> format, Args&&... args)
      : Error(component, fmt::format(format, std::forward<Args>(args)...)) {}
};

// Where a collective stood when it failed. Negative ranks mean "not known".
struct CommContext {
  int rank = -1;
  int peer = -1;
  std::string
      operation{};  // {}: GCC warns of designated initialisers that skip a member without one
  std::uint64_t sequence = 0;
  std::chrono::milliseconds elapsed{0};
};

class CommError : public Error {
 public:
  CommError(std::string_view component, std::string_view text, CommContext context = {})
      : Error(component, text), context_(std::move(context)) {}
  const CommContext& context() const { return context_; }

 private:
  CommContext context_;
};

class TimeoutError : public CommError {
 public:
  using CommError::CommError;
};

class InternalError : public Error {
 public:
  using Error::Error;
};

// An operating-system call that failed: the text ends with errno's message.
class SystemError : public Error {
 public:
  SystemError(std::string_view component, std::string_view text, int error_number);
  int error_number() const { return error_number_; }
  // With a text that has errno's message already.
  static SystemError described(std::string_view component, std::string_view text, int error_number);

 private:
  SystemError(const Error& error, int error_number) : Error(error), error_number_(error_number) {}
  int error_number_;
};

namespace detail {
[[noreturn]] void assertion_failed(const char* expression, const char* file, int line);
}

}  // namespace lockstep

#define LOCKSTEP_ASSERT(expression) \
  (static_cast<bool>(expression)    \
       ? static_cast<void>(0)       \
       : ::lockstep::detail::assertion_failed(#expression, __FILE__, __LINE__))
