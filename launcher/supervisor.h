// Starts the ranks of a plan, watches them, and reports how they ended.
//
// One epoll loop over pidfds, output pipes, a signalfd and the connections to other launchers, and
// a look at the ranks' ledgers a few times a second (stall_watch.h); no wait without an end. It
// runs in a child process that owns the ranks (see supervisor_guard.h), so that nothing is left
// behind whichever of the two is killed. Only processes started here are ever signalled.
//
//   LaunchPlan plan;
//   plan.nproc_per_node = 4;
//   plan.command = {"./train", "--epochs=3"};
//   return supervise(plan);
//
// Files: <log_dir>/<run_id>_<random>/attempt_<k>/<local_rank>/{stdout.log,stderr.log,error.json};
// the ledger of a rank that failed or stalled (core/ledger_file.h); attempt_<k>/stall.log;
// with several nodes each one makes <log_dir>/<run_id>_<random>/node_<n>/attempt_<k>/...
// Call it from a process whose threads do not mind that signals are blocked.
#pragma once

#include "launcher/plan.h"
#include "launcher/run_observer.h"

namespace lockstep::launch {

// Runs the plan to its end and returns the launcher's exit code: 0, the first failing rank's own
// code, 128+n when it died of signal n, 143 after a stop request (a rank's own code where it failed
// in its stop; ranks that had to be killed when the grace ran out change nothing), 130 after
// Ctrl-C, 2 when other launchers refuse it, 1 when one of them is lost. Throws UsageError, before
// anything is started, for a plan that cannot be carried out. With an observer every rank has a
// ledger, whatever the plan's stall_timeout is.
int supervise(const LaunchPlan& plan, RunObserver* observer = nullptr);

}  // namespace lockstep::launch
