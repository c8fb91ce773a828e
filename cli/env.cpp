// `lockstep env`: the rank of this process and where it comes from. Reads the variables that a
// program's World would read and prints its choices; starts nothing and connects to nothing.
#include "lockstep/core/env.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <ctime>
#include <map>
#include <optional>
#include <set>

#include "cli/commands.h"
#include "launcher/host.h"
#include "lockstep/core/device_rule.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
#include "lockstep/core/text.h"
#include "lockstep/monitor/gpu_sampler.h"
#include "lockstep/rendezvous/rank_env.h"
#include "lockstep/train/config_keys.h"
#include "lockstep/version.h"

namespace lockstep::cli {
namespace {

constexpr const char* kEnvHelp =
    "usage: lockstep env [--json]\n\n"
    "Prints who this process would be as a rank (and which launcher says so), which device and\n"
    "backend a program would choose and why, what each GPU of the host does (utilisation, memory,\n"
    "power, temperature, clock), and the environment variables that are set.\n"
    "Under a launcher each rank prints its own: lockstep run --nproc-per-node=2 lockstep env\n\n"
    "  --json    the same as one line of JSON, with the variables that are not set\n";

// ------------------------------------------------------------------ environment variables

// A variable that matters to a rank, with one line of meaning; docs/environment.md must list them.
struct KnownVariable {
  std::string_view name;
  std::string_view meaning;
  bool important = false;  // listed even when it is not set
};

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

// Whether it belongs to a family that is shown in full.
bool is_shown(std::string_view name) {
  return std::any_of(kFamilies.begin(), kFamilies.end(), [&](std::string_view family) {
    return name.substr(0, family.size()) == family;
  });
}

// Every variable of this process that is known or shown, with its value.
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

// ------------------------------------------------------------------ what is found

struct Choice {
  std::string name;
  std::string reason;
};

// Everything that is printed, gathered once.
struct Findings {
  std::optional<RankEnv> identity;
  std::string problem;  // why there is no identity, or why the world would refuse to start
  launch::Gpus gpus;
  monitor::GpuSnapshot nvml;
  Choice device;
  Choice backend;
  int cores = 0;
  std::string cpus;
  std::optional<double> quota;
  std::string host;
  std::vector<std::string> warnings;
};

// The choices of a World in a program built with CUDA.
void choose(Findings& found) {
  const RankEnv& me = *found.identity;
  const DeviceRule rule =
      apply_device_rule({.local_rank = me.local_rank,
                         .visible_gpus = [&found] { return found.gpus.count; },
                         .no_gpu = fmt::format("no GPU: {}", found.gpus.reason)});
  found.device = {rule.device(), rule.reason};
  found.problem = rule.problem;
  const std::string backend = env::get("LOCKSTEP_BACKEND").value_or("auto");
  if (backend != "auto") {
    found.backend = {rule.backend, fmt::format("LOCKSTEP_BACKEND={}", backend)};
  } else if (me.alone()) {
    found.backend = {"single", "a world of one needs none"};
  } else if (!rule.automatic) {
    found.backend = {rule.backend, fmt::format("the device is {}", found.device.name)};
  } else if (me.local_size_known && me.local_world_size < me.world_size) {
    found.backend = {"gloo", "the device is cpu and there are ranks on other hosts"};
  } else {
    found.backend = {rule.backend, "the device is cpu; gloo where ranks cannot share memory"};
  }
}

void warn(Findings& found) {
  found.warnings = unread_variables();
  if (!found.identity) return;
  const RankEnv& me = *found.identity;
  if (me.source == "alone")
    found.warnings.push_back(
        "WORLD_SIZE is not set: this is a world of one. Start several ranks with lockstep run, or "
        "set RANK, WORLD_SIZE and LOCAL_RANK for each.");
  if (me.alone() && found.gpus.count > 1) {
    found.warnings.push_back(fmt::format(
        "{} GPUs are visible but there is one rank: the others stay idle. Use lockstep run "
        "--nproc-per-node=gpu.",
        found.gpus.count));
  }
}

Findings gather() {
  Findings found;
  found.gpus = launch::find_gpus();  // forks, and so comes before the sampler's thread
  const monitor::GpuSampler sampler;
  found.cores = allowed_cores();
  found.cpus = launch::cpu_list_text(allowed_cpus());
  found.quota = cgroup_quota_cores();
  found.host = host_name();
  try {
    found.identity = read_rank_env();
    choose(found);
  } catch (const UsageError& error) {
    found.problem = error.what();
  }
  warn(found);
  sampler.wait_for_samples(1);
  found.nvml = sampler.snapshot();
  return found;
}

// ------------------------------------------------------------------ text

// Formats a line as the log does: "2025-12-10 13:00:00.123 info [env] RANK=0".
std::string log_line(const char* level, const std::string& text) {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  std::tm local{};
  ::localtime_r(&seconds, &local);
  char stamp[32] = "";
  std::strftime(stamp, sizeof stamp, "%Y-%m-%d %H:%M:%S", &local);
  return fmt::format("{}.{:03} {} [env] {}\n", stamp, ms, level, text);
}

std::string rendezvous_text(const RankEnv& me) {
  if (me.alone()) return "not needed in a world of one";
  if (!me.rendezvous_name.empty())
    return "a free port, agreed on through this host's rendezvous socket";
  const std::string where = fmt::format("{}:{}", me.master_addr, me.master_port);
  if (me.store_channel >= 0)
    return fmt::format("a store hosted by the launcher, on descriptor {} (no port)",
                       me.store_channel);
  if (me.agent_store) return where + ", a store hosted by the launcher";
  return where + ", a store hosted by rank 0";
}

std::string row(const char* name, const std::string& text) {
  return fmt::format("{:<12}{}\n", name, text);
}

// All GPUs of the host in NVML's numbering, whatever CUDA_VISIBLE_DEVICES says.
std::string nvml_text(const Findings& found) {
  std::string text;
  for (const monitor::GpuIdentity& gpu : found.nvml.gpus) {
    const std::string values =
        found.nvml.newest
            ? monitor::reading_text(found.nvml.newest->gpus.at(static_cast<std::size_t>(gpu.index)))
            : "no sample";
    text += row(fmt::format("  GPU {}", gpu.index).c_str(),
                fmt::format("{} at {}: {}", gpu.name, gpu.pci_bus_id, values));
  }
  if (!found.nvml.problem.empty() && (found.gpus.count > 0 || !found.nvml.gpus.empty()))
    text += row("  NVML", found.nvml.problem);
  return text;
}

std::string facts_text(const Findings& found) {
  std::string text;
  if (found.identity) {
    const RankEnv& me = *found.identity;
    text += row("identity",
                fmt::format("rank {} of {}, local rank {} of {}, node {} (from: {})", me.rank,
                            me.world_size, me.local_rank, me.local_world_size, me.node, me.source));
    text += row("rendezvous", rendezvous_text(me));
  }
  if (!found.device.name.empty()) {
    text += row("device", fmt::format("{} ({})", found.device.name, found.device.reason));
    text += row("backend", fmt::format("{} ({})", found.backend.name, found.backend.reason));
  }
  text += row("gpus", found.gpus.count > 0 ? std::to_string(found.gpus.count)
                                           : fmt::format("0 ({})", found.gpus.reason));
  text += nvml_text(found);
  text += row("cores", fmt::format("{} (affinity {}, cgroup quota {})", found.cores, found.cpus,
                                   found.quota ? fmt::format("{:.2f}", *found.quota) : "none"));
  text +=
      row("host", fmt::format("{}, pid {}, lockstep {}", found.host, ::getpid(), LOCKSTEP_VERSION));
  return text;
}

std::string variables_text() {
  const auto set = set_variables();
  std::string text = "\nvariables\n";
  const auto line = [&](std::string_view name, const std::string& value, std::string_view meaning) {
    const std::string left = fmt::format("{}={}", name, value);
    text += meaning.empty()
                ? fmt::format("  {}\n", left)
                : fmt::format("  {:<44}{}{}\n", left, left.size() < 44 ? "" : "  ", meaning);
  };
  auto rest = set;
  for (const KnownVariable& variable : kKnown) {
    const std::string name(variable.name);
    if (const auto found = set.find(name); found != set.end()) {
      line(name, found->second, variable.meaning);
      rest.erase(name);
    } else if (variable.important) {
      text += fmt::format("  {:<44}{}\n", name + " (not set)", variable.meaning);
    }
  }
  for (const auto& [name, value] : rest) line(name, value, "");
  return text;
}

std::string env_text(const Findings& found) {
  std::string text;
  for (const char* name : {"WORLD_SIZE", "RANK", "LOCAL_RANK"}) {
    const auto value = env::get(name);
    text += log_line(
        "info", value ? fmt::format("{}={}", name, *value) : fmt::format("{} is not set", name));
  }
  for (const std::string& warning : found.warnings) text += log_line("warning", warning);
  if (!found.problem.empty()) text += log_line("error", found.problem);
  return text + facts_text(found) + variables_text();
}

// ------------------------------------------------------------------ JSON

std::string env_json(const Findings& found) {
  NodeMembers out = {{"version", text_node(LOCKSTEP_VERSION)},
                     {"host", text_node(found.host)},
                     {"pid", integer_node(::getpid())}};
  if (found.identity) {
    const RankEnv& me = *found.identity;
    out.emplace_back("identity", map_node({{"rank", integer_node(me.rank)},
                                           {"world_size", integer_node(me.world_size)},
                                           {"local_rank", integer_node(me.local_rank)},
                                           {"local_world_size", integer_node(me.local_world_size)},
                                           {"node", integer_node(me.node)},
                                           {"source", text_node(me.source)},
                                           {"rendezvous", text_node(rendezvous_text(me))}}));
  }
  if (!found.device.name.empty()) {
    for (const auto& [key, choice] :
         {std::pair{"device", &found.device}, std::pair{"backend", &found.backend}})
      out.emplace_back(key, map_node({{"name", text_node(choice->name)},
                                      {"reason", text_node(choice->reason)}}));
  }
  out.emplace_back("gpus", map_node({{"count", integer_node(found.gpus.count)},
                                     {"reason", text_node(found.gpus.reason)}}));
  out.emplace_back("nvml", monitor::gpu_node(found.nvml));
  out.emplace_back("cores", integer_node(found.cores));
  out.emplace_back("warnings", texts_node(found.warnings));
  if (!found.problem.empty()) out.emplace_back("problem", text_node(found.problem));
  NodeMembers set;
  for (const auto& [name, value] : set_variables()) set.emplace_back(name, text_node(value));
  out.emplace_back("variables", map_node(std::move(set)));
  std::vector<Node> known;
  for (const KnownVariable& variable : kKnown) known.push_back(text_node(variable.name));
  out.emplace_back("known", list_node(std::move(known)));
  return to_json(map_node(std::move(out))) + '\n';
}

}  // namespace

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

int env_command(const Args& args) {
  if (print_help(args, kEnvHelp)) return 0;
  bool json = false;
  Flags flags("env");
  flags.toggle("--json", json);
  for (const std::string& name : flags.read(args))
    throw UsageError("env", "'{}' is no flag. 'lockstep env --help' lists them.", name);
  const Findings found = gather();
  const std::string text = json ? env_json(found) : env_text(found);
  print_text("{}", text);
  return found.problem.empty() ? 0 : 2;
}

}  // namespace lockstep::cli
