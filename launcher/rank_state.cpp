#include "launcher/rank_state.h"

#include <fmt/format.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <vector>

#include "lockstep/core/host.h"

namespace lockstep::launch {
namespace {

struct SystemCall {
  long number;
  const char* name;
  bool has_descriptor = true;  // as its first argument
};

constexpr SystemCall kCalls[] = {
    {SYS_read, "read"},
    {SYS_write, "write"},
    {SYS_pread64, "pread"},
    {SYS_pwrite64, "pwrite"},
    {SYS_readv, "readv"},
    {SYS_writev, "writev"},
    {SYS_recvfrom, "recv"},
    {SYS_recvmsg, "recvmsg"},
    {SYS_sendto, "send"},
    {SYS_sendmsg, "sendmsg"},
    {SYS_connect, "connect"},
    {SYS_accept, "accept"},
    {SYS_accept4, "accept"},
    {SYS_fsync, "fsync"},
    {SYS_fdatasync, "fdatasync"},
    {SYS_flock, "flock"},
    {SYS_fcntl, "fcntl"},
    {SYS_ioctl, "ioctl"},
    {SYS_openat, "open", false},
#ifdef SYS_poll  // older calls, which new architectures do not have
    {SYS_open, "open", false},
    {SYS_poll, "poll", false},
    {SYS_select, "select", false},
    {SYS_epoll_wait, "epoll_wait", false},
#endif
    {SYS_futex, "futex", false},
    {SYS_ppoll, "poll", false},
    {SYS_pselect6, "select", false},
    {SYS_epoll_pwait, "epoll_wait", false},
    {SYS_nanosleep, "sleep", false},
    {SYS_clock_nanosleep, "sleep", false},
    {SYS_wait4, "wait for a child", false},
    {SYS_waitid, "wait for a child", false},
};

std::string file_behind(pid_t pid, int fd) {
  char path[4096];
  const std::string link = fmt::format("/proc/{}/fd/{}", pid, fd);
  const ssize_t n = ::readlink(link.c_str(), path, sizeof path);
  return n > 0 ? std::string(path, static_cast<std::size_t>(n)) : fmt::format("descriptor {}", fd);
}

// "read of /data/train.bin"; the kernel's own name for the wait where the call cannot be read.
std::string wait_of(pid_t pid, const std::string& task) {
  std::istringstream call(text_or_empty(task + "/syscall"));
  long number = -1;
  std::string first;
  if (call >> number >> first) {
    for (const SystemCall& known : kCalls) {
      if (known.number != number) continue;
      if (!known.has_descriptor) return known.name;
      return fmt::format(
          "{} of {}", known.name,
          file_behind(pid, static_cast<int>(std::strtol(first.c_str(), nullptr, 16))));
    }
    if (number >= 0) return fmt::format("system call {}", number);
  }
  const std::string name = text_or_empty(task + "/wchan");
  return name == "0" ? std::string() : name;
}

}  // namespace

double cpu_seconds(pid_t pid) {
  constexpr std::size_t kUser = 14, kSystem = 15;
  const std::string text = text_or_empty(fmt::format("/proc/{}/stat", pid));
  const auto fields = stat_fields(text);
  if (fields.size() <= kSystem) return 0;
  const auto ticks =
      leading_number(fields[kUser]).value_or(0) + leading_number(fields[kSystem]).value_or(0);
  return static_cast<double>(ticks) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

RankState read_rank_state(pid_t pid, pid_t thread) {
  RankState state;
  std::string task = fmt::format("/proc/{}/task/{}", pid, thread);
  std::string text = text_or_empty(task + "/stat");
  if (text.empty()) {  // the thread has ended
    task = fmt::format("/proc/{}/task/{}", pid, pid);
    text = text_or_empty(task + "/stat");
  }
  const auto fields = stat_fields(text);
  if (fields.size() <= 3) return state;
  state.state = fields[3].front();
  state.cpu_s = cpu_seconds(pid);
  if (state.state == 'S' || state.state == 'D') state.waits = wait_of(pid, task);
  return state;
}

bool in_library(pid_t pid, const std::vector<std::uint64_t>& addresses,
                const std::vector<std::string>& beginnings_of_names) {
  std::ifstream maps(fmt::format("/proc/{}/maps", pid));
  for (std::string line; std::getline(maps, line);) {
    const std::size_t name = line.rfind('/') + 1;  // 0: not a file
    if (name == 0 || std::ranges::none_of(beginnings_of_names, [&](const std::string& beginning) {
          return line.compare(name, beginning.size(), beginning) == 0;
        }))
      continue;
    std::uint64_t first = 0, end = 0;
    char dash = 0;
    std::istringstream(line) >> std::hex >> first >> dash >> end;
    if (std::ranges::any_of(addresses, [&](std::uint64_t at) { return at >= first && at < end; }))
      return true;
  }
  return false;
}

std::string RankState::text() const {
  const auto inside = [this](const char* what) {
    return waits.empty() ? std::string(what) : fmt::format("{} in {}", what, waits);
  };
  switch (state) {
    case 'R':
      return "R running";
    case 'S':
      return inside("S waiting");
    case 'D':
      return inside("D blocked on I/O");
    case 'T':
      return "T stopped";
    case 't':
      return "t held by a debugger";
    case 'Z':
      return "Z ended";
    default:
      return "not readable";
  }
}

}  // namespace lockstep::launch
