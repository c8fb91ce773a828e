// One rank of this host: its process, what it prints, its control pipe and its ledger.
//
//   Worker worker(setup, place, record);
//   worker.start(options, [&] { on_exit(worker); });
//   worker.notify(line);                              // another rank has failed
//   worker.signal(SIGTERM);
//
// What it does is written into its record (rank_record.h). Owned by a WorkerGroup, one thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launcher/host.h"
#include "launcher/output.h"
#include "launcher/plan.h"
#include "launcher/rank_record.h"
#include "launcher/run_observer.h"
#include "launcher/store_server.h"
#include "launcher/supervisor_guard.h"
#include "lockstep/core/ledger_file.h"
#include "lockstep/rendezvous/rank_env.h"

namespace lockstep::launch {

// What stays the same over attempts.
struct GroupSetup {
  const LaunchPlan& plan;
  EventLoop& loop;
  Console& console;
  const GuardContext& guard;
  Observed& observed;
  std::string host;
  std::string interface;      // for worker_environment
  int threads = 0;            // for worker_environment
  std::vector<CpuMask> cpus;  // by local rank; empty: not bound
  WorldLayout layout;         // the current attempt's
};

struct GroupInfo {
  int attempt = 0;
  std::string master_addr;
  int master_port = 0;
  StoreServer* store = nullptr;
  std::string directory;  // absolute; created
};

class Worker {
 public:
  Worker(GroupSetup& setup, const GroupInfo& place, RankRecord& record);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // `filtered`: two files for lines of stdout and stderr that match a filter, or none. Throws
  // UsageError or SystemError when it cannot be started.
  void start(const Fd* filtered, bool with_ledger, std::function<void()> on_exit);
  bool alive() const { return record.life.alive(); }
  // Writes the line to its control pipe; whether it may have been read.
  bool notify(const std::string& line);
  // Asks it to end, by a signal to its group.
  void signal(int number);
  // It has ended, or nothing more is expected of it.
  void let_go();
  void save_ledger() const;  // beside its error file, if it was used

  RankRecord& record;
  Process process{};
  std::optional<OutputStream> out{}, err{};
  std::shared_ptr<ledger::File> ledger{};  // null: none

 private:
  StreamRoute route(OutputKind kind, const std::string& directory, int filtered_fd);
  std::string terminal() const;
  std::vector<std::string> environment(int control_fd, int store_fd) const;
  void make_ledger();

  GroupSetup& setup_;
  const GroupInfo& place_;
  Fd control_;  // writing end
};

void make_directories(const std::string& path);  // throws SystemError

// The variables a worker is started with: torchrun's, with torchrun's meaning, and ours.
// A pure function of the plan, of what the supervisor decided for this attempt, and of the caller's
// environment, which wins only where "unless already set" is stated.
//
//   auto set = worker_environment(plan, {.local_rank = 1, .master_port = 29500, ...});

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
  std::string terminal;       // LOCKSTEP_TERMINAL (core/terminal.h); empty: not on a terminal
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
