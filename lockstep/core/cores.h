// How many cores this process may really use: those its affinity allows, and no more than the quota
// of its control groups pays for. A container with a quota of two sees all cores of its host.
//
//   const int threads = allowed_cores() / local_ranks;
//
// Free functions without state; call them from any thread.
#pragma once

#include <optional>
#include <vector>

#include "lockstep/core/host_files.h"  // IWYU pragma: export

namespace lockstep {

// The CPUs this process may run on (sched_getaffinity), ascending.
std::vector<int> allowed_cpus();
// The CPU quota of this process's cgroups (v1 and v2, every level up to the mount), in cores;
// nothing when there is none.
std::optional<double> cgroup_quota_cores(const HostFiles& files = {});
// The smaller of both, at least 1.
int allowed_cores();

}  // namespace lockstep
