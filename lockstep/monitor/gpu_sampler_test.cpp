// The sampler on a driver that is not there (tests/monitor/fake_nvml.cpp), with hangs and losses.
#include "lockstep/monitor/gpu_sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep::monitor {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ElementsAre;
using testing::Ge;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::MatchesRegex;
using testing::SizeIs;
using Clock = std::chrono::steady_clock;

constexpr auto kLong = 30s;  // of waits that end by themselves

class GpuSamplerTest : public testing::Test {
 protected:
  GpuSamplerTest() {
    path_ = std::filesystem::temp_directory_path() /
            ("lockstep_nvml_" + std::to_string(::getpid()) + ".txt");
    ::setenv("FAKE_NVML_SCRIPT", path_.c_str(), 1);
  }
  ~GpuSamplerTest() override { std::filesystem::remove(path_); }

  // The lines of two_gpus.txt, where those of `changes` do not replace them.
  void script(const std::string& changes) {
    const auto key = [](const std::string& line) {
      return line.substr(0, line.find(' ', line.find(' ') + 1));
    };
    std::ofstream file(path_);
    std::ifstream old_lines(LOCKSTEP_TWO_GPUS);
    for (std::string line; std::getline(old_lines, line);) {
      if (("\n" + changes).find("\n" + key(line) + " ") == std::string::npos) file << line << '\n';
    }
    file << changes;
  }

  static GpuSamplerOptions fast(std::chrono::milliseconds deadline = 2000ms) {
    return {.library = LOCKSTEP_FAKE_NVML_NEW, .interval = 5ms, .call_deadline = deadline};
  }

  std::string path_;
};

// The first that it reports, and how long the slowest reader waited meanwhile.
std::string problem_of(const GpuSampler& sampler, std::chrono::milliseconds* slowest = nullptr) {
  std::string problem;
  for (const auto begin = Clock::now(); problem.empty() && Clock::now() - begin < kLong;) {
    const auto asked = Clock::now();
    problem = sampler.snapshot().problem;
    sampler.history();
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - asked);
    if (slowest != nullptr) *slowest = std::max(*slowest, took);
    std::this_thread::sleep_for(1ms);
  }
  return problem;
}

TEST_F(GpuSamplerTest, ReadsEveryValue) {
  script("");
  const GpuSampler sampler(fast());
  ASSERT_TRUE(sampler.wait_for_samples(1, kLong));
  const GpuSnapshot now = sampler.snapshot();
  EXPECT_EQ(now.problem, "");
  EXPECT_EQ(now.driver_version, "999.1");
  ASSERT_THAT(now.gpus, SizeIs(2));
  EXPECT_EQ(now.gpus[0].name, "Fake H200");
  EXPECT_EQ(now.gpus[1].uuid, "GPU-bbbb");
  EXPECT_EQ(now.gpus[1].pci_bus_id, "0000:2a:00.0");
  ASSERT_THAT(now.newest->gpus, SizeIs(2));
  const GpuReading& gpu = now.newest->gpus[0];
  EXPECT_EQ(gpu.utilisation_percent, 97);
  EXPECT_EQ(gpu.memory_utilisation_percent, 48);
  EXPECT_EQ(gpu.memory_used_bytes, 32u << 20);  // without what the driver reserves
  EXPECT_EQ(gpu.memory_total_bytes, 1u << 30);
  EXPECT_EQ(gpu.power_w, 412.5);
  EXPECT_EQ(gpu.power_limit_w, 700);
  EXPECT_EQ(gpu.temperature_c, 61);
  EXPECT_EQ(gpu.sm_clock_mhz, 1980);
  EXPECT_EQ(gpu.memory_clock_mhz, 2619);
  EXPECT_EQ(gpu.clock_reasons, 68);
  EXPECT_EQ(gpu.ecc_corrected, 3);
  EXPECT_EQ(gpu.ecc_uncorrected, 0);
  ASSERT_THAT(gpu.processes, SizeIs(2));
  EXPECT_EQ(gpu.processes[0].pid, 17);
  EXPECT_EQ(gpu.processes[0].memory_bytes, 1048576);
  EXPECT_EQ(gpu.processes[1].memory_bytes, std::nullopt);
  // What the second card does not have is no problem.
  EXPECT_EQ(now.newest->gpus[1].problem, "");
  EXPECT_EQ(now.newest->gpus[1].sm_clock_mhz, std::nullopt);
  EXPECT_EQ(gpu_line(now),
            "0: 97 %, 0.0 of 1.0 GiB, 412 of 700 W, 61 C, 1980 MHz, throttled (software power cap, "
            "hardware thermal slowdown); 1: 5 %, 0.0 of 1.0 GiB, 90 W, 40 C");
}

TEST_F(GpuSamplerTest, AnOldDriverLacksFunctions) {
  script("");
  GpuSamplerOptions options = fast();
  options.library = LOCKSTEP_FAKE_NVML_OLD;
  const GpuSampler sampler(options);
  ASSERT_TRUE(sampler.wait_for_samples(2, kLong));
  const GpuSnapshot now = sampler.snapshot();
  EXPECT_EQ(now.problem, "");
  ASSERT_THAT(now.gpus, SizeIs(2));
  EXPECT_EQ(now.gpus[0].pci_bus_id, "");
  const GpuReading& gpu = now.newest->gpus[0];
  EXPECT_EQ(gpu.problem, "");
  EXPECT_EQ(gpu.memory_used_bytes, 33u << 20);  // with it
  EXPECT_EQ(gpu.power_limit_w, 700);
  EXPECT_EQ(gpu.clock_reasons, 68);
  ASSERT_THAT(gpu.processes, SizeIs(2));
  EXPECT_EQ(gpu.processes[1].pid, 18);
}

TEST_F(GpuSamplerTest, MoreProcessesThanExpected) {
  std::string list = "0 processes 1:1";
  for (int pid = 2; pid <= 300; ++pid) list += fmt::format(",{}:{}", pid, pid);
  script(list + "\n");
  const GpuSampler sampler(fast());
  ASSERT_TRUE(sampler.wait_for_samples(1, kLong));
  EXPECT_THAT(sampler.snapshot().newest->gpus[0].processes, SizeIs(300));
}

TEST_F(GpuSamplerTest, ALostGpuSaysSoAndTheOthersContinue) {
  script("1 power 90000 90000 lost lost lost 90000\n0 power 1000 2000 3000 4000 5000 6000\n");
  testing::internal::CaptureStderr();
  {
    const GpuSampler sampler(fast());
    ASSERT_TRUE(sampler.wait_for_samples(6, kLong));
    const auto samples = sampler.history();
    for (std::size_t i = 0; i < 6; ++i) {
      EXPECT_EQ(samples[i]->gpus[0].power_w, 1.0 + static_cast<double>(i));
      const GpuReading& other = samples[i]->gpus[1];
      const bool lost = i >= 2 && i < 5;
      EXPECT_THAT(other.problem, HasSubstr(lost ? "GPU is lost" : ""));
      EXPECT_EQ(other.problem.empty(), !lost);
      EXPECT_EQ(other.temperature_c.has_value(), !lost);
    }
  }
  const std::string lines = testing::internal::GetCapturedStderr();
  EXPECT_THAT(lines, HasSubstr("[gpu] GPU 1: GPU is lost: "));
  EXPECT_THAT(lines, HasSubstr("[gpu] GPU 1 answers again."));
  // Once each time, not once for every sample.
  EXPECT_EQ(lines.find("GPU is lost"), lines.rfind("GPU is lost", lines.find("answers again")));
}

TEST_F(GpuSamplerTest, AGpuWithoutAHandleIsAskedAgain) {
  script("1 handle lost lost unsupported\n");
  const GpuSampler sampler(fast());
  ASSERT_TRUE(sampler.wait_for_samples(2, kLong));
  const auto samples = sampler.history();
  EXPECT_THAT(samples[0]->gpus[1].problem, HasSubstr("GPU is lost"));
  EXPECT_EQ(samples[0]->gpus[0].utilisation_percent, 97);
  EXPECT_EQ(samples[1]->gpus[1].utilisation_percent, 5);
}

TEST_F(GpuSamplerTest, AHangIsReportedAndNoReaderWaits) {
  script("1 temperature 40 40 hang:6000 40\n");
  const GpuSampler sampler(fast(1000ms));
  ASSERT_TRUE(sampler.wait_for_samples(2, kLong));
  auto slowest = 0ms;
  const std::string problem = problem_of(sampler, &slowest);
  EXPECT_THAT(problem,
              MatchesRegex("no answer from the driver for [1-5] s .nvmlDeviceGetTemperature of GPU "
                           "1."));
  EXPECT_LT(slowest, 3s);
  EXPECT_THAT(gpu_line(sampler.snapshot()), AllOf(HasSubstr("no answer"), HasSubstr("0: 97 %")));
  ASSERT_TRUE(sampler.wait_for_samples(4, kLong));
  EXPECT_EQ(sampler.snapshot().problem, "");
}

TEST_F(GpuSamplerTest, AThreadThatIsStuckIsLeftBehind) {
  script("init hang:60000\n");
  const auto begin = Clock::now();
  {
    const GpuSampler sampler(fast(100ms));
    EXPECT_FALSE(sampler.wait_for_samples(1, 300ms));
    EXPECT_THAT(problem_of(sampler),
                MatchesRegex("no answer from the driver for [0-9]+ s .nvmlInit.*"));
    EXPECT_EQ(sampler.snapshot().newest, nullptr);
  }
  EXPECT_LT(Clock::now() - begin, 20s);
}

TEST_F(GpuSamplerTest, ALibraryThatIsMissingOrDoesNotStartIsAReason) {
  const auto problem_with = [&](const std::string& library) {
    GpuSamplerOptions options = fast();
    options.library = library;
    const GpuSampler sampler(options);
    EXPECT_TRUE(sampler.wait_for_samples(1, kLong));
    return sampler.snapshot().problem;
  };
  EXPECT_THAT(problem_with("/nowhere/libnvidia-ml.so.1"),
              HasSubstr("[nvml] /nowhere/libnvidia-ml.so.1 is not there: no NVIDIA driver"));
  EXPECT_THAT(problem_with("libm.so.6"), HasSubstr("libm.so.6 is not NVIDIA's management library"));
  script("init error:9\n");
  EXPECT_THAT(problem_with(LOCKSTEP_FAKE_NVML_NEW),
              HasSubstr("nvmlInit failed: Driver Not Loaded"));
  ::setenv("LOCKSTEP_NVML", "/nowhere/else.so", 1);
  EXPECT_THAT(problem_with(""), HasSubstr("/nowhere/else.so is not there"));
  ::unsetenv("LOCKSTEP_NVML");
  EXPECT_EQ(nvml_library(), "libnvidia-ml.so.1");
}

TEST_F(GpuSamplerTest, TheHistoryIsBoundedAndInOrder) {
  script("0 utilisation 100 0\n1 utilisation 0 100\n");
  GpuSamplerOptions options = fast();
  options.history = 8;
  const GpuSampler sampler(options);
  ASSERT_TRUE(sampler.wait_for_samples(20, kLong));
  const auto samples = sampler.history();
  ASSERT_THAT(samples, SizeIs(8));
  for (std::size_t i = 1; i < samples.size(); ++i) {
    EXPECT_GT(samples[i]->unix_time_s, samples[i - 1]->unix_time_s);
    EXPECT_EQ(*samples[i]->gpus[0].utilisation_percent + *samples[i]->gpus[1].utilisation_percent,
              100u);
    EXPECT_NE(samples[i]->gpus[0].utilisation_percent, samples[i - 1]->gpus[0].utilisation_percent);
  }
  const auto few = sampler.history(3);
  EXPECT_THAT(few, SizeIs(3));
}

TEST_F(GpuSamplerTest, XidEventsNameTheirGpu) {
  script(
      "1 xid 0 79 31 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n");
  testing::internal::CaptureStderr();
  {
    const GpuSampler sampler(fast());
    ASSERT_TRUE(sampler.wait_for_samples(5, kLong));
    const GpuSnapshot now = sampler.snapshot();
    ASSERT_THAT(now.xids, SizeIs(2));
    EXPECT_EQ(now.xids[0].gpu, 1);
    EXPECT_EQ(now.xids[0].xid, 79);
    EXPECT_EQ(now.xids[1].xid, 31);
    EXPECT_EQ(now.xid_counts.at({1, 79}), 1);
  }
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("GPU 1: the driver reports Xid 79."));
}

TEST_F(GpuSamplerTest, ManyReadersAtOnce) {
  script("");
  GpuSamplerOptions options = fast();
  options.interval = 1ms;
  options.history = 16;
  const GpuSampler sampler(options);
  std::atomic<bool> bad{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 4; ++i) {
    readers.emplace_back([&] {
      std::uint64_t before = 0;
      while (before < 50) {
        const GpuSnapshot now = sampler.snapshot();
        bad = bad || now.samples < before || (now.newest && now.newest->gpus.size() != 2) ||
              sampler.history().size() > 16;
        before = now.samples;
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_FALSE(bad);
}

TEST(ClockReasons, HaveWords) {
  EXPECT_THAT(clock_reason_words(0), IsEmpty());
  EXPECT_THAT(clock_reason_words(0x1), ElementsAre("idle"));
  EXPECT_THAT(clock_reason_words(0x4 | 0x80),
              ElementsAre("software power cap", "hardware power brake"));
  EXPECT_THAT(clock_reason_words(0x40000000000), ElementsAre("unknown reason 0x40000000000"));
  for (const std::string& word : clock_reason_words(kKnownClockReasons))
    EXPECT_THAT(word, testing::Not(HasSubstr("unknown")));
  EXPECT_THAT(clock_reason_words(kKnownClockReasons), SizeIs(11));
  EXPECT_FALSE(is_throttled(0x1 | 0x2 | 0x10 | 0x100 | 0x400));
  for (const int bit : {0x4, 0x8, 0x20, 0x40, 0x80, 0x200})
    EXPECT_TRUE(is_throttled(static_cast<std::uint64_t>(bit)));
}

}  // namespace
}  // namespace lockstep::monitor
