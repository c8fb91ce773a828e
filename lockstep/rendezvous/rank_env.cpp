#include "lockstep/rendezvous/rank_env.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "lockstep/core/deadline.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/host.h"
#include "lockstep/core/log.h"
#include "lockstep/core/thread_signals.h"
#include "lockstep/rendezvous/startup.h"
#include "lockstep/rendezvous/store_client.h"

namespace lockstep {

namespace {

constexpr int kDefaultPort = 29500;  // PyTorch's

// Every world of a process calls read_rank_env(); its warnings are logged once.
void warn_once(const std::string& text) {
  static std::mutex mutex;
  static std::set<std::string>* said = new std::set<std::string>;
  const std::lock_guard lock(mutex);
  if (said->insert(text).second) log::warning("rank", "{}", text);
}

// The value of a variable; none if it is unset or `name` is null.
std::optional<int> number(const char* name) {
  const auto value = name != nullptr ? env::get_int(name, 0, INT_MAX) : std::nullopt;
  return value ? std::optional(static_cast<int>(*value)) : std::nullopt;
}

// The variables in which a launcher names a process's rank.
struct Names {
  const char *rank, *size, *local_rank, *local_size;
};

// A rank as one launcher numbers it.
struct RankInfo {
  RankInfo(std::string launcher, const Names& variables)
      : source(std::move(launcher)),
        names(variables),
        rank(*number(names.rank)),
        size(number(names.size).value_or(kUnset)),
        local_rank(number(names.local_rank)),
        local_size(number(names.local_size)) {}

  static constexpr int kUnset = -1;
  std::string source;
  Names names;
  int rank, size;
  std::optional<int> local_rank, local_size, node;
};

void check(const RankInfo& info) {
  if (info.size < 1) {
    throw UsageError("rank", "{}={} is not a world. A world has at least one rank.",
                     info.names.size, info.size);
  }
  if (info.rank >= info.size) {
    throw UsageError("rank",
                     "{}={} does not exist in a world of {}={}: ranks count from 0. Correct one "
                     "of the two variables.",
                     info.names.rank, info.rank, info.names.size, info.size);
  }
  if (info.local_size && (*info.local_size < 1 || *info.local_size > info.size)) {
    throw UsageError("rank",
                     "{}={} contradicts {}={}: a host runs between one and all ranks. Correct one "
                     "of the two variables.",
                     info.names.local_size, *info.local_size, info.names.size, info.size);
  }
  const int most = info.local_size.value_or(info.size);
  if (info.local_rank && *info.local_rank >= most) {
    throw UsageError("rank",
                     "{}={} does not exist among {}={} ranks: local ranks count from 0. Correct "
                     "one of the two variables.",
                     info.names.local_rank, *info.local_rank,
                     info.local_size ? info.names.local_size : info.names.size, most);
  }
}

RankEnv to_env(const RankInfo& info) {
  check(info);
  RankEnv env;
  env.source = info.source;
  env.rank = info.rank;
  env.world_size = info.size;
  env.local_rank = info.local_rank.value_or(0);
  env.local_size_known = info.local_size.has_value() || info.size == 1;
  env.local_rank_known = info.local_rank.has_value() || info.size == 1;
  env.node_known = info.node.has_value() || env.local_size_known;
  env.local_world_size = info.local_size.value_or(env.local_rank + 1);
  // Without information on nodes, assumes equal hosts that are filled one after the other.
  const bool one_each = !env.local_size_known && !env.local_rank_known;
  env.node = info.node.value_or(one_each               ? env.rank
                                : env.local_size_known ? env.rank / env.local_world_size
                                                       : 0);
  return env;
}

bool takes_master_variables(RankEnv& env) {
  const auto address = env::get("MASTER_ADDR");
  const auto port = env::get_int("MASTER_PORT", 1, 65535);
  if (!address && !port) return false;
  if (env.alone()) return true;
  env.master_addr = address.value_or("127.0.0.1");
  env.master_port = static_cast<int>(port.value_or(kDefaultPort));
  if (!address && env.local_world_size != env.world_size) {
    throw UsageError("rank",
                     "MASTER_PORT={} is set but MASTER_ADDR is not, and the {} ranks are on "
                     "several hosts. Set MASTER_ADDR to rank 0's host on every one of them.",
                     *port, env.world_size);
  }
  if (!port && env.rank == 0) {
    warn_once(fmt::format("MASTER_PORT is not set; using {}. Two jobs on one host would collide.",
                          kDefaultPort));
  }
  return true;
}

// ---------------------------------------------------------------- MPI

std::optional<RankInfo> mpi_rank() {
  // MPICH and Intel MPI both have PMI's names, and the same names for the local rank.
  constexpr Names kFamilies[] = {
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
       "OMPI_COMM_WORLD_LOCAL_SIZE"},
      {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
       "MV2_COMM_WORLD_LOCAL_SIZE"},
      {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
  };
  for (const Names& names : kFamilies) {
    if (!number(names.rank)) continue;
    RankInfo info("mpirun", names);
    if (info.size != RankInfo::kUnset) return info;
    throw UsageError("rank", "{}={} is set but {} is not. Start the program with mpirun.",
                     names.rank, info.rank, names.size);
  }
  return std::nullopt;
}

struct Ancestor {
  long pid = 0;
  std::string name;
  std::string start_time;  // in ticks since boot: distinguishes processes with a reused pid
};

Ancestor read_process(long pid, long& parent) {
  const std::string text = text_or_empty(fmt::format("/proc/{}/stat", pid));
  const auto fields = stat_fields(text);
  const auto open = text.find('('), close = text.rfind(')');
  if (fields.size() <= 22 || open >= close) return {};
  parent = static_cast<long>(leading_number(fields[4]).value_or(0));
  return {pid, text.substr(open + 1, close - open - 1), std::string(fields[22])};
}

// MPICH passes no job id in variables, but all ranks on a host are started by one proxy.
std::string mpi_proxy() {
  long pid = ::getppid();
  std::string parent_id;
  while (pid > 1) {
    long next = 0;
    const Ancestor process = read_process(pid, next);
    if (process.pid == 0) break;
    const std::string id = fmt::format("{}@{}", process.pid, process.start_time);
    if (parent_id.empty()) parent_id = id;
    if (process.name.find("pmi_proxy") != std::string::npos) return id;
    pid = next;
  }
  return parent_id;
}

// Identifies one mpirun on this host. Only 16 bits of Open MPI's job id differ between jobs, so its
// daemon's directory and address are included.
std::string mpi_job() {
  std::string job;
  for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMIX_SERVER_TMPDIR",
                           "OMPI_MCA_orte_hnp_uri", "MV2_COMM_WORLD_JOBID", "PMI_JOBID"}) {
    if (const auto value = env::get(name)) job += fmt::format("{}={};", name, *value);
  }
  return job.empty() ? "proxy=" + mpi_proxy() : job;
}

std::string rendezvous_name(const std::string& job) {
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const unsigned char c : job) hash = (hash ^ c) * 1099511628211u;
  return fmt::format("lockstep/{}/{:016x}", ::geteuid(), hash);
}

RankEnv from_mpi(const RankInfo& info) {
  RankEnv env = to_env(info);
  if (env.alone() || takes_master_variables(env)) return env;
  if (!env.local_size_known || env.local_world_size != env.world_size) {
    throw UsageError(
        "rank",
        "mpirun started {} ranks on several hosts (rank {} says {}={}), and MASTER_ADDR is not "
        "set: the ranks have no rendezvous address. Pass it along, for example "
        "mpirun -x MASTER_ADDR=$(hostname) -x MASTER_PORT={} ..., or use lockstep run --nnodes.",
        env.world_size, env.rank, info.names.local_size,
        env.local_size_known ? fmt::to_string(env.local_world_size) : "(unset)", kDefaultPort);
  }
  env.master_addr = "127.0.0.1";
  env.rendezvous_name = rendezvous_name(mpi_job());
  return env;
}

// ---------------------------------------------------------------- SLURM

// Only tasks of srun are ranks. An sbatch script also has SLURM_PROCID=0 and SLURM_NTASKS, and a
// salloc shell may run in a step of its own; both have no step id or a reserved one.
bool in_srun_task() {
  constexpr std::int64_t kFirstReservedStep = 0xfffffff0;
  auto step = env::get("SLURM_STEP_ID");
  if (!step) step = env::get("SLURM_STEPID");
  if (!step || !env::get("SLURM_PROCID")) return false;
  return env::parse_int(*step, "SLURM_STEP_ID") < kFirstReservedStep;
}

std::optional<RankInfo> slurm_rank() {
  if (!in_srun_task()) return std::nullopt;
  RankInfo info("srun", {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr});
  info.names.local_size = "SLURM_STEP_TASKS_PER_NODE";  // a list
  info.node = number("SLURM_NODEID");
  if (info.size == RankInfo::kUnset)
    info.size = number(info.names.size = "SLURM_NTASKS").value_or(RankInfo::kUnset);
  if (info.size == RankInfo::kUnset) {
    throw UsageError("rank",
                     "SLURM_PROCID={} is set but neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS "
                     "is. Start the program with srun.",
                     info.rank);
  }
  if (const auto tasks = env::get(info.names.local_size)) {
    info.local_size = detail::tasks_on_node(*tasks, info.node.value_or(0));
  } else if (number("SLURM_STEP_NUM_NODES").value_or(0) == 1) {
    info.local_size = info.size;
  }
  return info;
}

RankEnv from_slurm(const RankInfo& info) {
  RankEnv env = to_env(info);
  if (env.alone() || takes_master_variables(env)) return env;
  const auto job = env::get_int("SLURM_JOB_ID", 0).value_or(0);
  auto step = env::get_int("SLURM_STEP_ID", 0);
  if (!step) step = env::get_int("SLURM_STEPID", 0).value_or(0);
  if (env.local_size_known && env.local_world_size == env.world_size) {
    env.master_addr = "127.0.0.1";
    env.rendezvous_name = rendezvous_name(fmt::format("slurm {}.{}", job, *step));
    return env;
  }
  auto nodes = env::get("SLURM_STEP_NODELIST");
  if (!nodes) nodes = env::get("SLURM_NODELIST");
  if (!nodes) {
    throw UsageError("rank",
                     "srun started {} ranks on several nodes, but SLURM_STEP_NODELIST is not set, "
                     "so the first node is not known. Set MASTER_ADDR and MASTER_PORT.",
                     env.world_size);
  }
  env.master_addr = detail::first_host(*nodes);
  env.master_port = detail::port_of_step(job, *step);
  return env;
}

// ---------------------------------------------------------------- RANK, WORLD_SIZE

bool under_elastic_launcher() {
  return env::get("TORCHELASTIC_RUN_ID").has_value();
}

// A Kubernetes job has one rank per pod, unless it sets the number that its launcher starts on each
// pod. Without that launcher, a program would wait for ranks that nobody starts.
void refuse_missing_launcher() {
  const auto per_node = env::get("PET_NPROC_PER_NODE");
  if (!per_node || *per_node == "1") return;
  throw UsageError("rank",
                   "PET_NPROC_PER_NODE={} asks for a launcher, but this process was started "
                   "without one (LOCAL_RANK is not set). Start it as: lockstep run <program>.",
                   *per_node);
}

RankInfo environment_rank() {
  RankInfo info("environment", {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"});
  if (info.size == RankInfo::kUnset) {
    throw UsageError("rank",
                     "RANK={} is set but WORLD_SIZE is not. Set WORLD_SIZE to the number of ranks, "
                     "or unset RANK for a world of one.",
                     info.rank);
  }
  info.node = number("GROUP_RANK");
  if (!info.node) info.node = number("NODE_RANK");
  if (under_elastic_launcher()) {
    info.source = under_lockstep_run() ? "lockstep run" : "torchrun";
    return info;
  }
  const bool pods = env::get("KUBERNETES_SERVICE_HOST").has_value();
  const auto address = env::get("MASTER_ADDR");
  if (!pods && (!address || is_loopback(*address))) {  // everything is on this host
    if (!info.local_size) info.local_size = info.size;
    if (!info.local_rank && *info.local_size == info.size) info.local_rank = info.rank;
  } else if (!info.local_rank && !info.local_size) {  // one rank per host or pod, most likely
    if (info.size > 1) refuse_missing_launcher();
  }
  return info;
}

// RANK and WORLD_SIZE contradict the launcher's own variables. Under mpirun that is a forgotten
// export, and every process would be the same rank. Under srun it is also how people start several
// ranks from one task, so it only logs a warning.
void compare(const RankInfo& info, const std::optional<RankInfo>& launcher) {
  if (!launcher || (launcher->rank == info.rank && launcher->size == info.size)) return;
  if (launcher->source == "mpirun") {
    throw UsageError("rank",
                     "RANK={} and WORLD_SIZE={} are set, but mpirun says {}={} and {}={}. Unset "
                     "RANK and WORLD_SIZE, or unset {} where they are meant.",
                     info.rank, info.size, launcher->names.rank, launcher->rank,
                     launcher->names.size, launcher->size, launcher->names.rank);
  }
  warn_once(
      fmt::format("RANK={} and WORLD_SIZE={} are used; srun says rank {} of {}. Unset them "
                  "if they are left over.",
                  info.rank, info.size, launcher->rank, launcher->size));
}

// -1 if another launcher has set this process's rank, and in children of a rank, where the
// descriptor is closed.
int inherited_store_channel(const RankEnv& env) {
  const auto channel = StoreChannel::from_env();
  const bool ours = channel && channel->rank == env.rank && channel->world_size == env.world_size &&
                    channel->master_port == env.master_port && channel->intact();
  return ours ? channel->fd : -1;
}

RankEnv from_variables(const RankInfo& info) {
  RankEnv env = to_env(info);
  env.attempt = number("TORCHELASTIC_RESTART_COUNT").value_or(0);
  if (env.alone()) return env;
  if (!takes_master_variables(env)) {
    if (!env.local_size_known || env.local_world_size != env.world_size) {
      throw UsageError("rank",
                       "RANK={} and WORLD_SIZE={} are set but MASTER_ADDR is not, and the ranks "
                       "are on several hosts. Set MASTER_ADDR to rank 0's host and MASTER_PORT to "
                       "a free port there, on every rank.",
                       env.rank, env.world_size);
    }
    env.master_addr = "127.0.0.1";
    env.master_port = kDefaultPort;
    if (env.rank == 0) {
      warn_once(
          fmt::format("MASTER_ADDR and MASTER_PORT are not set; using 127.0.0.1:{}. Two jobs "
                      "on one host would collide.",
                      kDefaultPort));
    }
  }
  // torchrun writes "True", and torch compares with it.
  env.agent_store = env::get("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (env.agent_store) env.store_channel = inherited_store_channel(env);
  return env;
}

// ---------------------------------------------------------------- PET_*, and nothing

std::optional<RankEnv> from_pet() {
  const auto nodes = env::get("PET_NNODES");
  const auto node_rank = number("PET_NODE_RANK");
  if (!nodes || *nodes == "1" || !node_rank) return std::nullopt;
  refuse_missing_launcher();
  RankInfo info("environment", {"PET_NODE_RANK", "PET_NNODES", "LOCAL_RANK", "LOCAL_WORLD_SIZE"});
  info.local_rank = 0;
  info.local_size = 1;
  info.node = info.rank;
  RankEnv env = to_env(info);
  const auto address = env::get("PET_MASTER_ADDR");
  if (!address) {
    throw UsageError("rank",
                     "PET_NNODES={} and PET_NODE_RANK={} are set but PET_MASTER_ADDR is not. Start "
                     "the program with lockstep run, or set MASTER_ADDR, RANK and WORLD_SIZE.",
                     *nodes, *node_rank);
  }
  env.master_addr = *address;
  env.master_port =
      static_cast<int>(env::get_int("PET_MASTER_PORT", 1, 65535).value_or(kDefaultPort));
  return env;
}

RankEnv from_nothing() {
  const auto size = number("WORLD_SIZE");
  if (size && *size != 1) {
    throw UsageError("rank",
                     "WORLD_SIZE={} is set but RANK is not. Start the program with lockstep run, "
                     "or set RANK on every rank.",
                     *size);
  }
  const auto local_rank = number("LOCAL_RANK");
  if (local_rank && *local_rank != 0) {
    throw UsageError("rank",
                     "LOCAL_RANK={} is set but RANK and WORLD_SIZE are not. Start the program with "
                     "lockstep run; to choose a GPU for a world of one, set CUDA_VISIBLE_DEVICES.",
                     *local_rank);
  }
  return {};
}

// A WORLD_SIZE without RANK that contradicts the launcher: the user expects another world.
void compare_size(const RankInfo& info) {
  const auto size = number("WORLD_SIZE");
  if (!size || *size == info.size) return;
  throw UsageError("rank",
                   "WORLD_SIZE={} is set, but {} started {}={} ranks. Unset WORLD_SIZE or start "
                   "that many.",
                   *size, info.source, info.names.size, info.size);
}

}  // namespace

bool under_lockstep_run() {
  // A torchrun that one of our ranks started inherits LOCKSTEP_RUN and overrides the others. Its
  // run id may be the same (a default, or given to both), but its store has another port.
  const auto run = env::get("LOCKSTEP_RUN");
  if (!run || run != env::get("TORCHELASTIC_RUN_ID")) return false;
  if (env::get("TORCHELASTIC_USE_AGENT_STORE") == "False") return true;
  const auto channel = StoreChannel::from_env();
  return channel && std::to_string(channel->master_port) == env::get("MASTER_PORT");
}

RankEnv read_rank_env() {
  auto mpi = mpi_rank();
  const auto slurm = slurm_rank();
  // srun --mpi=pmi2 also sets PMI's variables; SLURM's say more. If they differ, srun has started
  // MPICH's proxy, one per node.
  if (mpi && slurm && std::string_view(mpi->names.rank) == "PMI_RANK" && mpi->rank == slurm->rank &&
      mpi->size == slurm->size) {
    mpi.reset();
  }
  if (env::get("RANK")) {
    const RankInfo info = environment_rank();
    if (!under_elastic_launcher()) compare(info, mpi ? mpi : slurm);
    return from_variables(info);
  }
  if (mpi) {
    compare_size(*mpi);
    return from_mpi(*mpi);
  }
  if (slurm) {
    compare_size(*slurm);
    return from_slurm(*slurm);
  }
  if (auto pet = from_pet()) return *pet;
  return from_nothing();
}

int bind_on_loopback(const RankEnv& env) {
  const bool six = env.master_addr == "::1";
  if (!is_loopback(env.master_addr)) return -1;
  sockaddr_in address4{};
  address4.sin_family = AF_INET;
  address4.sin_port = htons(static_cast<std::uint16_t>(env.master_port));
  address4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (!six) ::inet_pton(AF_INET, env.master_addr.c_str(), &address4.sin_addr);  // 127.0.1.1, say
  sockaddr_in6 address6{};
  address6.sin6_family = AF_INET6;
  address6.sin6_port = address4.sin_port;
  address6.sin6_addr = in6addr_loopback;
  Fd fd(::socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  if (!fd || ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0) return -1;
  const int bound = six ? ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address6), sizeof address6)
                        : ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address4), sizeof address4);
  return bound == 0 ? fd.release() : -1;
}

namespace detail {

std::string first_host(const std::string& node_list) {
  std::string host;
  std::size_t i = 0;
  while (i < node_list.size() && node_list[i] != ',') {
    if (node_list[i] != '[') {
      host += node_list[i++];
      continue;
    }
    const auto close = node_list.find(']', i);
    const auto end = node_list.find_first_of(",-]", i + 1);
    if (close == std::string::npos || end == i + 1) break;
    host += node_list.substr(i + 1, end - i - 1);
    i = close + 1;
  }
  const bool complete = i >= node_list.size() || node_list[i] == ',';
  if (host.empty() || !complete) {
    throw UsageError("rank",
                     "the node list '{}' cannot be read: it should look like n[1-3,7],m1. Set "
                     "MASTER_ADDR and MASTER_PORT instead.",
                     node_list);
  }
  return host;
}

int tasks_on_node(const std::string& tasks_per_node, int node) {
  int first = 0;
  std::istringstream parts(tasks_per_node);
  for (std::string part; std::getline(parts, part, ',');) {
    const auto open = part.find("(x");
    const std::string what = "SLURM_STEP_TASKS_PER_NODE";
    const auto tasks = env::parse_int(part.substr(0, open), what, 1, INT_MAX);
    std::int64_t nodes = 1;
    if (open != std::string::npos)
      nodes = env::parse_int(part.substr(open + 2, part.size() - open - 3), what, 1, INT_MAX);
    if (node < first + nodes) return static_cast<int>(tasks);
    first += static_cast<int>(nodes);
  }
  throw UsageError("rank",
                   "SLURM_NODEID={} is not among the {} nodes of "
                   "SLURM_STEP_TASKS_PER_NODE={}. Start the program with srun.",
                   node, first, tasks_per_node);
}

int port_of_step(long long job, long long step) {
  // Different for neighbouring jobs, and for steps of one job. Few services use 10000 to 29999, and
  // the kernel assigns ephemeral ports above.
  return 10000 + static_cast<int>(((job % 20000) * 37 + step % 20000) % 20000);
}

}  // namespace detail

WorldLayout layout_of(const std::vector<NodeShare>& nodes, int node_rank) {
  const auto own = static_cast<std::size_t>(node_rank);
  if (node_rank < 0 || own >= nodes.size())
    throw UsageError("launch", "node rank {} is not one of {} nodes.", node_rank, nodes.size());
  WorldLayout layout{.world_size = 0, .role_world_size = 0};
  std::int64_t world_size = 0;
  for (std::size_t node = 0; node < nodes.size(); ++node) {
    const NodeShare& share = nodes[node];
    world_size += share.nproc;
    if (share.nproc < 1 || world_size > kMaxWorldSize)
      throw UsageError("launch", "{} ranks on node {} make a world of {}; it has 1 to {}.",
                       share.nproc, node, world_size, kMaxWorldSize);
    const bool same_role = share.role == nodes[own].role;
    if (node < own) layout.first_rank += share.nproc;
    if (node < own && same_role) layout.first_role_rank += share.nproc;
    if (same_role) layout.role_world_size += share.nproc;
  }
  layout.world_size = static_cast<int>(world_size);
  return layout;
}

}  // namespace lockstep

namespace lockstep::body_mark {
namespace {

std::string mark_beside(const std::string& error_file) {
  return error_file + ".inside";
}

// Empty if no launcher would look for it.
std::string own_mark() {
  const auto error_file = env::get("TORCHELASTIC_ERROR_FILE");
  return error_file && under_lockstep_run() ? mark_beside(*error_file) : "";
}

}  // namespace

void set() noexcept {
  try {
    const std::string mark = own_mark();
    if (!mark.empty()) Fd(::open(mark.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644)).reset();
  } catch (...) {
  }
}

void clear() noexcept {
  try {
    const std::string mark = own_mark();
    if (!mark.empty()) ::unlink(mark.c_str());
  } catch (...) {
  }
}

bool take(const std::string& error_file) noexcept {
  try {
    return !error_file.empty() && ::unlink(mark_beside(error_file).c_str()) == 0;
  } catch (...) {
    return false;
  }
}

}  // namespace lockstep::body_mark

// ---------------------------------------------------------------- a port of the ranks of one host
//
// rendezvous(): rank 0 tells the other ranks of its host its port through an abstract socket, whose
// name derives from the launcher's job id. Ranks that are missing, or come twice, are named by the
// start-up check, which follows.
namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPause{20};

Fd unix_socket() {
  Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) throw SystemError("rank", "cannot create a local socket", errno);
  return fd;
}

// A listening socket on a free port of the loopback interface.
Fd listen_on_free_port(int& port) {
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (!fd || ::bind(fd.get(), generic, length) != 0 || ::listen(fd.get(), SOMAXCONN) != 0 ||
      ::getsockname(fd.get(), generic, &length) != 0) {
    throw SystemError("rank", "cannot listen on a free port of 127.0.0.1", errno);
  }
  port = ntohs(address.sin_port);
  return fd;
}

// ---------------------------------------------------------------- rank 0

// The name is free unless an earlier program of the same job is still exiting.
Fd listen_at(const std::string& name, const Deadline& deadline) {
  Fd listener = unix_socket();
  while (bind_abstract(listener.get(), name) != 0) {
    const int error = errno;
    if (error == EADDRINUSE && !deadline.expired()) {
      std::this_thread::sleep_for(kPause);
      continue;
    }
    throw SystemError(
        "rank",
        fmt::format("cannot take the rendezvous name '{}' (another rank 0 of this job "
                    "may be alive; MASTER_ADDR and MASTER_PORT avoid the name)",
                    name),
        error);
  }
  if (::listen(listener.get(), SOMAXCONN) != 0)
    throw SystemError("rank", "cannot listen on the rendezvous name", errno);
  return listener;
}

// Tells `others` ranks the port, on a thread of its own. The name is given up then: the next
// program of the job takes it again.
void serve(Fd listener, int port, int others, const Deadline& deadline) {
  const SignalsBlocked blocked;
  std::thread([listener = std::move(listener), text = std::to_string(port), others,
               deadline]() mutable {
    while (others > 0 && !deadline.expired()) {
      pollfd waits{listener.get(), POLLIN, 0};
      if (::poll(&waits, 1, deadline.remaining_ms()) <= 0) continue;
      const Fd client(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!client) std::this_thread::sleep_for(kPause);  // no descriptor is left
      if (!client || peer_uid(client.get()) != ::geteuid()) continue;
      if (::send(client.get(), text.data(), text.size(), MSG_NOSIGNAL) > 0) --others;
    }
  }).detach();
}

// ---------------------------------------------------------------- the others

// One attempt: the port, or nothing if rank 0 does not listen (yet, or any more).
std::optional<int> ask(const RankEnv& env, const std::string& name, const Deadline& deadline) {
  const Fd fd = unix_socket();
  const milliseconds left = std::max(milliseconds(1), deadline.remaining());
  const timeval limit{left.count() / 1000, (left.count() % 1000) * 1000};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);  // of connect(), too
  if (connect_abstract(fd.get(), name) != 0) return std::nullopt;
  const auto uid = peer_uid(fd.get());
  if (uid != ::geteuid()) {
    throw CommError(
        "rank",
        fmt::format("the rendezvous name '{}' is held by user {}, not by rank 0 of this "
                    "job. Set MASTER_ADDR and MASTER_PORT.",
                    name, uid ? fmt::to_string(*uid) : "(unknown)"),
        {.rank = env.rank, .peer = 0, .operation = "rendezvous"});
  }
  char text[16];
  ssize_t n = -1;
  do n = ::recv(fd.get(), text, sizeof text, 0);
  while (n < 0 && errno == EINTR);  // rank 0 answers each rank once
  const auto port = leading_number({text, static_cast<std::size_t>(std::max<ssize_t>(n, 0))});
  return port ? std::optional(static_cast<int>(*port)) : std::nullopt;
}

int find_port(const RankEnv& env, const std::string& name, const Deadline& deadline) {
  std::optional<int> port;
  const auto found = [&] { return (port = ask(env, name, deadline)).has_value(); };
  if (poll_until(found, deadline, milliseconds(50))) return *port;
  throw TimeoutError(
      "rank",
      fmt::format(
          "rank {} did not find rank 0 on this host within {:.1f} s. Rank 0 may have failed "
          "to start, or runs in another container: then set MASTER_ADDR and MASTER_PORT.",
          env.rank, static_cast<double>(deadline.total().count()) / 1000),
      {.rank = env.rank, .peer = 0, .operation = "rendezvous", .elapsed = deadline.elapsed()});
}

}  // namespace

void rendezvous(RankEnv& env, int timeout_ms) {
  if (env.rendezvous_name.empty() || env.alone() || env.master_port != 0) return;
  // A process may call this more than once; a fast rank's second call must not disturb the first.
  static std::atomic<int> rendezvous_count{0};
  const std::string name = fmt::format("{}/{}", env.rendezvous_name, rendezvous_count++);
  const Deadline deadline = Deadline::after(milliseconds(timeout_ms));
  if (env.rank != 0) {
    env.master_port = find_port(env, name, deadline);
    return;
  }
  Fd listener = listen_at(name, deadline);
  env.store_fd = listen_on_free_port(env.master_port).release();
  serve(std::move(listener), env.master_port, env.world_size - 1, deadline);
}

}  // namespace lockstep
