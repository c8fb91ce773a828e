#include "lockstep/core/source_location.h"

namespace lockstep {

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
