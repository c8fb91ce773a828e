#include "launcher/process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>

#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/host.h"
#include "lockstep/core/log.h"
#include "lockstep/core/text.h"

namespace lockstep::launch {

namespace {

namespace fs = std::filesystem;

std::vector<char*> pointers_to(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (const std::string& text : strings) pointers.push_back(const_cast<char*>(text.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

// An ignored signal stays ignored after exec. Shells ignore SIGINT and SIGQUIT in background jobs,
// but ranks must receive them from the launcher. SIGHUP (nohup) and all others that the caller
// ignores stay ignored.
void default_dispositions() {
  for (const int number : {SIGINT, SIGQUIT, SIGTERM, SIGPIPE, SIGCHLD}) ::signal(number, SIG_DFL);
}

struct ChildPlan {
  const ProcessRequest* request;
  char* const* argv;
  char* const* environment;
  pid_t parent;
  int error_fd;
};

// Runs between fork and exec: only calls that are safe in a child of a process with threads.
[[noreturn]] void become_rank(const ChildPlan& plan) {
  const auto give_up = [&plan] {
    const int error = errno;
    [[maybe_unused]] const auto n = ::write(plan.error_fd, &error, sizeof error);
    ::_exit(127);
  };
  const ProcessRequest& request = *plan.request;
  ::setsid();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != plan.parent) ::_exit(127);  // the parent died before the line above
  if (request.stdout_fd >= 0 && ::dup2(request.stdout_fd, STDOUT_FILENO) < 0) give_up();
  if (request.stderr_fd >= 0 && ::dup2(request.stderr_fd, STDERR_FILENO) < 0) give_up();
  for (const int fd : request.pass_fds) {
    if (::fcntl(fd, F_SETFD, 0) < 0) give_up();
  }
  if (request.cpus != nullptr && !request.cpus->apply()) give_up();
  default_dispositions();
  if (request.files.rlim_max != 0) ::setrlimit(RLIMIT_NOFILE, &request.files);
  ::sigprocmask(SIG_SETMASK, &request.signal_mask, nullptr);
  ::execvpe(plan.argv[0], plan.argv, plan.environment);
  give_up();
  ::_exit(127);
}

// The child's error, or 0 once exec has closed the pipe. The timeout is for a program on a file
// system that does not respond.
int error_from_exec(int fd) {
  constexpr int kExecTimeoutMs = 120'000;
  pollfd poll_fd{fd, POLLIN, 0};
  int ready;
  do {
    ready = ::poll(&poll_fd, 1, kExecTimeoutMs);
  } while (ready < 0 && errno == EINTR);
  if (ready == 0) return ETIMEDOUT;
  int error = 0;
  return ::read(fd, &error, sizeof error) == static_cast<ssize_t>(sizeof error) ? error : 0;
}

// Fields of proc_pid_stat(5).
struct Stat {
  pid_t parent = -1;
  pid_t group = -1;
  pid_t session = -1;
};

Stat read_stat(pid_t pid) {
  const std::string text = text_or_empty(fmt::format("/proc/{}/stat", pid));
  const auto fields = stat_fields(text);
  if (fields.size() <= 6) return {};
  const auto number = [&](std::size_t which) {
    return static_cast<pid_t>(leading_number(fields[which]).value_or(0));
  };
  return {.parent = number(4), .group = number(5), .session = number(6)};
}

std::vector<pid_t> children_by_scan(pid_t parent) {
  std::vector<pid_t> children;
  std::error_code gone;
  for (fs::directory_iterator at("/proc", gone), end; !gone && at != end; at.increment(gone)) {
    const auto pid = static_cast<pid_t>(std::atoi(at->path().filename().c_str()));
    if (pid > 0 && read_stat(pid).parent == parent) children.push_back(pid);
  }
  return children;
}

}  // namespace

std::string Ending::text() const {
  if (!by_signal) return fmt::format("exited with code {}", number);
  return fmt::format("killed by {}{}", signal_name(number), dumped_core ? " (core dumped)" : "");
}

void Process::signal_group(int number) const {
  // Until it is reaped, its pid, which is the group's id, is not reused.
  if (alive()) ::kill(-pid_, number);
}

bool Process::wait_for(std::chrono::milliseconds limit) const {
  const Deadline deadline = Deadline::after(limit);
  pollfd fd{pidfd(), POLLIN, 0};
  int count;
  do {
    count = ::poll(&fd, 1, deadline.remaining_ms());
  } while (count < 0 && errno == EINTR);
  return count > 0;
}

std::optional<Ending> Process::reap() {
  if (!alive()) return std::nullopt;
  siginfo_t info{};
  int result;
  do {
    result = ::waitid(static_cast<idtype_t>(P_PIDFD), static_cast<id_t>(pidfd_.get()), &info,
                      WEXITED | WNOHANG);
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    // Other code has reaped it: its status is lost, but the process is gone.
    reaped_ = true;
    return Ending{false, 1, false};
  }
  if (info.si_pid == 0) return std::nullopt;
  reaped_ = true;
  Ending ending;
  ending.by_signal = info.si_code != CLD_EXITED;
  ending.dumped_core = info.si_code == CLD_DUMPED;
  ending.number = info.si_status;
  return ending;
}

std::optional<Pause> Process::poll_pause() const {
  if (!alive()) return std::nullopt;
  siginfo_t info{};
  if (::waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WCONTINUED | WNOHANG) != 0 ||
      info.si_pid == 0)
    return std::nullopt;
  return Pause{info.si_code == CLD_STOPPED, info.si_status};
}

Process start_process(const ProcessRequest& request) {
  LOCKSTEP_ASSERT(!request.argv.empty());
  const auto argv = pointers_to(request.argv);
  const auto environment = pointers_to(request.environment);
  Pipe errors = make_pipe();
  const ChildPlan plan{&request, argv.data(), environment.data(), ::getpid(), errors.write.get()};
  const pid_t pid = ::fork();
  if (pid < 0) throw SystemError("launch", "cannot start a process", errno);
  if (pid == 0) become_rank(plan);
  errors.write.reset();
  // The child cannot have been reaped yet, so the pid is still its own.
  Fd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  const int pidfd_error = errno;
  if (const int error = error_from_exec(errors.read.get()); error != 0) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    throw SystemError("launch", fmt::format("cannot execute '{}'", request.argv[0]), error);
  }
  if (!pidfd) {
    ::kill(-pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    throw SystemError("launch", "cannot watch a process (Linux 5.4 or newer is needed)",
                      pidfd_error);
  }
  return Process(pid, std::move(pidfd));
}

std::optional<std::string> find_program(const std::string& name,
                                        const std::optional<std::string>& path) {
  const auto runnable = [](const std::string& file) {
    struct stat info;
    return ::stat(file.c_str(), &info) == 0 && S_ISREG(info.st_mode) &&
           ::access(file.c_str(), X_OK) == 0;
  };
  if (name.empty()) return std::nullopt;
  if (name.find('/') != std::string::npos)
    return runnable(name) ? std::optional(name) : std::nullopt;
  std::istringstream folders(path.value_or("/usr/local/bin:/usr/bin:/bin"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string candidate = (folder.empty() ? "." : folder) + "/" + name;
    if (runnable(candidate)) return candidate;
  }
  return std::nullopt;
}

bool no_children_left() {
  siginfo_t info{};
  return ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 && errno == ECHILD;
}

std::vector<pid_t> children_of(pid_t parent) {
  std::vector<pid_t> children;
  bool readable = true;
  std::error_code gone;  // a process may end while it is read
  for (fs::directory_iterator at(fmt::format("/proc/{}/task", parent), gone), end;
       !gone && at != end; at.increment(gone)) {
    std::ifstream file(at->path() / "children");
    if (!file) readable = false;
    for (pid_t child; file >> child;) children.push_back(child);
  }
  // Kernels without CONFIG_PROC_CHILDREN do not have this file.
  if (!readable && children.empty()) return children_by_scan(parent);
  return children;
}

std::vector<pid_t> descendants_of(pid_t root, const std::set<pid_t>& except) {
  std::vector<pid_t> found = children_of(root);
  std::erase_if(found, [&](pid_t pid) { return except.count(pid) != 0; });
  constexpr std::size_t kMax = 100'000;  // the tree may grow while it is read
  for (std::size_t i = 0; i < found.size() && i < kMax; ++i) {
    const auto below = children_of(found[i]);
    found.insert(found.end(), below.begin(), below.end());
  }
  return found;
}

bool signal_below(pid_t root, pid_t pid, int number) {
  // The descriptor is opened before the ancestors are checked, so both mean the same process.
  Fd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!pidfd || !is_below(root, pid)) return false;
  return ::syscall(SYS_pidfd_send_signal, pidfd.get(), number, nullptr, 0) == 0;
}

bool is_below(pid_t root, pid_t pid) {
  pid_t above = read_stat(pid).parent;
  while (above > 1 && above != root) above = read_stat(above).parent;
  return above == root;
}

bool signal_thread_below(pid_t root, pid_t pid, pid_t thread, int number) {
  return is_below(root, pid) && ::syscall(SYS_tgkill, pid, thread, number) == 0;
}

bool handles_signal(pid_t pid, int number) {
  const std::string status = text_or_empty(fmt::format("/proc/{}/status", pid));
  return std::ranges::any_of(std::array{"SigBlk", "SigIgn", "SigCgt"}, [&](const char* set) {
    const std::string mask(text_after(status, set).substr(0, 16));
    return (std::strtoull(mask.c_str(), nullptr, 16) >> (number - 1) & 1) != 0;
  });
}

pid_t group_of(pid_t pid) {
  return read_stat(pid).group;
}
pid_t session_of(pid_t pid) {
  return read_stat(pid).session;
}

namespace {

enum class FileKind { kMissing, kDirectory, kPlain, kExecutable };

FileKind kind_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return FileKind::kMissing;
  if (S_ISDIR(status.st_mode)) return FileKind::kDirectory;
  return ::access(path.c_str(), X_OK) == 0 ? FileKind::kExecutable : FileKind::kPlain;
}

// Whether Python runs the folder as a program (`python3 folder`).
bool has_main(const std::string& folder) {
  return kind_of(folder) == FileKind::kDirectory &&
         kind_of(folder + "/__main__.py") != FileKind::kMissing;
}

// Files that people give in place of a program: a training file, or a program's source.
void refuse_other_files(const std::string& name) {
  if (kind_of(name) == FileKind::kExecutable) return;
  const std::string extension = lower(fs::path(name).extension().string());
  const auto is = [&](std::initializer_list<std::string_view> all) {
    return std::ranges::find(all, extension) != all.end();
  };
  if (is({".yaml", ".yml", ".json"}))
    throw UsageError("run",
                     "'{}' is a training file and no program. Use lockstep train {}, with the same "
                     "flags.",
                     name, name);
  if (is({".cpp", ".cc", ".cxx", ".cu"}))
    throw UsageError("run",
                     "'{}' is the source of a program. Build it first, as README.md shows, and "
                     "give the program that the build makes.",
                     name);
}

// The file to execute. Throws UsageError with the reason if it cannot be.
std::string executable(const std::string& program, const Variables& variable) {
  refuse_other_files(program);
  if (program.find('/') == std::string::npos) {
    if (const auto found = find_program(program, variable("PATH"))) return *found;
    // `lockstep run lockstep env` works wherever lockstep is.
    std::error_code ignored;
    const auto self = std::filesystem::read_symlink("/proc/self/exe", ignored);
    if (self.filename() == program) return self.string();
    const bool here = kind_of(program) != FileKind::kMissing;
    throw UsageError("run", "the program '{}' is not on PATH.{}", program,
                     here ? fmt::format(" There is one in this directory: write ./{}.", program)
                          : " Check the spelling, or write its path.");
  }
  switch (kind_of(program)) {
    case FileKind::kExecutable:
      return program;
    case FileKind::kMissing:
      throw UsageError("run",
                       "the program '{}' does not exist. Check the path; the current "
                       "directory is '{}'.",
                       program, std::filesystem::current_path().string());
    case FileKind::kDirectory:
      throw UsageError("run",
                       "the program '{}' is a directory without __main__.py. A Python package runs "
                       "with -m.",
                       program);
    case FileKind::kPlain:
      break;
  }
  throw UsageError("run",
                   "the program '{}' is not executable. Run chmod +x on it; for a Python file "
                   "without .py in its name use --run-path.",
                   program);
}

// The interpreter of the virtual environment that this launcher is installed in, activated or not;
// none elsewhere.
std::optional<std::string> own_interpreter() {
  std::error_code ignored;
  const auto folder = std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path();
  const std::string candidate = folder / "python3";
  if (kind_of(folder.parent_path() / "pyvenv.cfg") == FileKind::kMissing) return std::nullopt;
  return kind_of(candidate) == FileKind::kExecutable ? std::optional(candidate) : std::nullopt;
}

std::string interpreter(const Variables& variable) {
  const std::string name = variable("PYTHON_EXEC").value_or("");
  if (name.empty()) {
    if (const auto own = own_interpreter()) return *own;
  }
  try {
    return executable(name.empty() ? "python3" : name, variable);
  } catch (const UsageError&) {
    throw UsageError("run",
                     "the Python interpreter '{}' cannot be executed. Install python3, or set "
                     "PYTHON_EXEC to one.",
                     name.empty() ? "python3" : name);
  }
}

}  // namespace

bool runs_python(const std::vector<std::string>& command) {
  return !command.empty() &&
         std::filesystem::path(command.front()).filename().string().starts_with("python");
}

std::vector<std::string> resolve_command(const ProgramRequest& request, const Variables& variable) {
  const std::vector<std::string>& program = request.args;
  if (program.empty()) {
    throw UsageError("run",
                     "no program was given. Usage: lockstep run [flags] PROGRAM [arguments].");
  }
  const bool module = request.module && !request.run_path;
  const bool no_python = request.no_python && !request.run_path;
  if (module && no_python) {
    throw UsageError("run",
                     "-m (--module) and --no-python contradict each other: a module runs under "
                     "Python. Drop one of them.");
  }
  const std::string& name = program.front();
  const bool file = request.run_path ||
                    (name.size() > 3 && name.compare(name.size() - 3, 3, ".py") == 0) ||
                    (!no_python && has_main(name));
  std::vector<std::string> command;
  if (module) {
    command = {interpreter(variable), "-u", "-m", name};
  } else if (file && !no_python) {
    if (kind_of(name) == FileKind::kMissing) {
      throw UsageError("run",
                       "the script '{}' does not exist. Check the path; the current "
                       "directory is '{}'.",
                       name, std::filesystem::current_path().string());
    }
    if (::access(name.c_str(), R_OK) != 0)
      throw UsageError("run", "the script '{}' cannot be read. Check its permissions.", name);
    command = {interpreter(variable), "-u", name};
  } else {
    command = {executable(name, variable)};
  }
  command.insert(command.end(), program.begin() + 1, program.end());
  return command;
}

// ---------------------------------------------------------------- front process and supervisor

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
  if (::access("/proc/self/stat", F_OK) != 0)
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
