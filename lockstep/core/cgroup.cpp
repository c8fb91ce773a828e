#include "lockstep/core/cgroup.h"

#include <algorithm>
#include <cstdlib>

#include "lockstep/core/kernel_files.h"

namespace lockstep {
namespace {

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(at, begin), text.size());
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

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

// Lines of /proc/PID/cgroup: "0::/path" for v2, "4:cpu,cpuacct:/path" for v1.
std::optional<std::string> path_in(const std::string& groups, bool unified,
                                   const std::string& controller) {
  for (const std::string& line : split(groups, '\n')) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool match = unified ? controllers.empty() : has_option(controllers, controller);
    if (match) return line.substr(second + 1);
  }
  return std::nullopt;
}

}  // namespace

std::vector<CgroupDirectory> cgroup_directories(const std::string& controller,
                                                const HostFiles& files, pid_t pid) {
  const std::string process = pid == 0 ? "self" : std::to_string(pid);
  const std::string groups = text_or_empty(files.proc + "/" + process + "/cgroup");
  std::vector<CgroupDirectory> found;
  for (const CgroupMount& mount : cgroup_mounts(files, controller)) {
    std::string path = path_in(groups, mount.unified, controller).value_or("/");
    // Inside a container the mount may show a subtree: what lies above it cannot be read.
    if (mount.root != "/" && path.rfind(mount.root, 0) == 0) path = path.substr(mount.root.size());
    if (path.find("..") != std::string::npos) path.clear();
    for (;;) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      found.push_back({mount.unified, mount.point + path});
      if (path.empty()) break;
      path.erase(path.rfind('/'));
    }
  }
  return found;
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
