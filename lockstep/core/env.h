// Environment variables, parsed strictly: a value that does not parse is an error that names the
// variable, and is never silently replaced by a default.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::env {

// The value, or nothing when the variable is unset. An empty value counts as unset.
std::optional<std::string> get(const std::string& name);

// Throw UsageError naming variable and value when it does not parse completely or is out of range.
std::optional<std::int64_t> get_int(const std::string& name, std::int64_t min = INT64_MIN,
                                    std::int64_t max = INT64_MAX);
// 1/true/yes/on and 0/false/no/off, in any case.
std::optional<bool> get_bool(const std::string& name);

// The same rules for text from elsewhere; `what` names it in the error.
std::int64_t parse_int(std::string_view text, std::string_view what, std::int64_t min = INT64_MIN,
                       std::int64_t max = INT64_MAX);
bool parse_bool(std::string_view text, std::string_view what);

}  // namespace lockstep::env
