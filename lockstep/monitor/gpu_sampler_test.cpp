// The sampler of GPUs on a driver that is not there (tests/monitor/fake_nvml.cpp), with hangs and
// losses; that of processes and control groups.
#include "lockstep/monitor/gpu_sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <thread>

#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/core/host.h"
#include "lockstep/core/log.h"
#include "lockstep/monitor/cpu_sampler.h"

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

// ---------------------------------------------------------------- processes

// Real processes, and control groups of both versions in a temporary directory.

std::size_t own_threads() {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}));
}

int say(const std::string& text) {
  write_all(STDOUT_FILENO, text + "\n");
  for (;;) ::pause();
}

CHILD(busy) {
  ::prctl(PR_SET_NAME, "a) Z 1 (b c");  // what a name may hold
  write_all(STDOUT_FILENO, "ready\n");
  for (std::atomic<unsigned> i{0};;) i.fetch_add(1);
}

CHILD(idle) {
  return say("ready");
}

// On the first CPU that it may use, which others like it use as well.
int keep_one_core_busy(int more_threads) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<std::size_t>(allowed_cpus().front()), &set);
  if (::sched_setaffinity(0, sizeof set, &set) != 0) return 1;
  for (int i = 0; i < more_threads; ++i)
    std::thread([] {
      for (std::atomic<unsigned> n{0};;) n.fetch_add(1);
    }).detach();
  write_all(STDOUT_FILENO, "ready\n");
  for (std::atomic<unsigned> i{0};;) i.fetch_add(1);
}

CHILD(busy_on_one_core) {
  return keep_one_core_busy(0);
}

CHILD(four_threads_on_one_core) {
  return keep_one_core_busy(3);
}

constexpr std::size_t kTouched = 64u << 20;

CHILD(touches_memory) {
  auto* memory = static_cast<char*>(
      ::mmap(nullptr, kTouched, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ::madvise(memory, kTouched, MADV_NOHUGEPAGE);
  for (std::size_t i = 0; i < kTouched; i += page_bytes()) memory[i] = 1;
  return say("ready");
}

CHILD(writes_and_has_threads) {
  const Fd file(::memfd_create("lockstep_cpu_sampler", MFD_CLOEXEC));
  write_all(file.get(), std::string(3u << 20, 'x'));
  for (int i = 0; i < 3; ++i) std::thread([] { ::pause(); }).detach();
  return say("threads " + std::to_string(own_threads()) + ", ready");
}

// One of those, sampled.
class Process {
 public:
  explicit Process(const std::string& name) : child_(name, {}) {
    EXPECT_TRUE(child_.says("ready"));
  }
  pid_t pid() const { return child_.pid(); }
  const std::string& output() const { return child_.output(); }
  ProcessSample sample() const { return read_process(pid()).value(); }
  // Samples until this holds; the last one when the time is over.
  ProcessSample until(const std::function<bool(const ProcessSample&)>& holds) const {
    const Deadline deadline = Deadline::after(30s);
    ProcessSample now = sample();
    while (!holds(now) && !deadline.expired()) {
      std::this_thread::sleep_for(10ms);
      now = sample();
    }
    return now;
  }

 private:
  child_for_test::Child child_;
};

TEST(CpuSampler, ABusyProcessUsesCpuTime) {
  const Process process("busy");
  const ProcessSample before = process.sample();
  const ProcessSample after =
      process.until([&](const auto& s) { return s.user_s > before.user_s + 0.2; });
  EXPECT_EQ(after.state, 'R');
  const auto change = rates(before, after);
  ASSERT_TRUE(change);
  EXPECT_GT(change->cores, 0.01);
  EXPECT_LT(change->cores, 1.5);
  EXPECT_GT(after.involuntary_switches + after.voluntary_switches, 0u);
}

TEST(CpuSampler, ProcessesThatShareACoreWaitForIt) {
  const Process process("busy_on_one_core");
  const Process second("busy_on_one_core");
  const Process third("busy_on_one_core");
  const ProcessSample before = process.sample();
  if (!before.run_delay_s) GTEST_SKIP() << "this kernel does not count it";
  std::this_thread::sleep_for(1500ms);
  const auto change = rates(before, process.sample());
  ASSERT_TRUE(change && change->run_delay_share);
  EXPECT_GT(*change->run_delay_share, 0.4);
  EXPECT_LE(*change->run_delay_share, 1);
  EXPECT_LT(change->cores, 0.6);
}

// Whoever else is on the cores: a process of one thread never has more than one that waits.
TEST(CpuSampler, ThreadsThatWaitAreThoseOfTheProcess) {
  const Process alone("busy_on_one_core");
  const Process second("busy_on_one_core");
  const Process many("four_threads_on_one_core");
  const ProcessSample one = alone.sample(), four = many.sample();
  if (!one.threads_delay_s) GTEST_SKIP() << "this kernel does not count it";
  std::this_thread::sleep_for(1500ms);
  const auto of_one = rates(one, alone.sample()), of_four = rates(four, many.sample());
  ASSERT_TRUE(of_one && of_one->waiting_threads && of_four && of_four->waiting_threads);
  EXPECT_LT(*of_one->waiting_threads + of_one->cores, 1.1);
  EXPECT_GT(*of_one->waiting_threads, 0.4);
  EXPECT_GT(*of_four->waiting_threads + of_four->cores, 2.5);
  EXPECT_LT(*of_four->waiting_threads + of_four->cores, 4.4);
}

TEST(CpuSampler, AStoppedProcessDiffersFromOneThatSleeps) {
  const Process process("idle");
  EXPECT_EQ(process.until([](const auto& s) { return s.state == 'S'; }).state, 'S');
  ASSERT_EQ(::kill(process.pid(), SIGSTOP), 0);
  EXPECT_EQ(process.until([](const auto& s) { return s.state == 'T'; }).state, 'T');
  const ProcessSample before = process.sample();
  std::this_thread::sleep_for(50ms);
  const auto change = rates(before, process.sample());
  EXPECT_EQ(change->cores, 0);
  EXPECT_LT(change->run_delay_share.value_or(0), 0.1);
}

TEST(CpuSampler, MemoryThatIsTouchedFaultsAndStaysResident) {
  const Process idle("idle");
  const Process process("touches_memory");
  const ProcessSample sample = process.sample();
  EXPECT_GE(sample.resident_bytes, idle.sample().resident_bytes + kTouched * 9 / 10);
  EXPECT_GE(sample.minor_faults, idle.sample().minor_faults + kTouched / page_bytes() * 9 / 10);
}

TEST(CpuSampler, WritesAndThreadsAreCounted) {
  const Process process("writes_and_has_threads");
  const ProcessSample sample = process.sample();
  EXPECT_GE(sample.threads, 4);
  EXPECT_EQ(process.output(), "threads " + std::to_string(sample.threads) + ", ready\n");
  ASSERT_TRUE(sample.written_chars);
  EXPECT_GE(*sample.written_chars, 3u << 20);
}

TEST(CpuSampler, AProcessThatHasEnded) {
  pid_t pid = 0;
  {
    const Process process("idle");
    pid = process.pid();
    ASSERT_EQ(::kill(pid, SIGKILL), 0);
    EXPECT_EQ(process.until([](const auto& s) { return s.state == 'Z'; }).state, 'Z');
  }
  EXPECT_EQ(read_process(pid), std::nullopt);
}

TEST(CpuSampler, RatesAreOfOneProcess) {
  const auto now = std::chrono::steady_clock::now();
  const ProcessSample before{.pid = 7, .time = now, .start_ticks = 100, .user_s = 1};
  ProcessSample after = before;
  EXPECT_EQ(rates(before, after), std::nullopt);  // no time between them
  after.time = now + 2s;
  after.user_s = 4;
  after.minor_faults = 10;
  ASSERT_TRUE(rates(before, after));
  EXPECT_EQ(rates(before, after)->cores, 1.5);
  EXPECT_EQ(rates(before, after)->minor_faults_per_s, 5);
  after.start_ticks = 200;  // the pid was given to another process
  EXPECT_EQ(rates(before, after), std::nullopt);
}

// ------------------------------------------------------------------ control groups

class MadeUpHost : public testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) const {
    folder_.write(path, text + '\n');
  }

  TemporaryDirectory folder_;
  std::string root_ = folder_.path();
  HostFiles files_{root_ + "/proc", root_ + "/sys"};
};

TEST_F(MadeUpHost, CgroupVersion2) {
  write("/proc/self/mountinfo", "31 23 0:28 / " + root_ + "/cg rw shared:5 - cgroup2 cgroup2 rw");
  write("/proc/42/cgroup", "0::/job/rank");
  write("/cg/job/cpu.max", "150000 100000");
  write("/cg/job/cpu.stat", "usage_usec 9\nnr_periods 30\nnr_throttled 12\nthrottled_usec 2500000");
  write("/cg/job/rank/cpu.max", "400000 100000");  // more than the group above allows
  write("/cg/job/rank/cpu.stat", "nr_periods 0\nnr_throttled 0\nthrottled_usec 0");
  write("/cg/job/rank/memory.max", "1073741824");
  write("/cg/job/rank/memory.current", "536870912");
  write("/cg/job/rank/memory.stat", "anon 1\ninactive_file 1000\nactive_file 24");
  write("/cg/job/memory.max", "8589934592");
  write("/cg/job/memory.current", "999");
  const CgroupSample sample = read_cgroup(42, files_);
  EXPECT_EQ(sample.cpu_limit_cores, 1.5);
  EXPECT_EQ(sample.periods, 30);
  EXPECT_EQ(sample.throttled_periods, 12);
  EXPECT_EQ(sample.throttled_s, 2.5);
  EXPECT_EQ(sample.memory_limit_bytes, 1073741824);
  EXPECT_EQ(sample.memory_used_bytes, 536870912);
  EXPECT_EQ(sample.memory_cache_bytes, 1024);
}

TEST_F(MadeUpHost, CgroupVersion1) {
  write("/proc/self/mountinfo", "32 23 0:29 / " + root_ +
                                    "/cpu rw - cgroup cgroup rw,cpu,cpuacct\n" + "33 23 0:30 / " +
                                    root_ + "/memory rw - cgroup cgroup rw,memory");
  write("/proc/42/cgroup", "4:cpu,cpuacct:/job\n3:memory:/box\n0::/");
  write("/cpu/job/cpu.cfs_quota_us", "50000");
  write("/cpu/job/cpu.cfs_period_us", "100000");
  write("/cpu/job/cpu.stat", "nr_periods 7\nnr_throttled 3\nthrottled_time 1500000000");
  write("/memory/box/memory.limit_in_bytes", "9223372036854771712");
  write("/memory/box/memory.usage_in_bytes", "4096");
  write("/memory/box/memory.stat", "inactive_file 1\ntotal_inactive_file 10\ntotal_active_file 5");
  const CgroupSample sample = read_cgroup(42, files_);
  EXPECT_EQ(sample.cpu_limit_cores, 0.5);
  EXPECT_EQ(sample.throttled_periods, 3);
  EXPECT_EQ(sample.throttled_s, 1.5);
  EXPECT_EQ(sample.memory_limit_bytes, std::nullopt);
  EXPECT_EQ(sample.memory_used_bytes, 4096);
  EXPECT_EQ(sample.memory_cache_bytes, 15);
}

TEST_F(MadeUpHost, WithoutControlGroups) {
  const CgroupSample sample = read_cgroup(42, files_);
  EXPECT_EQ(sample.cpu_limit_cores, std::nullopt);
  EXPECT_EQ(sample.memory_used_bytes, std::nullopt);
}

}  // namespace
}  // namespace lockstep::monitor
