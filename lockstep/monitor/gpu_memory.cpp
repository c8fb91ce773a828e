#include "lockstep/monitor/gpu_memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "lockstep/core/log.h"
#include "lockstep/monitor/gpu_sampler.h"

namespace lockstep {
namespace {

using MemoryClock = std::chrono::steady_clock;

// One for the process, and never destroyed: any thread may call until the end.
struct MemoryLog {
  std::mutex mutex;
  MemoryClock::time_point next{};
  std::unique_ptr<monitor::GpuSampler> sampler;
  bool said_none = false;
  bool ended = false;

  static MemoryLog& get() {
    static auto* const log = new MemoryLog;
    return *log;
  }

  void start() {
    sampler = std::make_unique<monitor::GpuSampler>();
    sampler->wait_for_samples(1, std::chrono::seconds(1));
    // Registered now that the driver's library is loaded: our thread then ends before the library's
    // own exit handlers run.
    std::atexit([] {
      const std::lock_guard lock(get().mutex);
      get().ended = true;
      get().sampler.reset();
    });
  }
};

std::string driver_memory(const monitor::GpuSnapshot& snapshot) {
  if (!snapshot.newest) return "";
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < snapshot.newest->gpus.size(); ++i) {
    const monitor::GpuReading& gpu = snapshot.newest->gpus[i];
    if (!gpu.problem.empty())
      parts.push_back(fmt::format("GPU {} {}", i, gpu.problem));
    else if (gpu.memory_used_bytes && gpu.memory_total_bytes)
      parts.push_back(fmt::format("GPU {} {}", i, monitor::memory_text(gpu)));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string allocator_memory() {
  if (!c10::impl::hasDeviceGuardImpl(c10::kCUDA)) return "";
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(c10::kCUDA));
  if (allocator == nullptr || !allocator->initialized()) return "";
  const c10::Device device = c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
  const auto stats = allocator->getDeviceStats(device.index());
  const auto gib = [](std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); };
  return fmt::format("{} of this process: allocated {:.1f}, reserved {:.1f}, peak {:.1f} GiB",
                     device.str(), gib(stats.allocated_bytes[0].current),
                     gib(stats.reserved_bytes[0].current), gib(stats.allocated_bytes[0].peak));
}

}  // namespace

void log_gpu_memory(std::chrono::milliseconds interval) {
  if (!log::enabled(log::Level::kInfo)) return;
  MemoryLog& own = MemoryLog::get();
  const std::unique_lock lock(own.mutex, std::try_to_lock);
  if (!lock || own.ended || MemoryClock::now() < own.next) return;
  own.next = MemoryClock::now() + interval;
  if (!own.sampler) own.start();
  const monitor::GpuSnapshot snapshot = own.sampler->snapshot();
  std::vector<std::string> parts;
  for (const std::string& part :
       {driver_memory(snapshot), allocator_memory(), snapshot.newest ? snapshot.problem : ""})
    if (!part.empty()) parts.push_back(part);
  if (!parts.empty()) {
    log::info("gpu", "memory: {}", fmt::join(parts, "; "));
  } else if (!own.said_none) {
    own.said_none = true;
    log::info("gpu", "there is no memory of a GPU to show: {}",
              snapshot.problem.empty() ? "the driver shows no GPU" : snapshot.problem);
  }
}

}  // namespace lockstep
