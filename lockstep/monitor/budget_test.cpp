// The one definition of where time went: it adds up, and on a device time is the device's.
#include "lockstep/monitor/budget.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

namespace lockstep::monitor {
namespace {

using ledger::index;
using ledger::Phase;

struct Measured {
  double seconds = 1;
  PhaseSeconds host_s{};
  PhaseSeconds device_s{};
  Measured& host(Phase phase, double value) {
    host_s[index(phase)] = value;
    return *this;
  }
  Measured& device(Phase phase, double value) {
    device_s[index(phase)] = value;
    return *this;
  }
  double spent(Phase phase) const { return spent_s(*this)[index(phase)]; }
  double sum() const {
    const PhaseSeconds spent = spent_s(*this);
    return std::accumulate(spent.begin(), spent.end(), 0.0);
  }
};

TEST(Budget, OfAHostIsWhatItDid) {
  Measured run;
  run.host(Phase::kData, 0.25).host(Phase::kForward, 0.5).host(Phase::kDeviceWait, 0.125);
  EXPECT_EQ(run.spent(Phase::kData), 0.25);
  EXPECT_EQ(run.spent(Phase::kForward), 0.5);
  EXPECT_EQ(run.spent(Phase::kDeviceWait), 0.125);  // a device whose times nobody measures
  EXPECT_EQ(run.spent(Phase::kNone), 0.125);
  EXPECT_EQ(idle_s(run.seconds, run.device_s), 1);
}

// Seen as forward 95 %, logging 31 %: 126 % of the time.
TEST(Budget, AHostThatLogsWhileTheDeviceComputesIsNotCountedTwice) {
  Measured run;
  run.host(Phase::kForward, 0.64).host(Phase::kLogging, 0.31).host(Phase::kNone, 0.05);
  run.device(Phase::kForward, 0.95).device(Phase::kNone, 0.05);
  EXPECT_DOUBLE_EQ(run.spent(Phase::kForward), 0.95);
  EXPECT_NEAR(run.spent(Phase::kLogging), 0.05, 1e-12);
  EXPECT_NEAR(run.sum(), 1, 1e-12);
  // The wait within logging is the device's time.
  run.host(Phase::kLogging, 0.01).host(Phase::kDeviceWait, 0.30);
  EXPECT_DOUBLE_EQ(run.spent(Phase::kLogging), 0.01);
  EXPECT_EQ(run.spent(Phase::kDeviceWait), 0);
  EXPECT_NEAR(run.spent(Phase::kNone), 0.04, 1e-12);
}

TEST(Budget, IdleTimeIsChargedOnceAndInOrder) {
  Measured run;
  run.device(Phase::kForward, 0.5);
  for (const Phase phase : {Phase::kStartup, Phase::kLogging, Phase::kEvaluation, Phase::kSaving,
                            Phase::kData, Phase::kForward})
    run.host(phase, 0.2);
  EXPECT_DOUBLE_EQ(run.spent(Phase::kData), 0.2);
  EXPECT_DOUBLE_EQ(run.spent(Phase::kSaving), 0.2);
  EXPECT_NEAR(run.spent(Phase::kEvaluation), 0.1, 1e-12);
  EXPECT_NEAR(run.spent(Phase::kLogging), 0, 1e-12);
  EXPECT_NEAR(run.spent(Phase::kStartup), 0, 1e-12);
  EXPECT_NEAR(run.sum(), 1, 1e-12);
  // What the device itself did for a phase is not charged to it again.
  run.device(Phase::kSaving, 0.15);
  EXPECT_DOUBLE_EQ(run.spent(Phase::kSaving), 0.2);
  EXPECT_NEAR(run.sum(), 1, 1e-12);
}

TEST(Budget, DeviceTimeThatIsBookedLateDoesNotExceedTheInterval) {
  Measured run;
  run.host(Phase::kData, 0.5);
  run.device(Phase::kForward, 2.4).device(Phase::kNone, 0.6);
  EXPECT_NEAR(run.spent(Phase::kForward), 0.8, 1e-12);
  EXPECT_NEAR(run.spent(Phase::kData), 0.2, 1e-12);
  EXPECT_NEAR(run.sum(), 1, 1e-12);
}

TEST(Budget, TimeBetweenPhasesAloneIsNoDevicesTime) {
  Measured run;
  run.host(Phase::kForward, 1).device(Phase::kNone, 1);
  EXPECT_FALSE(has_device_times(run.device_s));
  EXPECT_EQ(run.spent(Phase::kForward), 1);
}

TEST(Budget, AddsUpWhateverWasMeasured) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> part(0, 0.4);
  for (int i = 0; i < 2000; ++i) {
    Measured run;
    run.seconds = i % 10 == 0 ? 0 : 5 * part(random);
    for (std::size_t phase = 0; phase < ledger::kPhases; ++phase) {
      if (random() % 2 == 0) run.host_s[phase] = part(random);
      if (i % 3 != 0 && random() % 2 == 0) run.device_s[phase] = part(random);
    }
    EXPECT_NEAR(run.sum(), run.seconds, 1e-9);
    for (const double value : spent_s(run)) EXPECT_GE(value, 0);
    EXPECT_LE(idle_s(run.seconds, run.device_s), run.seconds);
  }
}

}  // namespace
}  // namespace lockstep::monitor
