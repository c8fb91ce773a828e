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
#pragma once

#include <c10/core/Device.h>

#include "lockstep/core/ledger.h"

namespace lockstep {

void mark_device_phase(ledger::Phase phase, c10::Device device) noexcept;

// While a CUDA graph is captured: an event in a graph has no time.
class DeviceMarksOff {
 public:
  DeviceMarksOff() noexcept;
  ~DeviceMarksOff();
  DeviceMarksOff(const DeviceMarksOff&) = delete;
  DeviceMarksOff& operator=(const DeviceMarksOff&) = delete;
};

}  // namespace lockstep
