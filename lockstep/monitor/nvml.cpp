#include "lockstep/monitor/nvml.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "lockstep/core/deadline.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"

namespace lockstep::monitor {
namespace {

using Clock = std::chrono::steady_clock;
using Handle = void*;

// ------------------------------------------------------------------ the library's interface

// Return codes that have a meaning here.
constexpr int kSuccess = 0;
constexpr int kNotSupported = 3;
constexpr int kNoPermission = 4;
constexpr int kNotFound = 6;
constexpr int kInsufficientSize = 7;
constexpr int kFunctionNotFound = 13;
constexpr int kGpuIsLost = 15;

constexpr int kTemperatureOfGpu = 0;
constexpr int kClockOfSm = 1;
constexpr int kClockOfMemory = 2;
constexpr int kEccCorrected = 0;
constexpr int kEccUncorrected = 1;
constexpr int kEccSinceLoad = 0;
constexpr unsigned long long kEventXid = 8;
constexpr unsigned long long kNotAvailable = ~0ull;

struct Utilisation {
  unsigned gpu;
  unsigned memory;
};

struct Memory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

// This version reports the driver's reserved memory separately, as nvidia-smi shows it.
struct MemoryV2 {
  unsigned version;
  unsigned long long total;
  unsigned long long reserved;
  unsigned long long free;
  unsigned long long used;
};
constexpr unsigned kMemoryVersion2 = sizeof(MemoryV2) | 2u << 24;

struct Pci {
  char legacy_bus_id[16];
  unsigned domain;
  unsigned bus;
  unsigned device;
  unsigned device_id;
  unsigned subsystem_id;
  char bus_id[32];
};
static_assert(sizeof(Pci) == 68);

struct ProcessV1 {
  unsigned pid;
  unsigned long long memory;
};

struct ProcessV2 {  // of v2 and v3
  unsigned pid;
  unsigned long long memory;
  unsigned gpu_instance;
  unsigned compute_instance;
};
static_assert(sizeof(ProcessV1) == 16 && sizeof(ProcessV2) == 24);

struct Event {
  Handle device;
  unsigned long long type;
  unsigned long long data;
  unsigned gpu_instance;
  unsigned compute_instance;
};

struct ReasonWord {
  std::uint64_t bit;
  const char* word;
  bool throttles;
};
constexpr ReasonWord kReasons[] = {
    {0x001, "idle", false},
    {0x002, "application clocks", false},
    {0x004, "software power cap", true},
    {0x008, "hardware slowdown", true},
    {0x010, "sync boost", false},
    {0x020, "software thermal slowdown", true},
    {0x040, "hardware thermal slowdown", true},
    {0x080, "hardware power brake", true},
    {0x100, "display clocks", false},
    {0x200, "card limit", true},
    {0x400, "reliability", false},
};

std::int64_t now_ns() {
  return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
}

// Whether only this value is unavailable, while the GPU is healthy.
bool is_missing(int code) {
  return code == kNotSupported || code == kNoPermission || code == kFunctionNotFound ||
         code == kNotFound;
}

// "00000000:17:00.0" as NVML writes it, "0000:17:00.0" as sysfs and CUDA do.
std::string sysfs_bus_id(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (text.size() == 16 && text.rfind("0000", 0) == 0) text.erase(0, 4);
  return text;
}

}  // namespace

std::string nvml_library() {
  return env::get("LOCKSTEP_NVML").value_or("libnvidia-ml.so.1");
}

// ------------------------------------------------------------------ DriverCall

std::optional<DriverCall::Pending> DriverCall::pending() const {
  const std::int64_t begun = begun_ns_.load(std::memory_order_acquire);
  if (begun == 0) return std::nullopt;
  const auto elapsed = std::chrono::nanoseconds(now_ns() - begun);
  return Pending{function_.load(std::memory_order_relaxed), gpu_.load(std::memory_order_relaxed),
                 std::chrono::duration_cast<std::chrono::milliseconds>(elapsed)};
}

void DriverCall::begin(const char* function, int gpu) {
  function_.store(function, std::memory_order_relaxed);
  gpu_.store(gpu, std::memory_order_relaxed);
  begun_ns_.store(now_ns(), std::memory_order_release);
}

void DriverCall::end() {
  begun_ns_.store(0, std::memory_order_release);
}

// ------------------------------------------------------------------ words

std::vector<std::string> clock_reason_words(std::uint64_t reasons) {
  std::vector<std::string> words;
  for (const ReasonWord& reason : kReasons) {
    if ((reasons & reason.bit) != 0) words.emplace_back(reason.word);
    reasons &= ~reason.bit;
  }
  if (reasons != 0) words.push_back(fmt::format("unknown reason {:#x}", reasons));
  return words;
}

bool is_throttled(std::uint64_t reasons) {
  return std::any_of(std::begin(kReasons), std::end(kReasons), [&](const ReasonWord& reason) {
    return reason.throttles && (reasons & reason.bit) != 0;
  });
}

// ------------------------------------------------------------------ Nvml

// Null where the driver is too old to have one; of several names newer versions come first.
struct Nvml::Functions {
  // Converts to whatever the function is.
  struct Symbol {
    void* address;
    template <typename Function>
    operator Function*() const {
      return reinterpret_cast<Function*>(address);
    }
  };
  template <typename... Names>
  Symbol find(const Names*... names) const {
    void* address = nullptr;
    for (const char* name : {names...})
      if (address == nullptr) address = ::dlsym(library, name);
    return {address};
  }

  void* library;
  int (*init)() = find("nvmlInit_v2", "nvmlInit");
  int (*shutdown)() = find("nvmlShutdown");
  const char* (*error_string)(int) = find("nvmlErrorString");
  int (*driver_version)(char*, unsigned) = find("nvmlSystemGetDriverVersion");
  int (*count)(unsigned*) = find("nvmlDeviceGetCount_v2", "nvmlDeviceGetCount");
  int (*handle)(unsigned, Handle*) = find("nvmlDeviceGetHandleByIndex_v2",
                                          "nvmlDeviceGetHandleByIndex");
  int (*name)(Handle, char*, unsigned) = find("nvmlDeviceGetName");
  int (*uuid)(Handle, char*, unsigned) = find("nvmlDeviceGetUUID");
  int (*pci)(Handle, Pci*) = find("nvmlDeviceGetPciInfo_v3");
  int (*utilisation)(Handle, Utilisation*) = find("nvmlDeviceGetUtilizationRates");
  int (*memory)(Handle, Memory*) = find("nvmlDeviceGetMemoryInfo");
  int (*memory_v2)(Handle, MemoryV2*) = find("nvmlDeviceGetMemoryInfo_v2");
  int (*power)(Handle, unsigned*) = find("nvmlDeviceGetPowerUsage");
  int (*power_limit)(Handle, unsigned*) = find("nvmlDeviceGetEnforcedPowerLimit",
                                               "nvmlDeviceGetPowerManagementLimit");
  int (*temperature)(Handle, int, unsigned*) = find("nvmlDeviceGetTemperature");
  int (*clock)(Handle, int, unsigned*) = find("nvmlDeviceGetClockInfo");
  int (*clock_reasons)(Handle,
                       unsigned long long*) = find("nvmlDeviceGetCurrentClocksEventReasons",
                                                   "nvmlDeviceGetCurrentClocksThrottleReasons");
  int (*ecc)(Handle, int, int, unsigned long long*) = find("nvmlDeviceGetTotalEccErrors");
  int (*processes)(Handle, unsigned*, ProcessV1*) = find("nvmlDeviceGetComputeRunningProcesses");
  int (*processes_v2)(Handle, unsigned*,
                      ProcessV2*) = find("nvmlDeviceGetComputeRunningProcesses_v3",
                                         "nvmlDeviceGetComputeRunningProcesses_v2");
  int (*event_set)(Handle*) = find("nvmlEventSetCreate");
  int (*event_set_free)(Handle) = find("nvmlEventSetFree");
  int (*register_events)(Handle, unsigned long long, Handle) = find("nvmlDeviceRegisterEvents");
  int (*event_wait)(Handle, Event*, unsigned) = find("nvmlEventSetWait_v2", "nvmlEventSetWait");
};

struct Nvml::Gpu {
  int index = 0;
  Handle handle = nullptr;
  int failed = kSuccess;  // why there is no handle

  template <typename... Parameters, typename... Arguments>
  int ask(DriverCall& call, const char* name, int (*function)(Parameters...),
          Arguments... arguments) const {
    if (function == nullptr) return kFunctionNotFound;
    call.begin(name, index);
    const int code = function(arguments...);
    call.end();
    return code;
  }
};

Nvml::Nvml(const std::string& library, DriverCall& call) : call_(call) {
  const Gpu whole{.index = -1};
  call_.begin("dlopen", -1);
  void* handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  call_.end();
  if (handle == nullptr)
    throw Error("nvml", fmt::format("{} is not there: no NVIDIA driver is installed, or a "
                                    "container was started without it ({}).",
                                    library, ::dlerror()));
  functions_.reset(new Functions{handle});
  if (functions_->init == nullptr || functions_->count == nullptr || functions_->handle == nullptr)
    throw Error("nvml", fmt::format("{} is not NVIDIA's management library.", library));
  if (const int code = whole.ask(call_, "nvmlInit", functions_->init); code != kSuccess)
    throw Error("nvml", error_text("nvmlInit", code) +
                            ". The driver and its library probably do not match, or this process "
                            "may not open /dev/nvidiactl. Compare with nvidia-smi.");
  char version[96] = "";
  if (whole.ask(call_, "nvmlSystemGetDriverVersion", functions_->driver_version, version,
                static_cast<unsigned>(sizeof version - 1)) == kSuccess)
    driver_version_ = version;
  find_gpus();
  subscribe_to_events();
}

Nvml::~Nvml() {
  const Gpu whole{.index = -1};
  if (events_ != nullptr) whole.ask(call_, "nvmlEventSetFree", functions_->event_set_free, events_);
  whole.ask(call_, "nvmlShutdown", functions_->shutdown);
}

int Nvml::count() const {
  return static_cast<int>(gpus_.size());
}

void Nvml::find_gpus() {
  const Gpu whole{.index = -1};
  unsigned count = 0;
  if (const int code = whole.ask(call_, "nvmlDeviceGetCount", functions_->count, &count);
      code != kSuccess)
    throw Error("nvml", error_text("nvmlDeviceGetCount", code) + ". Compare with nvidia-smi.");
  for (unsigned i = 0; i < count; ++i) {
    Gpu gpu{.index = static_cast<int>(i)};
    gpu.failed = gpu.ask(call_, "nvmlDeviceGetHandleByIndex", functions_->handle, i, &gpu.handle);
    gpus_.push_back(gpu);
  }
}

// A driver that refuses a GPU's events (some virtual ones do) leaves those of the others.
void Nvml::subscribe_to_events() {
  const Gpu whole{.index = -1};
  if (functions_->register_events == nullptr || functions_->event_wait == nullptr) return;
  if (whole.ask(call_, "nvmlEventSetCreate", functions_->event_set, &events_) != kSuccess) {
    events_ = nullptr;
    return;
  }
  for (const Gpu& gpu : gpus_) {
    if (gpu.failed == kSuccess)
      gpu.ask(call_, "nvmlDeviceRegisterEvents", functions_->register_events, gpu.handle, kEventXid,
              events_);
  }
}

std::string Nvml::error_text(const char* function, int code) const {
  const char* text = functions_->error_string == nullptr ? nullptr : functions_->error_string(code);
  return text == nullptr ? fmt::format("{} failed with error {}", function, code)
                         : fmt::format("{} failed: {}", function, text);
}

GpuIdentity Nvml::identity(int index) {
  const Gpu& gpu = gpus_.at(static_cast<std::size_t>(index));
  GpuIdentity found{.index = index};
  if (gpu.failed != kSuccess) return found;
  char text[96] = "";
  constexpr unsigned size = sizeof text - 1;
  if (gpu.ask(call_, "nvmlDeviceGetName", functions_->name, gpu.handle, text, size) == kSuccess)
    found.name = text;
  if (gpu.ask(call_, "nvmlDeviceGetUUID", functions_->uuid, gpu.handle, text, size) == kSuccess)
    found.uuid = text;
  Pci pci{};
  if (gpu.ask(call_, "nvmlDeviceGetPciInfo", functions_->pci, gpu.handle, &pci) == kSuccess)
    found.pci_bus_id = sysfs_bus_id(std::string(pci.bus_id, ::strnlen(pci.bus_id, 32)));
  return found;
}

// Fills a reading value by value, until an answer says that the GPU itself has failed: the rest
// would only fail as well.
struct Nvml::Query {
  Nvml& nvml;
  const Gpu& gpu;
  GpuReading& reading;

  // True when the value is there.
  template <typename Function, typename... Arguments>
  bool operator()(const char* name, Function function, Arguments... arguments) const {
    if (!reading.problem.empty()) return false;
    const int code = gpu.ask(nvml.call_, name, function, gpu.handle, arguments...);
    if (code != kSuccess && !is_missing(code)) reading.problem = nvml.gpu_problem(name, code);
    return code == kSuccess;
  }
};

std::string Nvml::gpu_problem(const char* function, int code) const {
  if (code != kGpuIsLost) return error_text(function, code);
  return "GPU is lost: the driver cannot reach it any more. The kernel log (dmesg) has the Xid; "
         "the "
         "host probably needs a reboot";
}

GpuReading Nvml::read(int index) {
  Gpu& gpu = gpus_.at(static_cast<std::size_t>(index));
  const Functions& f = *functions_;
  GpuReading reading;
  if (gpu.failed != kSuccess)
    gpu.failed = gpu.ask(call_, "nvmlDeviceGetHandleByIndex", f.handle,
                         static_cast<unsigned>(index), &gpu.handle);
  if (gpu.failed != kSuccess) {
    reading.problem = gpu_problem("nvmlDeviceGetHandleByIndex", gpu.failed);
    return reading;
  }
  const Query ask{*this, gpu, reading};
  Utilisation utilisation{};
  if (ask("nvmlDeviceGetUtilizationRates", f.utilisation, &utilisation)) {
    reading.utilisation_percent = utilisation.gpu;
    reading.memory_utilisation_percent = utilisation.memory;
  }
  read_memory(ask);
  unsigned number = 0;
  if (ask("nvmlDeviceGetPowerUsage", f.power, &number)) reading.power_w = number / 1000.0;
  if (ask("nvmlDeviceGetEnforcedPowerLimit", f.power_limit, &number))
    reading.power_limit_w = number / 1000.0;
  if (ask("nvmlDeviceGetTemperature", f.temperature, kTemperatureOfGpu, &number))
    reading.temperature_c = number;
  if (ask("nvmlDeviceGetClockInfo", f.clock, kClockOfSm, &number)) reading.sm_clock_mhz = number;
  if (ask("nvmlDeviceGetClockInfo", f.clock, kClockOfMemory, &number))
    reading.memory_clock_mhz = number;
  unsigned long long bits = 0;
  if (ask("nvmlDeviceGetCurrentClocksEventReasons", f.clock_reasons, &bits))
    reading.clock_reasons = bits;
  if (ask("nvmlDeviceGetTotalEccErrors", f.ecc, kEccCorrected, kEccSinceLoad, &bits))
    reading.ecc_corrected = bits;
  if (ask("nvmlDeviceGetTotalEccErrors", f.ecc, kEccUncorrected, kEccSinceLoad, &bits))
    reading.ecc_uncorrected = bits;
  read_processes(ask);
  return reading;
}

void Nvml::read_memory(const Query& ask) {
  MemoryV2 precise{};
  precise.version = kMemoryVersion2;
  if (ask("nvmlDeviceGetMemoryInfo_v2", functions_->memory_v2, &precise)) {
    ask.reading.memory_total_bytes = precise.total;
    ask.reading.memory_used_bytes = precise.used;
    return;
  }
  Memory memory{};
  if (ask("nvmlDeviceGetMemoryInfo", functions_->memory, &memory)) {
    ask.reading.memory_total_bytes = memory.total;
    ask.reading.memory_used_bytes = memory.used;
  }
}

template <typename Process>
void Nvml::read_processes_by(int (*function)(Handle, unsigned*, Process*), const Query& ask) {
  if (function == nullptr || !ask.reading.problem.empty()) return;
  constexpr const char* kName = "nvmlDeviceGetComputeRunningProcesses";
  std::vector<Process> list(64);
  // Processes may start between two calls; a third attempt that still has no room is not repeated.
  for (int attempt = 0; attempt < 3; ++attempt) {
    unsigned count = static_cast<unsigned>(list.size());
    const int code = ask.gpu.ask(call_, kName, function, ask.gpu.handle, &count, list.data());
    if (code == kInsufficientSize) {
      list.resize(std::max<std::size_t>(count, list.size()) * 2);
      continue;
    }
    if (code != kSuccess) {
      if (!is_missing(code)) ask.reading.problem = gpu_problem(kName, code);
      return;
    }
    for (std::size_t i = 0; i < count && i < list.size(); ++i) {
      GpuProcess process{.pid = list[i].pid};
      if (list[i].memory != kNotAvailable) process.memory_bytes = list[i].memory;
      ask.reading.processes.push_back(process);
    }
    return;
  }
}

void Nvml::read_processes(const Query& ask) {
  if (functions_->processes_v2 != nullptr)
    read_processes_by(functions_->processes_v2, ask);
  else
    read_processes_by(functions_->processes, ask);
}

std::vector<XidEvent> Nvml::xid_events() {
  const Gpu whole{.index = -1};
  std::vector<XidEvent> found;
  if (events_ == nullptr) return found;
  Event event{};
  // A failing GPU may report without end; the rest is read next time.
  while (found.size() < 64 && whole.ask(call_, "nvmlEventSetWait", functions_->event_wait, events_,
                                        &event, 0u) == kSuccess) {
    if (event.type != kEventXid) continue;
    const auto gpu = std::find_if(gpus_.begin(), gpus_.end(),
                                  [&](const Gpu& g) { return g.handle == event.device; });
    found.push_back({gpu == gpus_.end() ? -1 : gpu->index, event.data, unix_time_s()});
  }
  return found;
}

}  // namespace lockstep::monitor
