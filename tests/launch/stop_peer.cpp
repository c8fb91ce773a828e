// A rank that would save on a stop request, and prints how it interpreted SIGTERM.
//
//   stop_peer RANK    that rank exits with code 7 when the files up.<rank> of all are in $NOTES
//
// Times are from CLOCK_MONOTONIC, which all processes of the host share.
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "lockstep/core/fd.h"
#include "lockstep/rendezvous/control.h"

namespace {

namespace fs = std::filesystem;

void say(const std::string& what) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const std::string line =
      fmt::format("{} at {:.6f}\n", what, std::chrono::duration<double>(now).count());
  [[maybe_unused]] const auto n = ::write(STDOUT_FILENO, line.data(), line.size());
}

// failure() and say() allocate and lock, so the handler only wakes the main thread.
int g_wake = -1;

void on_sigterm(int) {
  [[maybe_unused]] const auto n = ::write(g_wake, "", 1);
}

// Sleeps, or ends the process because of SIGTERM.
void sleep_10_ms(const lockstep::Fd& terminated) {
  pollfd fd{terminated.get(), POLLIN, 0};
  if (::poll(&fd, 1, 10) == 0 || (fd.revents & POLLIN) == 0) return;
  say(lockstep::control::failure() ? "handler: failure" : "handler: request");
  ::_exit(0);
}

bool all_are_up(const fs::path& notes) {
  const int size = std::atoi(std::getenv("WORLD_SIZE"));
  for (int rank = 0; rank < size; ++rank) {
    if (!fs::exists(notes / fmt::format("up.{}", rank))) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const fs::path notes = std::getenv("NOTES");
  const std::string rank = std::getenv("RANK");
  const auto token =
      lockstep::control::subscribe([](const lockstep::control::PeerFailure&) { say("notified"); });
  const lockstep::Pipe wake = lockstep::make_pipe();
  g_wake = wake.write.get();
  std::signal(SIGTERM, on_sigterm);
  const fs::path note = notes / ("up." + rank);
  std::ofstream(note.string() + ".tmp") << ::getpid();
  fs::rename(note.string() + ".tmp", note);
  for (int round = 0; round < 3000; ++round) {
    if (argc > 1 && rank == argv[1] && all_are_up(notes)) {
      say("leaving");
      return 7;
    }
    sleep_10_ms(wake.read);
  }
  return 1;
}
