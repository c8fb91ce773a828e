#include "launcher/host.h"

#include <dlfcn.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>

#include "launcher/lookup.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"
#include "lockstep/rendezvous/this_host.h"

namespace lockstep::launch {

// How the child that asks the driver passes its answer on.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GpuModel, name, memory_bytes, multiprocessors, clock_khz,
                                   capability_major, capability_minor)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Gpus, count, pci_addresses, models, reason, cuda_version)

namespace {

constexpr std::size_t kBitsPerWord = sizeof(unsigned long) * CHAR_BIT;

// ------------------------------------------------------------------ the CUDA driver

// The driver's functions by their C types; only what needs no context.
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

// Nothing when the driver refuses.
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
  // A partial list is useless, since nobody knows which devices it describes.
  if (gpus.models.size() != gpus.pci_addresses.size()) gpus.models.clear();
  return gpus;
}

// ------------------------------------------------------------------ interfaces

// The interface that carries `address`; a 127.x address that none names belongs to the loopback.
std::optional<Interface> carrier_of(const sockaddr* address) {
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
  // A program that already uses CUDA cannot use it in a forked child, but then it may ask itself.
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
    if (const auto found = carrier_of(reinterpret_cast<const sockaddr*>(&own))) return *found;
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

}  // namespace lockstep::launch
