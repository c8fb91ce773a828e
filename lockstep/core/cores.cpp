#include "lockstep/core/cores.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <fstream>
#include <sstream>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

constexpr std::size_t kBitsPerWord = sizeof(unsigned long) * CHAR_BIT;

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

struct CgroupMount {
  bool unified = false;  // v2
  std::string root;      // which cgroup the mount point shows
  std::string point;
};

bool has_option(const std::string& options, const std::string& wanted) {
  std::istringstream stream(options);
  std::string option;
  while (std::getline(stream, option, ',')) {
    if (option == wanted) return true;
  }
  return false;
}

// Lines of mountinfo: id parent major:minor ROOT POINT options [optional...] - TYPE source OPTIONS
std::vector<CgroupMount> cgroup_mounts(const HostFiles& files) {
  std::vector<CgroupMount> mounts;
  std::ifstream mountinfo(files.proc + "/self/mountinfo");
  for (std::string line; std::getline(mountinfo, line);) {
    const auto dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::string id, parent, device, type, source, options;
    CgroupMount mount;
    std::istringstream(line.substr(0, dash)) >> id >> parent >> device >> mount.root >> mount.point;
    std::istringstream(line.substr(dash + 3)) >> type >> source >> options;
    mount.unified = type == "cgroup2";
    if (mount.unified || (type == "cgroup" && has_option(options, "cpu"))) mounts.push_back(mount);
  }
  return mounts;
}

// Lines of /proc/self/cgroup: "0::/path" for v2, "4:cpu,cpuacct:/path" for v1.
std::optional<std::string> own_cgroup(const HostFiles& files, bool unified) {
  std::ifstream cgroup(files.proc + "/self/cgroup");
  for (std::string line; std::getline(cgroup, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool match = unified ? controllers.empty() : has_option(controllers, "cpu");
    if (match) return line.substr(second + 1);
  }
  return std::nullopt;
}

// The quota written in one cgroup directory, in cores; nothing when it is unlimited.
std::optional<double> quota_of(const std::string& directory, bool unified) {
  double quota = -1;
  double period = 0;
  if (unified) {
    std::istringstream(first_line(directory + "/cpu.max")) >> quota >> period;  // "max 100000"
  } else {
    std::istringstream(first_line(directory + "/cpu.cfs_quota_us")) >> quota;  // -1: none
    std::istringstream(first_line(directory + "/cpu.cfs_period_us")) >> period;
  }
  if (quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

}  // namespace

std::vector<int> allowed_cpus() {
  // The kernel refuses a mask smaller than its own, whose size is not published: grow until it
  // fits.
  for (std::size_t words = 16; words <= 4096; words *= 2) {
    std::vector<unsigned long> bits(words, 0);
    auto* mask = reinterpret_cast<cpu_set_t*>(bits.data());
    if (::sched_getaffinity(0, words * sizeof(unsigned long), mask) != 0) {
      if (errno == EINVAL) continue;
      throw SystemError("host", "cannot read the CPU affinity", errno);
    }
    std::vector<int> cpus;
    for (std::size_t cpu = 0; cpu < words * kBitsPerWord; ++cpu) {
      if ((bits[cpu / kBitsPerWord] >> (cpu % kBitsPerWord) & 1ul) != 0)
        cpus.push_back(static_cast<int>(cpu));
    }
    return cpus;
  }
  throw SystemError("host", "cannot read the CPU affinity", EINVAL);
}

std::optional<double> cgroup_quota_cores(const HostFiles& files) {
  std::optional<double> smallest;
  for (const CgroupMount& mount : cgroup_mounts(files)) {
    std::string path = own_cgroup(files, mount.unified).value_or("/");
    // Inside a container the mount may show a subtree: what lies above it cannot be read.
    if (mount.root != "/" && path.rfind(mount.root, 0) == 0) path = path.substr(mount.root.size());
    if (path.find("..") != std::string::npos) path.clear();
    for (;;) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      if (const auto quota = quota_of(mount.point + path, mount.unified))
        smallest = smallest ? std::min(*smallest, *quota) : *quota;
      if (path.empty()) break;
      path.erase(path.rfind('/'));
    }
  }
  return smallest;
}

int allowed_cores() {
  double cores = static_cast<double>(allowed_cpus().size());
  if (const auto quota = cgroup_quota_cores()) cores = std::min(cores, *quota);
  return std::max(1, static_cast<int>(std::floor(cores)));
}

}  // namespace lockstep
