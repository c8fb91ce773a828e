#include "lockstep/core/memory_limits.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lockstep/core/cgroup.h"
#include "lockstep/core/kernel_files.h"

namespace lockstep {
namespace {

std::string mib(std::uint64_t bytes) {
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
}

// How many of the groups are this one or lie in it.
std::size_t ranks_in(const CgroupDirectory& group, const std::vector<std::string>& groups) {
  return static_cast<std::size_t>(std::ranges::count_if(groups, [&](const std::string& text) {
    const auto path = cgroup_in(text, group.unified, "memory");
    return path && (*path + "/").starts_with(group.group + "/");
  }));
}

std::string lacking_in_cgroups(const MemoryNeed& need, const HostFiles& files) {
  for (const CgroupDirectory& group : cgroup_directories("memory", files)) {
    const CgroupMemory memory = memory_of(group);
    if (!memory.limit || !memory.used) continue;
    const std::size_t ranks = std::max<std::size_t>(ranks_in(group, need.groups), 1);
    const std::uint64_t held = *memory.used - std::min(*memory.used, memory.cache.value_or(0));
    if (held + need.own_bytes * ranks <= *memory.limit) continue;
    return fmt::format(
        "{} of shared memory are needed{}, but the control group's limit of {} leaves {}",
        mib(need.own_bytes * ranks), ranks > 1 ? fmt::format(" for {} ranks", ranks) : "",
        mib(*memory.limit), mib(*memory.limit - std::min(*memory.limit, held)));
  }
  return "";
}

std::string lacking_address_space(const MemoryNeed& need, const HostFiles& files) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  const auto pages = leading_number(text_or_empty(files.proc + "/self/statm"));
  if (!pages) return "";
  const std::uint64_t used = *pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  if (used + need.map_bytes <= limit.rlim_cur) return "";
  return fmt::format("{} of address space are needed, but the limit of {} (ulimit -v) leaves {}",
                     mib(need.map_bytes), mib(limit.rlim_cur),
                     mib(limit.rlim_cur - std::min<std::uint64_t>(limit.rlim_cur, used)));
}

std::string lacking_on_host(const MemoryNeed& need, const HostFiles& files) {
  const auto available = number_after(text_or_empty(files.proc + "/meminfo"), "MemAvailable");
  if (!available || need.host_bytes <= *available * 1024) return "";
  return fmt::format("{} of shared memory are needed for all ranks of this host, which has {}",
                     mib(need.host_bytes), mib(*available * 1024));
}

}  // namespace

std::string memory_groups(const HostFiles& files) {
  return text_or_empty(files.proc + "/self/cgroup");
}

std::string lacking_memory(const MemoryNeed& need, const HostFiles& files) {
  std::string lack = lacking_in_cgroups(need, files);
  if (lack.empty()) lack = lacking_address_space(need, files);
  if (lack.empty()) lack = lacking_on_host(need, files);
  return lack;
}

}  // namespace lockstep
