// NVIDIA's management library (NVML), loaded at run time: a GPU's use, temperature and reasons for
// throttling. Nothing links it, so the same program runs where there is no driver.
//
// A call into the driver can block for seconds, and forever when a GPU has failed. So every call is
// recorded in a DriverCall that other threads can read, and is only made on a thread that may be
// abandoned (gpu_sampler.h).
//
//   DriverCall call;
//   Nvml nvml(nvml_library(), call);
//   for (int gpu = 0; gpu < nvml.count(); ++gpu) use(nvml.read(gpu));
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::monitor {

// LOCKSTEP_NVML, or libnvidia-ml.so.1 wherever the loader finds it.
std::string nvml_library();

// The driver call in progress on a thread, so that others can see its duration.
class DriverCall {
 public:
  struct Pending {
    const char* function;
    int gpu;  // -1: of the whole driver
    std::chrono::milliseconds elapsed;
  };
  std::optional<Pending> pending() const;

  void begin(const char* function, int gpu);
  void end();

 private:
  std::atomic<std::int64_t> begun_ns_{0};
  std::atomic<const char*> function_{nullptr};
  std::atomic<int> gpu_{-1};
};

struct GpuIdentity {
  int index = 0;  // NVML's, in PCI order: CUDA_VISIBLE_DEVICES does not apply
  std::string name{};
  std::string uuid{};        // "GPU-..."
  std::string pci_bus_id{};  // "0000:17:00.0", as sysfs spells it
};

struct GpuProcess {
  std::int64_t pid = 0;  // the host's, also inside a container
  std::optional<std::uint64_t> memory_bytes{};
};

// One GPU at one moment. A value that this card or driver does not have is empty.
struct GpuReading {
  std::string problem{};                                 // why nothing follows: "GPU is lost", ...
  std::optional<unsigned> utilisation_percent{};         // time with a kernel running
  std::optional<unsigned> memory_utilisation_percent{};  // time in which memory was accessed
  std::optional<std::uint64_t> memory_used_bytes{};
  std::optional<std::uint64_t> memory_total_bytes{};
  std::optional<double> power_w{};
  std::optional<double> power_limit_w{};
  std::optional<unsigned> temperature_c{};
  std::optional<unsigned> sm_clock_mhz{};
  std::optional<unsigned> memory_clock_mhz{};
  std::optional<std::uint64_t> clock_reasons{};  // bits; clock_reason_words()
  std::optional<std::uint64_t> ecc_corrected{};  // since the driver was loaded
  std::optional<std::uint64_t> ecc_uncorrected{};
  std::vector<GpuProcess> processes{};
};

// The reasons for reduced clocks: {"software power cap", "hardware thermal slowdown"}.
std::vector<std::string> clock_reason_words(std::uint64_t reasons);
inline constexpr std::uint64_t kKnownClockReasons = 0x7ff;
// Whether heat, power or hardware reduce the clocks, rather than idleness or a user's setting.
bool is_throttled(std::uint64_t reasons);

// A critical error that the driver has reported; NVIDIA's documentation lists the numbers.
struct XidEvent {
  int gpu = -1;
  std::uint64_t xid = 0;
  double unix_time_s = 0;  // when it was read
};

// Used by one thread. Owns one initialisation of the library, which stays loaded, because its own
// threads and exit handlers may still run.
class Nvml {
 public:
  // `call` must outlive it. Throws Error when the library is missing or does not start.
  Nvml(const std::string& library, DriverCall& call);
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  const std::string& driver_version() const { return driver_version_; }
  int count() const;
  GpuIdentity identity(int gpu);
  // Does not throw for a GPU that has failed: its `problem` says so.
  GpuReading read(int gpu);
  // The events since the last call, oldest first.
  std::vector<XidEvent> xid_events();

 private:
  struct Functions;
  struct Gpu;
  struct Query;
  void find_gpus();
  void subscribe_to_events();
  void read_memory(const Query& ask);
  void read_processes(const Query& ask);
  template <typename Process>
  void read_processes_by(int (*function)(void*, unsigned*, Process*), const Query& ask);
  std::string error_text(const char* function, int code) const;
  std::string gpu_problem(const char* function, int code) const;

  std::unique_ptr<Functions> functions_;
  DriverCall& call_;
  std::string driver_version_;
  std::vector<Gpu> gpus_;
  void* events_ = nullptr;
};

}  // namespace lockstep::monitor
