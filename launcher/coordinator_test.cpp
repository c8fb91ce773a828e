// Node 0's decisions, from the messages it gets and sends. Real launchers are in tests/launch.
#include "launcher/coordinator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <vector>

namespace lockstep::launch {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CoordinatorTest : public ::testing::Test {
 protected:
  using Kind = Message::Kind;
  void SetUp() override {
    plan_.nnodes = 2;
    plan_.max_restarts = 1;
    coordinator_ = std::make_unique<Coordinator>(
        loop_, plan_,
        Coordinator::Actions{[this](const Message& message) { sent_.push_back(message); },
                             [this] { ++waits_; }, [this] { return missing_; }});
  }
  Message message(Kind kind, int attempt = 0) {
    Message result;
    result.kind = kind;
    result.attempt = attempt;
    return result;
  }
  Message failed(int node, int rank, int attempt = 0) {
    Message result = message(Kind::kFailed, attempt);
    result.failure.emplace();
    result.failure->node = node;
    result.failure->rank = rank;
    result.failure->code = 3;
    return result;
  }
  Message stop(int signal) {
    Message result = message(Kind::kStop);
    result.signal = signal;
    return result;
  }
  std::vector<Kind> kinds() const {
    std::vector<Kind> result;
    for (const Message& sent : sent_) result.push_back(sent.kind);
    return result;
  }
  void run_for(milliseconds time) {
    loop_.after(time, [this] { loop_.stop(); });
    loop_.run();
  }

  EventLoop loop_;
  LaunchPlan plan_;
  std::vector<Message> sent_;
  int waits_ = 0;  // for lost nodes
  std::vector<int> missing_ = {1};
  std::unique_ptr<Coordinator> coordinator_;
};

TEST_F(CoordinatorTest, TheFirstFailureCountsAndNothingStartsBeforeAllAreDown) {
  coordinator_->begin();
  coordinator_->on_message(1, failed(1, 2));
  coordinator_->on_message(0, failed(0, 0));  // too late
  coordinator_->on_message(1, message(Kind::kDown));
  EXPECT_THAT(kinds(), ElementsAre(Kind::kStart, Kind::kFailed));
  coordinator_->on_message(0, message(Kind::kDown));
  EXPECT_THAT(kinds(), ElementsAre(Kind::kStart, Kind::kFailed, Kind::kRestart));
  EXPECT_EQ(sent_.back().failure->rank, 2);
  run_for(Coordinator::backoff(0) + milliseconds(50));
  EXPECT_EQ(sent_.back().kind, Kind::kStart);
  EXPECT_EQ(sent_.back().attempt, 1);
  coordinator_->on_message(0, failed(0, 1, 0));  // from the attempt that is over
  EXPECT_EQ(sent_.back().kind, Kind::kStart);
  coordinator_->on_message(0, failed(0, 1, 1));
  Message down = message(Kind::kDown, 1);
  coordinator_->on_message(1, down);
  down.failure = failed(0, 0).failure;  // an earlier cause on the same node
  coordinator_->on_message(0, down);
  EXPECT_EQ(sent_.back().kind, Kind::kEnd);
  EXPECT_EQ(sent_.back().code, 3);
  EXPECT_EQ(sent_.back().failure->rank, 0);
}

TEST_F(CoordinatorTest, WhoLeftOnANodeThatIsDownIsTheCauseOfALaterFailure) {
  plan_.max_restarts = 0;
  coordinator_->begin();
  Message down = message(Kind::kDown);
  down.failure = failed(1, 2).failure;
  coordinator_->on_message(1, down);
  EXPECT_THAT(kinds(), ElementsAre(Kind::kStart)) << "that it left is not yet a failure";
  coordinator_->on_message(0, failed(0, 0));
  EXPECT_EQ(sent_.back().failure->rank, 2);
  EXPECT_THAT(sent_.back().failure->others, ElementsAre(HasSubstr("rank 0 on ")));
  coordinator_->on_message(0, message(Kind::kDown));
  EXPECT_EQ(sent_.back().kind, Kind::kEnd);
  EXPECT_EQ(sent_.back().failure->rank, 2);
}

TEST_F(CoordinatorTest, AStopRequestIsNoFailureAndEndsWithItsCode) {
  coordinator_->begin();
  coordinator_->on_message(1, stop(15));
  coordinator_->on_message(0, failed(0, 0));
  coordinator_->on_message(0, message(Kind::kDown));
  coordinator_->on_message(1, message(Kind::kDown));
  EXPECT_THAT(kinds(), ElementsAre(Kind::kStart, Kind::kStop, Kind::kEnd));
  EXPECT_EQ(sent_.back().code, 143);
  EXPECT_FALSE(sent_.back().failure);
}

TEST_F(CoordinatorTest, AStopThatFailedEndsWithTheRanksCode) {
  for (const bool failed_stop : {false, true}) {
    SetUp();
    coordinator_->begin();
    coordinator_->on_message(0, stop(15));
    Message down = message(Kind::kDown);
    down.failure = failed(1, 2).failure;  // from a rank that lost its peer on the other host
    coordinator_->on_message(1, down);
    down.failure->rank = 0;
    down.failure->restartable = !failed_stop;
    coordinator_->on_message(0, down);
    EXPECT_EQ(sent_.back().kind, Kind::kEnd);
    EXPECT_EQ(sent_.back().code, failed_stop ? 3 : 143);
    EXPECT_EQ(sent_.back().failure.has_value(), failed_stop);
    if (failed_stop) {
      EXPECT_EQ(sent_.back().failure->rank, 0);
    }
  }
}

TEST_F(CoordinatorTest, AFailureBeforeARequestIsTheCause) {
  coordinator_->begin();
  coordinator_->on_message(0, failed(0, 1));
  coordinator_->on_message(0, stop(2));
  coordinator_->on_message(0, message(Kind::kDown));
  coordinator_->on_message(1, message(Kind::kDown));
  EXPECT_EQ(sent_.back().kind, Kind::kEnd);
  EXPECT_EQ(sent_.back().code, 3);
}

TEST_F(CoordinatorTest, ANodeThatIsLostInThePauseIsWaitedFor) {
  plan_.nnodes = 3;
  coordinator_->begin();
  coordinator_->on_message(1, failed(1, 2));
  for (const int node : {0, 1, 2}) coordinator_->on_message(node, message(Kind::kDown));
  EXPECT_EQ(sent_.back().kind, Kind::kRestart);
  coordinator_->on_lost(1, "n1", "gone");
  missing_ = {1, 2};
  coordinator_->on_lost(2, "n2", "gone");
  EXPECT_THAT(sent_.back().text, HasSubstr("for node 1, 2: start"));
  EXPECT_EQ(waits_, 1) << "for both";
  run_for(Coordinator::backoff(0) + milliseconds(50));
  EXPECT_EQ(sent_.back().kind, Kind::kRestart);
  coordinator_->on_message(0, stop(15));
  EXPECT_EQ(sent_.back().kind, Kind::kEnd);
  EXPECT_EQ(sent_.back().code, 143);
}

TEST_F(CoordinatorTest, OfSeveralThatWereLostTheOneThatIsMissingIsNamed) {
  plan_.nnodes = 4;
  coordinator_->begin();
  coordinator_->on_lost(1, "n1", "gone");
  coordinator_->on_lost(2, "n2", "gone");
  missing_ = {1, 2};
  for (const int node : {0, 3}) coordinator_->on_message(node, message(Kind::kDown));
  EXPECT_THAT(sent_.back().text, HasSubstr("for node 1, 2: start"));
  missing_ = {2, 3};  // the first is here again
  coordinator_->on_lost(3, "n3", "gone");
  EXPECT_THAT(sent_.back().text, HasSubstr("for node 2, 3: start"));
  coordinator_->give_up();
  EXPECT_THAT(sent_.back().failure->cause, HasSubstr("the launcher of node 2 on n2 is lost"));
  EXPECT_THAT(sent_.back().failure->cause, HasSubstr("--node-rank=2 came back within 300 s"));
}

TEST_F(CoordinatorTest, ARunOfWhichNodesHaveSeenAttemptsContinuesCounting) {
  plan_.max_restarts = 2;
  coordinator_->begin({{2}, {2}}, 1);
  EXPECT_EQ(sent_.back().attempt, 1);
  SetUp();
  coordinator_->begin({{2}, {2}}, 1000);
  EXPECT_EQ(sent_.back().attempt, 1) << "a peer cannot exceed --max-restarts=1";
}

TEST_F(CoordinatorTest, ANodeThatNeverComesDownIsNotWaitedForForever) {
  plan_.shutdown_timeout = milliseconds(-14'950);  // the slack beyond it is 15 s
  coordinator_->begin();
  coordinator_->on_message(0, failed(0, 0));
  coordinator_->on_message(0, message(Kind::kDown));
  run_for(milliseconds(150));
  EXPECT_EQ(sent_.back().kind, Kind::kEnd);
  EXPECT_EQ(sent_.back().code, 3);
}

TEST(Coordinator, PausesGrowAndHaveABound) {
  EXPECT_EQ(Coordinator::backoff(0), milliseconds(500));
  EXPECT_EQ(Coordinator::backoff(1), milliseconds(1000));
  EXPECT_EQ(Coordinator::backoff(1000), milliseconds(30'000));
}

}  // namespace
}  // namespace lockstep::launch
