// The variables a worker is started with: torchrun's, with torchrun's meaning, and ours.
// A pure function of the plan, of what the supervisor decided for this attempt, and of the caller's
// environment, which wins only where "unless already set" is stated.
//
//   auto set = worker_environment(plan, {.local_rank = 1, .master_port = 29500, ...});
#pragma once

#include <map>
#include <string>
#include <vector>

#include "launcher/host.h"
#include "launcher/plan.h"
#include "lockstep/rendezvous/world_layout.h"

namespace lockstep::launch {

struct WorkerInfo {
  int local_rank = 0;
  WorldLayout layout;
  int attempt = 0;          // TORCHELASTIC_RESTART_COUNT
  std::string master_addr;  // where this launcher serves the store
  int master_port = 0;
  std::string error_file;     // absolute; TORCHELASTIC_ERROR_FILE
  int control_fd = -1;        // LOCKSTEP_CONTROL_FD: read end; failures are announced here
  std::string store_channel;  // LOCKSTEP_STORE_CHANNEL: to the store that the launcher serves
  std::string interface;      // GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME unless already set
  int threads = 0;            // OMP_NUM_THREADS unless already set; 0: leave alone
  std::string ledger;         // LOCKSTEP_LEDGER (core/ledger.h); empty: none
  std::string terminal;       // LOCKSTEP_TERMINAL (core/fd.h); empty: not on a terminal
};

// Only the variables to set (they override the caller's environment, except where noted above).
// A value of "" means: remove the variable. Throws UsageError when --virtual-local-rank asks for
// more GPUs than CUDA_VISIBLE_DEVICES names.
std::map<std::string, std::string> worker_environment(
    const LaunchPlan& plan, const WorkerInfo& place,
    const Variables& variable = process_variables());

// The launcher's own environment with these set or removed, as "NAME=value".
std::vector<std::string> process_environment(const std::map<std::string, std::string>& set);

}  // namespace lockstep::launch
