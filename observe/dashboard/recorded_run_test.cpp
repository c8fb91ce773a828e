// A record as `lockstep monitor DIR` reads it: whether the run is over, and what is known.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ctime>
#include <filesystem>
#include <fstream>

#include "lockstep/core/document.h"
#include "lockstep/core/folder_for_test.h"
#include "lockstep/monitor/run_record.h"
#include "lockstep/monitor/run_view.h"
#include "observe/dashboard/record_writer.h"

namespace lockstep::dashboard {
namespace {

using monitor::Interval;

class RecordView : public testing::Test {
 protected:
  // Five seconds until now of a program without steps, and the rest after its last sample.
  void write(const monitor::RunFacts& facts) {
    RecordWriter writer(folder_, 0);
    writer.write(facts);
    const double now = static_cast<double>(std::time(nullptr));
    for (int i = 1; i <= 5; ++i) {
      Interval interval{.unix_time_s = now - 6 + i, .seconds = 1};
      interval.host_s[ledger::index(ledger::Phase::kNone)] = 1;
      interval.process = monitor::ProcessRates{.seconds = 1, .cores = 1.5};
      interval.resident_bytes = 3u << 30;
      interval.threads = 7;
      writer.add(0, interval);
    }
    writer.add(0, {.unix_time_s = now - 0.8, .seconds = 0.2});
  }
  std::string state() { return monitor::read_run_view(folder_).state; }
  void log(const std::string& line) {
    std::ofstream(folder_ + "/metrics.jsonl", std::ios::app) << line << "\n";
  }

  TemporaryDirectory directory_;
  std::string folder_ = directory_.path();
};

TEST_F(RecordView, OfAProgramWithoutStepsShowsWhatIsKnown) {
  write({.started_unix_s = 100});
  const monitor::RunView view = monitor::read_run_view(folder_);
  ASSERT_EQ(view.ranks.size(), 1u);
  const Node snapshot = parse_json(monitor::snapshot_json(view), "snapshot");
  const Node& rank = snapshot.at("ranks").items.at(0);
  for (const char* key : {"step", "step_ms", "pid"})
    EXPECT_TRUE(rank.at(key).is(NodeKind::kNull)) << key;
  EXPECT_TRUE(rank.at("budget").entries.empty());
  EXPECT_EQ(rank.at("cores").real, 1.5);
  EXPECT_EQ(rank.at("resident_bytes").integer, 3LL << 30);
  EXPECT_EQ(rank.at("threads").integer, 7);
}

TEST_F(RecordView, ARunEndsWithTheProcessThatRecordsIt) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(60);
    while (true) ::pause();
  }
  const monitor::RunFacts facts{.started_unix_s = 100, .writer = monitor::process_identity(child)};
  write(facts);
  EXPECT_FALSE(facts.writer.empty());
  EXPECT_EQ(state(), "running");
  ::kill(child, SIGKILL);
  siginfo_t ended{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(state(), "killed") << "nobody has waited for it";
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_EQ(state(), "killed");
  EXPECT_THAT(monitor::read_run_view(folder_).message, testing::HasSubstr("it was killed"));
  // What it could still write down counts.
  monitor::RunFacts failed = facts;
  failed.failure = "an error";
  write(failed);
  EXPECT_EQ(state(), "failed");
  write(facts);
  log("{\"step\": 5, \"train_runtime\": 1.5}");
  EXPECT_EQ(state(), "ended");
  EXPECT_FALSE(monitor::has_ended("")) << "not known";
  EXPECT_FALSE(monitor::has_ended("another-boot " + facts.writer));
  EXPECT_FALSE(monitor::has_ended(monitor::process_identity(::getpid())));
  EXPECT_TRUE(monitor::has_ended(monitor::process_identity(::getpid()) + "1")) << "a later process";
}

TEST_F(RecordView, TheRecordAndTheMetricsSayThatItEnded) {
  write({.started_unix_s = 100, .ended_unix_s = 200});
  EXPECT_EQ(state(), "ended");
  write({.started_unix_s = 100, .ended_unix_s = 200, .failure = "rank 0 failed"});
  EXPECT_EQ(state(), "failed");
  EXPECT_EQ(monitor::read_run_view(folder_).message, "Rank 0 failed.");
  write({.world_size = 3,
         .started_unix_s = 100,
         .total_steps = 40,
         .ended_unix_s = 200,
         .failure = "rank 0 failed",
         .failed_ranks = map_node({{"2", text_node("exited with code 3")},
                                   {"0", text_node("killed by SIGKILL")},
                                   {"7", text_node("there is no such rank")}})});
  const monitor::RunView view = monitor::read_run_view(folder_);
  EXPECT_EQ(view.ranks.at(0).status, monitor::RankStatus::kFailed);
  EXPECT_EQ(view.ranks.at(0).exit, "killed by SIGKILL");
  ASSERT_EQ(view.ranks.size(), 2u) << "one has left nothing, and one is known by its failure";
  EXPECT_EQ(view.ranks.at(1).exit, "exited with code 3");
  EXPECT_EQ(view.facts().total_steps, 40);
  EXPECT_TRUE(view.recorded);
  write({.program = "trainer", .started_unix_s = 100, .total_steps = 40, .ended_unix_s = 200});
  EXPECT_THAT(monitor::read_run_view(folder_).message, testing::StartsWith("Stopped on request"));
  write({.started_unix_s = 100});
  EXPECT_EQ(state(), "running") << "of another host, say";
  log("{\"step\": 5, \"loss\": 1}");
  EXPECT_EQ(state(), "running");
  log("{\"step\": 5, \"train_runtime\": 1.5}");
  EXPECT_EQ(state(), "ended");
  write({.started_unix_s = static_cast<double>(std::time(nullptr)) + 5});
  EXPECT_EQ(state(), "running") << "these are of an earlier start";
}

// A launcher makes one before it knows whether the ranks record themselves.
TEST_F(RecordView, AWriterThatWritesNothingLeavesTheEarlierRecord) {
  write({.started_unix_s = 100, .ended_unix_s = 200});
  { const RecordWriter unused(folder_, 0); }
  EXPECT_EQ(state(), "ended");
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/monitor.1"));
}

}  // namespace
}  // namespace lockstep::dashboard
