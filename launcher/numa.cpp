// --numa-binding: which CPUs lie near a rank's GPU, read from sysfs.
#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>

#include "launcher/host.h"
#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
#include "lockstep/core/text.h"

namespace lockstep::launch {
namespace {

std::vector<int> list_in(const std::string& path) {
  return parse_cpu_list(text_or_empty(path));
}

std::optional<int> number_in(const std::string& path) {
  const auto number = leading_number(text_or_empty(path));
  return number ? std::optional(static_cast<int>(*number)) : std::nullopt;
}

class Topology {
 public:
  Topology(const HostFiles& files, std::vector<int> allowed)
      : files_(files), allowed_(std::move(allowed)) {
    std::ranges::sort(allowed_);
    find_nodes();
  }

  // Nodes with at least one allowed CPU. A machine without NUMA is one node.
  const std::map<int, std::vector<int>>& nodes() const { return nodes_; }

  int node_of_gpu(const std::string& pci_address) const {
    const std::string path = files_.sys + "/bus/pci/devices/" + pci_address + "/numa_node";
    // The kernel says -1 where there is only one node or the firmware does not know.
    return std::max(0, number_in(path).value_or(0));
  }

  int socket_of(int cpu) const {
    return number_in(cpu_path(cpu) + "/topology/physical_package_id").value_or(0);
  }

  // The smallest CPU number of the physical core, which stands for the core.
  int core_of(int cpu) const {
    const auto cpus = list_in(cpu_path(cpu) + "/topology/thread_siblings_list");
    return cpus.empty() ? cpu : cpus.front();
  }

  // The same for the largest data cache that the CPU shares.
  int cache_of(int cpu) const {
    int best_level = -1;
    int representative = 0;
    std::error_code ignored;
    for (const auto& entry :
         std::filesystem::directory_iterator(cpu_path(cpu) + "/cache", ignored)) {
      const std::string path = entry.path().string();
      const std::string type = text_or_empty(path + "/type");
      const int level = number_in(path + "/level").value_or(-1);
      const auto shared = list_in(path + "/shared_cpu_list");
      if ((!type.starts_with("Unified") && !type.starts_with("Data")) || level <= best_level ||
          shared.empty())
        continue;
      best_level = level;
      representative = shared.front();
    }
    return representative;
  }

 private:
  std::string cpu_path(int cpu) const {
    return fmt::format("{}/devices/system/cpu/cpu{}", files_.sys, cpu);
  }

  void find_nodes() {
    const std::string base = files_.sys + "/devices/system/node";
    for (const int node : list_in(base + "/online"))
      for (const int cpu : list_in(fmt::format("{}/node{}/cpulist", base, node)))
        if (std::ranges::binary_search(allowed_, cpu)) nodes_[node].push_back(cpu);
    if (nodes_.empty() && !allowed_.empty()) nodes_[0] = allowed_;
  }

  HostFiles files_;
  std::vector<int> allowed_;
  std::map<int, std::vector<int>> nodes_;
};

// The node of every slot: a slot is a GPU, or a local rank where ranks outnumber GPUs.
std::vector<int> node_of_slots(const Topology& topology, const NumaRequest& request) {
  const auto& gpus = request.gpu_pci_addresses;
  const std::size_t ranks = static_cast<std::size_t>(std::max(1, request.local_ranks));
  std::vector<int> slots;
  if (!gpus.empty()) {
    for (std::size_t slot = 0; slot < std::max(ranks, gpus.size()); ++slot)
      slots.push_back(topology.node_of_gpu(gpus[slot % gpus.size()]));
    return slots;
  }
  std::vector<int> nodes;
  for (const auto& [node, cpus] : topology.nodes()) nodes.push_back(node);
  for (std::size_t slot = 0; slot < ranks; ++slot)
    slots.push_back(nodes[slot * nodes.size() / ranks]);
  return slots;
}

using Groups = std::map<int, std::vector<int>>;

template <typename Key>
Groups group_by(const std::vector<int>& cpus, const Key& key) {
  Groups groups;
  for (const int cpu : cpus) groups[key(cpu)].push_back(cpu);
  return groups;
}

std::vector<int> whole_socket(const Topology& topology, int node) {
  const int socket = topology.socket_of(topology.nodes().at(node).front());
  std::vector<int> result;
  for (const auto& [other, cpus] : topology.nodes()) {
    if (topology.socket_of(cpus.front()) == socket)
      result.insert(result.end(), cpus.begin(), cpus.end());
  }
  return result;
}

// The node's cores in `sharers` consecutive parts; where they do not divide evenly, the first parts
// are one larger.
std::vector<int> own_cores(const Topology& topology, int node, int sharers, int index) {
  const Groups cores =
      group_by(topology.nodes().at(node), [&](int cpu) { return topology.core_of(cpu); });
  const int count = static_cast<int>(cores.size());
  if (count < sharers) {
    throw UsageError("run",
                     "--numa-binding=exclusive: NUMA node {} has {} allowed cores for {} ranks. "
                     "Start fewer ranks, or use --numa-binding=node.",
                     node, count, sharers);
  }
  const int begin = index * (count / sharers) + std::min(index, count % sharers);
  const int end = begin + count / sharers + (index < count % sharers ? 1 : 0);
  std::vector<int> result;
  int position = 0;
  for (const auto& [core, cpus] : cores) {
    if (position >= begin && position < end) result.insert(result.end(), cpus.begin(), cpus.end());
    ++position;
  }
  return result;
}

// One group of CPUs under a common last-level cache; the groups with most CPUs first.
std::vector<int> own_cache(const Topology& topology, int node, int index) {
  const Groups caches =
      group_by(topology.nodes().at(node), [&](int cpu) { return topology.cache_of(cpu); });
  std::vector<std::vector<int>> ordered;
  for (const auto& [cache, cpus] : caches) ordered.push_back(cpus);
  std::ranges::stable_sort(ordered,
                           [](const auto& a, const auto& b) { return a.size() > b.size(); });
  return ordered[static_cast<std::size_t>(index) % ordered.size()];
}

}  // namespace

std::vector<int> cpus_for_rank(const NumaRequest& request, const HostFiles& files) {
  if (request.binding == NumaBinding::kNone) return request.allowed;
  const Topology topology(files, request.allowed);
  LOCKSTEP_ASSERT(!topology.nodes().empty());
  const std::vector<int> slots = node_of_slots(topology, request);
  const auto rank = static_cast<std::size_t>(request.local_rank);
  LOCKSTEP_ASSERT(rank < slots.size());
  const int node = slots[rank];
  if (topology.nodes().count(node) == 0) {
    throw UsageError("run",
                     "--numa-binding: local rank {} belongs to NUMA node {}, where this process is "
                     "allowed no CPU (allowed: {}). Widen the affinity, or drop --numa-binding.",
                     request.local_rank, node, cpu_list_text(request.allowed));
  }
  // Its place among those that share the node.
  const int sharers = static_cast<int>(std::ranges::count(slots, node));
  const int index = static_cast<int>(
      std::count(slots.begin(), slots.begin() + static_cast<std::ptrdiff_t>(rank), node));
  std::vector<int> cpus;
  switch (request.binding) {
    case NumaBinding::kNone:
    case NumaBinding::kNode:
      cpus = topology.nodes().at(node);
      break;
    case NumaBinding::kSocket:
      cpus = whole_socket(topology, node);
      break;
    case NumaBinding::kExclusive:
      cpus = own_cores(topology, node, sharers, index);
      break;
    case NumaBinding::kCoreComplex:
      cpus = own_cache(topology, node, index);
      break;
  }
  std::ranges::sort(cpus);
  return cpus;
}

std::string cpu_list_text(const std::vector<int>& cpus) {
  return ranges_text(cpus, ",");
}

std::vector<int> parse_cpu_list(const std::string& text) {
  std::set<int> cpus;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    int first = 0;
    int last = 0;
    char dash = 0;
    std::istringstream range(part);
    if (!(range >> first)) continue;
    if (!(range >> dash >> last)) last = first;
    for (int cpu = first; cpu <= last; ++cpu) cpus.insert(cpu);
  }
  return {cpus.begin(), cpus.end()};
}

}  // namespace lockstep::launch
