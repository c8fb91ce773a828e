// When a stall is reported: the times, with this process as the rank. Real ranks are in
// tests/ledger.
#include "launcher/stall_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/core/fd.h"

namespace lockstep::launch {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

class Watch : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    static ledger::File file = ledger::File::create({.rank = 0, .world_size = 2});
    file_ = &file;
    ::setenv(ledger::kVariable, file.variable().c_str(), 1);
    ::setenv("RANK", "0", 1);
    ::setenv("WORLD_SIZE", "2", 1);
    ASSERT_TRUE(ledger::open());
  }

  void watch(milliseconds stall_time) {
    watch_ = std::make_unique<StallWatch>(
        loop_, StallOptions{.stall_time = stall_time},
        StallEvents{[this](const StallReport& report) { reports_.push_back(report.text); },
                    [this](const std::string& line) { busy_.push_back(line); }});
    watch_->add({.rank = 0, .pid = ::getpid(), .ledger = file_});
  }
  void at(milliseconds time, EventLoop::Task task) { loop_.after(time, std::move(task)); }
  void run_for(milliseconds time) {
    at(time, [this] { loop_.stop(); });
    loop_.run();
  }
  // Stall times as printed in the reports.
  std::vector<double> stall_times() const {
    std::vector<double> times;
    for (const std::string& text : reports_)
      times.push_back(std::strtod(text.c_str() + text.find("stall time ") + 11, nullptr));
    return times;
  }

  static ledger::File* file_;
  EventLoop loop_;
  std::unique_ptr<StallWatch> watch_;
  std::vector<std::string> reports_;
  std::vector<std::string> busy_;
};
ledger::File* Watch::file_ = nullptr;

ledger::Ticket post(std::uint64_t sequence) {
  return ledger::post({.name = "all_reduce", .dtype = "Float", .sequence = sequence});
}

TEST_F(Watch, ReportsAStallOnceAndTheNextOneAfterAMovement) {
  watch(milliseconds(200));
  const ledger::Ticket first = post(1);
  ledger::Ticket second = 0;
  at(milliseconds(1500), [&] {
    EXPECT_EQ(reports_.size(), 1u) << "one stall";
    ledger::ended(first, ledger::End::kFinished);
    second = post(2);
  });
  run_for(milliseconds(3000));
  ledger::ended(second, ledger::End::kFinished);
  ASSERT_EQ(reports_.size(), 2u);
  EXPECT_THAT(reports_[0], HasSubstr("#1 all_reduce (Float, 0 B): posted for "));
  EXPECT_THAT(reports_[1], HasSubstr("#2 all_reduce (Float, 0 B): posted for "));
  EXPECT_TRUE(busy_.empty());
}

// A rank that does not answer the request for its stack, so that there is time to move meanwhile.
[[noreturn]] void move_before_the_stack(const ledger::File& file, int stack_signal) {
  ::signal(stack_signal, SIG_DFL);  // its ledger is another one than this process's
  ::setenv(ledger::kVariable, file.variable().c_str(), 1);
  ::setenv("RANK", "1", 1);
  // A thread of its own: the forked one still has the parent's number in its thread-local memory.
  std::thread([stack_signal] {
    if (!ledger::open()) ::_exit(1);
    sigset_t request;
    ::sigemptyset(&request);
    ::sigaddset(&request, stack_signal);
    ::pthread_sigmask(SIG_BLOCK, &request, nullptr);
    const ledger::Ticket ticket = post(1);
    std::this_thread::sleep_for(milliseconds(450));
    ledger::ended(ticket, ledger::End::kFinished);
    std::this_thread::sleep_for(std::chrono::seconds(30));
  }).join();
  ::_exit(0);
}

TEST_F(Watch, AStallThatEndsWhileStacksAreCollectedIsNone) {
  const ledger::File file = ledger::File::create({.rank = 1, .world_size = 2});
  const int stack_signal = ledger::stack_signal();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) move_before_the_stack(file, stack_signal);
  watch(milliseconds(200));
  watch_->add({.rank = 1, .pid = child, .ledger = &file});
  run_for(milliseconds(800));
  watch_.reset();
  end_child(child);
  EXPECT_TRUE(reports_.empty()) << reports_.front();
}

TEST_F(Watch, WhoComputesIsBusy) {
  watch(milliseconds(200));
  ledger::set_phase(ledger::Phase::kForward);
  run_for(milliseconds(1500));
  EXPECT_TRUE(reports_.empty());
  EXPECT_EQ(busy_.size(), 1u) << "a line for one quiet";
}

TEST_F(Watch, WhoComputesAfterAnEnqueuedOperationIsBusy) {
  watch(milliseconds(200));
  ledger::ended(post(3), ledger::End::kReleased);
  run_for(milliseconds(1500));
  EXPECT_TRUE(reports_.empty()) << reports_.front();
  EXPECT_EQ(busy_.size(), 1u);
}

// Two ranks at the same enqueued call, whose stacks do not show that they wait.
TEST_F(Watch, RanksThatComputeAfterTheSameOperationAreBusy) {
  watch(milliseconds(200));
  watch_->add({.rank = 1, .pid = ::getpid(), .ledger = file_});
  ledger::ended(post(4), ledger::End::kReleased);
  run_for(milliseconds(2500));
  EXPECT_TRUE(reports_.empty()) << reports_.front();
  EXPECT_EQ(busy_.size(), 1u) << "a line for one quiet";
}

TEST_F(Watch, IgnoresARankWhoseBodyHasReturned) {
  watch(milliseconds(200));
  const ledger::Phase before = ledger::set_phase(ledger::Phase::kEnded);
  run_for(milliseconds(800));
  ledger::set_phase(before);
  EXPECT_TRUE(reports_.empty() && busy_.empty());
}

// Last: the ledger has steps from here on.
TEST_F(Watch, WaitsForTenMedianSteps) {
  watch(milliseconds(100));
  for (int step = 1; step <= 5; ++step)
    at(milliseconds(100 * step), [step] { ledger::set_step(step); });
  ledger::Ticket ticket = 0;
  at(milliseconds(600), [&] { ticket = post(3); });
  at(milliseconds(1400), [&] { EXPECT_TRUE(reports_.empty()) << reports_.front(); });
  run_for(milliseconds(4000));
  ledger::ended(ticket, ledger::End::kFinished);
  ASSERT_EQ(reports_.size(), 1u);
  EXPECT_GE(stall_times()[0], 0.9) << "ten steps of 100 ms";
}

}  // namespace
}  // namespace lockstep::launch
