// Which rank this process is, read from the variables of whatever launcher started it.
//
// The innermost launcher decides. Recognised, in this order:
//   1. RANK and WORLD_SIZE: lockstep run, torchrun, Accelerate, Kubeflow, or set by hand
//   2. Open MPI, MVAPICH, MPICH and Intel MPI (OMPI_COMM_WORLD_*, MV2_COMM_WORLD_*, PMI_*)
//   3. a task of srun (SLURM_STEP_ID, SLURM_PROCID); an sbatch script or salloc shell is not one
//   4. PET_NNODES and PET_NODE_RANK of a Kubernetes job that starts the program without a launcher
//   5. nothing at all: a world of one
// Values that contradict each other are refused by name before any communication.
//
//   RankEnv env = read_rank_env();
//   rendezvous(env, 300'000);          // agrees on master_port where the launcher gave none
//
// Also the numbering of ranks over nodes, and the marker by which the launcher detects that a rank
// exited in the middle of training.
#pragma once

#include <string>
#include <vector>

namespace lockstep {

struct RankEnv {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  int node = 0;
  // False where no variable says so (RANK, WORLD_SIZE and a remote MASTER_ADDR, set by hand): then
  // the value above assumes one rank per host, and the ranks are counted at start-up.
  bool local_rank_known = true;
  bool local_size_known = true;
  bool node_known = true;
  std::string source = "alone";  // "lockstep run", "torchrun", "mpirun", "srun", "environment"

  // The rendezvous of the ranks. With agent_store, the launcher hosts the store, and all ranks are
  // clients: over store_channel where it is set (store_client.h), otherwise over TCP. Without it
  // rank 0 hosts the store, on store_fd if rendezvous() has opened it, otherwise on master_port.
  std::string master_addr;
  int master_port = 0;
  int store_fd = -1;
  int store_channel = -1;
  bool agent_store = false;
  int attempt = 0;  // TORCHELASTIC_RESTART_COUNT, part of the store's keys

  // mpirun or srun on one host gives no port: ranks find it through an abstract socket of this
  // name, which rendezvous() serves on rank 0. Empty when not needed.
  std::string rendezvous_name;

  bool alone() const { return world_size == 1; }
};

// Throws UsageError naming the variable that is wrong or missing and what to set. Reads only;
// may be called any number of times, from any thread that does not race with setenv().
RankEnv read_rank_env();

// If rendezvous_name is set, rank 0 listens on a free port (store_fd, which the caller owns) and
// publishes it to the others; otherwise this does nothing. Every rank of the job calls it, the same
// number of times. Rank 0 returns at once; another rank throws TimeoutError if it does not find it.
void rendezvous(RankEnv& env, int timeout_ms);

// If master_addr is a loopback address, a socket bound to master_port there: c10d by itself would
// listen on every interface. -1 for any other address, or if the port is taken: by the store of an
// earlier world of this process, which c10d reuses, or by another process, which c10d reports.
int bind_on_loopback(const RankEnv& env);

// Whether `lockstep run` (or spawn) started this process, according to its variables. Then its
// control and store descriptors are for this process, unless it is a child of a rank.
bool under_lockstep_run();

namespace detail {
// "n[03-07,9],m1" is "n03"; throws UsageError on a list that cannot be read.
std::string first_host(const std::string& node_list);
// SLURM_STEP_TASKS_PER_NODE: "2(x3),1" has 2 tasks on nodes 0 to 2 and 1 on node 3.
int tasks_on_node(const std::string& tasks_per_node, int node);
// A port below the kernel's ephemeral range, the same for every rank of a job step.
int port_of_step(long long job, long long step);
}  // namespace detail

constexpr int kMaxWorldSize = 1'000'000;  // far above any real world, far below overflow

// The ranks that one node contributes to the world.
struct NodeShare {
  int nproc = 1;
  std::string role = "default";
  std::string program = {};  // a fingerprint of their command line; empty: not known
  bool operator==(const NodeShare&) const = default;
};

// The numbers of one node's ranks.
struct WorldLayout {
  int first_rank = 0;
  int world_size = 1;
  int first_role_rank = 0;
  int role_world_size = 1;
};

// Numbers ranks as torchrun does: those of node 0 come first, then those of node 1, and so on;
// within a role in the same order. `nodes` is indexed by node rank. Throws UsageError if
// `node_rank` is not one of them, a node has no rank, or there are more than kMaxWorldSize ranks.
//
//   WorldLayout layout = layout_of({{.nproc = 2}, {.nproc = 3}}, 1);   // first_rank 2 of 5
WorldLayout layout_of(const std::vector<NodeShare>& nodes, int node_rank);

// The marker of a rank whose body, the function given to run(), has not returned.
//
// std::exit(0) or _exit(0) in the middle of training looks like success, and the rank's peers,
// whose connections break, look like the cause. So run() creates an empty file beside the rank's
// error file and removes it after the body; if it is still there when the process has exited, the
// rank exited early. This needs no exit handler, so _exit() cannot bypass it.
//
//   body_mark::set();  body(world);  body_mark::clear();    // the rank
//   const bool early = body_mark::take(error_file);         // the launcher, after its exit
namespace body_mark {

// Called by run(). They do nothing unless `lockstep run` started this process, and never throw:
// without the marker an early exit only looks like a normal one.
void set() noexcept;
void clear() noexcept;

// Removes the marker beside this error file; true if there was one.
bool take(const std::string& error_file) noexcept;

}  // namespace body_mark
}  // namespace lockstep
