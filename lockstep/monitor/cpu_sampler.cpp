#include "lockstep/monitor/cpu_sampler.h"

#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/host.h"

namespace lockstep::monitor {
namespace {

using Count = std::optional<std::uint64_t>;

// ------------------------------------------------------------------ one process

// Numbers of proc_pid_stat(5).
constexpr std::size_t kState = 3, kMinorFaults = 10, kMajorFaults = 12, kUser = 14, kSystem = 15,
                      kThreads = 20, kStart = 22, kResident = 24;

// "<ns on a core> <ns waiting for one> <turns>".
std::optional<double> delay_s(const std::string& folder) {
  const std::string schedule = text_or_empty(folder + "/schedstat");
  const std::size_t second = schedule.find(' ');
  if (second == std::string::npos) return std::nullopt;
  const Count ns = leading_number(std::string_view(schedule).substr(second));
  if (!ns) return std::nullopt;
  return static_cast<double>(*ns) / 1e9;
}

// Of every thread: /proc/PID/status and schedstat have what the main thread did alone.
void add_threads(const std::string& folder, ProcessSample& sample) {
  const std::unique_ptr<DIR, int (*)(DIR*)> tasks(::opendir((folder + "/task").c_str()),
                                                  &::closedir);
  if (!tasks) return;
  while (const dirent* entry = ::readdir(tasks.get())) {
    if (std::isdigit(static_cast<unsigned char>(entry->d_name[0])) == 0) continue;
    const std::string task = folder + "/task/" + entry->d_name;
    const std::string text = text_or_empty(task + "/status");
    sample.voluntary_switches += number_after(text, "voluntary_ctxt_switches").value_or(0);
    sample.involuntary_switches += number_after(text, "nonvoluntary_ctxt_switches").value_or(0);
    if (const auto seconds = delay_s(task))
      sample.threads_delay_s = sample.threads_delay_s.value_or(0) + *seconds;
  }
}

double per_second(std::uint64_t before, std::uint64_t after, double seconds) {
  // The switches of a thread that has ended are no longer counted.
  return after > before ? static_cast<double>(after - before) / seconds : 0;
}

// ------------------------------------------------------------------ control groups

// The group with the smallest limit; without one the first that has the controller's counters.
template <typename Limit>
const CgroupDirectory* binding_group(const std::vector<CgroupDirectory>& groups, Limit limit_in,
                                     const char* version1, const char* version2) {
  const CgroupDirectory* binding = nullptr;
  decltype(limit_in(groups[0])) smallest;
  for (const CgroupDirectory& group : groups) {
    const auto limit = limit_in(group);
    if (limit && (!smallest || *limit < *smallest)) {
      smallest = limit;
      binding = &group;
    }
  }
  if (binding != nullptr) return binding;
  for (const CgroupDirectory& group : groups) {
    if (!text_or_empty(group.path + (group.unified ? version2 : version1)).empty()) return &group;
  }
  return nullptr;
}

void add_cpu(const CgroupDirectory& group, CgroupSample& sample) {
  sample.cpu_limit_cores = cpu_quota_cores(group);
  const std::string stat = text_or_empty(group.path + "/cpu.stat");
  sample.periods = number_after(stat, "nr_periods");
  sample.throttled_periods = number_after(stat, "nr_throttled");
  if (const Count us = number_after(stat, "throttled_usec"); us && group.unified)
    sample.throttled_s = static_cast<double>(*us) / 1e6;
  if (const Count ns = number_after(stat, "throttled_time"); ns && !group.unified)
    sample.throttled_s = static_cast<double>(*ns) / 1e9;
}

void add_memory(const CgroupDirectory& group, CgroupSample& sample) {
  const CgroupMemory memory = memory_of(group);
  sample.memory_limit_bytes = memory.limit;
  sample.memory_used_bytes = memory.used;
  sample.memory_cache_bytes = memory.cache;
}

}  // namespace

std::optional<ProcessSample> read_process(pid_t pid, const HostFiles& files) {
  const std::string folder = files.proc + "/" + std::to_string(pid);
  ProcessSample sample{.pid = pid, .time = std::chrono::steady_clock::now()};
  const std::string stat = text_or_empty(folder + "/stat");
  const auto fields = stat_fields(stat);
  if (fields.size() <= kResident) return std::nullopt;
  const auto number = [&](std::size_t which) { return leading_number(fields[which]).value_or(0); };
  const double tick_s = 1.0 / static_cast<double>(::sysconf(_SC_CLK_TCK));
  sample.state = fields[kState].front();
  sample.minor_faults = number(kMinorFaults);
  sample.major_faults = number(kMajorFaults);
  sample.user_s = static_cast<double>(number(kUser)) * tick_s;
  sample.system_s = static_cast<double>(number(kSystem)) * tick_s;
  sample.threads = static_cast<int>(number(kThreads));
  sample.start_ticks = number(kStart);
  sample.resident_bytes = number(kResident) * page_bytes();
  add_threads(folder, sample);
  const std::string io = text_or_empty(folder + "/io");
  sample.read_chars = number_after(io, "rchar");
  sample.written_chars = number_after(io, "wchar");
  sample.read_bytes = number_after(io, "read_bytes");
  sample.written_bytes = number_after(io, "write_bytes");
  sample.run_delay_s = delay_s(folder);
  return sample;
}

std::optional<ProcessRates> rates(const ProcessSample& before, const ProcessSample& after) {
  const double seconds = std::chrono::duration<double>(after.time - before.time).count();
  if (before.pid != after.pid || before.start_ticks != after.start_ticks || seconds <= 0)
    return std::nullopt;
  ProcessRates result{.seconds = seconds};
  result.system_cores = (after.system_s - before.system_s) / seconds;
  result.cores = (after.user_s - before.user_s) / seconds + result.system_cores;
  const auto rate = [&](auto member) { return per_second(before.*member, after.*member, seconds); };
  result.minor_faults_per_s = rate(&ProcessSample::minor_faults);
  result.involuntary_switches_per_s = rate(&ProcessSample::involuntary_switches);
  if (before.run_delay_s && after.run_delay_s)
    result.run_delay_share =
        std::clamp((*after.run_delay_s - *before.run_delay_s) / seconds, 0.0, 1.0);
  // The waits of a thread that has ended are no longer counted.
  if (before.threads_delay_s && after.threads_delay_s)
    result.waiting_threads =
        std::max(0.0, (*after.threads_delay_s - *before.threads_delay_s) / seconds);
  return result;
}

CgroupSample read_cgroup(pid_t pid, const HostFiles& files) {
  CgroupSample sample;
  const auto cpu = cgroup_directories("cpu", files, pid);
  if (const auto* group = binding_group(cpu, cpu_quota_cores, "/cpu.stat", "/cpu.stat"))
    add_cpu(*group, sample);
  const auto memory = cgroup_directories("memory", files, pid);
  const auto limit_in = [](const CgroupDirectory& group) { return memory_of(group).limit; };
  if (const auto* group =
          binding_group(memory, limit_in, "/memory.usage_in_bytes", "/memory.current"))
    add_memory(*group, sample);
  return sample;
}

}  // namespace lockstep::monitor
