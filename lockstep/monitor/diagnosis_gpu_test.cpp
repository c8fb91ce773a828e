// The rules that read the samples of GPUs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "lockstep/monitor/diagnosis.h"
#include "lockstep/monitor/record_for_test.h"
#include "lockstep/monitor/run_figures.h"

namespace lockstep::monitor {
namespace {

using namespace for_test;
using ::testing::HasSubstr;

using ledger::Counter;
using ledger::Phase;

// A GPU that has no work for that share of each step, which its stream books as Phase::kNone.
RunRecord on_gpus(double idle, int gpus = 2) {
  RunRecord run = run_of(std::vector<Shape>(static_cast<std::size_t>(gpus), Shape{}));
  run.facts.device = "cuda";
  run.facts.backend = "nccl";
  run.facts.gpus_visible = gpus;
  change(run, [&](Interval& interval) {
    const double busy = interval.seconds * (1 - idle);
    at(interval.device_s, Phase::kForward) = 0.3 * busy;
    at(interval.device_s, Phase::kBackward) = 0.6 * busy;
    at(interval.device_s, Phase::kCommunication) = 0.03 * busy;
    at(interval.device_s, Phase::kOptimizer) = 0.07 * busy;
    at(interval.device_s, Phase::kNone) = interval.seconds * idle;
  });
  return run;
}

GpuReading reading(unsigned utilisation, double gib = 60, double power = 600) {
  GpuReading gpu;
  gpu.utilisation_percent = utilisation;
  gpu.memory_used_bytes = static_cast<std::uint64_t>(gib * (1u << 30));
  gpu.memory_total_bytes = std::uint64_t{80} << 30;
  gpu.power_w = power;
  gpu.clock_reasons = 0;
  return gpu;
}

HostGpus gpus_of(int samples, const std::function<std::vector<GpuReading>(int)>& readings) {
  HostGpus host;
  for (int i = 0; i < samples; ++i)
    host.samples.push_back({.unix_time_s = 1e9 + i, .gpus = readings(i)});
  for (std::size_t g = 0; g < host.samples.front().gpus.size(); ++g)
    host.gpus.push_back({.index = static_cast<int>(g), .name = "NVIDIA H100 80GB HBM3"});
  return host;
}

HostGpus steady(int samples, const std::vector<GpuReading>& readings) {
  return gpus_of(samples, [&](int) { return readings; });
}

RunRecord alone(int gpus) {
  RunRecord run;
  run.facts.device = "cuda";
  run.facts.program = "./train --batch_size 16";
  run.facts.gpus_visible = gpus;
  return run;
}

TEST(NotLaunched, OneProcessWithManyGpus) {
  const Finding finding = only(alone(4), "not-launched");
  EXPECT_EQ(finding.cause, "one-process");
  EXPECT_THAT(finding.remedy,
              HasSubstr("lockstep run --standalone --nproc-per-node=4 ./train --batch_size 16"));
  EXPECT_DOUBLE_EQ(finding.gain, 0.75);
  expect_silence(alone(1));
  RunRecord cpu = alone(4);
  cpu.facts.device = "cpu";
  expect_silence(cpu);
}

TEST(NotLaunched, IsNotSaidOfAProgramThatUsesNoGpu) {
  RunRecord run = alone(2);
  run.facts.device.clear();  // not ours
  expect_silence(run);
  const auto busy = [&](unsigned first) {
    run.gpus = {gpus_of(20, [&](int) { return std::vector<GpuReading>{reading(first), {}}; })};
    return run;
  };
  expect_silence(busy(9));
  EXPECT_EQ(only(busy(40), "not-launched").cause, "one-process");
  // On CPUs, beside GPUs of others that take turns.
  run.facts.device = "cpu";
  run.gpus = {gpus_of(30, [](int i) {
    return std::vector<GpuReading>{reading(i % 2 == 0 ? 100 : 0), reading(i % 2 == 0 ? 0 : 100)};
  })};
  expect_silence(run);
}

TEST(NotLaunched, AlternatingGpusWithinThirtySamples) {
  const auto turns = [](int i) {
    return std::vector<GpuReading>{reading(i % 2 == 0 ? 100 : 0), reading(i % 2 == 0 ? 0 : 100)};
  };
  for (const int samples : {10, 30}) {
    RunRecord run = alone(2);
    run.gpus = {gpus_of(samples, turns)};
    const Finding finding = only(run, "not-launched");
    EXPECT_EQ(finding.cause, "alternating");
    EXPECT_THAT(finding.what, HasSubstr("take turns"));
    EXPECT_THAT(finding.evidence, HasSubstr("0/100"));
    EXPECT_THAT(finding.remedy, HasSubstr("lockstep run --standalone --nproc-per-node=2 ./train"));
    EXPECT_DOUBLE_EQ(finding.gain, 0.5);
    EXPECT_EQ(busy_together_share(run.gpus[0]), 0);
  }
  RunRecord early = alone(1);
  early.gpus = {gpus_of(9, turns)};
  expect_silence(early);
}

TEST(NotLaunched, FourGpusThatTakeTurnsForSeconds) {
  RunRecord run = alone(4);
  run.gpus = {gpus_of(30, [](int i) {
    std::vector<GpuReading> gpus(4, reading(3));
    gpus[static_cast<std::size_t>(i / 3 % 4)] = reading(97);
    return gpus;
  })};
  EXPECT_EQ(only(run, "not-launched").cause, "alternating");
}

TEST(NotLaunched, IsNotSaidOfGpusThatWorkTogether) {
  std::mt19937 random(5);
  for (const unsigned noise : {0u, 5u, 9u}) {
    RunRecord run = on_gpus(0.05);
    run.gpus = {gpus_of(30, [&](int) {
      std::uniform_int_distribution<unsigned> more(0, 2 * noise);
      return std::vector<GpuReading>{reading(std::min(100u, 92 - noise + more(random))),
                                     reading(std::min(100u, 91 - noise + more(random)))};
    })};
    expect_silence(run);
    if (noise <= 5) {
      EXPECT_EQ(busy_together_share(run.gpus[0]), 1);
    }
  }
  // A process that drives both by itself.
  RunRecord run = alone(2);
  run.gpus = {steady(30, {reading(92), reading(91)})};
  expect_silence(run);
}

TEST(BusyTogether, IsEightyFivePercentOrMoreOfEveryGpu) {
  const auto share = [](unsigned first, unsigned second) {
    return busy_together_share(steady(20, {reading(first), reading(second)}));
  };
  EXPECT_EQ(share(85, 85), 1);
  EXPECT_EQ(share(84, 92), 0);
  EXPECT_EQ(share(92, 84), 0);
  EXPECT_EQ(
      busy_together_share(gpus_of(
          20,
          [](int i) { return std::vector<GpuReading>{reading(95), reading(i < 15 ? 85 : 84)}; })),
      0.75);
}

TEST(Unbalanced, MemoryPowerAndIdleGpus) {
  RunRecord run = on_gpus(0.05);
  const auto with = [&](const GpuReading& a, const GpuReading& b) {
    run.gpus = {steady(20, {a, b})};
    return run;
  };
  EXPECT_EQ(only(with(reading(92, 40), reading(91, 20)), "unbalanced").cause, "memory");
  EXPECT_EQ(only(with(reading(92, 40), reading(91, 29)), "unbalanced").cause, "memory");
  expect_silence(with(reading(92, 40), reading(91, 31)));
  expect_silence(with(reading(92, 1.0), reading(91, 0.5)));
  EXPECT_EQ(only(with(reading(92, 40, 600), reading(91, 40, 440)), "unbalanced").cause, "power");
  expect_silence(with(reading(92, 40, 600), reading(91, 40, 460)));
  const Finding idle = only(with(reading(98), reading(0, 1, 80)), "unbalanced");
  EXPECT_EQ(idle.cause, "idle");
  EXPECT_DOUBLE_EQ(idle.gain, 0.5);
}

TEST(Unbalanced, LooksOnlyAtTheGpusOfTheRun) {
  const auto with_others = [](RunRecord run) {
    run.gpus = {steady(20, {reading(92), reading(91), reading(95, 10, 200), reading(0)})};
    return run;
  };
  expect_silence(with_others(on_gpus(0.05)));
  RunRecord unknown = with_others(on_gpus(0.05, 4));
  EXPECT_NE(find(diagnose(unknown), "unbalanced"), nullptr);
  unknown.facts.device.clear();
  expect_silence(unknown);
}

// Two ranks on GPUs 3 and 5 of eight.
RunRecord on_two_of_eight(const GpuReading& third, const GpuReading& fifth, unsigned others = 0) {
  RunRecord run = on_gpus(0.05);
  run.facts.gpus_visible = 8;
  run.gpus = {gpus_of(30, [&](int) {
    std::vector<GpuReading> gpus(8, reading(others, 0.01, 70));
    gpus[3] = third;
    gpus[5] = fifth;
    return gpus;
  })};
  return run;
}

TEST(Unbalanced, ARunOnTwoOfEightGpusIsJudgedByItsTwo) {
  expect_silence(on_two_of_eight(reading(92), reading(91)));
  const Finding memory = only(on_two_of_eight(reading(92, 40), reading(91, 20)), "unbalanced");
  EXPECT_EQ(memory.cause, "memory");
  EXPECT_THAT(memory.evidence, HasSubstr("GPU 3 uses 40.0 GiB, GPU 5 20.0 GiB."));
  EXPECT_EQ(only(on_two_of_eight(reading(92, 40, 600), reading(91, 40, 400)), "unbalanced").cause,
            "power");
  // Both ranks on one of them, or one that waits for the other forever.
  EXPECT_EQ(only(on_two_of_eight(reading(98), reading(0, 0.01, 70)), "unbalanced").cause, "idle");
  EXPECT_EQ(only(on_two_of_eight(reading(98), reading(0, 1, 70)), "unbalanced").cause, "idle");
  // Somebody else is there as well, and who has which is not known.
  RunRecord shared = on_two_of_eight(reading(92, 40), reading(91, 20));
  for (GpuSample& sample : shared.gpus[0].samples) sample.gpus[6] = reading(50, 10);
  expect_silence(shared);
}

TEST(MicroBatch, IsSeenOnTwoOfEightGpus) {
  EXPECT_EQ(only(on_two_of_eight(reading(50), reading(50)), "micro-batch-too-small").cause,
            "launch");
}

TEST(NotLaunched, CountsTheGpusThatTakeTurns) {
  RunRecord run = alone(8);
  run.gpus = {gpus_of(30, [](int i) {
    std::vector<GpuReading> gpus(8, reading(0, 0.01, 70));
    gpus[static_cast<std::size_t>(2 + i % 2)] = reading(100);
    gpus[static_cast<std::size_t>(3 - i % 2)] = reading(0);
    return gpus;
  })};
  const Finding finding = only(run, "not-launched");
  EXPECT_EQ(finding.cause, "alternating");
  EXPECT_THAT(finding.evidence, HasSubstr("one of 2 GPUs had all the work"));
  EXPECT_THAT(finding.remedy, HasSubstr("--nproc-per-node=2 ./train"));
  EXPECT_DOUBLE_EQ(finding.gain, 0.5);
  // One process that uses one of them.
  run.gpus = {gpus_of(30, [](int) {
    std::vector<GpuReading> gpus(8, reading(0, 0.01, 70));
    gpus[0] = reading(100);
    return gpus;
  })};
  EXPECT_EQ(only(run, "not-launched").cause, "one-process");
}

TEST(MicroBatch, LeavesTheGpuWithoutWork) {
  // The gaps between kernels lie within forward and backward by the device's clock.
  RunRecord run = on_gpus(0.05);
  const auto busy = [&](unsigned percent) {
    run.gpus = {steady(20, {reading(percent), reading(percent)})};
    return run;
  };
  Finding finding = only(busy(50), "micro-batch-too-small");
  EXPECT_EQ(finding.cause, "launch");
  EXPECT_THAT(finding.remedy, HasSubstr("compile_model"));
  EXPECT_LE(finding.gain, 0.5);
  only(busy(65), "micro-batch-too-small");
  expect_silence(busy(75));
  run.facts.arguments = map_node({{"compile_model", bool_node(true)}});
  finding = only(busy(50), "micro-batch-too-small");
  EXPECT_THAT(finding.remedy, ::testing::Not(HasSubstr("compile_model")));
  EXPECT_THAT(finding.remedy, HasSubstr("per_device_train_batch_size"));
  // Without the driver's samples nobody knows.
  run.gpus.clear();
  expect_silence(run);
  expect_silence(on_gpus(0.5));
}

TEST(OnADevice, TimeBetweenThePhasesIsIdle) {
  RunRecord run = on_gpus(0.4);
  change(run, [](Interval& interval) { at(interval.host_s, Phase::kData) = 0.3; });
  EXPECT_NEAR(only(run, "loader-bound").gain, 0.3, 0.01);
  run = on_gpus(0.05);  // the host waits, and the device still has work
  change(run, [](Interval& interval) { at(interval.host_s, Phase::kData) = 0.3; });
  expect_silence(run);
}

TEST(OnADevice, LoggingAndSavingCostWhatTheDeviceIsIdle) {
  const auto with = [](double idle, Phase phase, Counter events) {
    RunRecord run = on_gpus(idle);
    change(run, [&](Interval& interval) {
      at(interval.host_s, phase) = 0.5;
      at(interval.counts, events) = static_cast<std::uint64_t>(interval.steps);
    });
    return run;
  };
  expect_silence(with(0.02, Phase::kLogging, Counter::kLogs));  // the wait for the backlog
  expect_silence(with(0.02, Phase::kSaving, Counter::kSaves));
  const Finding logging = only(with(0.2, Phase::kLogging, Counter::kLogs), "logging-too-often");
  EXPECT_LE(logging.gain, 0.2);
  EXPECT_GT(logging.gain, 0.1);
  only(with(0.2, Phase::kSaving, Counter::kSaves), "saving-too-often");
}

// ------------------------------------------------------------------ a host that is ahead

// One GPU: shares of a second by the device's clock and of the training thread, whose rest waits
// for the device. `busy`: what the driver says.
struct Planted {
  double device = 0.96;
  double data = 0.005;
  double forward = 0.05;
  double logging = 0.005;
  unsigned busy = 100;
  bool log_each_step = false;
  std::string compile_model = "true";
};

RunRecord planted(const Planted& what) {
  RunRecord run = on_gpus(0, 1);
  run.facts.arguments = map_node(
      {{"compile_model", what.compile_model == "auto" ? text_node("auto")
                                                      : bool_node(what.compile_model == "true")}});
  change(run, [&](Interval& interval) {
    interval.host_s = interval.device_s = {};
    at(interval.host_s, Phase::kData) = what.data * interval.seconds;
    at(interval.host_s, Phase::kForward) = what.forward * interval.seconds;
    at(interval.host_s, Phase::kLogging) = what.logging * interval.seconds;
    at(interval.host_s, Phase::kDeviceWait) =
        std::max(0.0, 1 - what.data - what.forward - what.logging) * interval.seconds;
    at(interval.device_s, Phase::kForward) = what.device * interval.seconds;
    at(interval.device_s, Phase::kNone) = (1 - what.device) * interval.seconds;
    const auto steps = static_cast<std::uint64_t>(interval.steps);
    at(interval.counts, Counter::kLogs) = what.log_each_step ? steps : steps / 10;
    at(interval.counts, Counter::kHostSyncs) = at(interval.counts, Counter::kLogs);
  });
  run.gpus = {steady(20, {reading(what.busy)})};
  return run;
}

// No advice promises what the device cannot give.
Finding only_within(const RunRecord& run, const std::string& rule, double idle) {
  Finding finding = only(run, rule);
  EXPECT_LE(finding.gain, idle + 1e-9) << finding_text(finding);
  EXPECT_GT(finding.gain, 0.4 * idle) << finding_text(finding);
  return finding;
}

TEST(BusyDevice, AHealthyRunIsSilent) {
  expect_silence(planted({}));
  expect_silence(planted({.device = 0.999, .data = 0, .logging = 0}));
  RunRecord captured = planted({.compile_model = "auto"});
  expect_silence(captured);
}

TEST(BusyDevice, WaitsOfTheHostForItCostNothing) {
  // An item() in every step, and metrics that are logged in every step: 30 % of the host's time.
  Planted what{.logging = 0.01, .log_each_step = true};
  expect_silence(planted(what));
  // The host is ahead of a loader that is slower than it, and faster than the device.
  expect_silence(planted({.data = 0.6}));
  RunRecord run = planted({.data = 0.6, .log_each_step = true});
  EXPECT_EQ(all(diagnose(run)), "");
}

TEST(BusyDevice, TimeThatIsBookedLateIsNoIdleTime) {
  RunRecord run = planted({.data = 0.3, .log_each_step = true});
  int n = 0;
  change(run, [&](Interval& interval) {
    for (double& part : interval.device_s) part *= n % 2 == 0 ? 0.9 : 1.1;
    ++n;
  });
  expect_silence(run);
}

TEST(BusyDevice, PageFaultsOfTheHostCostNothing) {
  const auto faults = [](double device) {
    RunRecord run = planted({.device = device});
    change(run, [](Interval& interval) {
      interval.process->minor_faults_per_s = 200'000;
      interval.process->system_cores = 0.3;
    });
    return run;
  };
  expect_silence(faults(0.99));
  only_within(faults(0.9), "page-faults", 0.1);
}

TEST(IdleDevice, IsChargedToWhatTheHostDid) {
  only_within(planted({.device = 0.5, .data = 0.48, .busy = 50}), "loader-bound", 0.5);
  only_within(planted({.device = 0.8, .logging = 0.19, .busy = 80, .log_each_step = true}),
              "logging-too-often", 0.2);
}

TEST(IdleDevice, ThatWaitsForKernelsIsGivenLargerBatchesOrAGraph) {
  // The gaps between kernels lie within the device's phases; the driver sees them.
  const Finding plain =
      only_within(planted({.busy = 45, .compile_model = "false"}), "micro-batch-too-small", 0.55);
  EXPECT_EQ(plain.cause, "launch");
  EXPECT_THAT(plain.remedy, HasSubstr("compile_model: true"));
  for (const char* captured : {"true", "auto"}) {
    const Finding small = only_within(planted({.busy = 45, .compile_model = captured}),
                                      "micro-batch-too-small", 0.55);
    EXPECT_THAT(small.remedy, HasSubstr("per_device_train_batch_size"));
    EXPECT_THAT(small.remedy, ::testing::Not(HasSubstr("compile_model")));
  }
}

TEST(OnADevice, WindowsWithoutItsTimesAreNotJudgedByTheHost) {
  RunRecord run = on_gpus(0.05);
  int n = 0;
  change(run, [&](Interval& interval) {
    if (n++ % 5 < 3) return;
    interval.device_s = {};
    at(interval.host_s, Phase::kLogging) = 0.9;
  });
  expect_silence(run);
}

TEST(MicroBatch, AccumulatesAlthoughLargerOnesFit) {
  RunRecord run = on_gpus(0.2);
  change(run, [](Interval& interval) { at(interval.counts, Counter::kMicroBatches) *= 8; });
  const auto filled = [&](double gib) {
    run.gpus = {steady(20, {reading(80, gib), reading(80, gib)})};
    return run;
  };
  const Finding finding = only(filled(15), "accumulation-too-high");
  EXPECT_THAT(finding.remedy, HasSubstr("multiply per_device_train_batch_size by 4"));
  EXPECT_THAT(finding.remedy, HasSubstr("or set compile_model: true"));
  EXPECT_NEAR(finding.gain, (0.2 - 0.02 - 0.005) * 0.75, 0.001);  // without data and logging
  only(filled(33), "accumulation-too-high");
  RunRecord captured = filled(33);
  captured.facts.arguments = map_node({{"compile_model", bool_node(true)}});
  EXPECT_THAT(only(captured, "accumulation-too-high").remedy,
              ::testing::Not(HasSubstr("compile_model")));
  expect_silence(filled(35));
}

TEST(Straggler, OnAThrottledGpu) {
  RunRecord run = on_gpus(0.02, 3);
  const RunRecord slow = with_slow_rank(10, 20);
  for (std::size_t r = 0; r < 3; ++r) {
    run.ranks[r] = slow.ranks[r];
    for (Interval& interval : run.ranks[r].intervals) interval.device_s = interval.host_s;
  }
  run.gpus = {gpus_of(20, [](int) {
    std::vector<GpuReading> gpus{reading(95), reading(99), reading(95)};
    gpus[1].clock_reasons = 0x40;  // hardware thermal slowdown
    return gpus;
  })};
  EXPECT_EQ(only(run, "straggler").cause, "throttled");
  run.gpus = {gpus_of(20, [](int) {
    std::vector<GpuReading> gpus{reading(95), reading(99), reading(95)};
    for (GpuReading& gpu : gpus) gpu.clock_reasons = 0x40;
    return gpus;
  })};
  EXPECT_EQ(only(run, "straggler").cause, "compute");
}

}  // namespace
}  // namespace lockstep::monitor
