// The control groups of a process as directories: where its limits and counters are.
//
//   for (const CgroupDirectory& group : cgroup_directories("memory")) read(group.path);
//
// Free functions without state; any thread may call.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/host_files.h"

namespace lockstep {

struct CgroupDirectory {
  bool unified = false;  // version 2
  std::string path;
};

// The group of the process in each hierarchy with this controller of version 1 ("cpu", "memory")
// and in version 2's, each followed by the groups above it up to the mount point: a limit of any of
// them holds. `pid` 0: this process.
std::vector<CgroupDirectory> cgroup_directories(const std::string& controller,
                                                const HostFiles& files = {}, pid_t pid = 0);

// The CPU quota written in this one group, in cores; nothing when it has none.
std::optional<double> cpu_quota_cores(const CgroupDirectory& group);

}  // namespace lockstep
