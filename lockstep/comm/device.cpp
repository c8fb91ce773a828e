#include "lockstep/comm/device.h"

#include <dlfcn.h>
#include <fmt/ranges.h>

#include <array>
#include <cstddef>

#include "lockstep/comm/nccl/nccl.h"
#include "lockstep/core/device_rule.h"
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

DeviceChoice choose_device(const Identity& identity, const WorldOptions& options) {
  DeviceRequest request{.local_rank = identity.local_rank,
                        .backend = options.backend,
                        .share = options.share_device,
                        .visible_gpus = cuda_device_count,
                        .cuda_built = nccl::built()};
  if (options.device) request.device = options.device->str();
  const DeviceRule rule = apply_device_rule(request);
  if (!rule.problem.empty()) throw UsageError("world", "{}", rule.problem);
  return {c10::Device(rule.device()), rule.backend, rule.reason, rule.automatic};
}

}  // namespace detail
}  // namespace lockstep
