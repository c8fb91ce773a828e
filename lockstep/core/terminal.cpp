#include "lockstep/core/terminal.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>

#include "lockstep/core/env.h"

namespace lockstep::terminal {
namespace {

constexpr int kUsualColumns = 80;

// "<device>:<inode>:"
std::string name_of(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return {};
  return fmt::format("{}:{}:", info.st_dev, info.st_ino);
}

}  // namespace

int columns(int fd) {
  if (::isatty(fd) == 1) {
    winsize size{};
    return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kUsualColumns;
  }
  const std::string text = env::get(kVariable).value_or("");
  const std::string name = name_of(fd);
  if (name.empty() || text.rfind(name, 0) != 0) return 0;
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data() + name.size(), end, value);
  return error == std::errc() && stop == end && value > 0 ? value : 0;
}

std::string describe_pipe(int fd, int columns) {
  const std::string name = name_of(fd);
  return name.empty() || columns <= 0 ? std::string() : name + std::to_string(columns);
}

}  // namespace lockstep::terminal
