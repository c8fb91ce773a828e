// Collects all mistakes of an input, so that a user fixes them in one go instead of one by one.
//
//   Problems problems;
//   problems.attempt([&] { batch = as_integer(node, "batch"); });
//   problems.raise();      // UsageError with all of them, or nothing
#pragma once

#include <fmt/ranges.h>  // join, in newer versions of fmt

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep {

// Used by one thread, on the stack.
class Problems {
 public:
  // Runs `read` and keeps the UsageError that it throws; true when there was none.
  template <typename Read>
  bool attempt(Read&& read) {
    try {
      std::forward<Read>(read)();
      return true;
    } catch (const UsageError& error) {
      add(error.what());
      return false;
    }
  }

  void add(std::string text) {
    // Strips the "[component] " prefix: all of them are reported as one.
    const std::size_t end = text.starts_with('[') ? text.find("] ") : text.npos;
    if (end < text.find(' ')) text.erase(0, end + 2);
    texts_.push_back(std::move(text));
  }

  void add(const Problems& others) {
    texts_.insert(texts_.end(), others.texts_.begin(), others.texts_.end());
  }

  bool empty() const { return texts_.empty(); }
  std::size_t size() const { return texts_.size(); }
  const std::vector<std::string>& texts() const { return texts_; }
  // True at the maximum: more mistakes would only make the message longer.
  bool full() const { return texts_.size() >= kMax; }

  void raise() const {
    if (texts_.empty()) return;
    if (texts_.size() == 1) throw UsageError("config", "{}", texts_.front());
    throw UsageError("config", "{}{} mistakes:\n  {}", full() ? "at least " : "", texts_.size(),
                     fmt::join(texts_, "\n  "));
  }

 private:
  static constexpr std::size_t kMax = 50;

  std::vector<std::string> texts_;
};

}  // namespace lockstep
