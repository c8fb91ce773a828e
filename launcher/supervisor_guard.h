// Nothing is left behind, whichever process is killed.
//
// supervise() runs as two processes. The one the user started stays in front: it passes signals on
// and returns the exit code. The supervisor proper is its child and the parent of all ranks, and
// holds the reading end of a pipe (the lifeline) whose writing end only the front has. So:
//   - the front is killed (kill -9 of "the launcher"): the lifeline closes and the supervisor, the
//     subreaper of everything its ranks ever started, kills all of it;
//   - the supervisor is killed: ranks get their parent-death signal, and the front, a subreaper as
//     well, inherits and kills what they had started. It spares children that it had before, and
//     those in its own session, which another thread of the program has started meanwhile.
// This is the guard of the ranks turned upside down: it owns them, so it needs no list of process
// numbers that might have been given to others, and a daemonised grandchild cannot hide from it.
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
  int lifeline_fd;           // readable (end of file) when the front has died
  sigset_t callers_mask;     // the signal mask before run_supervised(), for the ranks
  rlimit callers_files;      // RLIMIT_NOFILE before it was raised, for the ranks
  std::vector<int> signals;  // blocked, and sent to the supervisor as they came; to be read by it
};

// Forks; calls `supervise` in the child with `signals` and SIGCHLD blocked and returns its result
// in the parent. A SIGHUP that is ignored stays ignored and is dropped from the list. Call it from
// a process without threads that need these signals; waits as long as the child runs.
// `left_behind` is called in the parent after the fork.
int run_supervised(std::vector<int> signals,
                   const std::function<int(const GuardContext&)>& supervise,
                   const std::function<void()>& left_behind);

}  // namespace lockstep::launch
