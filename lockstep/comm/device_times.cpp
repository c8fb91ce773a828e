#include "lockstep/comm/device_times.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/core/ledger.h"
#include "lockstep/core/log.h"

namespace lockstep {
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
      // Where marks are missing, the time between belongs to no phase.
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

// Never destroyed: the driver may be gone before statics are.
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
