#include "lockstep/core/cores.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>

#include "lockstep/core/cgroup.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

constexpr std::size_t kBitsPerWord = sizeof(unsigned long) * CHAR_BIT;

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
  for (const CgroupDirectory& group : cgroup_directories("cpu", files)) {
    if (const auto quota = cpu_quota_cores(group))
      smallest = smallest ? std::min(*smallest, *quota) : *quota;
  }
  return smallest;
}

int allowed_cores() {
  double cores = static_cast<double>(allowed_cpus().size());
  if (const auto quota = cgroup_quota_cores()) cores = std::min(cores, *quota);
  return std::max(1, static_cast<int>(std::floor(cores)));
}

}  // namespace lockstep
