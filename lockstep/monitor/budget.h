// The budget of a rank's time by phase: the one definition, for page, terminal, report, doctor and
// Prometheus.
//
// Without device times, the budget is the training thread's. With them it is the device's: its
// phases count as measured, and host work that overlaps them costs nothing. The device's idle time
// is attributed to what the host did meanwhile: data, saving, evaluation, logging and startup, in
// this order, each at most with its own time. The remainder is other (Phase::kNone). The parts
// always add up to the whole.
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

// Whether a phase of the device was measured; time between its phases alone does not count.
bool has_device_times(const PhaseSeconds& device_s);

PhaseSeconds spent_s(double seconds, const PhaseSeconds& host_s, const PhaseSeconds& device_s);

// The budget of an Interval (run_record.h).
template <typename Part>
PhaseSeconds spent_s(const Part& part) {
  return spent_s(part.seconds, part.host_s, part.device_s);
}

// The device's time outside of all phases: all of `seconds` without device times.
double idle_s(double seconds, const PhaseSeconds& device_s);

}  // namespace lockstep::monitor
