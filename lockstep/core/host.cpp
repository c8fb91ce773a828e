#include "lockstep/core/host.h"

#include <arpa/inet.h>
#include <elf.h>
#include <fmt/format.h>
#include <link.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"

namespace lockstep {
namespace {

std::string_view without_blanks(std::string_view text) {
  return text.substr(std::min(text.find_first_not_of(" \t"), text.size()));
}

}  // namespace

std::string text_or_empty(const std::string& path) {
  try {
    return read_file(path, 16u << 20);
  } catch (const Error&) {
    return "";
  }
}

std::optional<std::uint64_t> leading_number(std::string_view text) {
  text = without_blanks(text);
  std::uint64_t value = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc())
    return std::nullopt;
  return value;
}

std::string_view text_after(std::string_view text, std::string_view key) {
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    if (line.size() > key.size() && line.starts_with(key) &&
        (line[key.size()] == ':' || line[key.size()] == ' '))
      return without_blanks(line.substr(key.size() + 1));
    begin = end + 1;
  }
  return {};
}

std::optional<std::uint64_t> number_after(std::string_view text, std::string_view key) {
  return leading_number(text_after(text, key));
}

std::vector<std::string_view> stat_fields(std::string_view text) {
  std::vector<std::string_view> fields(3);
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string_view::npos) return {};
  for (std::size_t begin = name_end + 1; begin < text.size();) {
    const std::size_t end = std::min(text.find_first_of(" \n", begin), text.size());
    if (end > begin) fields.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return fields;
}

// ---------------------------------------------------------------- control groups

namespace {

struct CgroupMount {
  bool unified = false;  // v2
  std::string root;      // which cgroup the mount point shows
  std::string point;
};

bool has_option(const std::string& options, const std::string& wanted) {
  const auto parts = split(options, ',');
  return std::find(parts.begin(), parts.end(), wanted) != parts.end();
}

// Lines of mountinfo: id parent major:minor ROOT POINT options [optional...] - TYPE source OPTIONS
std::vector<CgroupMount> cgroup_mounts(const HostFiles& files, const std::string& controller) {
  std::vector<CgroupMount> mounts;
  for (const std::string& line : split(text_or_empty(files.proc + "/self/mountinfo"), '\n')) {
    const auto dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const auto before = split(line.substr(0, dash), ' '), after = split(line.substr(dash + 3), ' ');
    if (before.size() < 5 || after.size() < 3) continue;
    const bool unified = after[0] == "cgroup2";
    if (unified || (after[0] == "cgroup" && has_option(after[2], controller)))
      mounts.push_back({unified, before[3], before[4]});
  }
  return mounts;
}

}  // namespace

// Lines of /proc/PID/cgroup: "0::/path" for v2, "4:cpu,cpuacct:/path" for v1.
std::optional<std::string> cgroup_in(const std::string& text, bool unified,
                                     const std::string& controller) {
  for (const std::string& line : split(text, '\n')) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool match = unified ? controllers.empty() : has_option(controllers, controller);
    if (match) return line.substr(second + 1);
  }
  return std::nullopt;
}

std::vector<CgroupDirectory> cgroup_directories(const std::string& controller,
                                                const HostFiles& files, pid_t pid) {
  const std::string process = pid == 0 ? "self" : std::to_string(pid);
  const std::string groups = text_or_empty(files.proc + "/" + process + "/cgroup");
  std::vector<CgroupDirectory> found;
  for (const CgroupMount& mount : cgroup_mounts(files, controller)) {
    const std::string own = cgroup_in(groups, mount.unified, controller).value_or("/");
    std::string path = own;
    // Inside a container the mount may show a subtree: what lies above it cannot be read.
    if (mount.root != "/" && path.rfind(mount.root, 0) == 0) path = path.substr(mount.root.size());
    if (path.find("..") != std::string::npos) path.clear();
    const std::string above = own.substr(0, own.size() - path.size());
    for (;;) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      found.push_back({mount.unified, mount.point + path, above + path});
      if (path.empty()) break;
      path.erase(path.rfind('/'));
    }
  }
  return found;
}

CgroupMemory memory_of(const CgroupDirectory& group) {
  const auto number_in = [&](const char* version1, const char* version2) {
    return leading_number(text_or_empty(group.path + "/" + (group.unified ? version2 : version1)));
  };
  CgroupMemory memory{.limit = number_in("memory.limit_in_bytes", "memory.max"),
                      .used = number_in("memory.usage_in_bytes", "memory.current"),
                      .cache = std::nullopt};
  // Version 1 says "none" with a number near the end of the address space.
  if (memory.limit > (std::uint64_t{1} << 60)) memory.limit.reset();
  const std::string stat = text_or_empty(group.path + "/memory.stat");
  const std::string prefix = group.unified ? "" : "total_";
  const auto inactive = number_after(stat, prefix + "inactive_file");
  const auto active = number_after(stat, prefix + "active_file");
  if (inactive || active) memory.cache = inactive.value_or(0) + active.value_or(0);
  return memory;
}

std::optional<double> cpu_quota_cores(const CgroupDirectory& group) {
  // v2: "max 100000"; v1: -1 for none.
  const std::string text = group.unified ? text_or_empty(group.path + "/cpu.max")
                                         : text_or_empty(group.path + "/cpu.cfs_quota_us") + " " +
                                               text_or_empty(group.path + "/cpu.cfs_period_us");
  char* end = nullptr;
  const double quota = std::strtod(text.c_str(), &end);
  const double period = std::strtod(end, nullptr);
  if (quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

// ---------------------------------------------------------------- cores

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

// ---------------------------------------------------------------- memory

namespace {

std::string mib(std::uint64_t bytes) {
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
}

// The number of groups that are this one or below it.
std::size_t ranks_in(const CgroupDirectory& group, const std::vector<std::string>& groups) {
  return static_cast<std::size_t>(std::ranges::count_if(groups, [&](const std::string& text) {
    const auto path = cgroup_in(text, group.unified, "memory");
    return path && (*path + "/").starts_with(group.group + "/");
  }));
}

std::string lacking_in_cgroups(const MemoryNeed& need, const HostFiles& files) {
  for (const CgroupDirectory& group : cgroup_directories("memory", files)) {
    const CgroupMemory memory = memory_of(group);
    if (!memory.limit || !memory.used) continue;
    const std::size_t ranks = std::max<std::size_t>(ranks_in(group, need.groups), 1);
    const std::uint64_t held = *memory.used - std::min(*memory.used, memory.cache.value_or(0));
    if (held + need.own_bytes * ranks <= *memory.limit) continue;
    return fmt::format(
        "{} of shared memory are needed{}, but the control group's limit of {} leaves {}",
        mib(need.own_bytes * ranks), ranks > 1 ? fmt::format(" for {} ranks", ranks) : "",
        mib(*memory.limit), mib(*memory.limit - std::min(*memory.limit, held)));
  }
  return "";
}

std::string lacking_address_space(const MemoryNeed& need, const HostFiles& files) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  const auto pages = leading_number(text_or_empty(files.proc + "/self/statm"));
  if (!pages) return "";
  const std::uint64_t used = *pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  if (used + need.map_bytes <= limit.rlim_cur) return "";
  return fmt::format("{} of address space are needed, but the limit of {} (ulimit -v) leaves {}",
                     mib(need.map_bytes), mib(limit.rlim_cur),
                     mib(limit.rlim_cur - std::min<std::uint64_t>(limit.rlim_cur, used)));
}

std::string lacking_on_host(const MemoryNeed& need, const HostFiles& files) {
  const auto available = number_after(text_or_empty(files.proc + "/meminfo"), "MemAvailable");
  if (!available || need.host_bytes <= *available * 1024) return "";
  return fmt::format("{} of shared memory are needed for all ranks of this host, which has {}",
                     mib(need.host_bytes), mib(*available * 1024));
}

}  // namespace

std::string memory_groups(const HostFiles& files) {
  return text_or_empty(files.proc + "/self/cgroup");
}

std::string lacking_memory(const MemoryNeed& need, const HostFiles& files) {
  std::string lack = lacking_in_cgroups(need, files);
  if (lack.empty()) lack = lacking_address_space(need, files);
  if (lack.empty()) lack = lacking_on_host(need, files);
  return lack;
}

// ---------------------------------------------------------------- other programs

namespace {

constexpr double kMuch = 0.10;  // share of the cores that others use
// Others take nothing away while cores are idle.
constexpr double kAllInUse = 0.9;

// CPU seconds of all programs on the cores that this process may use.
double busy_s() {
  const std::string stat = text_or_empty("/proc/stat");
  std::uint64_t ticks = 0;
  for (const int cpu : allowed_cpus()) {
    std::string_view fields = text_after(stat, fmt::format("cpu{}", cpu));
    // user nice system idle iowait irq softirq steal
    for (int field = 0; field < 8 && !fields.empty(); ++field) {
      fields.remove_prefix(std::min(fields.find_first_not_of(' '), fields.size()));
      if (field != 3 && field != 4) ticks += leading_number(fields).value_or(0);
      fields.remove_prefix(std::min(fields.find(' '), fields.size()));
    }
  }
  return static_cast<double>(ticks) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

double seconds_of(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

// The processor time of this process, with that of its children that have ended.
double own_s() {
  double sum = 0;
  for (const int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage used{};
    ::getrusage(who, &used);
    sum += seconds_of(used.ru_utime) + seconds_of(used.ru_stime);
  }
  return sum;
}

}  // namespace

OtherPrograms::OtherPrograms() : all_s_(busy_s()), own_s_(own_s()) {}

std::string OtherPrograms::text(double shortest_s) const {
  const auto cores = static_cast<double>(allowed_cpus().size());
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin_;
  const double seconds = passed.count();
  if (seconds < shortest_s) return "";
  const double all = (busy_s() - all_s_) / seconds;
  const double others = all - (own_s() - own_s_) / seconds;
  if (others < kMuch * cores || all < kAllInUse * cores) return "";
  return fmt::format("other programs used {:.1f} of the {} cores", others, cores);
}

// ---------------------------------------------------------------- pages

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

void* map_at_huge_page(std::size_t bytes, int protection, int flags) {
  void* const held =
      ::mmap(nullptr, bytes + kHugePage, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  if (held == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(held);
  const std::size_t past = reinterpret_cast<std::uintptr_t>(begin) % kHugePage;
  const std::size_t skipped = past == 0 ? 0 : kHugePage - past;
  if (skipped > 0) ::munmap(begin, skipped);
  ::munmap(begin + skipped + bytes, kHugePage - skipped);
  return begin + skipped;
}

// ---------------------------------------------------------------- names and addresses

std::string host_name() {
  char name[256] = "unknown";
  ::gethostname(name, sizeof name - 1);
  return name;
}

std::string machine_of(const std::string& host) {
  return fmt::format("{}/{}", host, trim(text_or_empty("/proc/sys/kernel/random/boot_id")));
}

std::string build_id() {
  std::string id;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* out) {
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& header = info->dlpi_phdr[i];
          if (header.p_type != PT_NOTE) continue;
          const char* at = reinterpret_cast<const char*>(info->dlpi_addr + header.p_vaddr);
          const char* end = at + header.p_memsz;
          while (at + sizeof(ElfW(Nhdr)) <= end) {
            const auto* note = reinterpret_cast<const ElfW(Nhdr)*>(at);
            const char* name = at + sizeof *note;
            const char* body = name + ((note->n_namesz + 3u) & ~3u);
            if (note->n_type == NT_GNU_BUILD_ID && note->n_namesz == 4) {
              for (unsigned k = 0; k < std::min(note->n_descsz, 8u); ++k)
                static_cast<std::string*>(out)->append(
                    fmt::format("{:02x}", static_cast<unsigned char>(body[k])));
            }
            at = body + ((note->n_descsz + 3u) & ~3u);
          }
        }
        return 1;  // the program itself comes first; the libraries do not matter
      },
      &id);
  if (!id.empty()) return id;
  struct stat status {};
  return ::stat("/proc/self/exe", &status) == 0 ? fmt::format("size-{}", status.st_size)
                                                : "unknown";
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

std::string address_text(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address->sa_family == AF_INET) {
    const auto& four = reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
    ::inet_ntop(AF_INET, &four, text, sizeof text);
  } else if (address->sa_family == AF_INET6) {
    const auto& six = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
    const bool wrapped = IN6_IS_ADDR_V4MAPPED(&six);
    ::inet_ntop(wrapped ? AF_INET : AF_INET6, six.s6_addr + (wrapped ? 12 : 0), text, sizeof text);
  }
  return text;
}

std::string address_towards(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  std::string address = "127.0.0.1";
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0)
    return address;
  const Fd fd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage local{};
  socklen_t length = sizeof local;
  if (fd && ::connect(fd.get(), found->ai_addr, found->ai_addrlen) == 0 &&
      ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&local), &length) == 0)
    address = address_text(reinterpret_cast<sockaddr*>(&local));
  ::freeaddrinfo(found);
  return address;
}

}  // namespace lockstep
