// The calls that an observer gets for real ranks. It runs in the supervising process, a fork of the
// test, so it writes everything to a file.
#include "launcher/run_observer.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "launcher/supervisor.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"

namespace lockstep::launch {
namespace {

namespace fs = std::filesystem;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

class Notes : public RunObserver {
 public:
  explicit Notes(std::string path) : path_(std::move(path)) {}

  void run_started(const LaunchPlan& plan) override { note("run of " + plan.command[0]); }
  void attempt_started(const AttemptStarted& attempt) override {
    note(fmt::format("attempt {}: {} of {} ranks from {}", attempt.attempt, attempt.local_ranks,
                     attempt.world_size, attempt.first_rank));
  }
  void rank_started(const RankStarted& rank) override {
    note(fmt::format("rank {} started, pid {}, ledger {}, files '{}' '{}'", rank.rank,
                     rank.pid > 0 ? "known" : "unknown", rank.ledger ? "there" : "missing",
                     fs::path(rank.out_file).filename().string(),
                     fs::path(rank.err_file).filename().string()));
  }
  void output_line(int rank, OutputKind kind, std::string_view line) override {
    note(fmt::format("rank {} {}: {}", rank, kind == OutputKind::kOut ? "out" : "err",
                     line.substr(0, 100)));
    if (line == "throw") throw std::runtime_error("an observer's mistake");
  }
  void output_progress(int rank, OutputKind, std::string_view line) override {
    note(fmt::format("rank {} shows: {}", rank, line.substr(0, 40)));
    if (line.size() > 4096) note("too long");
  }
  void rank_ended(const RankEnded& rank) override {
    note(fmt::format("rank {} {}{}", rank.rank, rank.outcome, rank.failed ? ", failed" : ""));
  }
  void attempt_ended(int attempt) override { note(fmt::format("attempt {} ended", attempt)); }
  std::vector<std::string> tick() override { return std::exchange(lines_, {}); }
  std::vector<std::string> run_ended(const RunEnded& run) override {
    note(fmt::format("run ended with {}: {}", run.code, run.cause));
    return {"the observer's last line"};
  }

 private:
  void note(const std::string& text) {
    std::ofstream(path_, std::ios::app) << text << std::endl;
    if (text.find("run of") == 0) lines_.push_back("the observer's first line");
  }

  const std::string path_;
  std::vector<std::string> lines_;
};

class RunObserverTest : public testing::Test {
 protected:
  RunObserverTest() {
    plan_.nproc_per_node = 2;
    plan_.stall_timeout = std::chrono::milliseconds(0);
    plan_.shutdown_timeout = std::chrono::milliseconds(5000);
  }

  // The exit code; what was noted and printed is in notes_ and said_.
  int run(const std::string& script) {
    plan_.command = {"bash", "-c", script};
    Notes observer(folder_ / "notes");
    testing::internal::CaptureStderr();
    const int code = supervise(plan_, &observer);
    said_ = testing::internal::GetCapturedStderr();
    notes_ = read_file(folder_ / "notes");
    return code;
  }

  LaunchPlan plan_;
  TemporaryDirectory folder_;
  std::string notes_;
  std::string said_;
};

TEST_F(RunObserverTest, SeesEveryRankItsLinesAndItsEnd) {
  EXPECT_EQ(run("test -n \"$LOCKSTEP_LEDGER\" || exit 9; printf 'be'; sleep 0.5; echo gun $RANK; "
                "printf 'no newline' >&2"),
            0);
  EXPECT_THAT(notes_, HasSubstr("run of bash\nattempt 0: 2 of 2 ranks from 0\n"));
  for (const char* rank : {"0", "1"}) {
    EXPECT_THAT(notes_, HasSubstr(fmt::format(
                            "rank {} started, pid known, ledger there, files '' ''\n", rank)));
    // A line that came to the console in two parts is one.
    EXPECT_THAT(notes_, HasSubstr(fmt::format("rank {0} out: begun {0}\n", rank)));
    EXPECT_THAT(notes_, HasSubstr(fmt::format("rank {} err: no newline\n", rank)));
    EXPECT_THAT(notes_, HasSubstr(fmt::format("rank {} exited with code 0\n", rank)));
  }
  EXPECT_THAT(notes_, ContainsRegex("attempt 0 ended\nrun ended with 0: \n$"));
  EXPECT_THAT(said_, HasSubstr("the observer's first line\n"));
  EXPECT_THAT(said_, HasSubstr("the observer's last line\n"));
}

TEST_F(RunObserverTest, SeesALineThatHasNotEndedAsATerminalShowsIt) {
  plan_.nproc_per_node = 1;
  plan_.local_ranks_filter = {7};  // not on the console
  // One bar ends with the return, one begins with it; a line without any comes in two parts.
  EXPECT_EQ(run("for i in 10 20 30; do printf \"$i of 30\\r\"; sleep 0.5; done; printf 'end\\n'; "
                "for i in 1 2; do printf \"\\rbar $i\" >&2; sleep 0.5; done; "
                "printf 'load'; sleep 0.5; printf 'ing\\n'; "
                "printf 'x%.0s' {1..5000}; sleep 6"),
            0);
  EXPECT_THAT(notes_, HasSubstr("rank 0 shows: 10 of 30\n"));
  EXPECT_THAT(notes_, HasSubstr("rank 0 shows: 30 of 30\n"));
  EXPECT_THAT(notes_, ContainsRegex("rank 0 shows: bar 1\n(.*\n)*rank 0 shows: bar 2\n"));
  EXPECT_THAT(notes_, HasSubstr("rank 0 shows: load\nrank 0 out: loading\n"));
  EXPECT_THAT(notes_, HasSubstr("rank 0 shows: xxxxxxxx"));
  EXPECT_THAT(notes_, Not(HasSubstr("too long")));
}

// Each return ends what came before it: the launcher holds one state of the bar, not all of them.
TEST_F(RunObserverTest, ABarThatNeverEndsIsNotHeld) {
  plan_.nproc_per_node = 1;
  plan_.local_ranks_filter = {7};  // not on the console
  EXPECT_EQ(run("yes 'a state of the bar' | head -c 12000000 | tr '\\n' '\\r'"), 0);
  EXPECT_THAT(notes_, HasSubstr("rank 0 out: a state of the bar\n"));
  const std::string_view notes = notes_;
  const std::size_t line = notes.find("rank 0 out: ");
  EXPECT_EQ(notes.find("rank 0 out: ", line + 1), notes.npos) << "cut where it was too long";
}

TEST_F(RunObserverTest, SeesAFailureAndTheAttemptAfterIt) {
  plan_.max_restarts = 1;
  EXPECT_EQ(run("if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then exit 0; fi; "
                "if [ $RANK = 1 ]; then kill -9 $$; fi; sleep 60"),
            0);
  EXPECT_THAT(notes_, HasSubstr("rank 1 killed by SIGKILL, failed\n"));
  EXPECT_THAT(notes_, HasSubstr("rank 0 killed by SIGTERM\n")) << "stopped by us: it did not fail";
  EXPECT_THAT(notes_, HasSubstr("attempt 0 ended\nattempt 1: 2 of 2 ranks from 0\n"));
  EXPECT_THAT(notes_, ContainsRegex("attempt 1 ended\nrun ended with 0: \n$"));
}

TEST_F(RunObserverTest, HearsWhyTheRunFailed) {
  EXPECT_EQ(run("if [ $RANK = 1 ]; then exit 3; fi; sleep 60"), 3);
  EXPECT_THAT(notes_, ContainsRegex("run ended with 3: rank 1 on .* failed: exited with code 3\n"));
  // What the launcher itself has to say comes last.
  EXPECT_LT(said_.find("the observer's last line"), said_.find("exited with code 3"));
}

TEST_F(RunObserverTest, AnExceptionEndsTheObservationNotTheRun) {
  EXPECT_EQ(run("echo throw; sleep 0.3; echo later; exit 0"), 0);
  EXPECT_THAT(notes_, Not(HasSubstr("later")));
  EXPECT_THAT(notes_, Not(HasSubstr("ended")));
  const std::string report = "which failed: an observer's mistake\n";
  EXPECT_THAT(said_, HasSubstr(report));
  EXPECT_EQ(said_.find(report), said_.rfind(report)) << said_;
}

TEST_F(RunObserverTest, FilesThatTheRankWritesAreNamed) {
  plan_.log_dir = folder_ / "logs";
  plan_.redirects.all = Streams::kOut;
  EXPECT_EQ(run("echo to the file; echo to the pipe >&2"), 0);
  EXPECT_THAT(notes_, HasSubstr("rank 0 started, pid known, ledger there, files 'stdout.log' ''"));
  EXPECT_THAT(notes_, Not(HasSubstr("to the file")));
  EXPECT_THAT(notes_, HasSubstr("rank 0 err: to the pipe\n"));
}

TEST_F(RunObserverTest, WithoutOneThereAreNoLedgersWhereNoneWasAskedFor) {
  plan_.command = {"bash", "-c", "test -z \"$LOCKSTEP_LEDGER\""};
  EXPECT_EQ(supervise(plan_), 0);
}

}  // namespace
}  // namespace lockstep::launch
