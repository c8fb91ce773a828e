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
#pragma once

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

#include <functional>
#include <vector>

namespace lockstep::launch {

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
