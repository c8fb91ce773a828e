#include "lockstep/core/cgroup.h"

#include <algorithm>
#include <cstdlib>

#include "lockstep/core/kernel_files.h"
#include "lockstep/core/text.h"

namespace lockstep {
namespace {

struct CgroupMount {
  bool unified = false;  // v2
  std::string root;      // which cgroup the mount point shows
  std::string point;
};

bool has_option(const std::string& options, const std::string& wanted) {
  const auto parts = split(options, ',');
  return std::find(parts.begin(), parts.end(), wanted) != parts.end();
}

// Lines of mountinfo: id parent major:minor ROOT POINT options [optional...] - TYPE source OPTIONS
std::vector<CgroupMount> cgroup_mounts(const HostFiles& files, const std::string& controller) {
  std::vector<CgroupMount> mounts;
  for (const std::string& line : split(text_or_empty(files.proc + "/self/mountinfo"), '\n')) {
    const auto dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const auto before = split(line.substr(0, dash), ' '), after = split(line.substr(dash + 3), ' ');
    if (before.size() < 5 || after.size() < 3) continue;
    const bool unified = after[0] == "cgroup2";
    if (unified || (after[0] == "cgroup" && has_option(after[2], controller)))
      mounts.push_back({unified, before[3], before[4]});
  }
  return mounts;
}

}  // namespace

// Lines of /proc/PID/cgroup: "0::/path" for v2, "4:cpu,cpuacct:/path" for v1.
std::optional<std::string> cgroup_in(const std::string& text, bool unified,
                                     const std::string& controller) {
  for (const std::string& line : split(text, '\n')) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool match = unified ? controllers.empty() : has_option(controllers, controller);
    if (match) return line.substr(second + 1);
  }
  return std::nullopt;
}

std::vector<CgroupDirectory> cgroup_directories(const std::string& controller,
                                                const HostFiles& files, pid_t pid) {
  const std::string process = pid == 0 ? "self" : std::to_string(pid);
  const std::string groups = text_or_empty(files.proc + "/" + process + "/cgroup");
  std::vector<CgroupDirectory> found;
  for (const CgroupMount& mount : cgroup_mounts(files, controller)) {
    const std::string own = cgroup_in(groups, mount.unified, controller).value_or("/");
    std::string path = own;
    // Inside a container the mount may show a subtree: what lies above it cannot be read.
    if (mount.root != "/" && path.rfind(mount.root, 0) == 0) path = path.substr(mount.root.size());
    if (path.find("..") != std::string::npos) path.clear();
    const std::string above = own.substr(0, own.size() - path.size());
    for (;;) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      found.push_back({mount.unified, mount.point + path, above + path});
      if (path.empty()) break;
      path.erase(path.rfind('/'));
    }
  }
  return found;
}

CgroupMemory memory_of(const CgroupDirectory& group) {
  const auto number_in = [&](const char* version1, const char* version2) {
    return leading_number(text_or_empty(group.path + "/" + (group.unified ? version2 : version1)));
  };
  CgroupMemory memory{.limit = number_in("memory.limit_in_bytes", "memory.max"),
                      .used = number_in("memory.usage_in_bytes", "memory.current"),
                      .cache = std::nullopt};
  // Version 1 says "none" with a number near the end of the address space.
  if (memory.limit > (std::uint64_t{1} << 60)) memory.limit.reset();
  const std::string stat = text_or_empty(group.path + "/memory.stat");
  const std::string prefix = group.unified ? "" : "total_";
  const auto inactive = number_after(stat, prefix + "inactive_file");
  const auto active = number_after(stat, prefix + "active_file");
  if (inactive || active) memory.cache = inactive.value_or(0) + active.value_or(0);
  return memory;
}

std::optional<double> cpu_quota_cores(const CgroupDirectory& group) {
  // v2: "max 100000"; v1: -1 for none.
  const std::string text = group.unified ? text_or_empty(group.path + "/cpu.max")
                                         : text_or_empty(group.path + "/cpu.cfs_quota_us") + " " +
                                               text_or_empty(group.path + "/cpu.cfs_period_us");
  char* end = nullptr;
  const double quota = std::strtod(text.c_str(), &end);
  const double period = std::strtod(end, nullptr);
  if (quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

}  // namespace lockstep
