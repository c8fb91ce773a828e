#include "lockstep/core/source_lines.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "lockstep/core/fd.h"
#include "lockstep/core/symbols.h"

namespace lockstep {
namespace {

struct SpawnActions {
  SpawnActions() {
    ::posix_spawn_file_actions_init(&files);
    ::posix_spawnattr_init(&attributes);
  }
  ~SpawnActions() {
    ::posix_spawn_file_actions_destroy(&files);
    ::posix_spawnattr_destroy(&attributes);
  }
  SpawnActions(const SpawnActions&) = delete;
  SpawnActions& operator=(const SpawnActions&) = delete;
  posix_spawn_file_actions_t files{};
  posix_spawnattr_t attributes{};
};

// A program that is found in PATH, with its output in `out` and nothing on stderr.
pid_t start(const std::vector<std::string>& command, int out) {
  SpawnActions actions;
  ::posix_spawn_file_actions_addopen(&actions.files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions.files, out, STDOUT_FILENO);
  ::posix_spawn_file_actions_addopen(&actions.files, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  sigset_t none, all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  ::posix_spawnattr_setsigmask(&actions.attributes, &none);
  ::posix_spawnattr_setsigdefault(&actions.attributes, &all);
  ::posix_spawnattr_setflags(&actions.attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  // It gets nothing else of the environment: a preloaded library or a server of debug information
  // (DEBUGINFOD_URLS) would only delay it.
  const char* path = std::getenv("PATH");
  std::string variable = fmt::format("PATH={}", path != nullptr ? path : "/usr/bin:/bin");
  char* environment[] = {variable.data(), nullptr};
  pid_t pid = -1;
  const int problem = ::posix_spawnp(&pid, arguments[0], &actions.files, &actions.attributes,
                                     arguments.data(), environment);
  return problem == 0 ? pid : -1;
}

// "/src/train.cpp:41 (discriminator 2)", "??:0", "/src/train.cpp:?"
std::string location_of(std::string line) {
  if (const auto note = line.find(" (discriminator"); note != line.npos) line.erase(note);
  const auto colon = line.rfind(':');
  if (colon == line.npos || line.starts_with("??")) return {};
  const std::string number = line.substr(colon + 1);
  const bool known = number != "0" && number.find_first_not_of("0123456789") == number.npos;
  if (!known || number.empty()) return {};
  return std::filesystem::path(line).lexically_normal().string();
}

std::vector<std::string> locations_in(const std::string& text, std::size_t count) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(location_of(line));
  if (lines.size() != count) lines.assign(count, "");
  return lines;
}

}  // namespace

std::vector<std::string> source_lines(const std::string& file,
                                      const std::vector<std::uint64_t>& addresses,
                                      const Deadline& deadline) {
  std::vector<std::string> unknown(addresses.size());
  if (addresses.empty() || !symbols::has_line_numbers(file)) return unknown;
  for (const char* tool : {"addr2line", "llvm-addr2line", "eu-addr2line"}) {
    std::vector<std::string> command = {tool, "-e", file};
    for (const std::uint64_t address : addresses) command.push_back(fmt::format("{:#x}", address));
    Pipe pipe = make_pipe();
    const pid_t pid = start(command, pipe.write.get());
    if (pid < 0) continue;  // it is not installed
    pipe.write.reset();
    const auto text = read_until_closed(pipe.read.get(), deadline);
    end_child(pid);
    return text ? locations_in(*text, addresses.size()) : unknown;
  }
  return unknown;
}

}  // namespace lockstep
