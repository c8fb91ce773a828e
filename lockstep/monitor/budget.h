// Where the time of a rank went: the one definition, for page, terminal, report, doctor and
// Prometheus.
//
// Without a device's times it is what the training thread did. With them, time is the device's: its
// phases count as measured, and what the host does costs nothing while the device has work. The
// time that remains, in which the device trains nothing, is charged to what the host did besides:
// data, saving, evaluation, logging and startup, in this order and each at most with its own time.
// The rest is other (Phase::kNone). The parts always add up to the whole.
//
//   const PhaseSeconds spent = spent_s(interval);
//   spent[ledger::index(ledger::Phase::kData)] / interval.seconds;
//
// Free functions without state; call them from any thread.
#pragma once

#include <array>

#include "lockstep/core/ledger.h"

namespace lockstep::monitor {

using PhaseSeconds = std::array<double, ledger::kPhases>;  // by ledger::Phase

// A phase of the device was measured; time between its phases alone says nothing.
bool has_device_times(const PhaseSeconds& device_s);

PhaseSeconds spent_s(double seconds, const PhaseSeconds& host_s, const PhaseSeconds& device_s);

// The budget of an Interval (run_record.h).
template <typename Part>
PhaseSeconds spent_s(const Part& part) {
  return spent_s(part.seconds, part.host_s, part.device_s);
}

// Outside of all phases of the device: all of it where there are no device's times.
double idle_s(double seconds, const PhaseSeconds& device_s);

}  // namespace lockstep::monitor
