// A timer's signal reports what takes long, not a thread: the doctor forks to ask drivers.
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "cli/doctor_checks.h"

namespace lockstep::cli {
namespace {

constexpr int kFirst_s = 2;
constexpr int kEvery_s = 5;

std::atomic<const char*> under_way{nullptr};
std::atomic<int> said{0};  // lines written so far

// Called by a signal handler, which may not format.
void write_number(int value) {
  char digits[12];
  char* begin = digits + sizeof digits;
  do *--begin = static_cast<char>('0' + value % 10);
  while ((value /= 10) > 0);
  [[maybe_unused]] const ssize_t n =
      ::write(STDERR_FILENO, begin, static_cast<std::size_t>(digits + sizeof digits - begin));
}

void say_progress(int) {
  const int error = errno;
  if (const char* what = under_way.load()) {
    static constexpr char kBegin[] = "lockstep doctor: ";
    [[maybe_unused]] ssize_t n = ::write(STDERR_FILENO, kBegin, sizeof kBegin - 1);
    n = ::write(STDERR_FILENO, what, std::strlen(what));
    n = ::write(STDERR_FILENO, " ...", 4);
    if (const int before = said++; before > 0) {
      n = ::write(STDERR_FILENO, " ", 1);
      write_number(kFirst_s + before * kEvery_s);
      n = ::write(STDERR_FILENO, " s", 2);
    }
    n = ::write(STDERR_FILENO, "\n", 1);
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
  said = 0;
  under_way = what;
  struct sigaction action {};
  action.sa_handler = say_progress;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGALRM, &action, nullptr);
  set_timer(kFirst_s, kEvery_s);
}

Progress::~Progress() {
  set_timer(0, 0);
  under_way = nullptr;
}

}  // namespace lockstep::cli
