#include "lockstep/core/memory_limits.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <vector>

#include "lockstep/core/kernel_files.h"

namespace lockstep {
namespace {

std::optional<std::uint64_t> number_in(const std::string& path) {
  return leading_number(text_or_empty(path));
}

std::string mib(std::uint64_t bytes) {
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
}

struct CgroupFiles {
  const char* limit;
  const char* used;
  const char* inactive;
  const char* active;
};
constexpr CgroupFiles kVersion2 = {"memory.max", "memory.current", "inactive_file", "active_file"};
constexpr CgroupFiles kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                                   "total_inactive_file", "total_active_file"};

std::string lacking_in_group(const std::string& directory, const CgroupFiles& files,
                             std::size_t bytes, std::size_t ranks) {
  const auto limit = number_in(directory + "/" + files.limit);
  const auto used = number_in(directory + "/" + files.used);
  // Version 1 says "none" with a number near the end of the address space.
  if (!limit || !used || *limit > (std::uint64_t{1} << 60)) return "";
  // The page cache counts as used but is given back when memory is asked for.
  const std::string stat = text_or_empty(directory + "/memory.stat");
  const std::uint64_t cache =
      number_after(stat, files.inactive).value_or(0) + number_after(stat, files.active).value_or(0);
  const std::uint64_t held = *used - std::min(*used, cache);
  if (held + bytes * ranks <= *limit) return "";
  return fmt::format(
      "{} of shared memory are needed{}, but the control group's limit of {} leaves {}",
      mib(bytes * ranks), ranks > 1 ? fmt::format(" for {} ranks", ranks) : "", mib(*limit),
      mib(*limit - std::min(*limit, held)));
}

// A line of /proc/self/cgroup that has to do with memory.
struct GroupLine {
  bool version2 = false;
  std::string path;  // empty for the root
};

std::vector<GroupLine> lines_of(const std::string& text) {
  std::vector<GroupLine> found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool memory = (',' + controllers + ',').find(",memory,") != std::string::npos;
    if (!controllers.empty() && !memory) continue;
    const std::string path = line.substr(second + 1);
    found.push_back({controllers.empty(), path == "/" ? "" : path});
  }
  return found;
}

// How many of the groups are this one or lie in it.
std::size_t ranks_in(const GroupLine& group, const std::vector<std::string>& groups) {
  const auto inside = [&](const std::string& text) {
    const auto lines = lines_of(text);
    return std::any_of(lines.begin(), lines.end(), [&](const GroupLine& line) {
      return line.version2 == group.version2 && (line.path + "/").rfind(group.path + "/", 0) == 0;
    });
  };
  return static_cast<std::size_t>(std::count_if(groups.begin(), groups.end(), inside));
}

// From the process's own group up to the root of the hierarchy.
std::string lacking_in_groups(const std::string& mount, GroupLine group, const CgroupFiles& files,
                              const MemoryNeed& need) {
  for (;;) {
    const std::size_t ranks = std::max<std::size_t>(ranks_in(group, need.groups), 1);
    const std::string lack = lacking_in_group(mount + group.path, files, need.own_bytes, ranks);
    if (!lack.empty()) return lack;
    const std::size_t slash = group.path.rfind('/');
    if (slash == std::string::npos) return "";
    group.path.resize(slash);
  }
}

std::string lacking_in_cgroups(const MemoryNeed& need, const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup";
  for (const GroupLine& group : lines_of(memory_groups(root))) {
    std::string lack = group.version2
                           ? lacking_in_groups(mount, group, kVersion2, need)
                           : lacking_in_groups(mount + "/memory", group, kVersion1, need);
    if (lack.empty() && group.version2)
      lack = lacking_in_groups(mount + "/unified", group, kVersion2, need);
    if (!lack.empty()) return lack;
  }
  return "";
}

std::string lacking_address_space(const MemoryNeed& need, const std::string& root) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  const auto pages = number_in(root + "/proc/self/statm");
  if (!pages) return "";
  const std::uint64_t used = *pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  if (used + need.map_bytes <= limit.rlim_cur) return "";
  return fmt::format("{} of address space are needed, but the limit of {} (ulimit -v) leaves {}",
                     mib(need.map_bytes), mib(limit.rlim_cur),
                     mib(limit.rlim_cur - std::min<std::uint64_t>(limit.rlim_cur, used)));
}

std::string lacking_on_host(const MemoryNeed& need, const std::string& root) {
  const auto available = number_after(text_or_empty(root + "/proc/meminfo"), "MemAvailable");
  if (!available || need.host_bytes <= *available * 1024) return "";
  return fmt::format("{} of shared memory are needed for all ranks of this host, which has {}",
                     mib(need.host_bytes), mib(*available * 1024));
}

}  // namespace

std::string memory_groups(const std::string& root) {
  return text_or_empty(root + "/proc/self/cgroup");
}

std::string lacking_memory(const MemoryNeed& need, const std::string& root) {
  std::string lack = lacking_in_cgroups(need, root);
  if (lack.empty()) lack = lacking_address_space(need, root);
  if (lack.empty()) lack = lacking_on_host(need, root);
  return lack;
}

}  // namespace lockstep
