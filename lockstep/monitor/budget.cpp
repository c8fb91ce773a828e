#include "lockstep/monitor/budget.h"

#include <algorithm>
#include <numeric>

namespace lockstep::monitor {
namespace {

using ledger::index;
using ledger::Phase;

constexpr Phase kOfHost[] = {Phase::kData, Phase::kSaving, Phase::kEvaluation, Phase::kLogging,
                             Phase::kStartup};

double sum_of(const PhaseSeconds& seconds) {
  return std::accumulate(seconds.begin(), seconds.end(), 0.0);
}

// As it is, unless it is more than the whole: clocks are read one after the other, and a device's
// time is booked once it has passed, which may be in a later interval.
PhaseSeconds within(double seconds, PhaseSeconds parts) {
  const double sum = sum_of(parts);
  if (sum > seconds)
    for (double& part : parts) part *= std::max(seconds, 0.0) / sum;
  return parts;
}

// The marks tile the device's stream. What lies between its phases is nobody's.
PhaseSeconds phases_of(double seconds, const PhaseSeconds& device_s) {
  PhaseSeconds phases = within(seconds, device_s);
  phases[index(Phase::kNone)] = 0;
  return phases;
}

}  // namespace

bool has_device_times(const PhaseSeconds& device_s) {
  return sum_of(device_s) > device_s[index(Phase::kNone)];
}

double idle_s(double seconds, const PhaseSeconds& device_s) {
  return std::max(0.0, seconds - sum_of(phases_of(seconds, device_s)));
}

PhaseSeconds spent_s(double seconds, const PhaseSeconds& host_s, const PhaseSeconds& device_s) {
  PhaseSeconds spent = within(seconds, host_s);
  if (has_device_times(device_s)) {
    spent = phases_of(seconds, device_s);
    double idle = idle_s(seconds, device_s);
    for (const Phase phase : kOfHost) {
      double& part = spent[index(phase)];
      const double charged = std::clamp(host_s[index(phase)] - part, 0.0, idle);
      part += charged;
      idle -= charged;
    }
  }
  double& rest = spent[index(Phase::kNone)];
  rest = 0;
  rest = std::max(0.0, seconds - sum_of(spent));
  return spent;
}

}  // namespace lockstep::monitor
