// Stands in for libnvidia-ml.so.1 in tests: answers as scripted in the file that FAKE_NVML_SCRIPT
// names. nvmlInit reads it. One line per value, with what each call in turn gets:
//
//   devices 2
//   0 name Fake H200
//   0 utilisation 100 0          first call 100, second 0, third 100, ...
//   1 power 300000 lost          the second call finds the GPU lost; also "unsupported"
//   1 temperature 60 hang:5000   the second call takes 5 s
//   0 processes 17:1048576,18:-  pid:bytes, - for unknown
//   0 xid 0 79                   what is found by each look for events; 0: nothing
//   init error:9                 nvmlInit fails; also "hang:MS"
//
// Compiled with FAKE_NVML_OLD it lacks what old drivers did not have.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidArgument = 2;
constexpr int kNotSupported = 3;
constexpr int kInsufficientSize = 7;
constexpr int kTimeout = 10;
constexpr int kGpuIsLost = 15;

struct Value {
  std::vector<std::string> tokens;
  std::string line;
  std::size_t asked = 0;
};

struct Script {
  int devices = 1;
  std::map<std::string, Value> values;  // "0 power"
};

std::mutex mutex;
Script script;
int initialised = 0;

void read_script() {
  script = {};
  const char* path = std::getenv("FAKE_NVML_SCRIPT");
  std::ifstream file(path == nullptr ? "" : path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string gpu, key;
    words >> gpu;
    if (gpu == "devices") words >> script.devices;
    if (gpu.empty() || gpu == "devices") continue;
    if (gpu == "init") {
      key = gpu;
    } else {
      words >> key;
      key = gpu + " " + key;
    }
    Value value;
    std::getline(words >> std::ws, value.line);
    std::istringstream tokens(value.line);
    for (std::string token; tokens >> token;) value.tokens.push_back(token);
    script.values[key] = value;
  }
}

// What this call gets; a hang happens without the lock, since other threads may call.
std::string next(const std::string& key) {
  std::string token;
  {
    const std::lock_guard lock(mutex);
    const auto found = script.values.find(key);
    if (found == script.values.end() || found->second.tokens.empty()) return "unsupported";
    Value& value = found->second;
    token = value.tokens[value.asked++ % value.tokens.size()];
  }
  if (token.rfind("hang:", 0) == 0) {
    ::usleep(static_cast<useconds_t>(std::atoi(token.c_str() + 5)) * 1000);
    return "0";
  }
  return token;
}

int code_of(const std::string& token) {
  if (token == "lost") return kGpuIsLost;
  if (token == "unsupported") return kNotSupported;
  if (token.rfind("error:", 0) == 0) return std::atoi(token.c_str() + 6);
  return kSuccess;
}

// Handles are index + 1, so that none is null.
std::string key_of(void* device, const char* name) {
  return std::to_string(reinterpret_cast<std::uintptr_t>(device) - 1) + " " + name;
}

template <typename Number>
int number(void* device, const char* name, Number* out) {
  const std::string token = next(key_of(device, name));
  if (const int code = code_of(token); code != kSuccess) return code;
  *out = static_cast<Number>(std::strtoull(token.c_str(), nullptr, 10));
  return kSuccess;
}

int text(void* device, const char* name, char* out, unsigned size) {
  const std::lock_guard lock(mutex);
  const auto found = script.values.find(key_of(device, name));
  if (found == script.values.end()) return kNotSupported;
  std::snprintf(out, size, "%s", found->second.line.c_str());
  return kSuccess;
}

int init() {
  {
    const std::lock_guard lock(mutex);
    read_script();
    ++initialised;
    if (script.values.count("init") == 0) return kSuccess;
  }
  return code_of(next("init"));
}

struct Process {
  unsigned pid;
  unsigned long long memory;
#ifndef FAKE_NVML_OLD
  unsigned gpu_instance;
  unsigned compute_instance;
#endif
};

int processes(void* device, unsigned* count, Process* list) {
  const std::string token = next(key_of(device, "processes"));
  if (const int code = code_of(token); code != kSuccess) return code;
  std::vector<Process> found;
  std::istringstream entries(token);
  for (std::string entry; std::getline(entries, entry, ',');) {
    Process process{};
    const auto colon = entry.find(':');
    process.pid = static_cast<unsigned>(std::atoi(entry.c_str()));
    process.memory =
        entry.substr(colon + 1) == "-" ? ~0ull : std::strtoull(&entry[colon + 1], nullptr, 10);
    found.push_back(process);
  }
  const unsigned room = *count;
  *count = static_cast<unsigned>(found.size());
  if (room < found.size()) return kInsufficientSize;
  std::copy(found.begin(), found.end(), list);
  return kSuccess;
}

}  // namespace

extern "C" {

struct Utilisation {
  unsigned gpu, memory;
};
struct Memory {
  unsigned long long total, free, used;
};
struct MemoryV2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
struct Pci {
  char legacy[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char bus_id[32];
};
struct Event {
  void* device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
};

int nvmlShutdown() {
  const std::lock_guard lock(mutex);
  --initialised;
  return kSuccess;
}
const char* nvmlErrorString(int code) {
  return code == 9 ? "Driver Not Loaded" : code == kGpuIsLost ? "GPU is lost" : "Some Error";
}
int nvmlSystemGetDriverVersion(char* out, unsigned size) {
  const std::string token = next("system driver");
  std::snprintf(out, size, "%s", token == "unsupported" ? "999.1" : token.c_str());
  return kSuccess;
}
int nvmlDeviceGetName(void* device, char* out, unsigned size) {
  return text(device, "name", out, size);
}
int nvmlDeviceGetUUID(void* device, char* out, unsigned size) {
  return text(device, "uuid", out, size);
}
int nvmlDeviceGetUtilizationRates(void* device, Utilisation* out) {
  const int code = number(device, "utilisation", &out->gpu);
  if (code == kSuccess) out->memory = out->gpu / 2;
  return code;
}
int nvmlDeviceGetMemoryInfo(void* device, Memory* out) {
  if (const int code = number(device, "used", &out->used); code != kSuccess) return code;
  out->used += 1 << 20;  // what the driver reserves counts as used here
  return number(device, "total", &out->total);
}
int nvmlDeviceGetPowerUsage(void* device, unsigned* out) {
  return number(device, "power", out);
}
int nvmlDeviceGetPowerManagementLimit(void* device, unsigned* out) {
  return number(device, "limit", out);
}
int nvmlDeviceGetTemperature(void* device, int, unsigned* out) {
  return number(device, "temperature", out);
}
int nvmlDeviceGetClockInfo(void* device, int kind, unsigned* out) {
  return number(device, kind == 1 ? "sm_clock" : "memory_clock", out);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void* device, unsigned long long* out) {
  return number(device, "reasons", out);
}
int nvmlDeviceGetTotalEccErrors(void* device, int kind, int, unsigned long long* out) {
  return number(device, kind == 0 ? "ecc_corrected" : "ecc_uncorrected", out);
}

#ifdef FAKE_NVML_OLD
int nvmlInit() {
  return init();
}
int nvmlDeviceGetCount(unsigned* count) {
  *count = static_cast<unsigned>(script.devices);
  return kSuccess;
}
int nvmlDeviceGetHandleByIndex(unsigned index, void** device) {
  *device = reinterpret_cast<void*>(static_cast<std::uintptr_t>(index) + 1);
  return kSuccess;
}
int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, Process* list) {
  return processes(device, count, list);
}
#else
int nvmlInit_v2() {
  return init();
}
int nvmlInitWithFlags(unsigned) {  // NVIDIA's binding for Python
  return init();
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  const std::lock_guard lock(mutex);
  *count = static_cast<unsigned>(script.devices);
  return kSuccess;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = reinterpret_cast<void*>(static_cast<std::uintptr_t>(index) + 1);
  const std::string token = next(key_of(*device, "handle"));
  return token == "lost" ? kGpuIsLost : kSuccess;
}
int nvmlDeviceGetPciInfo_v3(void* device, Pci* out) {
  return text(device, "pci", out->bus_id, sizeof out->bus_id);
}
int nvmlDeviceGetMemoryInfo_v2(void* device, MemoryV2* out) {
  if (out->version != (sizeof(MemoryV2) | 2u << 24)) return kInvalidArgument;
  out->reserved = 1 << 20;
  if (const int code = number(device, "used", &out->used); code != kSuccess) return code;
  return number(device, "total", &out->total);
}
int nvmlDeviceGetEnforcedPowerLimit(void* device, unsigned* out) {
  return number(device, "limit", out);
}
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, Process* list) {
  return processes(device, count, list);
}
int nvmlEventSetCreate(void** set) {
  *set = &script;
  return kSuccess;
}
int nvmlEventSetFree(void*) {
  return kSuccess;
}
int nvmlDeviceRegisterEvents(void*, unsigned long long types, void*) {
  return types == 8 ? kSuccess : kNotSupported;
}
int nvmlEventSetWait_v2(void*, Event* out, unsigned) {
  for (int gpu = 0; gpu < script.devices; ++gpu) {
    void* device = reinterpret_cast<void*>(static_cast<std::uintptr_t>(gpu) + 1);
    const std::string token = next(key_of(device, "xid"));
    if (code_of(token) != kSuccess || token == "0") continue;
    *out = {device, 8, std::strtoull(token.c_str(), nullptr, 10), 0, 0};
    return kSuccess;
  }
  return kTimeout;
}
#endif

}  // extern "C"
