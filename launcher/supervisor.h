// Starts the ranks of a plan, supervises them, and reports how they ended.
//
// One epoll loop waits for pidfds, output pipes, a signalfd and the connections to other launchers,
// and reads the ranks' ledgers a few times a second (stall_watch.h). It runs in a child process
// that owns the ranks (process.h), so that nothing is left behind whichever of the two is
// killed. Only processes that were started here are ever signalled.
//
//   LaunchPlan plan;
//   plan.nproc_per_node = 4;
//   plan.command = {"./train", "--epochs=3"};
//   return supervise(plan);
//
// Files: <log_dir>/<run_id>_<random>/attempt_<k>/<local_rank>/{stdout.log,stderr.log,error.json};
// the ledger of a rank that failed or stalled (core/ledger_file.h); attempt_<k>/stall.log;
// with several nodes each one makes <log_dir>/<run_id>_<random>/node_<n>/attempt_<k>/...
// Call it from a process whose threads do not depend on signals, which it blocks.
#pragma once

#include "launcher/plan.h"
#include "launcher/run_observer.h"

namespace lockstep::launch {

// Runs the plan and returns the launcher's exit code: 0, the code of the first rank that failed
// (128 + n if signal n killed it), 143 after a stop request or 130 after Ctrl-C (the code of a rank
// that failed while stopping, unless it had to be killed after the grace), 2 if other launchers
// refuse this one, 1 if one of them is lost. parse_flags() and spawn() have checked the plan. With
// an observer every rank has a ledger, whatever the plan's stall_timeout is.
int supervise(const LaunchPlan& plan, RunObserver* observer = nullptr);

}  // namespace lockstep::launch
