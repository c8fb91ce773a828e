#include "lockstep/core/cores.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdlib>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep {
namespace {

constexpr std::size_t kBitsPerWord = sizeof(unsigned long) * CHAR_BIT;

// Nothing here goes through a stream: in a process with two C++ libraries (an extension of Python's
// that brings its own) they do not find their locale.
std::string text_of(const std::string& path) {
  try {
    return read_file(path, 16u << 20);
  } catch (const Error&) {
    return "";
  }
}

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
std::vector<CgroupMount> cgroup_mounts(const HostFiles& files) {
  std::vector<CgroupMount> mounts;
  for (const std::string& line : split(text_of(files.proc + "/self/mountinfo"), '\n')) {
    const auto dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const auto before = split(line.substr(0, dash), ' '), after = split(line.substr(dash + 3), ' ');
    if (before.size() < 5 || after.size() < 3) continue;
    const bool unified = after[0] == "cgroup2";
    if (unified || (after[0] == "cgroup" && has_option(after[2], "cpu")))
      mounts.push_back({unified, before[3], before[4]});
  }
  return mounts;
}

// Lines of /proc/self/cgroup: "0::/path" for v2, "4:cpu,cpuacct:/path" for v1.
std::optional<std::string> own_cgroup(const HostFiles& files, bool unified) {
  for (const std::string& line : split(text_of(files.proc + "/self/cgroup"), '\n')) {
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
  // v2: "max 100000"; v1: -1 for none.
  const std::string text = unified ? text_of(directory + "/cpu.max")
                                   : text_of(directory + "/cpu.cfs_quota_us") + " " +
                                         text_of(directory + "/cpu.cfs_period_us");
  char* end = nullptr;
  const double quota = std::strtod(text.c_str(), &end);
  const double period = std::strtod(end, nullptr);
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
