#include "lockstep/monitor/writer_process.h"

#include <fmt/format.h>

#include <charconv>
#include <filesystem>
#include <system_error>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/monitor/cpu_sampler.h"

namespace lockstep::monitor {
namespace {

// Where PIDs mean what they mean here; empty: not known.
std::string place_of_pids() {
  std::error_code error;
  const std::string space = std::filesystem::read_symlink("/proc/self/ns/pid", error).string();
  try {
    std::string boot = read_file("/proc/sys/kernel/random/boot_id", 64);
    boot.erase(boot.find_last_not_of(" \n") + 1);
    return error || boot.empty() ? "" : fmt::format("{} {}", boot, space);
  } catch (const SystemError&) {
    return "";
  }
}

}  // namespace

std::string process_identity(pid_t pid) {
  const std::string place = place_of_pids();
  const auto process = read_process(pid);
  if (place.empty() || !process) return "";
  return fmt::format("{} {} {}", place, pid, process->start_ticks);
}

bool has_ended(const std::string& identity) {
  const std::string place = place_of_pids() + " ";
  if (place.size() == 1 || !identity.starts_with(place)) return false;
  pid_t pid = 0;
  const char* const digits = identity.data() + place.size();
  if (std::from_chars(digits, identity.data() + identity.size(), pid).ec != std::errc())
    return false;
  const auto process = read_process(pid);
  return !process || process->state == 'Z' || process_identity(pid) != identity;
}

}  // namespace lockstep::monitor
