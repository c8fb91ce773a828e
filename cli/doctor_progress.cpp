// What takes long is said by a timer's signal, not by a thread: the doctor forks to ask drivers.
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "cli/doctor_checks.h"

namespace lockstep::cli {
namespace {

std::atomic<const char*> under_way{nullptr};

void say_progress(int) {
  const int error = errno;
  if (const char* what = under_way.load()) {
    constexpr char kBegin[] = "lockstep doctor: ";
    [[maybe_unused]] ssize_t n = ::write(STDERR_FILENO, kBegin, sizeof kBegin - 1);
    n = ::write(STDERR_FILENO, what, std::strlen(what));
    n = ::write(STDERR_FILENO, " ...\n", 5);
  }
  errno = error;
}

void set_timer(int first_s, int interval_s) {
  itimerval timer{};
  timer.it_value.tv_sec = first_s;
  timer.it_interval.tv_sec = interval_s;
  ::setitimer(ITIMER_REAL, &timer, nullptr);
}

}  // namespace

Progress::Progress(const char* what) {
  under_way = what;
  struct sigaction action {};
  action.sa_handler = say_progress;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGALRM, &action, nullptr);
  set_timer(2, 5);
}

Progress::~Progress() {
  set_timer(0, 0);
  under_way = nullptr;
}

}  // namespace lockstep::cli
