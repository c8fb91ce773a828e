#include "lockstep/comm/device.h"

#include <dlfcn.h>
#include <fmt/ranges.h>

#include <array>
#include <cstddef>

#include "lockstep/comm/nccl/nccl.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"

namespace lockstep {

namespace {

// The three driver calls needed to count and name devices. Plain C, stable since CUDA 9.
struct Driver {
  int (*init)(unsigned) = nullptr;
  int (*count)(int*) = nullptr;
  int (*uuid)(std::array<unsigned char, 16>*, int) = nullptr;
  bool ready = false;
};

const Driver& driver() {
  static const Driver found = [] {
    Driver d;
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return d;
    const auto find = [&](auto& function, const char* symbol) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, symbol));
    };
    find(d.init, "cuInit");
    find(d.count, "cuDeviceGetCount");
    find(d.uuid, "cuDeviceGetUuid");
    d.ready = d.init != nullptr && d.count != nullptr && d.init(0) == 0;
    return d;
  }();
  return found;
}

}  // namespace

int cuda_device_count() {
  int count = 0;
  return driver().ready && driver().count(&count) == 0 ? count : 0;
}

void load_cuda() {
  detail::nccl::load();
}

namespace detail {

std::string cuda_device_id(int index) {
  std::array<unsigned char, 16> bytes{};
  if (!driver().ready || driver().uuid == nullptr || driver().uuid(&bytes, index) != 0) return "";
  return fmt::format("GPU-{:02x}", fmt::join(bytes, ""));
}

namespace {

c10::Device parse_device(const std::string& text, const char* source) {
  try {
    const c10::Device device(text);
    if (device.is_cpu() || device.is_cuda()) return device;
  } catch (const std::exception&) {
  }
  throw UsageError("world", "{}='{}' is not a device. Use cpu, cuda or cuda:N.", source, text);
}

std::string wanted_backend(const WorldOptions& options) {
  std::string backend = options.backend;
  if (backend == "auto") backend = env::get("LOCKSTEP_BACKEND").value_or("auto");
  if (backend != "auto" && backend != "gloo" && backend != "nccl") {
    throw UsageError("world", "there is no backend '{}'. Use auto, gloo or nccl.", backend);
  }
  return backend;
}

c10::Device place_on_gpu(const Identity& identity, const WorldOptions& options, int index,
                         int visible) {
  const bool share = options.share_device;
  if (index < 0) index = share && visible > 0 ? identity.local_rank % visible : identity.local_rank;
  if (index >= visible) {
    throw UsageError(
        "world",
        "local rank {} wants cuda:{}, but {} CUDA device{} visible. Start fewer ranks "
        "per host, set LOCKSTEP_SHARE_DEVICE=1 to share devices, or LOCKSTEP_DEVICE=cpu.",
        identity.local_rank, index, visible, visible == 1 ? " is" : "s are");
  }
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

}  // namespace

DeviceChoice choose_device(const Identity& identity, const WorldOptions& options) {
  const std::string backend = wanted_backend(options);
  std::optional<c10::Device> asked = options.device;
  std::string reason = "asked for by the program";
  if (!asked) {
    if (const auto text = env::get("LOCKSTEP_DEVICE")) {
      asked = parse_device(*text, "LOCKSTEP_DEVICE");
      reason = "LOCKSTEP_DEVICE=" + *text;
    }
  }
  const int visible = asked && asked->is_cpu() ? 0 : cuda_device_count();
  c10::Device device(c10::kCPU);
  if (asked && asked->is_cuda()) {
    device = place_on_gpu(identity, options, asked->has_index() ? asked->index() : -1, visible);
  } else if (asked) {
    // cpu it is
  } else if (backend == "gloo") {
    reason = "backend gloo was asked for";
  } else if (visible == 0) {
    reason = "no CUDA device is visible";
  } else if (!nccl::built()) {
    reason = fmt::format("{} CUDA device(s) visible, but this build has no CUDA plug-in", visible);
  } else {
    device = place_on_gpu(identity, options, -1, visible);
    reason = fmt::format("{} CUDA device(s) visible", visible);
  }
  if (backend == "nccl" && !device.is_cuda()) {
    throw UsageError("world",
                     "backend nccl needs a CUDA device, but this rank's device is cpu ({}). "
                     "Use gloo, or make a GPU visible.",
                     reason);
  }
  const std::string chosen = backend != "auto" ? backend : device.is_cuda() ? "nccl" : "gloo";
  return {device, chosen, reason};
}

}  // namespace detail
}  // namespace lockstep
