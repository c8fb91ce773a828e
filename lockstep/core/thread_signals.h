// Chooses the signals of the library's threads: they block all signals sent to the process, since
// handlers are for the program's own threads, but not those that a fault in the thread itself
// raises. If a thread faults with that signal blocked, the kernel ends the process at once: no
// handler runs, and the crash report is missing.
//
//   const SignalsBlocked blocked;
//   std::thread worker([] { ... });  // inherits the mask
#pragma once

#include <pthread.h>
#include <signal.h>
#include <string.h>

#include <string>

namespace lockstep {

// "SIGTERM" for 15, "signal 64" for a number without a name.
inline std::string signal_name(int number) {
  const char* name = ::sigabbrev_np(number);
  return name != nullptr ? std::string("SIG") + name : "signal " + std::to_string(number);
}

// The signals that the crash report handles (crash.h).
inline constexpr int kFaultSignals[] = {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};

// Blocks them for the calling thread and the threads it starts, until the end of the scope.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t blocked;
    ::sigfillset(&blocked);
    for (const int fault : kFaultSignals) ::sigdelset(&blocked, fault);
    ::pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace lockstep
