// What this machine offers the ranks: cores, GPUs, the network interface towards the master, and
// which CPUs lie near which GPU.
//
// Everything is read from the kernel (affinity, cgroups, sysfs, the routing table) or from the CUDA
// driver, which is loaded by name in a short-lived child process: the launcher itself stays without
// threads and without a GPU context, and a driver that hangs costs a deadline, not the launcher.
//
//   int threads = threads_per_rank(plan.nproc_per_node);
//   Interface route = interface_towards(plan.master_addr);      // {"eth0", "10.0.0.7"}
//
// Free functions without state; call them from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/plan.h"
#include "lockstep/core/host.h"
#include "lockstep/core/thread_signals.h"  // IWYU pragma: export

namespace lockstep::launch {

// Looks up an environment variable: nothing when unset, "" when set to nothing. Tests pass their
// own.
using Variables = std::function<std::optional<std::string>(const std::string&)>;
Variables process_variables();

// allowed_cores() shared by the local ranks, at least 1: the default OMP_NUM_THREADS.
int threads_per_rank(int local_ranks);

struct GpuModel {
  std::string name{};  // "NVIDIA H100 80GB HBM3"
  std::uint64_t memory_bytes = 0;
  int multiprocessors = 0;
  int clock_khz = 0;
  int capability_major = 0;
  int capability_minor = 0;
};
struct Gpus {
  int count = 0;
  std::vector<std::string> pci_addresses{};  // "0000:17:00.0", as sysfs spells them, by CUDA index
  std::vector<GpuModel> models{};            // by CUDA index; empty when the driver does not say
  std::string reason{};                      // why count is 0
  int cuda_version = 0;                      // the driver's, 13000 for 13.0; 0: not known
};
// What the CUDA driver shows this process, CUDA_VISIBLE_DEVICES included.
Gpus find_gpus(int timeout_ms = 60'000, const std::string& driver = "libcuda.so.1");

struct Addresses;  // lookup.h
struct Interface {
  std::string name;     // "eth0"
  std::string address;  // this host's address on it
  bool loopback = false;
};
// The interface from which packets to `host` (name or address) leave. An address of this host is
// found on the interface that carries it. Nothing is sent. Throws UsageError when `host` does not
// resolve and SystemError when there is no route.
Interface interface_towards(const std::string& host);
Interface interface_towards(const std::string& host, const Addresses& addresses);  // of that name

// The CPUs that --numa-binding gives to a local rank, ascending and never empty; throws UsageError
// when that cannot be done. As in torchrun the node is that of the GPU with the rank's index;
// without GPUs the local ranks are spread over the nodes in order. Ranks beyond the GPUs start over
// at 0.
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

// "0-3,8" for a message, and back (sysfs's own notation).
std::string cpu_list_text(const std::vector<int>& cpus);
std::vector<int> parse_cpu_list(const std::string& text);

// A set of CPUs in the kernel's form, made before fork() so that apply() allocates nothing.
class CpuMask {
 public:
  explicit CpuMask(const std::vector<int>& cpus);
  // Binds the calling thread and what it starts later; false with errno on failure.
  bool apply() const noexcept;

 private:
  std::vector<unsigned long> bits_;
};

}  // namespace lockstep::launch
