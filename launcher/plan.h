// What one launcher process is asked to do, after flags, PET_ variables and defaults are settled.
//
// parse (flags.h) turns arguments into a LaunchPlan or a UsageError; supervise (supervisor.h)
// carries it out. Neither knows the other, so a plan can also come from lockstep::spawn or a file.
#pragma once

#include <signal.h>

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace lockstep::launch {

// What happens to a worker's stdout and stderr: bit 1 = stdout, bit 2 = stderr, as in torchrun.
enum class Streams { kNone = 0, kOut = 1, kErr = 2, kAll = 3 };

// "3", or "0:3,1:1": one value for every local rank, or one per local rank with kNone elsewhere.
struct StreamMap {
  Streams all = Streams::kNone;
  std::map<int, Streams> by_local_rank;
  bool any() const { return all != Streams::kNone || !by_local_rank.empty(); }
  Streams at(int local_rank) const {
    const auto found = by_local_rank.find(local_rank);
    return found == by_local_rank.end() ? all : found->second;
  }
};

// What precedes a rank's line on the console: "[3] ", torchrun's "[role0]:", or nothing.
enum class LinePrefix { kRank, kRole, kNone };

// What is done when no rank moves any more, after the table is printed.
enum class StallAction { kWarn, kStop };

enum class NumaBinding { kNone, kNode, kSocket, kExclusive, kCoreComplex };

struct LaunchPlan {
  // The world.
  int nnodes = 1;
  int node_rank = 0;
  int nproc_per_node = 1;
  std::string run_id = "none";
  std::string role = "default";

  // The rendezvous of the ranks. Port 0: this host chooses a free one (one node only).
  std::string rdzv_backend = "static";
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  std::string local_addr;   // this host's address for other hosts; empty: found
  std::string secret_file;  // for the link between launchers; empty: anybody may join
  std::chrono::seconds rendezvous_timeout{300};  // for the other launchers to arrive

  // The program: argv as it will be executed (python3 -u already in front where asked for).
  std::vector<std::string> command;
  std::map<std::string, std::string> environment;  // for the ranks, where it is not set already

  // Supervision.
  int max_restarts = 0;
  std::chrono::milliseconds shutdown_timeout{30'000};  // from SIGTERM to SIGKILL
  // When no rank moves for this long and for ten median steps, a table says who is behind. 0: no
  // table, and no ledgers without an observer (run_observer.h).
  std::chrono::milliseconds stall_timeout{30'000};
  StallAction stall_action = StallAction::kWarn;
  // A rank that left with code 0 in the middle of its world is checked again after this time: the
  // others may do the same, but while some still run it has failed.
  std::chrono::milliseconds monitor_interval{1000};
  // Requests to stop; empty: the usual ones. USR1 and USR2 are forwarded even when not named.
  std::vector<int> signals_to_handle;
  std::chrono::seconds timeout{0};          // for a rank's operations; 0: as its environment says
  std::chrono::seconds startup_timeout{0};  // for its world to connect; the same
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

  // For the run's observer (dashboard/live_run.h); the supervisor reads none of it.
  bool doctor = false;                   // say on stderr what slows the ranks down
  std::string record_dir;                // absolute; empty: nothing is recorded
  std::optional<std::string> dashboard;  // where its page is served: "", "PORT", "ADDRESS:PORT"
};

// What asks a launcher to stop unless --signals-to-handle says otherwise.
inline const std::vector<int> kUsualStopSignals = {SIGTERM, SIGINT, SIGHUP, SIGQUIT};
inline const std::vector<int>& stop_signals(const LaunchPlan& plan) {
  return plan.signals_to_handle.empty() ? kUsualStopSignals : plan.signals_to_handle;
}

}  // namespace lockstep::launch
