// Starting one rank, knowing how it ended, and finding what it left behind.
//
// A process number is only ours until its process has been reaped. A rank is the leader of its own
// session and process group (setsid), so its group may be signalled exactly as long as the rank
// itself has not been reaped. What it leaves behind is found differently: the supervisor is a child
// subreaper, so every orphan of a rank becomes the supervisor's own child.
//
//   Process rank = start_process({.argv = {"./train"}, .environment = strings});
//   rank.signal_group(SIGTERM);
//   if (auto end = rank.reap()) log::info("launch", "{}", end->text());
//
// A Process is owned by one object of one thread; destroying it neither waits nor kills.
#pragma once

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

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

// Stopped (SIGSTOP, SIGTSTP, ...) or continued since the last look.
struct Pause {
  bool stopped = false;
  int signal = 0;
};

struct ProcessRequest {
  std::vector<std::string> argv;         // argv[0] is looked up in PATH
  std::vector<std::string> environment;  // all of it, NAME=value
  int stdout_fd = -1;                    // -1: inherited
  int stderr_fd = -1;
  std::vector<int> pass_fds = {};  // these keep their numbers
  const CpuMask* cpus = nullptr;
  sigset_t signal_mask = {};  // what the rank starts with
  rlimit files = {};          // RLIMIT_NOFILE, likewise
};

class Process {
 public:
  Process() = default;
  Process(pid_t pid, Fd pidfd) : pid_(pid), pidfd_(std::move(pidfd)) {}

  pid_t pid() const { return pid_; }
  int pidfd() const { return pidfd_.get(); }  // readable once it has ended
  bool alive() const { return pid_ > 0 && !reaped_; }

  // To every process of its group; a no-op once it has been reaped.
  void signal_group(int number) const;
  // Nothing while it runs. Afterwards its number is no longer ours.
  std::optional<Ending> reap();
  std::optional<Pause> look_for_pause() const;

 private:
  pid_t pid_ = -1;
  Fd pidfd_;
  bool reaped_ = false;
};

// Starts a session leader that the kernel kills when the calling thread dies. Throws SystemError
// when the program cannot be executed.
Process start_process(const ProcessRequest& request);

// The file that execvp would run for `name`, with this or another PATH; nothing when there is none
// that may be executed.
std::optional<std::string> find_program(const std::string& name);
std::optional<std::string> find_program(const std::string& name,
                                        const std::optional<std::string>& path);

// False without /proc, where the functions below find no process.
bool can_see_processes();
// Also those that have ended and were not waited for.
std::vector<pid_t> children_of(pid_t parent);
// All processes below `root`, parents before children, without the subtrees that begin at a process
// of `except`. Best effort while they run.
std::vector<pid_t> descendants_of(pid_t root, const std::set<pid_t>& except = {});
bool no_children_left();  // neither alive nor to be reaped
// Signals `pid` only if it is (still) below `root`: a number that has meanwhile been given to
// somebody else's process is left alone. False when nothing was signalled.
bool signal_below(pid_t root, pid_t pid, int number);
// The same to one of its threads.
bool signal_thread_below(pid_t root, pid_t pid, pid_t thread, int number);
bool is_below(pid_t root, pid_t pid);
pid_t group_of(pid_t pid);  // -1 when it is gone
// Does it catch, block or ignore the signal? If not, the signal's default action would end it.
bool handles_signal(pid_t pid, int number);
pid_t session_of(pid_t pid);  // -1 when it is gone

// From the program's args to an argv: under Python or directly, found on PATH or at its path, and
// refused with a reason before any rank is started.
//
//   resolve_command({.args = {"train.py", "--lr=1"}});   // /usr/bin/python3 -u train.py --lr=1

struct ProgramRequest {
  std::vector<std::string> args{};  // the program and its arguments, which are passed untouched
  bool module = false;              // -m
  bool no_python = false;           // --no-python
  bool run_path = false;            // --run-path: a Python file whatever its name; beats the others
};

// Whether such a command is a Python interpreter's; its ranks will connect to MASTER_PORT.
bool runs_python(const std::vector<std::string>& command);

// Throws UsageError when there is nothing to execute.
std::vector<std::string> resolve_command(const ProgramRequest& request,
                                         const Variables& variable = process_variables());

}  // namespace lockstep::launch
