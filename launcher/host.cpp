#include "launcher/host.h"

#include <dlfcn.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <string>

#include "launcher/event_loop.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/host.h"
#include "lockstep/core/text.h"

namespace lockstep {

// The child process that asks the driver answers in JSON.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GpuModel, name, memory_bytes, multiprocessors, clock_khz,
                                   capability_major, capability_minor)

namespace launch {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Gpus, count, pci_addresses, models, reason, cuda_version)

namespace {

constexpr std::size_t kBitsPerWord = sizeof(unsigned long) * CHAR_BIT;

// ------------------------------------------------------------------ the CUDA driver

// The driver's functions that need no context.
struct Driver {
  int (*init)(unsigned) = nullptr;
  int (*count)(int*) = nullptr;
  int (*device)(int*, int) = nullptr;
  int (*pci)(char*, int, int) = nullptr;
  int (*error_name)(int, const char**) = nullptr;
  int (*version)(int*) = nullptr;
  int (*name)(char*, int, int) = nullptr;
  int (*memory)(std::size_t*, int) = nullptr;
  int (*attribute)(int*, int, int) = nullptr;
};

template <typename Function>
bool load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

std::string error_text(const Driver& driver, const char* call, int code) {
  const char* name = nullptr;
  if (driver.error_name == nullptr || driver.error_name(code, &name) != 0 || name == nullptr)
    return fmt::format("{} failed with error {}", call, code);
  return fmt::format("{} failed with {}", call, name);
}

// None if the driver fails.
std::optional<GpuModel> model_of(const Driver& driver, int device) {
  GpuModel model;
  char name[256] = "";
  std::size_t memory = 0;
  if (driver.memory(&memory, device) != 0 || driver.name(name, sizeof name, device) != 0)
    return std::nullopt;
  model.name = name;
  model.memory_bytes = memory;
  // Numbers of CUdevice_attribute: CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, ...
  for (const auto& [attribute, value] : {std::pair{16, &model.multiprocessors},
                                         {13, &model.clock_khz},
                                         {75, &model.capability_major},
                                         {76, &model.capability_minor}})
    if (driver.attribute(value, attribute, device) != 0) return std::nullopt;
  return model;
}

Gpus ask_driver(const std::string& path) {
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    return {.reason = fmt::format("{} is not there (no NVIDIA driver)", path)};
  Driver driver;
  if (!load(library, "cuInit", driver.init) || !load(library, "cuDeviceGetCount", driver.count) ||
      !load(library, "cuDeviceGet", driver.device) ||
      !load(library, "cuDeviceGetPCIBusId", driver.pci))
    return {.reason = fmt::format("{} is not a CUDA driver", path)};
  load(library, "cuGetErrorName", driver.error_name);
  load(library, "cuDriverGetVersion", driver.version);
  const bool knows_models = load(library, "cuDeviceGetName", driver.name) &&
                            load(library, "cuDeviceTotalMem_v2", driver.memory) &&
                            load(library, "cuDeviceGetAttribute", driver.attribute);
  if (const int code = driver.init(0); code != 0)
    return {.reason = error_text(driver, "cuInit", code)};
  Gpus gpus;
  if (const int code = driver.count(&gpus.count); code != 0)
    return {.reason = error_text(driver, "cuDeviceGetCount", code)};
  if (gpus.count == 0) return {.reason = "the driver shows no device"};
  int version = 0;
  if (driver.version != nullptr && driver.version(&version) == 0) gpus.cuda_version = version;
  for (int i = 0; i < gpus.count; ++i) {
    int device = 0;
    char address[64] = "";
    const bool known = driver.device(&device, i) == 0;
    if (known) driver.pci(address, sizeof address, device);
    gpus.pci_addresses.push_back(*address != '\0' ? lower(address) : "?");
    if (!known || !knows_models) continue;
    if (const auto model = model_of(driver, device)) gpus.models.push_back(*model);
  }
  // It would not be known which devices a partial list describes.
  if (gpus.models.size() != gpus.pci_addresses.size()) gpus.models.clear();
  return gpus;
}

// ------------------------------------------------------------------ interfaces

// The interface that has `address`; for any other 127.x address, the loopback interface.
std::optional<Interface> interface_with(const sockaddr* address) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) throw SystemError("host", "cannot list network interfaces", errno);
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  const std::string wanted = address_text(address);
  const bool loopback = wanted.rfind("127.", 0) == 0;
  std::optional<Interface> found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != address->sa_family) continue;
    const bool is_loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    const Interface candidate{entry->ifa_name, wanted, is_loopback};
    if (address_text(entry->ifa_addr) == wanted) return candidate;
    if (loopback && is_loopback) found = candidate;
  }
  return found;
}

}  // namespace

Variables process_variables() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  };
}

int threads_per_rank(int local_ranks) {
  return std::max(1, allowed_cores() / std::max(1, local_ranks));
}

Gpus find_gpus(int timeout_ms, const std::string& driver) {
  Pipe pipe = make_pipe();
  const pid_t child = ::fork();
  if (child < 0) throw SystemError("host", "cannot start a process to ask the CUDA driver", errno);
  if (child == 0) {
    try {
      write_all(pipe.write.get(), nlohmann::json(ask_driver(driver)).dump());
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(0);  // no destructors: they belong to the parent
  }
  pipe.write.reset();
  const auto answer =
      read_until_closed(pipe.read.get(), Deadline::after(std::chrono::milliseconds(timeout_ms)));
  end_child(child);
  if (!answer)
    return {.reason = fmt::format("the CUDA driver did not answer within {} ms", timeout_ms)};
  if (answer->empty()) return {.reason = "the CUDA driver ended the process"};
  const auto gpus = nlohmann::json::parse(*answer).get<Gpus>();
  // If this program already uses CUDA, a forked child cannot; but then it may ask directly.
  if (gpus.reason.find("CUDA_ERROR_NOT_INITIALIZED") != std::string::npos)
    return ask_driver(driver);
  return gpus;
}

Interface interface_towards(const std::string& host, const Addresses& addresses) {
  if (addresses.error != 0)
    throw UsageError("host",
                     "the address '{}' does not resolve ({}). Check the spelling, or give an IP "
                     "address with --master-addr and --local-addr.",
                     host, ::gai_strerror(addresses.error));
  int error = ENETUNREACH;
  for (const addrinfo* info = addresses.first.get(); info != nullptr; info = info->ai_next) {
    if (info->ai_family != AF_INET && info->ai_family != AF_INET6) continue;
    const Fd fd(::socket(info->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage own{};
    socklen_t size = sizeof own;
    if (!fd || ::connect(fd.get(), info->ai_addr, info->ai_addrlen) != 0 ||
        ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0) {
      error = errno;
      continue;
    }
    if (const auto found = interface_with(reinterpret_cast<const sockaddr*>(&own))) return *found;
  }
  throw SystemError("host", fmt::format("there is no network route to '{}'", host), error);
}

Interface interface_towards(const std::string& host) {
  constexpr int kPort = 9;  // never used: connecting a datagram socket only looks up the route
  return interface_towards(host, look_up(host, kPort));
}

std::optional<int> signal_number(std::string_view name) {
  std::string wanted = lower(name);
  if (!wanted.starts_with("sig")) wanted = "sig" + wanted;
  for (int number = 1; number < SIGRTMAX; ++number) {
    if (lower(signal_name(number)) == wanted) return number;
  }
  return std::nullopt;
}

CpuMask::CpuMask(const std::vector<int>& cpus) {
  for (const int cpu : cpus) {
    const auto index = static_cast<std::size_t>(cpu);
    if (index / kBitsPerWord >= bits_.size()) bits_.resize(index / kBitsPerWord + 1, 0);
    bits_[index / kBitsPerWord] |= 1ul << (index % kBitsPerWord);
  }
}

bool CpuMask::apply() const noexcept {
  return ::sched_setaffinity(0, bits_.size() * sizeof(unsigned long),
                             reinterpret_cast<const cpu_set_t*>(bits_.data())) == 0;
}

// ------------------------------------------------------------------ --numa-binding

namespace {

std::vector<int> list_in(const std::string& path) {
  return parse_cpu_list(text_or_empty(path));
}

std::optional<int> number_in(const std::string& path) {
  const auto number = leading_number(text_or_empty(path));
  return number ? std::optional(static_cast<int>(*number)) : std::nullopt;
}

class Topology {
 public:
  Topology(const HostFiles& files, std::vector<int> allowed)
      : files_(files), allowed_(std::move(allowed)) {
    std::ranges::sort(allowed_);
    find_nodes();
  }

  // The allowed CPUs of each node that has any. A machine without NUMA is one node.
  const std::map<int, std::vector<int>>& nodes() const { return nodes_; }

  int node_of_gpu(const std::string& pci_address) const {
    const std::string path = files_.sys + "/bus/pci/devices/" + pci_address + "/numa_node";
    // The kernel reports -1 if there is only one node or the firmware does not say.
    return std::max(0, number_in(path).value_or(0));
  }

  int socket_of(int cpu) const {
    return number_in(cpu_path(cpu) + "/topology/physical_package_id").value_or(0);
  }

  // Identifies a physical core by its lowest CPU.
  int core_of(int cpu) const {
    const auto cpus = list_in(cpu_path(cpu) + "/topology/thread_siblings_list");
    return cpus.empty() ? cpu : cpus.front();
  }

  // Identifies the largest data cache of a CPU by the lowest CPU that shares it.
  int cache_of(int cpu) const {
    int best_level = -1;
    int representative = 0;
    std::error_code ignored;
    for (const auto& entry :
         std::filesystem::directory_iterator(cpu_path(cpu) + "/cache", ignored)) {
      const std::string path = entry.path().string();
      const std::string type = text_or_empty(path + "/type");
      const int level = number_in(path + "/level").value_or(-1);
      const auto shared = list_in(path + "/shared_cpu_list");
      if ((!type.starts_with("Unified") && !type.starts_with("Data")) || level <= best_level ||
          shared.empty())
        continue;
      best_level = level;
      representative = shared.front();
    }
    return representative;
  }

 private:
  std::string cpu_path(int cpu) const {
    return fmt::format("{}/devices/system/cpu/cpu{}", files_.sys, cpu);
  }

  void find_nodes() {
    const std::string base = files_.sys + "/devices/system/node";
    for (const int node : list_in(base + "/online"))
      for (const int cpu : list_in(fmt::format("{}/node{}/cpulist", base, node)))
        if (std::ranges::binary_search(allowed_, cpu)) nodes_[node].push_back(cpu);
    if (nodes_.empty() && !allowed_.empty()) nodes_[0] = allowed_;
  }

  HostFiles files_;
  std::vector<int> allowed_;
  std::map<int, std::vector<int>> nodes_;
};

// The NUMA node of every slot. A slot is a GPU, or a local rank beyond the GPUs.
std::vector<int> node_of_slots(const Topology& topology, const NumaRequest& request) {
  const auto& gpus = request.gpu_pci_addresses;
  const std::size_t ranks = static_cast<std::size_t>(std::max(1, request.local_ranks));
  std::vector<int> slots;
  if (!gpus.empty()) {
    for (std::size_t slot = 0; slot < std::max(ranks, gpus.size()); ++slot)
      slots.push_back(topology.node_of_gpu(gpus[slot % gpus.size()]));
    return slots;
  }
  std::vector<int> nodes;
  for (const auto& [node, cpus] : topology.nodes()) nodes.push_back(node);
  for (std::size_t slot = 0; slot < ranks; ++slot)
    slots.push_back(nodes[slot * nodes.size() / ranks]);
  return slots;
}

using Groups = std::map<int, std::vector<int>>;

template <typename Key>
Groups group_by(const std::vector<int>& cpus, const Key& key) {
  Groups groups;
  for (const int cpu : cpus) groups[key(cpu)].push_back(cpu);
  return groups;
}

std::vector<int> whole_socket(const Topology& topology, int node) {
  const int socket = topology.socket_of(topology.nodes().at(node).front());
  std::vector<int> result;
  for (const auto& [other, cpus] : topology.nodes()) {
    if (topology.socket_of(cpus.front()) == socket)
      result.insert(result.end(), cpus.begin(), cpus.end());
  }
  return result;
}

// Part `index` of the node's cores, divided into `sharers` consecutive parts, of which the first
// may be larger by one core.
std::vector<int> own_cores(const Topology& topology, int node, int sharers, int index) {
  const Groups cores =
      group_by(topology.nodes().at(node), [&](int cpu) { return topology.core_of(cpu); });
  const int count = static_cast<int>(cores.size());
  if (count < sharers) {
    throw UsageError("run",
                     "--numa-binding=exclusive: NUMA node {} has {} allowed cores for {} ranks. "
                     "Start fewer ranks, or use --numa-binding=node.",
                     node, count, sharers);
  }
  const int begin = index * (count / sharers) + std::min(index, count % sharers);
  const int end = begin + count / sharers + (index < count % sharers ? 1 : 0);
  std::vector<int> result;
  int position = 0;
  for (const auto& [core, cpus] : cores) {
    if (position >= begin && position < end) result.insert(result.end(), cpus.begin(), cpus.end());
    ++position;
  }
  return result;
}

// The CPUs of one last-level cache; the caches with the most CPUs are given out first.
std::vector<int> own_cache(const Topology& topology, int node, int index) {
  const Groups caches =
      group_by(topology.nodes().at(node), [&](int cpu) { return topology.cache_of(cpu); });
  std::vector<std::vector<int>> ordered;
  for (const auto& [cache, cpus] : caches) ordered.push_back(cpus);
  std::ranges::stable_sort(ordered,
                           [](const auto& a, const auto& b) { return a.size() > b.size(); });
  return ordered[static_cast<std::size_t>(index) % ordered.size()];
}

}  // namespace

std::vector<int> cpus_for_rank(const NumaRequest& request, const HostFiles& files) {
  if (request.binding == NumaBinding::kNone) return request.allowed;
  const Topology topology(files, request.allowed);
  LOCKSTEP_ASSERT(!topology.nodes().empty());
  const std::vector<int> slots = node_of_slots(topology, request);
  const auto rank = static_cast<std::size_t>(request.local_rank);
  LOCKSTEP_ASSERT(rank < slots.size());
  const int node = slots[rank];
  if (topology.nodes().count(node) == 0) {
    throw UsageError("run",
                     "--numa-binding: local rank {} belongs to NUMA node {}, where this process is "
                     "allowed no CPU (allowed: {}). Widen the affinity, or drop --numa-binding.",
                     request.local_rank, node, cpu_list_text(request.allowed));
  }
  // The rank's position among those that share the node.
  const int sharers = static_cast<int>(std::ranges::count(slots, node));
  const int index = static_cast<int>(
      std::count(slots.begin(), slots.begin() + static_cast<std::ptrdiff_t>(rank), node));
  std::vector<int> cpus;
  switch (request.binding) {
    case NumaBinding::kNone:
    case NumaBinding::kNode:
      cpus = topology.nodes().at(node);
      break;
    case NumaBinding::kSocket:
      cpus = whole_socket(topology, node);
      break;
    case NumaBinding::kExclusive:
      cpus = own_cores(topology, node, sharers, index);
      break;
    case NumaBinding::kCoreComplex:
      cpus = own_cache(topology, node, index);
      break;
  }
  std::ranges::sort(cpus);
  return cpus;
}

std::string cpu_list_text(const std::vector<int>& cpus) {
  return ranges_text(cpus, ",");
}

std::vector<int> parse_cpu_list(const std::string& text) {
  std::set<int> cpus;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    int first = 0;
    int last = 0;
    char dash = 0;
    std::istringstream range(part);
    if (!(range >> first)) continue;
    if (!(range >> dash >> last)) last = first;
    for (int cpu = first; cpu <= last; ++cpu) cpus.insert(cpu);
  }
  return {cpus.begin(), cpus.end()};
}

// ---------------------------------------------------------------- ports

namespace {

namespace fs = std::filesystem;

void allow_reuse(int fd, bool allowed = true) {
  const int value = allowed ? 1 : 0;
  if (::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &value, sizeof value) != 0)
    throw SystemError("launch", "cannot set SO_REUSEADDR", errno);
}

int bound_port(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0)
    throw SystemError("launch", "cannot read the port of a socket", errno);
  return address.ss_family == AF_INET6
             ? ntohs(reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port)
             : ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

struct PortRequest {
  int port;
  Reach reach;
  bool reuse;
};

// None, with errno, if it cannot be bound.
Fd bind_socket(int family, const PortRequest& request) {
  Fd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return fd;
  if (request.reuse) allow_reuse(fd.get());
  const bool network = request.reach == Reach::kNetwork;
  const auto port = htons(static_cast<std::uint16_t>(request.port));
  sockaddr_in four{};
  four.sin_family = AF_INET;
  four.sin_port = port;
  if (!network) four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  sockaddr_in6 six{};
  six.sin6_family = AF_INET6;
  six.sin6_port = port;
  if (!network) six.sin6_addr = in6addr_loopback;
  const int off = 0;  // also accept IPv4, as c10d does
  const bool bound =
      family == AF_INET
          ? ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&four), sizeof four) == 0
          : ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0 &&
                ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&six), sizeof six) == 0;
  if (bound) return fd;
  const int error = errno;
  fd.reset();
  errno = error;
  return fd;
}

// IPv6 may be missing or disabled.
bool is_missing_family(int error) {
  return error == EAFNOSUPPORT || error == EADDRNOTAVAIL;
}

// Binds every address of the reach at one port; none of them, with errno, if one is taken.
std::vector<Fd> bind_sockets(PortRequest request) {
  std::vector<Fd> sockets;
  const bool network = request.reach == Reach::kNetwork;
  Fd first = bind_socket(network ? AF_INET6 : AF_INET, request);
  if (!first && network && is_missing_family(errno)) first = bind_socket(AF_INET, request);
  if (!first) return sockets;
  request.port = bound_port(first.get());
  sockets.push_back(std::move(first));
  if (request.reach != Reach::kLoopback) return sockets;
  Fd second = bind_socket(AF_INET6, request);
  if (second) {
    sockets.push_back(std::move(second));
  } else if (const int error = errno; !is_missing_family(error)) {
    sockets.clear();
    errno = error;
  }
  return sockets;
}

// Sets SO_REUSEADDR if connections that were accepted earlier need it. If another process binds the
// port in that moment, only one of the two can listen; this fails if it is the other.
bool begin_to_listen(const std::vector<Fd>& sockets) {
  constexpr int kQueue = 128;
  for (const Fd& socket : sockets) {
    if (::listen(socket.get(), kQueue) != 0) {
      if (errno != EADDRINUSE) return false;
      allow_reuse(socket.get());
      if (::listen(socket.get(), kQueue) != 0) return false;
    }
    // Otherwise the connections that are accepted would keep the next run from binding the port.
    allow_reuse(socket.get());
  }
  return true;
}

// The sockets stay bound, and Linux lets them listen again.
void end_listening(const std::vector<Fd>& sockets) {
  for (const Fd& socket : sockets) {
    int listening = 0;
    socklen_t size = sizeof listening;
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ACCEPTCONN, &listening, &size);
    if (listening == 0) continue;
    allow_reuse(socket.get(), false);  // before the next line, so that the port is never shared
    ::shutdown(socket.get(), SHUT_RDWR);
  }
}

// The kernel releases a port that was chosen by binding to 0 when its socket stops listening, so
// only the number is used.
int free_port(Reach reach) {
  const std::vector<Fd> sockets = bind_sockets({.port = 0, .reach = reach, .reuse = false});
  return sockets.empty() ? 0 : bound_port(sockets.front().get());
}

// ---------------------------------------------------------------- who has a port

struct Listener {
  std::string inode;
  std::string user;
};

std::optional<Listener> find_listener(int port) {
  for (const char* path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(path);
    std::string line;
    for (std::getline(file, line); std::getline(file, line);) {
      std::istringstream fields(line);
      std::string slot, local, remote, state, queues, timer, retransmits, user, timeout, inode;
      fields >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> user >>
          timeout >> inode;
      constexpr const char* kListening = "0A";
      if (state == kListening && local.ends_with(fmt::format(":{:04X}", port)))
        return Listener{inode, user};
    }
  }
  return std::nullopt;
}

// The first process that `matches`, of those that this user may inspect.
std::string find_process(const std::function<bool(const fs::path&)>& matches) {
  std::error_code problem;
  for (fs::directory_iterator at("/proc", problem), end; !problem && at != end;
       at.increment(problem)) {
    const std::string name = at->path().filename().string();
    if (name.find_first_not_of("0123456789") == std::string::npos && matches(at->path()))
      return name;
  }
  return {};
}

bool has_socket(const fs::path& process, const std::string& inode) {
  std::error_code problem;
  for (fs::directory_iterator at(process / "fd", problem), end; !problem && at != end;
       at.increment(problem)) {
    std::error_code ignored;
    if (fs::read_symlink(at->path(), ignored) == fmt::format("socket:[{}]", inode)) return true;
  }
  return false;
}

std::string process_text(const std::string& pid) {
  constexpr std::size_t kMost = 120;
  std::string command = text_or_empty(fs::path("/proc") / pid / "cmdline");
  while (command.ends_with('\0')) command.pop_back();
  for (char& c : command)
    if (c == '\0') c = ' ';
  if (command.size() > kMost) command = command.substr(0, kMost) + "...";
  return fmt::format("pid {} ({})", pid, printable(command));
}

// No table that every user may read lists sockets that do not listen, but a job's ranks have the
// port in their environment.
std::string holder_of(int port) {
  if (const auto listener = find_listener(port)) {
    const std::string pid =
        find_process([&](const fs::path& process) { return has_socket(process, listener->inode); });
    return pid.empty()
               ? fmt::format("a process of the user with id {} listens there", listener->user)
               : process_text(pid) + " listens there";
  }
  const std::string variable = fmt::format("{}MASTER_PORT={}{}", '\0', port, '\0');
  const std::string own = std::to_string(::getpid()), front = std::to_string(::getppid());
  const std::string pid = find_process([&](const fs::path& process) {
    const auto name = process.filename();
    return name != own && name != front &&
           text_or_empty(process / "environ").find(variable) != std::string::npos;
  });
  if (pid.empty()) return "another process has bound it";
  return fmt::format("another job has it: {} was started with MASTER_PORT={}", process_text(pid),
                     port);
}

[[noreturn]] void refuse(int port, int error) {
  if (error == EADDRINUSE)
    throw UsageError("launch",
                     "--master-port={} cannot be used: {}. Choose another port (on every host), "
                     "or leave the flag out on one host to get a free one.",
                     port, holder_of(port));
  if (error == EACCES)
    throw UsageError("launch",
                     "--master-port={} cannot be used: {}. Ports below 1024 are usually root's. "
                     "Choose a higher one.",
                     port, std::strerror(error));
  throw SystemError("launch", fmt::format("cannot bind port {}", port), error);
}

}  // namespace

HeldPort HeldPort::any(Reach reach) {
  constexpr int kTries = 100;  // another process may get the same number meanwhile
  for (int i = 0; i < kTries; ++i) {
    const int port = free_port(reach);
    if (port == 0 && errno != EADDRINUSE) break;
    if (port == 0) continue;
    std::vector<Fd> sockets = bind_sockets({.port = port, .reach = reach, .reuse = false});
    if (!sockets.empty()) return HeldPort(std::move(sockets), port);
  }
  throw SystemError("launch", "cannot find a free TCP port", errno);
}

namespace {

// None, with errno, if another process has the port.
std::vector<Fd> bind_asked(int port, Reach reach) {
  std::vector<Fd> sockets = bind_sockets({.port = port, .reach = reach, .reuse = false});
  if (!sockets.empty() || errno != EADDRINUSE) return sockets;
  sockets = bind_sockets({.port = port, .reach = reach, .reuse = true});
  if (!sockets.empty() && !begin_to_listen(sockets)) {
    const int error = errno;
    sockets.clear();
    errno = error;
  }
  end_listening(sockets);  // which shows that no other process listens, or can from now on
  return sockets;
}

}  // namespace

HeldPort HeldPort::exactly(int port, Reach reach) {
  std::vector<Fd> sockets = bind_asked(port, reach);
  if (sockets.empty()) refuse(port, errno);
  return HeldPort(std::move(sockets), port);
}

std::optional<HeldPort> HeldPort::unless_in_use(int port, Reach reach) {
  std::vector<Fd> sockets = bind_asked(port, reach);
  if (sockets.empty() && errno == EADDRINUSE) return std::nullopt;
  if (sockets.empty()) refuse(port, errno);
  return HeldPort(std::move(sockets), port);
}

void HeldPort::listen() const {
  if (!begin_to_listen(sockets_)) refuse(number_, errno);
}

void HeldPort::stop_listening() const {
  end_listening(sockets_);
}

}  // namespace launch
}  // namespace lockstep
