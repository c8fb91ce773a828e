// What a report leaves out, and where it is found. The rest is tested in supervisor_test.cpp.
#include "launcher/report.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "launcher/node_message.h"
#include "lockstep/core/fd.h"

namespace lockstep::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class StacksTest : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const std::string& path : {file_, stacks_}) ::unlink(path.c_str());
  }
  std::string file_ = ::testing::TempDir() + fmt::format("lockstep_report_{}.json", ::getpid());
  std::string stacks_ = file_ + ".txt";
};

TEST_F(StacksTest, HaveEveryFrameOfWhichTheReportShowsTheProgramsOwn) {
  const std::string frame = "at::f<" + std::string(2000, 'x') + ">()+0x1 (libtorch_cpu.so+0x2)";
  write_file_atomically(
      file_, fmt::format(R"({{"message": {{"message": "the cause", "extraInfo": {{"cpp_stack":
                            ["{}", "{}", "epoch()+0x1 (train+0x2) /src/train.cpp:7"]}}}}}})",
                         frame, frame));
  RankFailure failure;
  failure.rank = 1;
  failure.pid = 77;
  failure.host = "n1";
  failure.cause = "exited with code 1";
  failure.error_file = file_;
  add_error_file(failure, read_error_file(file_));
  failure.stacks = write_stacks(stacks_, {failure});
  EXPECT_EQ(failure.stacks, stacks_);
  EXPECT_THAT(failure.stack, ElementsAre("... 2 frames of LibTorch", "epoch() (/src/train.cpp:7)"));
  const std::string all = read_file(stacks_);
  EXPECT_THAT(all, HasSubstr("rank 1 (pid 77) on n1: the cause\n    at::f<xxx"));
  EXPECT_THAT(all, HasSubstr("\n    epoch()+0x1 (train+0x2) /src/train.cpp:7\n"));
  const RankFailure copy = failure_from_json(failure_to_json(failure));
  const std::string text = failure_report(copy);
  EXPECT_TRUE(
      text.starts_with("[launch] rank 1 on n1 failed: exited with code 1: the cause\n"
                       "  stack:"))
      << text;
  EXPECT_THAT(text, HasSubstr("\n  every frame: " + stacks_));
}

TEST_F(StacksTest, WithoutMoreFramesThereIsNoFile) {
  for (const char* extra : {"", R"x(, "extraInfo": {"cpp_stack": ["f()+0x1 (a+0x2)"]})x",
                            R"x(, "extraInfo": {"py_callstack": "Traceback"})x"}) {
    write_file_atomically(file_, fmt::format(R"({{"message": {{"message": "m"{}}}}})", extra));
    RankFailure failure;
    failure.error_file = file_;
    EXPECT_EQ(write_stacks(stacks_, {failure}), "") << extra;
  }
}

TEST(LaterFailures, RanksThatSayTheSameAreOneLine) {
  RankFailure first;
  first.rank = 3;
  first.message = "[world] rank 3: sum #4 was not finished after 5001 ms: rank 9 did not arrive.";
  const auto message = [](int rank, int late) {
    return fmt::format(
        "[world] rank {}: sum #4 was not finished after {} ms: rank 9 did not arrive.", rank, late);
  };
  std::vector<LaterFailure> later;
  for (const int rank : {2, 30, 1, 0})
    later.push_back({rank, "with exit code 1", 0.01 * rank, message(rank, 5000 + rank)});
  later.push_back({5, "with exit code 1", 0.4, "another"});
  later.push_back({6, "with exit code 1", 0.5, "another"});
  later.push_back({7, "with exit code 2", 0.6, ""});
  EXPECT_THAT(later_lines(first, later),
              ElementsAre("ranks 0-2, 30 with exit code 1, 0.30 s later: the same",
                          "ranks 5-6 with exit code 1, 0.50 s later: another",
                          "rank 7 with exit code 2, 0.60 s later"));
  // Another operation, or another rank that is missing, is another error.
  later = {{1, "with exit code 1", 0,
            "[world] rank 1: sum #5 was not finished after 5001 ms: "
            "rank 9 did not arrive."}};
  EXPECT_THAT(later_lines(first, later)[0], Not(HasSubstr("the same")));
}

// The message names a rank, which is the number of another rank.
TEST(LaterFailures, TheSameWordsAreTheSame) {
  RankFailure first;
  first.rank = 3;
  first.message = "ranks disagree: rank 0 has returned, rank 1 called sum.";
  EXPECT_THAT(later_lines(first, {{1, "with exit code 1", 0.02, first.message},
                                  {2, "with exit code 1", 0.06, first.message}}),
              ElementsAre("ranks 1-2 with exit code 1, 0.06 s later: the same"));
}

TEST(ErrorLines, OfRanksThatNoReportNames) {
  RankFailure silent;
  silent.rank = 0;
  silent.cause = "killed by SIGTERM";
  RankFailure said;
  said.rank = 1;
  said.cause = "with exit code 1";
  said.message = "cannot save\nmore";
  EXPECT_THAT(error_lines({silent, said}),
              ElementsAre("[launch] rank 1 with exit code 1: cannot save"));
}

}  // namespace
}  // namespace lockstep::launch
