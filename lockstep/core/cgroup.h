// The control groups of a process as directories: where its limits and counters are.
//
//   for (const CgroupDirectory& group : cgroup_directories("memory")) read(group.path);
//
// Free functions without state; any thread may call.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/host_files.h"

namespace lockstep {

struct CgroupDirectory {
  bool unified = false;  // version 2
  std::string path;
  std::string group;  // as /proc/PID/cgroup names it; empty for the root
};

// The group of the process in each hierarchy with this controller of version 1 ("cpu", "memory")
// and in version 2's, each followed by the groups above it up to the mount point: a limit of any of
// them holds. `pid` 0: this process.
std::vector<CgroupDirectory> cgroup_directories(const std::string& controller,
                                                const HostFiles& files = {}, pid_t pid = 0);

// The group of this controller in the text of a /proc/PID/cgroup; nothing when it has none there.
std::optional<std::string> cgroup_in(const std::string& text, bool unified,
                                     const std::string& controller);

// What this one group has of memory, in bytes; nothing where there is no limit or no counter.
struct CgroupMemory {
  std::optional<std::uint64_t> limit, used;
  std::optional<std::uint64_t> cache;  // part of `used` that is given back when it is asked for
};
CgroupMemory memory_of(const CgroupDirectory& group);

// The CPU quota written in this one group, in cores; nothing when it has none.
std::optional<double> cpu_quota_cores(const CgroupDirectory& group);

}  // namespace lockstep
