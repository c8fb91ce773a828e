// Where a device's time goes, by the device's own clock: marks on its stream, without a host sync.
//
// A host that only enqueues work is fast in every phase. So the phases of a step are marked where
// they begin, on the stream that computes; the time between two marks, known once the device
// has passed both, is added to the first one's phase (ledger::add_device_time). Time in which
// the stream was idle belongs to the phase in which it was.
//
//   mark_device_phase(ledger::Phase::kForward, device);
//   ... forward ...
//   mark_device_phase(ledger::Phase::kBackward, device);
//
// On a CPU nothing is marked: the ledger's phases have the wall time. Any thread may mark; marks of
// a process are one sequence, of one device. They are never waited for, and never throw.
//
// Where the training thread does wait for the device, that time is the device's and no part of the
// host's phase around it:
//
//   const DeviceWait wait(loss.device());
//   const double value = loss.item<double>();
#pragma once

#include <c10/core/Device.h>

#include <optional>

#include "lockstep/core/ledger.h"

namespace lockstep {

void mark_device_phase(ledger::Phase phase, c10::Device device) noexcept;

// Off while a CUDA graph is captured: an event in a graph has no time.
class DeviceMarksOff {
 public:
  DeviceMarksOff() noexcept;
  ~DeviceMarksOff();
  DeviceMarksOff(const DeviceMarksOff&) = delete;
  DeviceMarksOff& operator=(const DeviceMarksOff&) = delete;
};

// Phase::kDeviceWait until the end of the scope, then books the device's time up to that point. On
// a CPU there is nothing to wait for, and nothing happens.
class DeviceWait {
 public:
  explicit DeviceWait(c10::Device device) noexcept;
  ~DeviceWait();
  DeviceWait(const DeviceWait&) = delete;
  DeviceWait& operator=(const DeviceWait&) = delete;

 private:
  std::optional<ledger::PhaseScope> phase_;
};

}  // namespace lockstep
