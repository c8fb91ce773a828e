#include "launcher/worker_env.h"

#include <signal.h>
#include <unistd.h>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/text.h"

namespace lockstep::launch {
namespace {

using Environment = std::map<std::string, std::string>;

bool is_set(const Variables& variable, const std::string& name) {
  const auto value = variable(name);
  return value.has_value() && !value->empty();
}

std::string signals_text(const LaunchPlan& plan) {
  std::string text;
  for (const int number : stop_signals(plan))
    text += (text.empty() ? "" : ",") + signal_name(number);
  return text;
}

// The entry of CUDA_VISIBLE_DEVICES that belongs to the rank; without the variable, its own index.
std::string visible_device(const Variables& variable, int local_rank) {
  const auto list = variable("CUDA_VISIBLE_DEVICES");
  if (!list) return std::to_string(local_rank);
  std::vector<std::string> devices;
  for (const std::string& device : split(*list, ','))
    if (!trim(device).empty()) devices.push_back(trim(device));
  if (static_cast<std::size_t>(local_rank) >= devices.size()) {
    throw UsageError("run",
                     "--virtual-local-rank: local rank {} has no GPU (CUDA_VISIBLE_DEVICES='{}' "
                     "names {}). Start fewer ranks or make more devices visible.",
                     local_rank, *list, devices.size());
  }
  return devices[static_cast<std::size_t>(local_rank)];
}

void add_identity(Environment& set, const LaunchPlan& plan, const WorkerInfo& place) {
  set["RANK"] = std::to_string(place.layout.first_rank + place.local_rank);
  set["ROLE_RANK"] = std::to_string(place.layout.first_role_rank + place.local_rank);
  set["LOCAL_RANK"] = std::to_string(place.local_rank);
  set["GROUP_RANK"] = std::to_string(plan.node_rank);
  set["WORLD_SIZE"] = std::to_string(place.layout.world_size);
  set["ROLE_WORLD_SIZE"] = std::to_string(place.layout.role_world_size);
  set["LOCAL_WORLD_SIZE"] = std::to_string(plan.nproc_per_node);
  set["GROUP_WORLD_SIZE"] = std::to_string(plan.nnodes);
  set["ROLE_NAME"] = plan.role;
  set["MASTER_ADDR"] = place.master_addr;
  set["MASTER_PORT"] = std::to_string(place.master_port);
}

}  // namespace

Environment worker_environment(const LaunchPlan& plan, const WorkerInfo& place,
                               const Variables& variable) {
  Environment set;
  add_identity(set, plan, place);
  set["TORCHELASTIC_RESTART_COUNT"] = std::to_string(place.attempt);
  set["TORCHELASTIC_MAX_RESTARTS"] = std::to_string(plan.max_restarts);
  set["TORCHELASTIC_RUN_ID"] = plan.run_id;
  set["TORCHELASTIC_ERROR_FILE"] = place.error_file;
  set["TORCHELASTIC_SIGNALS_TO_HANDLE"] = signals_text(plan);
  set["TORCHELASTIC_USE_AGENT_STORE"] = "True";  // the launcher serves the store
  if (!is_set(variable, "TORCH_NCCL_ASYNC_ERROR_HANDLING"))
    set["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1";

  // The run's id, not just "1": under a launcher that a rank starts in turn (torchrun, say) it no
  // longer equals TORCHELASTIC_RUN_ID, which shows that the descriptors below belong to another
  // run.
  set["LOCKSTEP_RUN"] = plan.run_id;
  set["LOCKSTEP_CONTROL_FD"] = place.control_fd >= 0 ? std::to_string(place.control_fd) : "";
  set[terminal::kVariable] = place.terminal;
  set[ledger::kVariable] = place.ledger;
  set["LOCKSTEP_STORE_CHANNEL"] = place.store_channel;

  if (plan.timeout.count() > 0) set["LOCKSTEP_TIMEOUT_S"] = std::to_string(plan.timeout.count());
  if (plan.startup_timeout.count() > 0)
    set["LOCKSTEP_STARTUP_TIMEOUT_S"] = std::to_string(plan.startup_timeout.count());

  if (plan.replace_gloo) set["LOCKSTEP_REPLACE_GLOO"] = "1";

  for (const auto& [name, value] : plan.environment) {
    if (!is_set(variable, name)) set[name] = value;
  }
  if (plan.virtual_local_rank) {
    const auto devices = [&](const std::string& name) -> std::optional<std::string> {
      const auto found = set.find(name);
      return found != set.end() ? found->second : variable(name);
    };
    set["LOCAL_RANK"] = "0";
    set["CUDA_VISIBLE_DEVICES"] = visible_device(devices, place.local_rank);
  }
  if (place.threads > 0 && !is_set(variable, "OMP_NUM_THREADS"))
    set["OMP_NUM_THREADS"] = std::to_string(place.threads);
  if (!place.interface.empty()) {
    if (!is_set(variable, "GLOO_SOCKET_IFNAME")) set["GLOO_SOCKET_IFNAME"] = place.interface;
    // NCCL takes a name for a prefix ("eth1" also means eth10) unless it begins with '='.
    if (!is_set(variable, "NCCL_SOCKET_IFNAME")) set["NCCL_SOCKET_IFNAME"] = "=" + place.interface;
  }
  return set;
}

std::vector<std::string> process_environment(const Environment& set) {
  Environment all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const auto equals = text.find('=');
    if (equals != std::string::npos) all[text.substr(0, equals)] = text.substr(equals + 1);
  }
  for (const auto& [name, value] : set) {
    if (value.empty()) {
      all.erase(name);
    } else {
      all[name] = value;
    }
  }
  std::vector<std::string> strings;
  for (const auto& [name, value] : all) strings.push_back(name + "=" + value);
  return strings;
}

}  // namespace lockstep::launch
