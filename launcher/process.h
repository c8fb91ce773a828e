// Resolves the program, starts and reaps ranks, finds processes below the launcher, and leaves none
// of them behind.
//
// The kernel may reuse a pid once its process was reaped. A rank leads a session and process group
// of its own (setsid), so its group may be signalled until the rank is reaped. Processes that it
// leaves behind are found differently: the supervisor is a child subreaper, so orphans of a rank
// become the supervisor's children.
//
//   Process rank = start_process({.argv = {"./train"}, .environment = strings});
//   rank.signal_group(SIGTERM);
//   if (auto end = rank.reap()) log::info("launch", "{}", end->text());
//
// A Process is used by one thread; its destructor neither waits nor kills.
#pragma once

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launcher/host.h"
#include "lockstep/core/fd.h"

namespace lockstep::launch {

// How a process ended.
struct Ending {
  bool by_signal = false;
  int number = 0;  // exit code, or signal
  bool dumped_core = false;

  bool ok() const { return !by_signal && number == 0; }
  int exit_code() const { return by_signal ? 128 + number : number; }
  std::string text() const;  // "exited with code 3", "killed by SIGSEGV (core dumped)"
};

// The process was stopped (SIGSTOP, SIGTSTP, ...) or continued since the last poll.
struct Pause {
  bool stopped = false;
  int signal = 0;
};

struct ProcessRequest {
  std::vector<std::string> argv;         // argv[0] is looked up in PATH
  std::vector<std::string> environment;  // all of it, NAME=value
  int stdout_fd = -1;                    // -1: inherited
  int stderr_fd = -1;
  std::vector<int> pass_fds = {};  // inherited with their numbers
  const CpuMask* cpus = nullptr;
  sigset_t signal_mask = {};  // of the rank
  rlimit files = {};          // RLIMIT_NOFILE of the rank
};

class Process {
 public:
  Process() = default;
  Process(pid_t pid, Fd pidfd) : pid_(pid), pidfd_(std::move(pidfd)) {}

  pid_t pid() const { return pid_; }
  int pidfd() const { return pidfd_.get(); }  // readable once the process has ended
  bool alive() const { return pid_ > 0 && !reaped_; }

  // Signals every process of its group; a no-op once it was reaped.
  void signal_group(int number) const;
  // Waits until it has ended; false: it still runs after `limit`.
  bool wait_for(std::chrono::milliseconds limit) const;
  // None while it runs. Afterwards its pid may be reused.
  std::optional<Ending> reap();
  std::optional<Pause> poll_pause() const;

 private:
  pid_t pid_ = -1;
  Fd pidfd_;
  bool reaped_ = false;
};

// Starts a session leader that the kernel kills if the calling thread dies. Throws SystemError if
// the program cannot be executed.
Process start_process(const ProcessRequest& request);

// The file that execvp() would run for `name` with this PATH; none if there is no executable one.
std::optional<std::string> find_program(const std::string& name,
                                        const std::optional<std::string>& path);

// Including zombies; without /proc these functions find no process.
std::vector<pid_t> children_of(pid_t parent);
// All processes below `root`, parents before children, without the subtrees of `except`. Best
// effort while they run.
std::vector<pid_t> descendants_of(pid_t root, const std::set<pid_t>& except = {});
bool no_children_left();  // not even zombies
// Signals `pid` only if it is below `root`, so never another process that has got its pid. False if
// nothing was signalled.
bool signal_below(pid_t root, pid_t pid, int number);
// The same for one of its threads.
bool signal_thread_below(pid_t root, pid_t pid, pid_t thread, int number);
bool is_below(pid_t root, pid_t pid);
pid_t group_of(pid_t pid);  // -1 if it is gone
// Whether the process catches, blocks or ignores the signal. If not, the signal would end it.
bool handles_signal(pid_t pid, int number);
pid_t session_of(pid_t pid);  // -1 if it is gone

struct ProgramRequest {
  std::vector<std::string> args{};  // the program and its arguments, which are passed on unchanged
  bool module = false;              // -m
  bool no_python = false;           // --no-python
  bool run_path = false;            // --run-path: a Python file whatever its name; overrides both
};

// Whether the command runs a Python interpreter, whose ranks will connect to MASTER_PORT.
bool runs_python(const std::vector<std::string>& command);

// The argv of a program: found on PATH, under Python for a Python file or module. Throws UsageError
// if it cannot be executed.
//
//   resolve_command({.args = {"train.py", "--lr=1"}});   // /usr/bin/python3 -u train.py --lr=1
std::vector<std::string> resolve_command(const ProgramRequest& request,
                                         const Variables& variable = process_variables());

// ---------------------------------------------------------------- front process and supervisor

// Ensures that no process is left behind, whichever process of the launcher is killed.
//
// supervise() runs as two processes. The front process, which the user started, forwards signals
// and returns the exit code. Its child is the supervisor, the parent of all ranks. The supervisor
// has the read end of a pipe, the lifeline; only the front process has the write end. So:
//   - If the front process is killed, the lifeline closes, and the supervisor kills all processes
//     below it. It is the subreaper of all that its ranks have started, so it also finds daemonised
//     ones.
//   - If the supervisor is killed, ranks get their parent-death signal, and the front process, a
//     subreaper too, inherits and kills what they had started. It spares the children that it had
//     before, and those in its own session, which another thread of the program has started.
//
//   return run_supervised({SIGTERM, SIGINT},
//                         [&](const GuardContext& guard) { return serve(guard); }, [] {});
struct GuardContext {
  int lifeline_fd;           // readable (end of file) when the front process has died
  sigset_t callers_mask;     // the signal mask before run_supervised(), for the ranks
  rlimit callers_files;      // RLIMIT_NOFILE before it was raised, for the ranks
  std::vector<int> signals;  // blocked; the front process forwards them to the supervisor
};

// Forks, calls `supervise` in the child with `signals` and SIGCHLD blocked, waits for the child,
// and returns the result. An ignored SIGHUP stays ignored and is removed from the list. Call it
// from a process without threads that need these signals. `left_behind` is called in the parent
// after the fork.
int run_supervised(std::vector<int> signals,
                   const std::function<int(const GuardContext&)>& supervise,
                   const std::function<void()>& left_behind);

}  // namespace lockstep::launch
