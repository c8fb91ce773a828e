#include "cli/local_ranks.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "lockstep/core/deadline.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::ptrdiff_t kTailLines = 15;
constexpr std::size_t kTailBytes = 64u << 10;
constexpr std::chrono::seconds kEndLimit{5};  // from SIGTERM to SIGKILL of the launcher

// The caller's environment, without the flags of another `lockstep run`.
std::vector<std::string> environment(const std::vector<std::string>& more) {
  std::vector<std::string> variables = more;
  for (char** entry = ::environ; *entry != nullptr; ++entry)
    if (std::string_view(*entry).substr(0, 4) != "PET_") variables.emplace_back(*entry);
  return variables;
}

// A stall explains itself before the deadline, by the ranks' time-outs and the launcher's table.
std::vector<std::string> command(const RanksRequest& request, const std::string& folder) {
  const int third = std::max(1, request.timeout_s / 3);
  std::vector<std::string> all{fs::read_symlink("/proc/self/exe"),
                               "run",
                               "--standalone",
                               fmt::format("--nproc-per-node={}", request.ranks),
                               "--no-python",
                               "--shutdown-timeout=2",
                               "--log-dir=" + folder + "/logs",  // a stall's table is kept there
                               fmt::format("--stall-timeout={}", third),
                               "--stall-action=stop",
                               fmt::format("--startup-timeout={}", 2 * third),
                               fmt::format("--timeout={}", 2 * third),
                               train_program()};
  all.insert(all.end(), request.arguments.begin(), request.arguments.end());
  return all;
}

// Reads until the other end is closed or the deadline has passed; false: it has.
bool read_all(int fd, std::string& text, const Deadline& deadline) {
  char buffer[4096];
  for (;;) {
    pollfd waiting{fd, POLLIN, 0};
    const int ready = ::poll(&waiting, 1, deadline.remaining_ms());
    if (ready == 0) return false;
    if (ready < 0 && errno == EINTR) continue;
    const ssize_t n = ready < 0 ? -1 : ::read(fd, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return true;
    text.append(buffer, static_cast<std::size_t>(n));
    if (text.size() > 2 * kTailBytes) text.erase(0, text.size() - kTailBytes);
  }
}

}  // namespace

std::string train_program() {
  const fs::path self = fs::read_symlink("/proc/self/exe");
  std::string program = self.parent_path().parent_path() / "libexec" / "lockstep-train";
  return ::access(program.c_str(), X_OK) == 0 ? program : "";
}

RanksOutcome run_ranks(const RanksRequest& request, const std::string& folder) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(request.timeout_s));
  Pipe pipe = make_pipe();
  launch::Process launcher = launch::start_process({.argv = command(request, folder),
                                                    .environment = environment(request.environment),
                                                    .stdout_fd = pipe.write.get(),
                                                    .stderr_fd = pipe.write.get()});
  pipe.write.reset();
  RanksOutcome outcome;
  outcome.in_time = read_all(pipe.read.get(), outcome.output, deadline);
  if (!outcome.in_time) {
    // The launcher stops its ranks; its guard does when the launcher itself is killed.
    launcher.signal_group(SIGTERM);
    read_all(pipe.read.get(), outcome.output, Deadline::after(kEndLimit));
  }
  if (!launcher.wait_for(kEndLimit)) launcher.signal_group(SIGKILL);
  launcher.wait_for(kEndLimit);
  outcome.ending = launcher.reap().value_or(launch::Ending{});  // none: stuck in the kernel
  return outcome;
}

std::vector<std::string> tail(const std::string& text) {
  std::vector<std::string> lines = lines_of(text);
  std::erase_if(lines, [](const std::string& line) {
    return line.empty() || line.find("+0x") != std::string::npos;
  });
  lines.erase(lines.begin(), lines.end() - std::min(std::ssize(lines), kTailLines));
  for (std::string& line : lines) line.resize(std::min<std::size_t>(line.size(), 300));
  return lines;
}

}  // namespace lockstep::cli
