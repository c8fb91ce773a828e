// The identity of this process, read from whatever started it.
//
// The launcher nearest to the process is right. Recognised, in this order:
//   1. RANK and WORLD_SIZE: lockstep run, torchrun, Accelerate, Kubeflow, or set by hand
//   2. Open MPI, MVAPICH, MPICH and Intel MPI (OMPI_COMM_WORLD_*, MV2_COMM_WORLD_*, PMI_*)
//   3. a task of srun (SLURM_STEP_ID, SLURM_PROCID); an sbatch script or salloc shell is not one
//   4. PET_NNODES and PET_NODE_RANK of a Kubernetes job that starts the program without a launcher
//   5. nothing at all: a world of one
// Values that contradict each other are refused by name before any communication.
//
//   RankEnv env = read_rank_env();
//   rendezvous(env, 300'000);          // settles master_port where the launcher gave none
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
  // False when nobody said so (RANK, WORLD_SIZE and a MASTER_ADDR elsewhere, set by hand): the
  // value above is then a guess of one rank per host, and a world counts its hosts at start-up.
  bool local_rank_known = true;
  bool local_size_known = true;
  bool node_known = true;
  std::string source = "alone";  // "lockstep run", "torchrun", "mpirun", "srun", "environment"

  // The rendezvous of the ranks. Rank 0 listens on store_fd where rendezvous() has made one and
  // binds the port otherwise, unless agent_store: then the launcher hosts the store and rank 0 is a
  // client, over store_channel where this process has one (store_channel.h) and over TCP otherwise.
  std::string master_addr;
  int master_port = 0;
  int store_fd = -1;
  int store_channel = -1;
  bool agent_store = false;
  int attempt = 0;  // TORCHELASTIC_RESTART_COUNT: keys of an earlier attempt must not be read

  // mpirun or srun on one host gives no port: ranks find it through an abstract socket of this
  // name, which rendezvous() serves on rank 0. Empty when not needed.
  std::string rendezvous_name;

  bool alone() const { return world_size == 1; }
};

// Throws UsageError naming the variable that is wrong or missing and what to set. Reads only;
// may be called any number of times, from any thread that does not race with setenv().
RankEnv read_rank_env();

// Settles master_port where it is still open (rendezvous_name): rank 0 listens on a free port
// (store_fd, which the caller owns) and publishes it to the others. A no-op otherwise. Every rank
// of the job calls it, the same number of times. Throws TimeoutError naming ranks that did not
// come.
void rendezvous(RankEnv& env, int timeout_ms);

// A socket bound to master_port on loopback, where master_addr is loopback: c10d by itself would
// listen on every interface. -1 where it is another address or the port is taken (by the store of
// an earlier world of this process, which c10d finds; or by somebody else, which c10d reports).
int bind_on_loopback(const RankEnv& env);

// Did `lockstep run` (or spawn) start this process, according to its variables? Its control and
// store descriptors are then meant for it, unless it is a child of a rank.
bool under_lockstep_run();

namespace detail {
// "n[03-07,9],m1" is "n03"; throws UsageError on a list that cannot be read.
std::string first_host(const std::string& node_list);
// SLURM_STEP_TASKS_PER_NODE: "2(x3),1" has 2 tasks on nodes 0 to 2 and 1 on node 3.
int tasks_on_node(const std::string& tasks_per_node, int node);
// A port below the kernel's ephemeral range, the same for every rank of a job step.
int port_of_step(long long job, long long step);
}  // namespace detail

// Which ranks a node has: nodes may bring different numbers of ranks and different roles.
//
// As torchrun counts: the ranks of node 0 come first, then those of node 1, and so on; within a
// role they are numbered in the same order.
//
//   WorldLayout layout = layout_of({{.nproc = 2}, {.nproc = 3}}, 1);   // first_rank 2 of 5

constexpr int kMaxWorldSize = 1'000'000;  // far above any real world, far below overflow

// What a node brings to the world.
struct NodeShare {
  int nproc = 1;
  std::string role = "default";
  std::string program = {};  // which one its ranks run, to be compared; empty: not known
  bool operator==(const NodeShare&) const = default;
};

// Where the ranks of one node are in it.
struct WorldLayout {
  int first_rank = 0;
  int world_size = 1;
  int first_role_rank = 0;
  int role_world_size = 1;
};

// `nodes` by node rank. Throws UsageError when `node_rank` is not one of them, a node has no rank,
// or there are more than kMaxWorldSize.
WorldLayout layout_of(const std::vector<NodeShare>& nodes, int node_rank);

}  // namespace lockstep

// How `lockstep run` knows that a rank has left its world: the mark that run() holds while its body
// runs.
//
// An exit code of 0 says that a process is satisfied, not that its body has returned. std::exit(0)
// or _exit(0) in the middle of training looks like success, and its peers, whose connections break,
// look like the cause.
//
// The mark is made before the body and taken away after it, so it needs no handler at the end of
// the process, and _exit() cannot go past it. It is an empty file beside the rank's error file,
// which no child closes and no pipe can lose.
//
//   inside::enter();  body(world);  inside::leave();         // the rank
//   const bool left = inside::take_mark(error_file);         // the launcher, when it has ended
//
// enter() and leave() belong to run(), on the thread that calls it.

namespace lockstep::inside {

// Do nothing unless `lockstep run` started this process, and never throw: without the mark a rank
// that leaves is reported as before.
void enter() noexcept;
void leave() noexcept;

// Removes the mark that belongs to this error file; was there one?
bool take_mark(const std::string& error_file) noexcept;

}  // namespace lockstep::inside
