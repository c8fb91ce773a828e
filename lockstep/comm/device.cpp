#include "lockstep/comm/device.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/comm/backend.h"
#include "lockstep/core/device_rule.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/log.h"

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

namespace {

// A host that is further ahead than this makes no more marks until the device catches up.
constexpr std::size_t kMostMarks = 512;

class DeviceTimeline {
 public:
  void mark(ledger::Phase phase, c10::Device device) {
    const std::lock_guard lock(mutex_);
    if (off_ > 0 || failed_ || (device_ && device != *device_)) return;
    attempt([&] {
      device_ = device;
      add_passed();
      if (marks_.size() >= kMostMarks) {
        broken_ = true;
        return;
      }
      const c10::impl::VirtualGuardImpl guard(device.type());
      // If marks are missing, the time between them belongs to no phase.
      if (std::exchange(broken_, false) && !marks_.empty()) marks_.back().counts = false;
      marks_.push_back({phase, true, free_event(device)});
      marks_.back().event.record(guard.getStream(device));
    });
  }

  void book() {
    const std::lock_guard lock(mutex_);
    if (off_ > 0 || failed_) return;
    attempt([&] { add_passed(); });
  }

  void turn_off() {
    const std::lock_guard lock(mutex_);
    ++off_;
    broken_ = true;
  }
  void turn_on() {
    const std::lock_guard lock(mutex_);
    --off_;
  }

 private:
  struct Mark {
    ledger::Phase phase;
    bool counts;
    c10::Event event;
  };

  template <typename Body>
  void attempt(const Body& body) {
    try {
      body();
    } catch (const std::exception& error) {
      failed_ = true;
      marks_.clear();
      log::debug("record", "the device's times are not measured: {}", error.what());
    }
  }

  void add_passed() {
    while (marks_.size() >= 2 && marks_[1].event.query()) {
      const double ms = marks_[0].event.elapsedTime(marks_[1].event);
      if (marks_[0].counts && ms > 0)
        ledger::add_device_time(marks_[0].phase, static_cast<std::uint64_t>(ms * 1e6));
      free_.push_back(std::move(marks_[0].event));
      marks_.pop_front();
    }
  }

  c10::Event free_event(c10::Device device) {
    // The flag asks for events that can be timed.
    if (free_.empty()) return c10::Event(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    c10::Event event = std::move(free_.back());
    free_.pop_back();
    return event;
  }

  std::mutex mutex_;
  std::optional<c10::Device> device_;
  std::deque<Mark> marks_;  // the first may have been passed, the others have not
  std::vector<c10::Event> free_;
  int off_ = 0;
  bool broken_ = false;
  bool failed_ = false;
};

// Never destroyed: the driver may shut down before static objects are destroyed.
DeviceTimeline& device_timeline() {
  static auto* const timeline = new DeviceTimeline;
  return *timeline;
}

}  // namespace

void mark_device_phase(ledger::Phase phase, c10::Device device) noexcept {
  if (device.is_cpu()) return;
  device_timeline().mark(phase, device);
}

DeviceWait::DeviceWait(c10::Device device) noexcept {
  if (!device.is_cpu()) phase_.emplace(ledger::Phase::kDeviceWait);
}
DeviceWait::~DeviceWait() {
  if (phase_) device_timeline().book();
}

DeviceMarksOff::DeviceMarksOff() noexcept {
  device_timeline().turn_off();
}
DeviceMarksOff::~DeviceMarksOff() {
  device_timeline().turn_on();
}

}  // namespace lockstep
