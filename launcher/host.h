// The resources of this host: cores, GPUs, the network interface towards the master, and the CPUs
// near each GPU; and MASTER_PORT.
//
// Reads the kernel's files (affinity, cgroups, sysfs, the routing table) and asks the CUDA driver,
// which is loaded by name in a short-lived child process: so the launcher has no threads or GPU
// context of it, and a driver that hangs only costs a timeout.
//
//   int threads = threads_per_rank(plan.nproc_per_node);
//   Interface route = interface_towards(plan.master_addr);      // {"eth0", "10.0.0.7"}
//
// Call these functions from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/plan.h"
#include "lockstep/core/device_rule.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/host.h"
#include "lockstep/core/thread_signals.h"  // IWYU pragma: export

namespace lockstep::launch {

// Looks up an environment variable; none if it is unset. Tests pass their own function.
using Variables = std::function<std::optional<std::string>(const std::string&)>;
Variables process_variables();

// allowed_cores() divided by the local ranks, at least 1: the default OMP_NUM_THREADS.
int threads_per_rank(int local_ranks);

struct Gpus {
  int count = 0;
  std::vector<std::string> pci_addresses{};  // "0000:17:00.0", as sysfs spells them, by CUDA index
  std::vector<GpuModel> models{};            // by CUDA index; empty if not known
  std::string reason{};                      // why count is 0
  int cuda_version = 0;                      // the driver's, 13000 for 13.0; 0: not known
};
// The GPUs that the CUDA driver shows this process, according to CUDA_VISIBLE_DEVICES.
Gpus find_gpus(int timeout_ms = 60'000, const std::string& driver = "libcuda.so.1");

struct Addresses;  // event_loop.h
struct Interface {
  std::string name;     // "eth0"
  std::string address;  // this host's address on it
  bool loopback = false;
};
// The interface from which packets to `host` (name or address) leave; for an address of this host,
// the interface that has it. Sends nothing. Throws UsageError if `host` does not resolve,
// SystemError if there is no route.
Interface interface_towards(const std::string& host);
Interface interface_towards(const std::string& host, const Addresses& addresses);  // of that name

// The CPUs that --numa-binding gives a local rank, ascending and never empty; throws UsageError if
// there are none. As in torchrun, the NUMA node is that of the GPU with the rank's index, and
// further ranks start over at GPU 0; without GPUs the ranks are spread over the nodes in order.
struct NumaRequest {
  NumaBinding binding = NumaBinding::kNone;
  int local_rank = 0;
  int local_ranks = 1;
  std::vector<std::string> gpu_pci_addresses{};
  std::vector<int> allowed{};  // allowed_cpus()
};
std::vector<int> cpus_for_rank(const NumaRequest& request, const HostFiles& files = {});

// 15 for "SIGTERM" or "TERM": the inverse of signal_name().
std::optional<int> signal_number(std::string_view name);

// Converts to and from sysfs's notation, "0-3,8".
std::string cpu_list_text(const std::vector<int>& cpus);
std::vector<int> parse_cpu_list(const std::string& text);

// A set of CPUs in the kernel's format. Made before fork(), so that apply() does not allocate.
class CpuMask {
 public:
  explicit CpuMask(const std::vector<int>& cpus);
  // Binds the calling thread and its later children; false with errno on failure.
  bool apply() const noexcept;

 private:
  std::vector<unsigned long> bits_;
};

// ---------------------------------------------------------------- MASTER_PORT

// The addresses of the port. "localhost" may mean either loopback address, so kLoopback is both.
enum class Reach { kLoopback, kIpv4Loopback, kNetwork };

// MASTER_PORT: a port that no other process can use from the moment it is chosen.
//
// Its sockets are bound without SO_REUSEADDR, so no process of any user can bind the port, even
// while they do not listen. If the kernel still has connections of an earlier run at a requested
// port, it can be bound only with SO_REUSEADDR. Then it listens for a moment, which no other
// process can do meanwhile, and clears the flag: with the flag and without listening, any process
// could bind the port too, listen there and answer the ranks.
//
// The port stays bound when it stops listening, and can listen again while it has connections.
//
//   HeldPort port = HeldPort::any(Reach::kLoopback);   // or HeldPort::exactly(29500, reach)
//   port.listen();
//
// Owned by the supervisor; a new one for each attempt unless the port was requested.
class HeldPort {
 public:
  // A free port.
  static HeldPort any(Reach reach = Reach::kNetwork);
  // Throws UsageError naming --master-port and, if it is found, the process that has the port.
  static HeldPort exactly(int port, Reach reach = Reach::kNetwork);
  // None if another process has the port; otherwise like exactly().
  static std::optional<HeldPort> unless_in_use(int port, Reach reach);

  int number() const { return number_; }
  // One for each address; non-blocking. They belong to this object.
  const std::vector<Fd>& sockets() const { return sockets_; }
  // Throws UsageError like exactly(). Does nothing the second time.
  void listen() const;
  void stop_listening() const;  // the port stays held

 private:
  HeldPort(std::vector<Fd> sockets, int number) : sockets_(std::move(sockets)), number_(number) {}

  std::vector<Fd> sockets_;
  int number_;
};

}  // namespace lockstep::launch
