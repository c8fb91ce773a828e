// Diagnostics on stderr. INFO on rank 0, or where set_level() has asked for it; warnings and errors
// on every rank. LOCKSTEP_LOG=debug|info|warning|error|off changes the level on all of them.
//
//   log::info("world", "backend gloo: device is cpu");
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

namespace lockstep::log {

enum class Level { kDebug, kInfo, kWarning, kError, kOff };

// Called once a process knows its rank; before that it counts as rank 0 of one.
void set_rank(int rank, int world_size);
void set_level(Level level);
bool enabled(Level level);
void write(Level level, std::string_view component, std::string_view text);
// The newest error of this process, "[component] text"; empty: it has logged none since its last
// step, by the ledger. Training went on after what was logged before.
std::string last_error();

template <typename... Args>
void debug(std::string_view component, fmt::format_string<Args...> f, Args&&... args) {
  if (enabled(Level::kDebug))
    write(Level::kDebug, component, fmt::format(f, std::forward<Args>(args)...));
}
template <typename... Args>
void info(std::string_view component, fmt::format_string<Args...> f, Args&&... args) {
  if (enabled(Level::kInfo))
    write(Level::kInfo, component, fmt::format(f, std::forward<Args>(args)...));
}
template <typename... Args>
void warning(std::string_view component, fmt::format_string<Args...> f, Args&&... args) {
  if (enabled(Level::kWarning))
    write(Level::kWarning, component, fmt::format(f, std::forward<Args>(args)...));
}
template <typename... Args>
void error(std::string_view component, fmt::format_string<Args...> f, Args&&... args) {
  if (enabled(Level::kError))
    write(Level::kError, component, fmt::format(f, std::forward<Args>(args)...));
}

}  // namespace lockstep::log
