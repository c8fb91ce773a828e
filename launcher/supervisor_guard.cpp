#include "launcher/supervisor_guard.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <set>

#include "launcher/process.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/log.h"

namespace lockstep::launch {
namespace {

// Blocks signals, becomes a subreaper and makes children waitable; the destructor restores all.
class CallerState {
 public:
  explicit CallerState(const sigset_t& blocked) {
    ::pthread_sigmask(SIG_BLOCK, &blocked, &mask_);
    struct sigaction fresh {};
    fresh.sa_handler = SIG_DFL;  // if SIGCHLD is ignored, the kernel discards exit statuses
    ::sigaction(SIGCHLD, &fresh, &on_child_);
    ::prctl(PR_GET_CHILD_SUBREAPER, &subreaper_);
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  }
  ~CallerState() {
    ::prctl(PR_SET_CHILD_SUBREAPER, subreaper_);
    ::sigaction(SIGCHLD, &on_child_, nullptr);
    ::pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
  }
  CallerState(const CallerState&) = delete;
  CallerState& operator=(const CallerState&) = delete;
  const sigset_t& mask() const { return mask_; }

 private:
  sigset_t mask_;
  struct sigaction on_child_;
  int subreaper_ = 0;
};

// A pipe could get the number of a closed standard descriptor and be mistaken for stdout.
void open_standard_descriptors() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0 && errno == EBADF) {
      // open() returns the lowest free number, which is fd.
      [[maybe_unused]] const int opened = ::open("/dev/null", fd == 0 ? O_RDONLY : O_WRONLY);
    }
  }
}

bool is_ignored(int number) {
  struct sigaction action;
  return ::sigaction(number, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

sigset_t set_of(const std::vector<int>& signals) {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int number : signals) ::sigaddset(&set, number);
  return set;
}

// Kills what is below this process except the subtrees of `except`; returns what is left.
std::vector<pid_t> kill_below(const std::function<std::set<pid_t>()>& except) {
  constexpr int kRounds = 200;
  std::vector<pid_t> found;
  for (int round = 0; round < kRounds; ++round) {
    found = descendants_of(::getpid(), except());
    if (found.empty()) break;
    for (const pid_t pid : found) {
      signal_below(::getpid(), pid, SIGKILL);
      ::waitpid(pid, nullptr, WNOHANG);
    }
    ::poll(nullptr, 0, 10);
  }
  return found;
}

// The own children of a program that calls spawn(): those that it had before, and those that
// another thread has started since, which are in its session. Processes of ranks are in other
// sessions.
std::set<pid_t> own_children(const std::set<pid_t>& before) {
  std::set<pid_t> own;
  const pid_t session = ::getsid(0);
  for (const pid_t pid : children_of(::getpid()))
    if (before.count(pid) != 0 || session_of(pid) == session) own.insert(pid);
  return own;
}

int exit_code_of(const siginfo_t& info, const std::set<pid_t>& before) {
  if (info.si_code == CLD_EXITED) return info.si_status;
  // The supervisor was killed: this process inherits what its ranks had started.
  const auto left = kill_below([&] { return own_children(before); });
  std::string ending = "its ranks and what they had started were killed too.";
  if (!left.empty())
    ending +=
        fmt::format(" {} of them cannot be killed (first: pid {}).", left.size(), left.front());
  if (!can_see_processes())
    ending = "its ranks were killed too. Without /proc, what they had started is not found.";
  log::error("launch",
             "the supervising process was killed by {}. Somebody, perhaps the kernel's "
             "out-of-memory killer, sent it that signal; {}",
             signal_name(info.si_status), ending);
  return 128 + info.si_status;
}

// Forwards signals to the supervisor until it exits.
int relay_signals(pid_t supervisor, int signal_fd, const std::set<pid_t>& before) {
  Fd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, supervisor, 0)));
  if (!pidfd) {
    const int error = errno;
    ::kill(supervisor, SIGKILL);
    ::waitpid(supervisor, nullptr, 0);
    throw SystemError("launch", "cannot watch a process (Linux 5.4 or newer is needed)", error);
  }
  for (;;) {
    pollfd fds[] = {{signal_fd, POLLIN, 0}, {pidfd.get(), POLLIN, 0}};
    if (::poll(fds, 2, -1) < 0 && errno != EINTR)
      throw SystemError("launch", "cannot wait for the supervising process", errno);
    signalfd_siginfo signal{};
    if ((fds[0].revents & POLLIN) != 0 &&
        ::read(signal_fd, &signal, sizeof signal) == static_cast<ssize_t>(sizeof signal)) {
      ::syscall(SYS_pidfd_send_signal, pidfd.get(), static_cast<int>(signal.ssi_signo), nullptr, 0);
    }
    siginfo_t info{};
    if (::waitid(P_PID, static_cast<id_t>(supervisor), &info, WEXITED | WNOHANG) == 0 &&
        info.si_pid != 0)
      return exit_code_of(info, before);
  }
}

// Each rank needs four descriptors, so the usual limit of 1024 is too low for hundreds of ranks.
void allow_many_files(const rlimit& now) {
  rlimit limit = now;
  limit.rlim_cur = std::max(now.rlim_cur, std::min<rlim_t>(now.rlim_max, 65'536));
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

[[noreturn]] void be_supervisor(const GuardContext& guard,
                                const std::function<int(const GuardContext&)>& body) {
  // In a session of its own, so that a terminal's signals come only once, from the front process.
  ::setsid();
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  ::prctl(PR_SET_NAME, "rank-guard");  // not found by a kill that names the launcher
  allow_many_files(guard.callers_files);
  int code = 1;
  try {
    code = body(guard);
  } catch (const UsageError& error) {
    fmt::print(stderr, "{}\n", error.what());
    code = 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
  }
  // Normally nothing is left, but after an exception ranks may be running.
  kill_below([] { return std::set<pid_t>(); });
  // Without destructors and exit handlers, which the front process runs.
  ::_exit(code);
}

}  // namespace

int run_supervised(std::vector<int> signals,
                   const std::function<int(const GuardContext&)>& supervise,
                   const std::function<void()>& left_behind) {
  open_standard_descriptors();
  std::erase_if(signals, [](int number) { return number == SIGHUP && is_ignored(number); });
  const sigset_t passed_on = set_of(signals);
  sigset_t blocked = passed_on;
  ::sigaddset(&blocked, SIGCHLD);
  ::sigaddset(&blocked, SIGPIPE);
  const CallerState caller(blocked);
  Fd signal_fd(::signalfd(-1, &passed_on, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signal_fd) throw SystemError("launch", "cannot create a signalfd", errno);
  Pipe lifeline = make_pipe();
  const std::vector<pid_t> children = children_of(::getpid());
  const pid_t supervisor = ::fork();
  if (supervisor < 0) throw SystemError("launch", "cannot start the supervising process", errno);
  if (supervisor == 0) {
    lifeline.write.reset();
    signal_fd.reset();
    rlimit files{};
    ::getrlimit(RLIMIT_NOFILE, &files);
    be_supervisor({lifeline.read.get(), caller.mask(), files, signals}, supervise);
  }
  lifeline.read.reset();
  left_behind();
  return relay_signals(supervisor, signal_fd.get(), {children.begin(), children.end()});
}

}  // namespace lockstep::launch
