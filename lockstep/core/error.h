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
#include <memory>
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

// Where a value was written, for an error about it. Line and column count from 1, columns in
// characters; line 0 is a source without lines, such as a flag, and then `file` is its name.
struct SourceLocation {
  std::shared_ptr<const std::string> file;
  int line = 0;
  int column = 0;

  // Not inline: GCC 12 warns of members that it loses track of in temporaries that hold a
  // SourceLocation.
  SourceLocation();
  SourceLocation(std::shared_ptr<const std::string> in, int at_line, int at_column);
  SourceLocation(const SourceLocation& other);
  SourceLocation(SourceLocation&& other) noexcept;
  SourceLocation& operator=(const SourceLocation& other);
  SourceLocation& operator=(SourceLocation&& other) noexcept;
  ~SourceLocation();

  std::string text() const;  // "train.yaml:3:7", or "--learning_rate"
};
SourceLocation location_named(std::string name);

// Throws UsageError naming the location: "[config] train.yaml:3:7: k must be positive."
//
//   refuse_at(node.location, "{} must be positive.", key);
template <typename... Args>
[[noreturn]] void refuse_at(const SourceLocation& location, fmt::format_string<Args...> format,
                            Args&&... args) {
  throw UsageError("config", "{}: {}", location.text(),
                   fmt::format(format, std::forward<Args>(args)...));
}

namespace detail {

// Thrown by a rank because another rank threw first: an error of the same kind, so that all ranks
// catch the same type. Reports treat it as a consequence.
//
//   throw detail::PeerError(UsageError("world", "rank {}: {}", rank, text), rank);
class FromPeer {
 public:
  explicit FromPeer(int rank) : rank_(rank) {}
  virtual ~FromPeer() = default;
  int rank() const { return rank_; }

 private:
  int rank_;
};

template <typename Kind>
class PeerError final : public Kind, public FromPeer {
 public:
  PeerError(Kind error, int rank) : Kind(std::move(error)), FromPeer(rank) {}
};

// A TimeoutError that knows its cause: the part of its message after the time, such as which ranks
// did not arrive.
//
//   throw LateOperation({"shm", text, context}, ": rank 1 did not arrive. It is stopped.");
class LateOperation : public TimeoutError {
 public:
  LateOperation(const TimeoutError& error, std::string why)
      : TimeoutError(error), why_(std::move(why)) {}
  // Empty: not known.
  const std::string& why() const { return why_; }

 private:
  std::string why_;
};

// A CommError without a dead rank: live ranks called operations that do not match. Its reporter
// therefore need not wait for a launcher to announce an ended rank.
class Disagreement : public CommError {
 public:
  using CommError::CommError;
};

[[noreturn]] void assertion_failed(const char* expression, const char* file, int line);

}  // namespace detail
}  // namespace lockstep

#define LOCKSTEP_ASSERT(expression) \
  (static_cast<bool>(expression)    \
       ? static_cast<void>(0)       \
       : ::lockstep::detail::assertion_failed(#expression, __FILE__, __LINE__))
