// Where a value was written: the file, line and column that an error about it names.
//
//   refuse_at(node.location, "{} must be positive.", key);   // [config] train.yaml:3:7: ...
#pragma once

#include <fmt/format.h>

#include <memory>
#include <string>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep {

// Where something was written. Line and column count from 1, columns in characters; line 0 is a
// source without lines, such as a flag, and then `file` is its name.
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

// Throws UsageError naming the location.
template <typename... Args>
[[noreturn]] void refuse_at(const SourceLocation& location, fmt::format_string<Args...> format,
                            Args&&... args) {
  throw UsageError("config", "{}: {}", location.text(),
                   fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace lockstep
