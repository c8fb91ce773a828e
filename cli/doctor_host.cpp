// The checks of `lockstep doctor` that concern the host (cores, memory, limits, disk) and the way
// to the master.

#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "cli/doctor_checks.h"
#include "launcher/event_loop.h"
#include "launcher/host.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
#include "lockstep/monitor/cpu_sampler.h"
#include "lockstep/rendezvous/control.h"

namespace lockstep::cli {

namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kMiB = 1u << 20;
constexpr std::uint64_t kGiB = 1u << 30;
// A rank with LibTorch and nothing else holds 150 to 250 MiB.
constexpr std::uint64_t kLeastMemoryPerRank = 256 * kMiB;
constexpr std::uint64_t kMemoryPerRank = kGiB;
// Measured: a launcher fails with 20 for 2 ranks and 48 for 8; a rank with 16 for 4 ranks, 24 for
// 8.
constexpr std::uint64_t kFilesOfLauncher = 16;
constexpr std::uint64_t kFilesOfLauncherPerRank = 6;
constexpr std::uint64_t kFilesOfRank = 16;
constexpr std::uint64_t kFilesOfRankPerPeer = 3;
constexpr std::uint64_t kUsualOpenFiles = 1024;  // the kernel's default; data files come on top
constexpr std::uint64_t kThreadsPerRank = 24;    // LibTorch's, ours and the backend's
constexpr std::uint64_t kThreadsOfCudaRank = 64;
// NVIDIA's recommendation for a container (--shm-size=1g); Docker's default is too small.
constexpr std::uint64_t kShmForNccl = kGiB;
constexpr std::uint64_t kShmOfDocker = 64 * kMiB;
constexpr std::uint64_t kLeastDisk = 256 * kMiB;
constexpr std::uint64_t kDisk = 10 * kGiB;

std::string limit_text(std::uint64_t limit) {
  return limit == kUnlimited ? "unlimited" : std::to_string(limit);
}

Node limit_node(std::uint64_t limit) {
  return limit == kUnlimited ? Node{} : integer_node(static_cast<std::int64_t>(limit));
}

// How many processes and threads together the control groups still allow.
std::uint64_t processes_left(const HostFiles& files) {
  std::uint64_t left = kUnlimited;
  for (const CgroupDirectory& group : cgroup_directories("pids", files)) {
    const auto limit = leading_number(text_or_empty(group.path + "/pids.max"));
    const auto used = leading_number(text_or_empty(group.path + "/pids.current"));
    if (limit && used) left = std::min(left, *limit - std::min(*limit, *used));
  }
  return left;
}

}  // namespace

std::string bytes_text(std::uint64_t bytes) {
  const double value = static_cast<double>(bytes);
  if (bytes >= kGiB) return fmt::format("{:.1f} GiB", value / static_cast<double>(kGiB));
  return fmt::format("{:.0f} MiB", value / static_cast<double>(kMiB));
}

double Machine::cores() const {
  double count = static_cast<double>(cpus.size());
  if (quota) count = std::min(count, *quota);
  return std::max(1.0, count);
}

int Machine::threads_per_rank() const {
  return std::max(1, static_cast<int>(std::floor(cores())) / std::max(1, ranks));
}

Check check_cores(const Machine& machine) {
  Check check{.name = "cores"};
  check.value = fmt::format("{:g} core{} for {} rank{} (affinity {}, cgroup quota {})",
                            machine.cores(), machine.cores() == 1 ? "" : "s", machine.ranks,
                            machine.ranks == 1 ? "" : "s", launch::cpu_list_text(machine.cpus),
                            machine.quota ? fmt::format("{:.2f} cores", *machine.quota) : "none");
  check.data = {{"cores", real_node(machine.cores())}, {"ranks", integer_node(machine.ranks)}};
  if (machine.ranks <= machine.cores()) return check;
  return check.warn(fmt::format(
      "Ranks take turns on a core. Start at most {} (--nproc-per-node), or allow more cores: "
      "taskset, docker --cpus and --cpuset-cpus, srun --cpus-per-task.",
      static_cast<int>(machine.cores())));
}

Check check_threads(const Machine& machine) {
  Check check{.name = "threads"};
  const int fair = machine.threads_per_rank();
  const std::string text = machine.variable("OMP_NUM_THREADS").value_or("");
  check.data = {{"per_rank", integer_node(fair)}};
  if (text.empty()) {
    check.value =
        fmt::format("OMP_NUM_THREADS is not set: lockstep run gives each rank {} thread{}", fair,
                    fair == 1 ? "" : "s");
    return check;
  }
  const auto threads = leading_number(text);
  if (!threads || *threads == 0) {
    check.value = fmt::format("OMP_NUM_THREADS='{}' is not a number of threads", text);
    return check.warn(fmt::format("Unset it (lockstep run then sets {}), or set a number.", fair));
  }
  const double all = static_cast<double>(*threads) * machine.ranks;
  check.data = {{"per_rank", integer_node(static_cast<std::int64_t>(*threads))}};
  check.value = fmt::format("OMP_NUM_THREADS={} in {} rank{}: {:g} threads on {:g} cores", *threads,
                            machine.ranks, machine.ranks == 1 ? "" : "s", all, machine.cores());
  if (all <= std::max(machine.cores(), static_cast<double>(machine.ranks))) return check;
  return check.warn(fmt::format(
      "More threads than cores wait for each other in every operator. Set OMP_NUM_THREADS={}, or "
      "unset it: lockstep run then chooses that.",
      fair));
}

Check check_memory(const Machine& machine) {
  Check check{.name = "memory"};
  const std::string host = text_or_empty(machine.files.proc + "/meminfo");
  const auto bytes_of = [&](const char* name) {
    return number_after(host, name).value_or(0) * 1024;
  };
  const std::uint64_t total = bytes_of("MemTotal");
  const monitor::CgroupSample group = monitor::read_cgroup(0, machine.files);
  std::uint64_t free = bytes_of("MemAvailable");
  std::string limit = "no cgroup limit";
  if (group.memory_limit_bytes) {
    const std::uint64_t used = group.memory_used_bytes.value_or(0);
    const std::uint64_t held = used - std::min(used, group.memory_cache_bytes.value_or(0));
    const std::uint64_t left =
        *group.memory_limit_bytes - std::min(*group.memory_limit_bytes, held);
    limit = fmt::format("cgroup limit {}, of which {} are free",
                        bytes_text(*group.memory_limit_bytes), bytes_text(left));
    free = std::min(free, left);
  }
  const std::uint64_t share = free / static_cast<std::uint64_t>(machine.ranks);
  check.value = fmt::format("{} free of {} ({}): {} for each of {} ranks", bytes_text(free),
                            bytes_text(total), limit, bytes_text(share), machine.ranks);
  check.data = {{"free_bytes", integer_node(static_cast<std::int64_t>(free))},
                {"total_bytes", integer_node(static_cast<std::int64_t>(total))}};
  if (machine.address_space != kUnlimited) {
    check.value +=
        fmt::format("; address space limited to {} (ulimit -v)", bytes_text(machine.address_space));
    check.warn("CUDA and shared memory map far more than they use. Set ulimit -v unlimited.");
  }
  if (share >= kMemoryPerRank) return check;
  return check.judge(
      share < kLeastMemoryPerRank ? Status::kFail : Status::kWarn,
      "A rank that finds no memory is killed. Start fewer ranks, end other programs, or "
      "raise the limit (docker --memory, srun --mem).");
}

Check check_shm(const Machine& machine) {
  Check check{.name = "shm"};
  const bool nccl = machine.on_gpu && machine.ranks > 1;
  const char* who = nccl ? "NCCL needs it between GPUs"
                         : "Lockstep's shared memory needs none of it; Python's DataLoader does";
  struct statvfs room {};
  if (::statvfs(machine.shm.c_str(), &room) != 0) {
    check.value = fmt::format("there is no {} ({})", machine.shm, who);
    return check.judge(
        nccl ? Status::kFail : Status::kWarn,
        "Mount one: mount -t tmpfs -o size=1g tmpfs /dev/shm, or docker --shm-size=1g.");
  }
  const std::uint64_t free = std::uint64_t{room.f_bavail} * room.f_frsize;
  const std::uint64_t total = std::uint64_t{room.f_blocks} * room.f_frsize;
  check.value = fmt::format("{} free of {} in {} ({})", bytes_text(free), bytes_text(total),
                            machine.shm, who);
  check.data = {{"free_bytes", integer_node(static_cast<std::int64_t>(free))},
                {"total_bytes", integer_node(static_cast<std::int64_t>(total))}};
  if (free > (nccl ? kShmForNccl - 1 : kShmOfDocker)) return check;
  return check.judge(nccl && free <= kShmOfDocker ? Status::kFail : Status::kWarn,
                     "Make it larger: docker --shm-size=1g (or --ipc=host), or mount -o "
                     "remount,size=1g /dev/shm; remove what ended programs left there.");
}

// The launcher raises its own limit to the hard one; ranks start with the soft one.
Check check_open_files(const Machine& machine) {
  Check check{.name = "open_files"};
  const auto ranks = static_cast<std::uint64_t>(machine.ranks);
  const std::uint64_t launcher = kFilesOfLauncher + kFilesOfLauncherPerRank * ranks;
  const std::uint64_t rank = kFilesOfRank + kFilesOfRankPerPeer * ranks;
  check.value = fmt::format(
      "{} for each process (hard limit {}); a rank of {} needs {} besides its data, the launcher "
      "{}",
      limit_text(machine.open_files), limit_text(machine.open_files_max), machine.ranks, rank,
      launcher);
  check.data = {{"soft", limit_node(machine.open_files)},
                {"hard", limit_node(machine.open_files_max)},
                {"rank_needs", integer_node(static_cast<std::int64_t>(rank))},
                {"launcher_needs", integer_node(static_cast<std::int64_t>(launcher))}};
  const bool enough = machine.open_files >= rank && machine.open_files_max >= launcher;
  if (enough && machine.open_files >= kUsualOpenFiles) return check;
  return check.judge(
      enough ? Status::kWarn : Status::kFail,
      machine.open_files_max >= std::max(launcher, kUsualOpenFiles)
          ? "Set ulimit -n 65536 (or as much as the hard limit allows) before the run."
          : "Raise the hard limit: /etc/security/limits.conf (nofile), docker --ulimit "
            "nofile=65536, LimitNOFILE of a systemd unit.");
}

Check check_processes(const Machine& machine) {
  Check check{.name = "processes"};
  const std::uint64_t left = processes_left(machine.files);
  const std::uint64_t limit = machine.root ? kUnlimited : machine.processes;
  const std::uint64_t each = (machine.on_gpu ? kThreadsOfCudaRank : kThreadsPerRank) +
                             static_cast<std::uint64_t>(machine.threads_per_rank());
  const std::uint64_t need = static_cast<std::uint64_t>(machine.ranks) * each;
  check.value = fmt::format(
      "limit of this user: {} processes and threads{}; {} left in the cgroup; {} ranks need {}",
      limit_text(machine.processes), machine.root ? " (root is not bound by it)" : "",
      limit_text(left), machine.ranks, need);
  check.data = {{"limit", limit_node(limit)},
                {"cgroup_left", limit_node(left)},
                {"needed", integer_node(static_cast<std::int64_t>(need))}};
  if (std::min(limit, left) >= need) return check;
  return check.fail(left < need ? "Raise the cgroup's limit (docker --pids-limit, TasksMax of a "
                                  "systemd unit), or start fewer ranks and threads."
                                : "Set ulimit -u higher, or start fewer ranks and threads.");
}

// Tries to make a folder there: neither permissions nor free space show it for /proc and the like.
std::string write_problem(const fs::path& place) {
  std::error_code ignored;
  if (!fs::is_directory(place, ignored)) return fmt::format("{} is not a folder", place.string());
  std::string name = (place / ".lockstep-doctor-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr)
    return fmt::format("nothing can be made in {} ({})", place.string(), std::strerror(errno));
  ::rmdir(name.c_str());
  return "";
}

Check check_disk(const Machine& machine) {
  Check check{.name = "disk"};
  if (machine.request.output_dir.empty()) return check.skip("no --output-dir was given");
  std::error_code ignored;
  fs::path place = fs::absolute(machine.request.output_dir, ignored).lexically_normal();
  while (!fs::exists(place, ignored) && place != place.parent_path()) place = place.parent_path();
  struct statvfs room {};
  std::string problem = write_problem(place);
  if (problem.empty() && ::statvfs(place.c_str(), &room) != 0) problem = std::strerror(errno);
  if (!problem.empty()) {
    check.value = fmt::format("{} cannot be written: {}", machine.request.output_dir, problem);
    return check.fail("Choose another output_dir, or change its owner or mode.");
  }
  const std::uint64_t free = std::uint64_t{room.f_bavail} * room.f_frsize;
  check.value = fmt::format("{} free at {}", bytes_text(free), place.string());
  check.data = {{"free_bytes", integer_node(static_cast<std::int64_t>(free))}};
  if (free >= kDisk) return check;
  return check.judge(
      free < kLeastDisk ? Status::kFail : Status::kWarn,
      "A checkpoint with AdamW takes 12 bytes a parameter, and save_total_limit of them "
      "stay. Make room, or lower save_total_limit.");
}

// ------------------------------------------------------------------ the way to the master

namespace {

constexpr std::chrono::seconds kResolveLimit{10};

struct Resolved {
  std::string address{};  // numeric; empty: it does not resolve
  std::string problem{};
};

Resolved ask_resolver(const std::string& host) {
  const launch::Addresses found = launch::look_up(host, 0);
  if (found.error != 0) return {.problem = ::gai_strerror(found.error)};
  char text[NI_MAXHOST] = "";
  ::getnameinfo(found.first->ai_addr, found.first->ai_addrlen, text, sizeof text, nullptr, 0,
                NI_NUMERICHOST);
  return {.address = text};
}

// A name server that does not answer blocks a resolver for longer than anybody waits.
Resolved resolve(const std::string& host) {
  try {
    return detail::run_with_deadline<Resolved>("resolving", Deadline::after(kResolveLimit),
                                               [host] { return ask_resolver(host); });
  } catch (const CommError&) {
    return {.problem = fmt::format("no answer within {} s", kResolveLimit.count())};
  }
}

struct MasterRoute {
  Resolved master;
  launch::Interface interface{};
  std::string problem{};   // why there is no interface
  bool this_host = false;  // the master is here
};

MasterRoute route_to(const std::string& master) {
  MasterRoute route{.master = resolve(master)};
  if (route.master.address.empty()) return route;
  try {
    route.interface = launch::interface_towards(route.master.address);
    route.this_host = route.interface.loopback || route.interface.address == route.master.address;
  } catch (const Error& error) {
    route.problem = error.what();
  }
  return route;
}

Check check_master(const Machine& machine, const MasterRoute& route) {
  Check check{.name = "master"};
  const std::string& host = machine.request.master_addr;
  if (route.master.address.empty()) {
    check.value = fmt::format("'{}' does not resolve ({})", host, route.master.problem);
    return check.fail(
        "Check the spelling, add the name to DNS or /etc/hosts on every host, or give "
        "an IP address with --master-addr.");
  }
  check.value =
      fmt::format("{} is {}{}", host, route.master.address, route.this_host ? ", this host" : "");
  check.data = {{"address", text_node(route.master.address)},
                {"this_host", bool_node(route.this_host)}};
  if (!is_loopback(route.master.address) || is_loopback(host)) return check;
  return check.warn(
      "The name leads to the loopback interface, which other hosts cannot reach. Give "
      "this host's address on the network with --master-addr, or mend /etc/hosts.");
}

Check check_interface(const MasterRoute& route) {
  Check check{.name = "interface"};
  if (route.master.address.empty()) return check.skip("the master does not resolve");
  if (!route.problem.empty()) {
    check.value = route.problem;
    return check.fail("Compare with ip route get " + route.master.address + ".");
  }
  check.value = fmt::format("{} ({}) leads to the master{}", route.interface.name,
                            route.interface.address, route.interface.loopback ? "; loopback" : "");
  check.data = {{"name", text_node(route.interface.name)},
                {"address", text_node(route.interface.address)},
                {"loopback", bool_node(route.interface.loopback)}};
  return check;
}

Check check_port(const Machine& machine, const std::optional<MasterRoute>& route) {
  Check check{.name = "port"};
  const int port = machine.request.master_port;
  check.data = {{"port", integer_node(port)}};
  const auto reach =
      !route || route->interface.loopback ? launch::Reach::kLoopback : launch::Reach::kNetwork;
  if (route && !route->this_host) {
    return check.skip("the master is another host: run lockstep doctor there");
  }
  try {
    if (port == 0) {
      const launch::HeldPort held = launch::HeldPort::any(reach);
      check.value = fmt::format("no --master-port: a free one is chosen, {} now", held.number());
      held.listen();
      return check;
    }
    launch::HeldPort::exactly(port, reach).listen();
  } catch (const Error& error) {
    check.value = error.what();
    return check.fail(port == 0 ? "Too many ports are in use (ss -s)."
                                : fmt::format("ss -ltnp 'sport = :{}' shows who listens. Choose "
                                              "another --master-port on every host.",
                                              port));
  }
  check.value = fmt::format("{} is free", port);
  return check;
}

}  // namespace

std::vector<Check> network_checks(const Machine& machine) {
  if (machine.request.master_addr.empty()) {
    constexpr const char* kOneHost = "no --master-addr: one host, over loopback";
    return {Check{.name = "master"}.skip(kOneHost), Check{.name = "interface"}.skip(kOneHost),
            check_port(machine, std::nullopt)};
  }
  const MasterRoute route = route_to(machine.request.master_addr);
  return {check_master(machine, route), check_interface(route), check_port(machine, route)};
}

}  // namespace lockstep::cli
