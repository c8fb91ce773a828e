#include "lockstep/launch/supervisor_guard.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <new>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/log.h"
#include "lockstep/launch/process.h"

namespace lockstep::launch {
namespace {

class SharedRegistry {
 public:
  SharedRegistry() {
    void* memory = ::mmap(nullptr, sizeof(RankRegistry), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw SystemError("launch", "cannot map shared memory", errno);
    registry_ = new (memory) RankRegistry;
  }
  ~SharedRegistry() { ::munmap(registry_, sizeof(RankRegistry)); }
  SharedRegistry(const SharedRegistry&) = delete;
  SharedRegistry& operator=(const SharedRegistry&) = delete;
  RankRegistry* get() const { return registry_; }

 private:
  RankRegistry* registry_;
};

// Blocks signals, becomes a subreaper, makes children waitable, and puts all three back.
class CallerState {
 public:
  explicit CallerState(const sigset_t& blocked) {
    ::pthread_sigmask(SIG_BLOCK, &blocked, &mask_);
    struct sigaction fresh {};
    fresh.sa_handler = SIG_DFL;  // where SIGCHLD is ignored, the kernel throws statuses away
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

// A descriptor below 3 that is closed would be given to a pipe and then be mistaken for stdout.
void open_standard_descriptors() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0 && errno == EBADF) {
      // The lowest free number is this one.
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

// Kills what is below this process, of the sessions in `registry` only where one is given.
void kill_below(const RankRegistry* registry) {
  constexpr int kRounds = 200;
  for (int round = 0; round < kRounds; ++round) {
    bool found = false;
    for (const pid_t pid : descendants_of(::getpid())) {
      if (registry != nullptr && !registry->contains(session_of(pid))) continue;
      found = true;
      signal_below(::getpid(), pid, SIGKILL);
      ::waitpid(pid, nullptr, WNOHANG);
    }
    if (!found) return;
    ::poll(nullptr, 0, 10);
  }
}

int exit_code_of(const siginfo_t& info, const RankRegistry& registry) {
  if (info.si_code == CLD_EXITED) return info.si_status;
  kill_below(&registry);  // the supervisor could not clean up: what its ranks started is ours now
  log::error("launch",
             "the supervising process was killed by {}. Somebody, perhaps the kernel's "
             "out-of-memory killer, sent it that signal; its ranks were killed too.",
             signal_name(info.si_status));
  return 128 + info.si_status;
}

// Passes each signal on to the supervisor until it ends.
int stay_in_front(pid_t supervisor, int signal_fd, const RankRegistry& registry) {
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
      return exit_code_of(info, registry);
  }
}

// Four descriptors per rank: the usual 1024 would be too few for some hundred ranks.
void allow_many_files(const rlimit& now) {
  rlimit limit = now;
  limit.rlim_cur = std::max(now.rlim_cur, std::min<rlim_t>(now.rlim_max, 65'536));
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

[[noreturn]] void be_supervisor(const GuardContext& guard,
                                const std::function<int(const GuardContext&)>& body) {
  // Its own session: what the terminal sends comes once, through the front.
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
  // Nothing on the regular way out; after an exception whatever was running.
  kill_below(nullptr);
  // No destructors and no exit handlers of the front's: they are the front's to run.
  ::_exit(code);
}

}  // namespace

void RankRegistry::add(pid_t session) {
  const int slot = count_.load();
  if (slot >= kMax) return;
  sessions_[slot] = session;
  count_ = slot + 1;
}

bool RankRegistry::contains(pid_t session) const {
  const pid_t* end = sessions_ + std::min(count_.load(), kMax);
  return std::find(sessions_, end, session) != end;
}

int run_supervised(std::vector<int> signals,
                   const std::function<int(const GuardContext&)>& supervise,
                   const std::function<void()>& left_behind) {
  open_standard_descriptors();
  std::erase_if(signals, [](int number) { return number == SIGHUP && is_ignored(number); });
  const SharedRegistry registry;
  const sigset_t passed_on = set_of(signals);
  sigset_t blocked = passed_on;
  ::sigaddset(&blocked, SIGCHLD);
  ::sigaddset(&blocked, SIGPIPE);
  const CallerState caller(blocked);
  Fd signal_fd(::signalfd(-1, &passed_on, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signal_fd) throw SystemError("launch", "cannot create a signalfd", errno);
  Pipe lifeline = make_pipe();
  const pid_t supervisor = ::fork();
  if (supervisor < 0) throw SystemError("launch", "cannot start the supervising process", errno);
  if (supervisor == 0) {
    lifeline.write.reset();
    signal_fd.reset();
    rlimit files{};
    ::getrlimit(RLIMIT_NOFILE, &files);
    be_supervisor({lifeline.read.get(), caller.mask(), files, signals, registry.get()}, supervise);
  }
  lifeline.read.reset();
  left_behind();
  return stay_in_front(supervisor, signal_fd.get(), *registry.get());
}

}  // namespace lockstep::launch
