// Real processes, and control groups of both versions in a temporary directory.
#include "lockstep/monitor/cpu_sampler.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <iterator>
#include <string>
#include <thread>

#include "lockstep/core/deadline.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/core/host.h"

namespace lockstep::monitor {
namespace {

using namespace std::chrono_literals;

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
