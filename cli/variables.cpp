#include "cli/variables.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <set>

#include "lockstep/core/text.h"
#include "lockstep/train/config_keys.h"

namespace lockstep::cli {
namespace {

constexpr KnownVariable kKnown[] = {
    {"WORLD_SIZE", "number of ranks in all", true},
    {"RANK", "this rank, from 0", true},
    {"LOCAL_RANK", "this rank's number on its host; chooses the GPU", true},
    {"LOCAL_WORLD_SIZE", "ranks on this host", true},
    {"GROUP_RANK", "number of this host"},
    {"GROUP_WORLD_SIZE", "number of hosts"},
    {"ROLE_NAME", "role given with --role"},
    {"ROLE_RANK", "rank within the role"},
    {"ROLE_WORLD_SIZE", "ranks of the role"},
    {"NODE_RANK", "number of this host, where GROUP_RANK is not set"},
    {"MASTER_ADDR", "host of the store: rank 0's, or 127.0.0.1 under a launcher of ours", true},
    {"MASTER_PORT", "port on which the store listens there", true},
    {"TORCHELASTIC_RUN_ID", "id of the run"},
    {"TORCHELASTIC_RESTART_COUNT", "attempt, from 0"},
    {"TORCHELASTIC_MAX_RESTARTS", "attempts that may follow a failure"},
    {"TORCHELASTIC_USE_AGENT_STORE", "True: the launcher hosts the store, rank 0 is a client"},
    {"TORCHELASTIC_ERROR_FILE", "where a failing rank writes why"},
    {"TORCHELASTIC_SIGNALS_TO_HANDLE", "signals that the launcher forwards"},
    {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "prefix of console lines"},
    {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "PyTorch's NCCL watchdog; our worlds do without it"},
    {"LOCKSTEP_RUN", "id of the `lockstep run` that started this rank"},
    {"LOCKSTEP_SPAWN", "the call of lockstep::spawn that started this rank"},
    {"LOCKSTEP_CONTROL_FD", "pipe on which the launcher announces failures"},
    {"LOCKSTEP_LEDGER", "memory in which this rank notes where it is, for the launcher"},
    {"LOCKSTEP_TERMINAL", "rank 0's pipe to the launcher's terminal, and its columns"},
    {"LOCKSTEP_STORE_CHANNEL", "socket to the store that the launcher serves"},
    {"LOCKSTEP_SECRET_FILE", "secret of the link between launchers; --secret-file"},
    {"LOCKSTEP_TRACE_THROWS", "0 or 1: remember where exceptions were thrown"},
    {"LOCKSTEP_LOG", "debug, info, warning, error or off"},
    {"LOCKSTEP_GRAD_INPLACE_MIN_BYTES", "from which size on gradients are allocated in buckets"},
    {"LOCKSTEP_REPLACE_GLOO", "Python: groups asked for as gloo use shared memory on one host"},
    {"LOCKSTEP_CPU_CACHE_MAX_BYTES", "how much idle memory of large CPU tensors is cached"},
    {"LOCKSTEP_DEBUG", "1: compare every collective over ranks first"},
    {"LOCKSTEP_BACKEND", "shm, gloo or nccl instead of auto", true},
    {"LOCKSTEP_DEVICE", "cpu, cuda or cuda:N instead of auto", true},
    {"LOCKSTEP_CUDA_PLUGIN", "path of the CUDA plug-in"},
    {"LOCKSTEP_DASHBOARD_TOKEN_FILE", "token of --dashboard, in place of a random one"},
    {"LOCKSTEP_NVML", "path of NVIDIA's management library"},
    {"LOCKSTEP_SHARE_DEVICE", "1: several local ranks may share a GPU"},
    {"LOCKSTEP_TIMEOUT_S", "deadline of a training operation, in seconds (1800); --timeout"},
    {"LOCKSTEP_STARTUP_TIMEOUT_S",
     "deadline for the rendezvous of all ranks, in seconds (300); --startup-timeout"},
    {"CUDA_VISIBLE_DEVICES", "which GPUs this process sees, and in which order", true},
    {"OMP_NUM_THREADS", "threads for CPU operators", true},
    {"GLOO_SOCKET_IFNAME", "interface that gloo uses", true},
    {"NCCL_SOCKET_IFNAME", "interface that NCCL uses", true},
    {"NCCL_DEBUG", "INFO: NCCL says what it does"},
    {"NCCL_HOSTID", "a different one per rank lets NCCL ranks share a GPU"},
    {"PYTHON_EXEC", "interpreter for .py programs"},
    {"OMPI_COMM_WORLD_RANK", "rank under Open MPI's mpirun"},
    {"OMPI_COMM_WORLD_SIZE", "ranks under Open MPI's mpirun"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "local rank under Open MPI's mpirun"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "local ranks under Open MPI's mpirun"},
    {"MV2_COMM_WORLD_RANK", "rank under MVAPICH's mpirun"},
    {"MV2_COMM_WORLD_SIZE", "ranks under MVAPICH's mpirun"},
    {"MV2_COMM_WORLD_LOCAL_RANK", "local rank under MVAPICH's mpirun"},
    {"MV2_COMM_WORLD_LOCAL_SIZE", "local ranks under MVAPICH's mpirun"},
    {"PMI_RANK", "rank under MPICH's and Intel's mpirun"},
    {"PMI_SIZE", "ranks under MPICH's and Intel's mpirun"},
    {"MPI_LOCALRANKID", "local rank under MPICH's and Intel's mpirun"},
    {"MPI_LOCALNRANKS", "local ranks under MPICH's and Intel's mpirun"},
    {"PMIX_NAMESPACE", "job under mpirun, for where its ranks rendezvous"},
    {"PMIX_SERVER_TMPDIR", "the same"},
    {"OMPI_MCA_ess_base_jobid", "the same under older Open MPI"},
    {"OMPI_MCA_orte_hnp_uri", "the same under older Open MPI"},
    {"MV2_COMM_WORLD_JOBID", "the same under MVAPICH"},
    {"PMI_JOBID", "the same under MPICH and Intel MPI"},
    {"SLURM_JOB_ID", "job, for the port"},
    {"SLURM_STEP_ID", "step, for the port"},
    {"SLURM_PROCID", "rank under srun"},
    {"SLURM_NTASKS", "ranks under srun, where the step does not say"},
    {"SLURM_LOCALID", "local rank under srun"},
    {"SLURM_NODEID", "number of this host under srun"},
    {"SLURM_STEP_NUM_TASKS", "ranks of the step"},
    {"SLURM_STEP_NUM_NODES", "hosts of the step"},
    {"SLURM_STEP_TASKS_PER_NODE", "ranks on each host of the step"},
    {"SLURM_STEP_NODELIST", "hosts of the step; the first is rank 0's"},
    {"SLURM_NODELIST", "the same where the step does not say"},
    {"SLURM_STEPID", "step, where SLURM_STEP_ID is not set"},
    {"KUBERNETES_SERVICE_HOST", "ranks are pods, one to each"},
    {"PET_NNODES", "pods of a job that starts the program without a launcher"},
    {"PET_NODE_RANK", "this pod's number"},
    {"PET_NPROC_PER_NODE", "more than 1 asks for a launcher"},
    {"PET_MASTER_ADDR", "the first pod"},
    {"PET_MASTER_PORT", "port on which its store listens"},
};

// Variables of ./dev, the tests and the benchmarks: docs/environment.md says what they mean.
constexpr std::string_view kOfTools[] = {
    "LOCKSTEP_TORCH",     "LOCKSTEP_CACHE",  "LOCKSTEP_PRESET",     "LOCKSTEP_JOBS",
    "LOCKSTEP_TEST_JOBS", "LOCKSTEP_PYTHON", "LOCKSTEP_BIN",        "LOCKSTEP_SOURCE",
    "LOCKSTEP_LAUNCHER",  "LOCKSTEP_SOAK",   "LOCKSTEP_HALF_ON_CPU"};

constexpr std::array<std::string_view, 12> kFamilies = {
    "LOCKSTEP_", "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_DISTRIBUTED_", "PET_",
    "NCCL_",     "GLOO_",         "OMP_",        "CUDA_",       "ACCELERATE_",        "MKL_"};

}  // namespace

std::span<const KnownVariable> known_variables() {
  return kKnown;
}

bool is_shown(std::string_view name) {
  return std::any_of(kFamilies.begin(), kFamilies.end(), [&](std::string_view family) {
    return name.substr(0, family.size()) == family;
  });
}

std::vector<std::string> unread_variables() {
  constexpr std::string_view kOurs = "LOCKSTEP_";
  std::set<std::string> read(std::begin(kOfTools), std::end(kOfTools));
  for (const train::KeySpec& key : train::key_table()) read.insert(key.variable());
  for (const KnownVariable& variable : kKnown) read.emplace(variable.name);
  std::vector<std::string> candidates;  // without the common prefix, which would skew distances
  for (const std::string& name : read) {
    if (name.rfind(kOurs, 0) == 0) candidates.push_back(name.substr(kOurs.size()));
  }
  std::vector<std::string> lines;
  for (const auto& [name, value] : set_variables()) {
    if (name.rfind(kOurs, 0) != 0 || read.count(name) != 0) continue;
    const auto near = nearest(name.substr(kOurs.size()), candidates);
    lines.push_back(name + " is set, but nothing reads it." +
                    (near ? " Did you mean LOCKSTEP_" + *near + "?" : ""));
  }
  return lines;
}

std::map<std::string, std::string> set_variables() {
  std::map<std::string, std::string> found;
  for (char** entry = ::environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const auto equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string_view name = text.substr(0, equals);
    const bool known = std::any_of(std::begin(kKnown), std::end(kKnown),
                                   [&](const KnownVariable& v) { return v.name == name; });
    if (known || is_shown(name)) found.emplace(name, text.substr(equals + 1));
  }
  return found;
}

}  // namespace lockstep::cli
