// One rank of this host: its process, environment, output, control pipe and ledger.
//
//   Worker worker(setup, group, record);
//   worker.start(filtered, with_ledger, [&] { on_exit(worker); });
//   worker.notify(line);                              // another rank has failed
//   worker.signal(SIGTERM);
//
// Its state is kept in its record (rank_record.h). Owned by a WorkerGroup, one thread.
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
#include "launcher/process.h"
#include "launcher/rank_record.h"
#include "launcher/run_observer.h"
#include "launcher/store_server.h"
#include "lockstep/core/ledger_file.h"
#include "lockstep/rendezvous/rank_env.h"

namespace lockstep::launch {

// Shared by all attempts.
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
  Worker(GroupSetup& setup, const GroupInfo& group, RankRecord& record);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // `filtered`: two files for the lines of stdout and stderr that match a filter; may be closed.
  // Throws UsageError or SystemError if the rank cannot be started.
  void start(const Fd* filtered, bool with_ledger, std::function<void()> on_exit);
  bool alive() const { return record.life.alive(); }
  // Writes the line to the control pipe; false if it was not written.
  bool notify(const std::string& line);
  // Sends a signal that ends the rank to its process group.
  void signal(int number);
  // Releases an exited or abandoned rank.
  void release();
  void save_ledger() const;  // beside its error file, if the rank has opened it

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
  const GroupInfo& group_;
  Fd control_;  // the write end
};

void make_directories(const std::string& path);  // throws SystemError

struct WorkerInfo {
  int local_rank = 0;
  WorldLayout layout;
  int attempt = 0;          // TORCHELASTIC_RESTART_COUNT
  std::string master_addr;  // where this launcher serves the store
  int master_port = 0;
  std::string error_file;     // absolute; TORCHELASTIC_ERROR_FILE
  int control_fd = -1;        // LOCKSTEP_CONTROL_FD: the read end (rendezvous/control.h)
  std::string store_channel;  // LOCKSTEP_STORE_CHANNEL (rendezvous/store_client.h)
  std::string interface;      // GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME unless already set
  int threads = 0;            // OMP_NUM_THREADS unless already set; 0: not set here
  std::string ledger;         // LOCKSTEP_LEDGER (core/ledger.h); empty: none
  std::string terminal;       // LOCKSTEP_TERMINAL (core/fd.h); empty: not on a terminal
};

// The variables of a rank: torchrun's, with the same meaning, and ours. They override the caller's
// environment, except those that are set "unless already set"; "" removes a variable. Throws
// UsageError if --virtual-local-rank needs more GPUs than CUDA_VISIBLE_DEVICES has.
//
//   auto set = worker_environment(plan, {.local_rank = 1, .master_port = 29500, ...});
std::map<std::string, std::string> worker_environment(
    const LaunchPlan& plan, const WorkerInfo& info,
    const Variables& variable = process_variables());

// The launcher's environment with these variables set or removed, as "NAME=value".
std::vector<std::string> process_environment(const std::map<std::string, std::string>& set);

}  // namespace lockstep::launch
