// What a rank did is in its file, and a file that cannot be written stops nobody.
#include "lockstep/monitor/rank_recorder.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/core/ledger.h"

namespace lockstep::monitor {
namespace {

using namespace std::chrono_literals;
using ledger::Counter;
using ledger::Phase;
using testing::HasSubstr;
using testing::Not;

double total(const PhaseSeconds& seconds) {
  return std::accumulate(seconds.begin(), seconds.end(), 0.0);
}

std::string text_of(const std::string& path) {
  try {
    return read_file(path);
  } catch (const Error&) {
    return "";
  }
}

bool wait_until(const std::function<bool()>& there) {
  const auto deadline = Deadline::after(30s);
  while (!there()) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(2ms);
  }
  return true;
}

class RankRecorderTest : public testing::Test {
 protected:
  RankRecorderTest() { write_facts(dir_.path(), {.world_size = 2}); }

  RankRecorderOptions every(std::chrono::milliseconds interval) const {
    return {.directory = dir_.path(), .rank = 1, .interval = interval};
  }
  std::string file() const { return dir_ / "monitor/rank_1.jsonl"; }
  std::size_t lines() const {
    const std::string text = text_of(file());
    return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
  }
  std::vector<Interval> read() const {
    const RunRecord run = read_run(dir_.path());
    EXPECT_EQ(run.facts.world_size, 2);
    if (run.ranks.size() != 1u) return {};
    EXPECT_EQ(run.ranks[0].rank, 1);
    return run.ranks[0].intervals;
  }

  const io::TemporaryDirectory dir_;
};

void train(int steps) {
  for (int step = 0; step < steps; ++step) {
    {
      const ledger::PhaseScope data(Phase::kData);
      std::this_thread::sleep_for(2ms);
    }
    const ledger::PhaseScope forward(Phase::kForward);
    std::this_thread::sleep_for(4ms);
    ledger::add(Counter::kMicroBatches, 3);
    ledger::add_device_time(Phase::kForward, 1'000'000);
    ledger::count_step();
  }
}

TEST_F(RankRecorderTest, IntervalsAddUpToWhatTheRankDid) {
  const auto start = std::chrono::steady_clock::now();
  const std::int64_t first = ledger::step();
  {
    const RankRecorder recorder(every(20ms));
    train(40);
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  const std::vector<Interval> intervals = read();
  ASSERT_GE(intervals.size(), 3u);
  double seconds = 0;
  double data = 0;
  double device = 0;
  std::int64_t steps = 0;
  std::uint64_t micro_batches = 0;
  double end = 0;
  for (const Interval& interval : intervals) {
    EXPECT_NEAR(total(interval.host_s), interval.seconds, 1e-6);
    EXPECT_GT(interval.unix_time_s, end);
    if (end > 0) {
      // Two clocks, between which a busy machine may hold up the recorder.
      EXPECT_NEAR(interval.unix_time_s - interval.seconds, end, 5);
    }
    end = interval.unix_time_s;
    seconds += interval.seconds;
    data += interval.host_s[ledger::index(Phase::kData)];
    device += interval.device_s[ledger::index(Phase::kForward)];
    steps += interval.steps;
    micro_batches += interval.counts[ledger::index(Counter::kMicroBatches)];
    EXPECT_GT(interval.resident_bytes, 1u << 20);
    EXPECT_GE(interval.threads, 2);
  }
  EXPECT_LE(seconds, elapsed.count());
  EXPECT_GE(seconds, 40 * 0.006);
  EXPECT_GE(data, 40 * 0.002);
  EXPECT_NEAR(device, 0.040, 1e-9);
  EXPECT_EQ(steps, 40);
  EXPECT_EQ(micro_batches, 120u);
  EXPECT_EQ(intervals.back().step, std::max<std::int64_t>(first, 0) + 40);
  EXPECT_TRUE(intervals.back().process.has_value());
}

TEST_F(RankRecorderTest, ARunThatContinuesAppendsAndCutsATornLine) {
  const std::string whole = interval_json({.unix_time_s = 5, .seconds = 1}) + "\n";
  for (const std::string& torn : {std::string(), std::string("{\"unix_ti"),
                                  "{\"unix_time_s\":\"" + std::string(10'000, 'x')}) {
    io::put(file(), whole + torn);
    { const RankRecorder recorder(every(1h)); }
    EXPECT_EQ(read().size(), 2u) << torn.size();
    io::put(file(), torn);
    { const RankRecorder recorder(every(1h)); }
    EXPECT_EQ(read().size(), 1u) << torn.size();
  }
}

TEST_F(RankRecorderTest, TheFirstIntervalOfEachStartIsMarked) {
  for (int start = 0; start < 2; ++start) {
    const std::size_t before = lines();
    const RankRecorder recorder(every(5ms));
    ASSERT_TRUE(wait_until([&] { return lines() >= before + 2; }));
  }
  const std::vector<Interval> intervals = read();
  EXPECT_TRUE(intervals[0].start);
  EXPECT_FALSE(intervals[1].start);
  EXPECT_EQ(std::ranges::count_if(intervals, &Interval::start), 2);
}

TEST_F(RankRecorderTest, ALongRunWritesLessOften) {
  auto options = every(20ms);
  options.fine_lines = 3;
  {
    const RankRecorder recorder(options);
    ASSERT_TRUE(wait_until([&] { return lines() >= 5; }));
  }
  const std::vector<Interval> intervals = read();
  EXPECT_GE(intervals[3].seconds, 0.2);
  EXPECT_GE(intervals[4].seconds, 0.2);
}

TEST_F(RankRecorderTest, AFullDiskIsReportedOnce) {
  std::filesystem::create_symlink("/dev/full", file());
  testing::internal::CaptureStderr();
  {
    const RankRecorder recorder(every(5ms));
    train(10);
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("[record]"));
  EXPECT_THAT(said, HasSubstr("Training continues"));
  EXPECT_EQ(said.find("[record]"), said.rfind("[record]")) << said;
}

TEST_F(RankRecorderTest, ALostFolderIsReportedOnceAndMadeAgain) {
  testing::internal::CaptureStderr();
  {
    const RankRecorder recorder(every(5ms));
    EXPECT_TRUE(wait_until([&] { return lines() >= 1; }));
    std::filesystem::remove_all(dir_ / "monitor");
    EXPECT_TRUE(wait_until([&] { return lines() >= 2; }));
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("rank_1.jsonl"));
  EXPECT_EQ(said.find("[record]"), said.rfind("[record]")) << said;
}

TEST_F(RankRecorderTest, WhatCouldNotBeWrittenIsPartOfTheNextInterval) {
  std::filesystem::remove_all(dir_ / "monitor");
  io::put(dir_ / "monitor", "in the way");
  testing::internal::CaptureStderr();
  {
    const RankRecorder recorder(every(5ms));
    train(10);
    std::filesystem::remove(dir_ / "monitor");
    EXPECT_TRUE(wait_until([&] { return lines() >= 1; }));
  }
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("monitor"));
  write_facts(dir_.path(), {.world_size = 2});
  const std::vector<Interval> intervals = read();
  ASSERT_GE(intervals.size(), 1u);
  EXPECT_GE(intervals[0].seconds, 0.06);
  // The last step may come between a look at the ledger and its line.
  EXPECT_GE(intervals[0].steps, 9);
  std::int64_t steps = 0;
  for (const Interval& interval : intervals) steps += interval.steps;
  EXPECT_EQ(steps, 10);
}

TEST_F(RankRecorderTest, ADiskThatDoesNotAnswerIsLeftBehind) {
  ASSERT_EQ(::mkfifo(file().c_str(), 0644), 0);  // whose buffer fills up
  const Fd reader(::open(file().c_str(), O_RDWR | O_CLOEXEC));
  auto options = every(1ms);
  options.end_limit = 50ms;
  const auto before = std::chrono::steady_clock::now();
  {
    const RankRecorder recorder(options);
    std::this_thread::sleep_for(500ms);  // some 64 KiB
  }
  EXPECT_LT(std::chrono::steady_clock::now() - before, 20s);
}

TEST_F(RankRecorderTest, TheFirstRankOfAHostSamplesItsGpus) {
  const std::string script = dir_ / "nvml.txt";
  io::put(script, "devices 1\n0 name Fake H200\n0 uuid GPU-aaaa\n0 utilisation 97\n");
  ::setenv("FAKE_NVML_SCRIPT", script.c_str(), 1);
  auto options = every(10ms);
  options.gpus = true;
  options.host = 3;
  options.nvml = LOCKSTEP_FAKE_NVML_NEW;
  {
    const RankRecorder recorder(options);
    EXPECT_TRUE(wait_until([&] { return text_of(dir_ / "monitor/gpus_3.jsonl").size() > 300; }));
  }
  const RunRecord run = read_run(dir_.path());
  ASSERT_EQ(run.gpus.size(), 1u);
  EXPECT_EQ(run.gpus[0].host, 3);
  ASSERT_EQ(run.gpus[0].gpus.size(), 1u);
  EXPECT_EQ(run.gpus[0].gpus[0].uuid, "GPU-aaaa");
  ASSERT_GE(run.gpus[0].samples.size(), 2u);
  EXPECT_EQ(run.gpus[0].samples[0].gpus[0].utilisation_percent, 97u);
  EXPECT_LT(run.gpus[0].samples[0].unix_time_s, run.gpus[0].samples[1].unix_time_s);
}

TEST_F(RankRecorderTest, WithoutADriverThereIsNoFileOfGpus) {
  auto options = every(5ms);
  options.gpus = true;
  options.nvml = "/nowhere/libnvidia-ml.so.1";
  testing::internal::CaptureStderr();
  {
    const RankRecorder recorder(options);
    train(5);
  }
  EXPECT_THAT(testing::internal::GetCapturedStderr(), Not(HasSubstr("[record]")));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "monitor/gpus_0.jsonl"));
  EXPECT_GE(read().size(), 1u);
}

TEST(ThrottledShare, IsThatOfThePeriodsBetweenTwoReadings) {
  const CgroupSample before{.periods = 100, .throttled_periods = 10};
  EXPECT_EQ(throttled_share(before, {.periods = 110, .throttled_periods = 15}), 0.5);
  EXPECT_EQ(throttled_share(before, before), std::nullopt);
  EXPECT_EQ(throttled_share(before, {.periods = 5, .throttled_periods = 1}), std::nullopt);
  EXPECT_EQ(throttled_share({}, before), std::nullopt);
}

}  // namespace
}  // namespace lockstep::monitor
