// The LaunchPlan: everything that a launcher process is asked to do; and supervise(), which starts
// the ranks of a plan, supervises them, and reports how they ended.
//
// parse_flags() (flags.h) makes a plan from the command line, lockstep::spawn() another one.
//
//   LaunchPlan plan;
//   plan.nproc_per_node = 4;
//   plan.command = {"./train", "--epochs=3"};
//   return supervise(plan);
#pragma once

#include <signal.h>

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace lockstep::launch {

class RunObserver;  // run_observer.h

// Bits that select stdout and stderr of a rank, as in torchrun.
enum class Streams { kNone = 0, kOut = 1, kErr = 2, kAll = 3 };

// "3" or "0:3,1:1": one value for all local ranks, or one per local rank (kNone for the others).
struct StreamMap {
  Streams all = Streams::kNone;
  std::map<int, Streams> by_local_rank;
  bool any() const { return all != Streams::kNone || !by_local_rank.empty(); }
  Streams at(int local_rank) const {
    const auto found = by_local_rank.find(local_rank);
    return found == by_local_rank.end() ? all : found->second;
  }
};

// The prefix of a rank's lines on the console: "[3] ", torchrun's "[role0]:", or none.
enum class LinePrefix { kRank, kRole, kNone };

// What happens after the stall table is printed.
enum class StallAction { kWarn, kStop };

enum class NumaBinding { kNone, kNode, kSocket, kExclusive, kCoreComplex };

struct LaunchPlan {
  // The world.
  int nnodes = 1;
  int node_rank = 0;
  int nproc_per_node = 1;
  std::string run_id = "none";
  std::string role = "default";

  // The rendezvous. Port 0: a free one (one node only).
  std::string rdzv_backend = "static";
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  std::string local_addr;   // this host's address for other hosts; empty: found by routing
  std::string secret_file;  // of the link between launchers; empty: anybody may join
  std::chrono::seconds rendezvous_timeout{300};  // for the other launchers to join

  // The program: argv as it is executed, including `python3 -u`.
  std::vector<std::string> command;
  std::map<std::string, std::string> environment;  // of the ranks, unless already set

  // Supervision.
  int max_restarts = 0;
  std::chrono::milliseconds shutdown_timeout{30'000};  // from SIGTERM to SIGKILL
  // If no rank makes progress for this long and for ten median steps, a table shows which is
  // behind. 0: no table, and no ledgers without an observer (run_observer.h).
  std::chrono::milliseconds stall_timeout{30'000};
  StallAction stall_action = StallAction::kWarn;
  // A rank that exited early with code 0 has failed if other ranks still run after this time.
  std::chrono::milliseconds monitor_interval{1000};
  // Signals that request a stop; empty: the usual ones. USR1 and USR2 are forwarded in any case.
  std::vector<int> signals_to_handle;
  std::chrono::seconds timeout{0};          // of a rank's operations; 0: not set here
  std::chrono::seconds startup_timeout{0};  // for a rank's world to connect; 0: not set here
  bool virtual_local_rank = false;
  bool replace_gloo = false;  // for Python ranks: LOCKSTEP_REPLACE_GLOO=1
  NumaBinding numa_binding = NumaBinding::kNone;

  // Output.
  std::string log_dir;  // empty: a temporary one, removed after success without --redirects
  StreamMap redirects;
  StreamMap tee;
  std::optional<LinePrefix> line_prefix;  // for every line; unset: see prefix_style (output.h)
  std::optional<std::set<int>> local_ranks_filter;  // which ranks reach the console
  std::vector<std::string> duplicate_stdout_filters;
  std::vector<std::string> duplicate_stderr_filters;

  // For the run's observer (dashboard/live_run.h); the supervisor does not read these.
  bool doctor = false;                   // report on stderr what slows the ranks down
  std::string record_dir;                // absolute; empty: no record
  std::optional<std::string> dashboard;  // where to serve its page: "", "PORT" or "ADDRESS:PORT"
};

// The signals that request a stop without --signals-to-handle.
inline const std::vector<int> kUsualStopSignals = {SIGTERM, SIGINT, SIGHUP, SIGQUIT};
inline const std::vector<int>& stop_signals(const LaunchPlan& plan) {
  return plan.signals_to_handle.empty() ? kUsualStopSignals : plan.signals_to_handle;
}

// Runs the plan and returns the launcher's exit code: 0, the code of the first rank that failed
// (128 + n if signal n killed it), 143 after a stop request or 130 after Ctrl-C (the code of a rank
// that failed while stopping, unless it had to be killed after the grace), 2 if other launchers
// refuse this one, 1 if one of them is lost. parse_flags() and spawn() have checked the plan. With
// an observer every rank has a ledger, whatever the plan's stall_timeout is. In supervisor.cpp.
//
// One epoll loop waits for pidfds, output pipes, a signalfd and the connections to other launchers,
// and reads the ranks' ledgers a few times a second (stall_watch.h). It runs in a child process
// that owns the ranks (process.h), so that nothing is left behind whichever of the two is
// killed. Only processes that were started here are ever signalled.
//
// Files: <log_dir>/<run_id>_<random>/attempt_<k>/<local_rank>/{stdout.log,stderr.log,error.json};
// the ledger of a rank that failed or stalled (core/ledger_file.h); attempt_<k>/stall.log;
// with several nodes each one makes <log_dir>/<run_id>_<random>/node_<n>/attempt_<k>/...
// Call it from a process whose threads do not depend on signals, which it blocks.
int supervise(const LaunchPlan& plan, RunObserver* observer = nullptr);

}  // namespace lockstep::launch
