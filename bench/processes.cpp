#include "bench/processes.h"

#include <poll.h>
#include <signal.h>
#include <sys/resource.h>

#include <cerrno>
#include <filesystem>

#include "lockstep/core/deadline.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"

extern char** environ;

namespace lockstep::bench {
namespace fs = std::filesystem;

namespace {
fs::path here() {
  return fs::read_symlink("/proc/self/exe").parent_path();
}
}  // namespace

std::string program_beside(const std::string& relative) {
  const fs::path path = fs::weakly_canonical(here() / relative);
  if (!fs::exists(path))
    throw UsageError("bench", "{} is missing. Run ./dev build.", path.string());
  return path.string();
}

std::string peer(const std::string& file) {
  for (const char* place : {"../../bench/peers", "../share/lockstep/peers"}) {
    const fs::path path = fs::weakly_canonical(here() / place / file);
    if (fs::exists(path)) return path.string();
  }
  throw UsageError("bench", "the peer script {} is neither in the source tree nor installed.",
                   file);
}

std::string python() {
  return env::get("LOCKSTEP_PYTHON").value_or(LOCKSTEP_DEFAULT_PYTHON);
}

launch::Process start_lockstep(const std::vector<std::string>& arguments,
                               const Environment& changed, int output) {
  launch::ProcessRequest request;
  request.argv = {program_beside("../bin/lockstep")};
  request.argv.insert(request.argv.end(), arguments.begin(), arguments.end());
  for (char** entry = ::environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!changed.contains(text.substr(0, text.find('=')))) request.environment.push_back(text);
  }
  for (const auto& [name, value] : changed)
    if (!value.empty()) request.environment.push_back(name + "=" + value);
  request.stdout_fd = request.stderr_fd = output;
  ::sigprocmask(SIG_SETMASK, nullptr, &request.signal_mask);
  ::getrlimit(RLIMIT_NOFILE, &request.files);
  return launch::start_process(request);
}

bool ended(const launch::Process& process, std::chrono::milliseconds limit) {
  const Deadline deadline = Deadline::after(limit);
  pollfd fd{process.pidfd(), POLLIN, 0};
  int count;
  do {
    count = ::poll(&fd, 1, deadline.remaining_ms());
  } while (count < 0 && errno == EINTR);
  return count > 0;
}

void stop(launch::Process& process) {
  for (const int signal : {0, SIGTERM, SIGKILL}) {
    if (!process.alive()) return;
    if (signal != 0) process.signal_group(signal);
    if (ended(process, std::chrono::seconds(10))) process.reap();
  }
}

}  // namespace lockstep::bench
