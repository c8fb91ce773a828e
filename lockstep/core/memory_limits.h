// Is there room? Asked before a lot of memory is taken, because memory that turns out to be missing
// later is a killed process (the kernel's, or a container's limit) and not an error.
//
//   const std::string lack = lacking_memory({.own_bytes = n, .host_bytes = ranks * n});
//   if (!lack.empty()) throw UsageError("shm", "{}", lack);
//
// What counts is what all ranks under one limit need together, asked before any of them allocates.
// Ranks need not be in one control group to be under one limit, so they exchange their groups.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/core/host_files.h"

namespace lockstep {

struct MemoryNeed {
  std::size_t own_bytes = 0;   // what this process allocates
  std::size_t host_bytes = 0;  // what all ranks of this host allocate at the same time
  std::size_t map_bytes = 0;   // address space this process takes for it
  // memory_groups() of every rank that allocates own_bytes, this one included; empty: it alone.
  std::vector<std::string> groups = {};
};

// The control groups that may limit this process's memory, as in /proc/self/cgroup.
std::string memory_groups(const HostFiles& files = {});

// A sentence that says what is needed and what is there, or nothing. Looks at the limits of this
// process's control groups (versions 1 and 2, with all groups above), at RLIMIT_AS and at the
// host's available memory. What cannot be read does not count.
std::string lacking_memory(const MemoryNeed& need, const HostFiles& files = {});

}  // namespace lockstep
