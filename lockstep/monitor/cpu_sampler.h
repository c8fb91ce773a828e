// The resources that a process and its control group use, from /proc and cgroup v1 or v2.
// A rank of a program in any language can be sampled from outside, by its pid.
//
// Counters are totals since the process began; rates() computes rates from two samples.
//
//   const auto before = read_process(pid);
//   ... a second later ...
//   const auto now = read_process(pid);
//   if (before && now) use(rates(*before, *now));      // nothing when the pid is another process
//
// Free functions without state; any thread may call them. Reading costs some 10 us a thread of the
// process.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>

#include "lockstep/core/host.h"

namespace lockstep::monitor {

struct ProcessSample {
  pid_t pid = 0;
  std::chrono::steady_clock::time_point time{};
  std::uint64_t start_ticks = 0;  // after boot; another value is another process
  // State of the main thread: R runs, S sleeps, D waits for a device, T is stopped, Z has ended.
  char state = '?';
  double user_s = 0;
  double system_s = 0;
  std::uint64_t resident_bytes = 0;
  std::uint64_t minor_faults = 0;
  std::uint64_t major_faults = 0;
  int threads = 0;
  // Sums over the threads that exist now.
  std::uint64_t voluntary_switches = 0;
  std::uint64_t involuntary_switches = 0;
  // Bytes that read() and write() moved (chars), and of them those from and to a device (bytes).
  // Empty where the kernel does not count them, or the process is another user's.
  std::optional<std::uint64_t> read_chars{};
  std::optional<std::uint64_t> written_chars{};
  std::optional<std::uint64_t> read_bytes{};
  std::optional<std::uint64_t> written_bytes{};
  // How long the main thread waited for a core. Empty where the kernel does not count it.
  std::optional<double> run_delay_s{};
  std::optional<double> threads_delay_s{};  // the same, summed over the threads that exist now
};

// Nothing when there is no such process.
std::optional<ProcessSample> read_process(pid_t pid, const HostFiles& files = {});

struct ProcessRates {
  double seconds = 0;  // between the samples
  double cores = 0;    // 1.5: one and a half cores busy
  double system_cores = 0;
  double minor_faults_per_s = 0;
  double involuntary_switches_per_s = 0;
  std::optional<double> run_delay_share{};  // of the time that the main thread waited for a core
  std::optional<double> waiting_threads{};  // mean number of threads that waited for a core
};

// Nothing when the samples are of different processes, or have the same time.
std::optional<ProcessRates> rates(const ProcessSample& before, const ProcessSample& after);

// The control group that limits a process most: its own or one above it. Without a limit the
// counters are those of its own group.
struct CgroupSample {
  std::optional<double> cpu_limit_cores{};
  std::optional<std::uint64_t> periods{};
  std::optional<std::uint64_t> throttled_periods{};
  std::optional<double> throttled_s{};  // summed over its CPUs
  std::optional<std::uint64_t> memory_limit_bytes{};
  std::optional<std::uint64_t> memory_used_bytes{};
  std::optional<std::uint64_t> memory_cache_bytes{};  // part of it that the kernel can take back
};
CgroupSample read_cgroup(pid_t pid, const HostFiles& files = {});

}  // namespace lockstep::monitor
