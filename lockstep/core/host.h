// What the kernel reports about this host and process, from /proc, /sys and control groups: cores,
// free memory and pages; its names and network addresses.
//
//   const int threads = allowed_cores() / local_ranks;
//   const std::string lack = lacking_memory({.own_bytes = n, .host_bytes = ranks * n});
//
// Free functions without state; any thread may call. None of them uses a stream: in a process with
// two C++ standard libraries (a Python extension that brings its own) streams do not find their
// locale, and read every number as 0.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// ---------------------------------------------------------------- the kernel's files

// The roots of the kernel's files. Tests name folders that describe an imaginary machine.
struct HostFiles {
  std::string proc = "/proc";
  std::string sys = "/sys";
};

// Empty if the file cannot be read: processes end and control groups vanish at any time.
std::string text_or_empty(const std::string& path);

// The number at the beginning of the text, after blanks; nothing for "max" and "-1".
std::optional<std::uint64_t> leading_number(std::string_view text);

// The text after the key in a line "key value" or "key: value"; empty without such a line.
//
//   number_after(text_or_empty(files.proc + "/meminfo"), "MemAvailable");    // KiB
std::string_view text_after(std::string_view text, std::string_view key);
std::optional<std::uint64_t> number_after(std::string_view text, std::string_view key);

// The fields of a stat file (proc_pid_stat(5)) by the numbers that the manual gives them, from 3
// on: fields[3] is the state. The second is the name, which may hold anything. Empty where the text
// is none.
std::vector<std::string_view> stat_fields(std::string_view text);

// ---------------------------------------------------------------- control groups

// A control group of a process, as the directory with its limits and counters.
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

// Limit and use of memory in this one group, in bytes; unset without a limit or a counter.
struct CgroupMemory {
  std::optional<std::uint64_t> limit, used;
  std::optional<std::uint64_t> cache;  // the part of `used` that the kernel reclaims on demand
};
CgroupMemory memory_of(const CgroupDirectory& group);

// The CPU quota written in this one group, in cores; nothing when it has none.
std::optional<double> cpu_quota_cores(const CgroupDirectory& group);

// ---------------------------------------------------------------- cores

// The CPUs this process may run on (sched_getaffinity), in ascending order.
std::vector<int> allowed_cpus();
// The CPU quota of this process's cgroups (v1 and v2, every level up to the mount), in cores;
// nothing when there is none.
std::optional<double> cgroup_quota_cores(const HostFiles& files = {});
// How many cores this process may really use: the smaller of both, at least 1. A container with a
// quota of two sees all cores of its host.
int allowed_cores();

// ---------------------------------------------------------------- memory

struct MemoryNeed {
  std::size_t own_bytes = 0;   // what this process allocates
  std::size_t host_bytes = 0;  // what all ranks of this host allocate at the same time
  std::size_t map_bytes = 0;   // address space this process takes for it
  // memory_groups() of every rank that allocates own_bytes, this one included; empty: it alone.
  std::vector<std::string> groups = {};
};

// The control groups that may limit this process's memory, as in /proc/self/cgroup.
std::string memory_groups(const HostFiles& files = {});

// Whether there is room for a large allocation. Call it before the allocation: where memory is
// missing later, the kernel kills the process and there is no error. The limit counts what all
// ranks under it need together, before any of them allocates; ranks in different control groups can
// be under one limit, so they exchange their groups.
//
// Returns a sentence that says what is needed and what is there, or nothing. Looks at the limits of
// this process's control groups (versions 1 and 2, with all groups above), at RLIMIT_AS and at the
// host's available memory. What cannot be read does not count.
std::string lacking_memory(const MemoryNeed& need, const HostFiles& files = {});

// How much of the cores other programs use during a measurement, since a figure from a busy machine
// does not describe that machine. Child processes count once they have ended.
//
//   const OtherPrograms others;
//   measure();
//   if (const std::string what = others.text(); !what.empty()) say(what);
class OtherPrograms {
 public:
  OtherPrograms();

  // "other programs used 1.2 of the 2 cores", if they used a tenth of those that this process may
  // use while nearly all of them were busy. Empty: otherwise, in less time than `shortest_s`, and
  // where the kernel does not say.
  std::string text(double shortest_s = 0.2) const;

 private:
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  const double all_s_, own_s_;  // processor time of all programs, and of this one
};

inline constexpr std::size_t kHugePage = 2u << 20;

constexpr std::size_t whole_huge_pages(std::size_t bytes) {
  return bytes / kHugePage * kHugePage;
}

std::size_t page_bytes();

// Private memory that begins where a huge page can begin; nullptr when there is none left. Whole
// pages, with mmap's protection and flags. The caller unmaps it.
//
//   void* const place = map_at_huge_page(bytes, PROT_READ | PROT_WRITE);
//   ::madvise(place, whole_huge_pages(bytes), MADV_HUGEPAGE);
void* map_at_huge_page(std::size_t bytes, int protection, int flags = 0);

// ---------------------------------------------------------------- names and addresses

std::string host_name();

// Identifies the machine: equal for all of its processes. Host names are not unique ("localhost").
std::string machine_of(const std::string& host);

// The linker's build id of the running program, equal for equal builds only.
std::string build_id();

bool is_loopback(const std::string& host);

// An IPv4 or IPv6 address as text; an IPv4-mapped IPv6 address as IPv4.
std::string address_text(const sockaddr* address);

// This host's address on the route to `host`. Only asks the kernel and sends nothing.
std::string address_towards(const std::string& host, int port);

}  // namespace lockstep
