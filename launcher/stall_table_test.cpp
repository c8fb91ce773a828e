// Which rank is behind, from ledgers alone: the cases in which sequence numbers show it, and those
// in which they do not. Real processes that stall are in tests/ledger.

#include "launcher/stall_table.h"

#include <dlfcn.h>
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

#include "launcher/stall_watch.h"
#include "lockstep/core/fd.h"

namespace lockstep::launch {

namespace {

using ledger::Record;
using ledger::State;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

// "all_reduce:4096", "broadcast:16@0" (root), "all_reduce:8 of g"; the last one is under way.
struct Calls {
  std::vector<Record> records;

  Calls& add(const std::string& operation, std::uint64_t bytes, const std::string& group = "",
             std::uint64_t call_site = 0x1100) {
    Record record;
    record.ticket = records.size() + 1;
    record.operation = operation;
    record.group = group;
    record.dtype = "Float";
    record.bytes = bytes;
    record.state = State::kFinished;
    record.call_site = call_site;
    record.sequence = 1;
    for (const Record& other : records)
      if (other.group == group) record.sequence = other.sequence + 1;
    records.push_back(record);
    return *this;
  }
  Calls& open(State state = State::kStarted) {
    records.back().state = state;
    return *this;
  }
};

RankView rank_with(int rank, const Calls& calls, char state = 'S') {
  RankView view;
  view.ledger.rank = rank;
  view.ledger.pid = 100 + rank;
  view.ledger.records = calls.records;
  view.ledger.modules = {{0x1000, 0x1000, 0x2000, "/none"}};
  view.process.state = state;
  return view;
}

TEST(StallTable, WhoLacksACallIsBehind) {
  const std::vector<RankView> ranks = {
      rank_with(0, Calls().add("all_reduce", 8).add("all_reduce", 8).open()),
      rank_with(1, Calls().add("all_reduce", 8)),
      rank_with(2, Calls().add("all_reduce", 8).add("all_reduce", 8).open())};
  EXPECT_THAT(ranks_behind(ranks), ElementsAre(1));
  const auto missing = first_mismatch(ranks, CollectiveMismatch::Kind::kMissing);
  ASSERT_TRUE(missing);
  EXPECT_EQ(missing->sequence, 2u);
  EXPECT_FALSE(first_mismatch(ranks, CollectiveMismatch::Kind::kOperation));
}

TEST(StallTable, NobodyIsBehindWhereNobodyWaits) {
  const std::vector<RankView> ranks = {
      rank_with(0, Calls().add("all_reduce", 8).add("all_reduce", 8)),
      rank_with(1, Calls().add("all_reduce", 8))};
  EXPECT_FALSE(first_mismatch(ranks, CollectiveMismatch::Kind::kMissing));
}

TEST(StallTable, TheFewerAreTheOddOnes) {
  const std::vector<RankView> ranks = {
      rank_with(0, Calls().add("all_reduce", 8).add("all_reduce", 64).open()),
      rank_with(1, Calls().add("all_reduce", 8).add("all_reduce", 32).open()),
      rank_with(2, Calls().add("all_reduce", 8).add("all_reduce", 64).open())};
  EXPECT_THAT(ranks_behind(ranks), ElementsAre(1));
  EXPECT_EQ(first_mismatch(ranks, CollectiveMismatch::Kind::kOperation)->sequence, 2u);
}

TEST(StallTable, SizesThatMayDifferAreNotCompared) {
  const std::vector<RankView> ranks = {rank_with(0, Calls().add("all_to_all", 8).open()),
                                       rank_with(1, Calls().add("all_to_all", 9).open())};
  EXPECT_FALSE(first_mismatch(ranks, CollectiveMismatch::Kind::kOperation));
  EXPECT_THAT(ranks_behind(ranks), IsEmpty());
}

// Two worlds in two orders: all wait, each in a call that others have not made.
TEST(StallTable, TheRankThatMostOthersWaitForIsBehind) {
  const auto member = [] { return Calls().add("connect", 0, "a").add("connect", 0, "b"); };
  const std::vector<RankView> ranks = {rank_with(0, member().add("all_reduce", 8, "b").open()),
                                       rank_with(1, member().add("all_reduce", 8, "a").open()),
                                       rank_with(2, member().add("all_reduce", 8, "a").open())};
  EXPECT_THAT(ranks_behind(ranks), ElementsAre(0));
}

TEST(StallTable, AStoppedRankExplainsEverything) {
  const Calls all = Calls().add("all_reduce", 8).open();
  const std::vector<RankView> ranks = {rank_with(0, all), rank_with(1, all, 'T')};
  const StallReport report = describe_stall(ranks, {.quiet_s = 2.5, .stall_s = 2});
  EXPECT_THAT(report.behind, ElementsAre(1));
  EXPECT_THAT(report.text,
              HasSubstr("[launch] stall: no rank has moved for 2.5 s (stall time 2.0 s). Rank 1 is "
                        "behind: it is stopped (kill -CONT 101 continues it)."));
}

TEST(StallTable, ARankWithoutAWorldIsBehind) {
  std::vector<RankView> ranks = {rank_with(0, {}), rank_with(1, {})};
  ranks[1].ledger.pid = 0;
  EXPECT_THAT(describe_stall(ranks, {}).cause,
              HasSubstr("Rank 1 is behind: it has not created its world yet."));
}

TEST(StallTable, TheOneThatIsBehindMayBeElsewhere) {
  const Calls all = Calls().add("all_reduce", 8).open();
  const std::vector<RankView> ranks = {rank_with(0, all), rank_with(1, all)};
  EXPECT_THAT(describe_stall(ranks, {.other_hosts = true}).text,
              HasSubstr("no rank of this host has moved"));
  EXPECT_THAT(describe_stall(ranks, {.other_hosts = true}).cause, HasSubstr("on another host"));
  EXPECT_FALSE(describe_stall(ranks, {.other_hosts = true}).sure) << "that one may be at work";
  EXPECT_TRUE(describe_stall(ranks, {}).sure);
  EXPECT_THAT(describe_stall(ranks, {}).cause, HasSubstr("all wait in the same call"));
}

// Its peers in that group may be at work on another host, which is healthy; what it does alone is
// seen here.
TEST(StallTable, OnlyARankThatWaitsForNobodyIsSurelyBehindWhereOtherHostsAreNotSeen) {
  const auto member = [] { return Calls().add("connect", 0).add("connect", 0, "a"); };
  std::vector<RankView> ranks = {rank_with(0, member().add("all_reduce", 8).open()),
                                 rank_with(1, member().add("all_reduce", 8, "a").open())};
  EXPECT_THAT(ranks_behind(ranks), ElementsAre(1));
  EXPECT_FALSE(describe_stall(ranks, {.other_hosts = true}).sure);
  EXPECT_TRUE(describe_stall(ranks, {}).sure);
  ranks[1].ledger.records.pop_back();
  EXPECT_TRUE(describe_stall(ranks, {.other_hosts = true}).sure);
  ranks[1] = rank_with(1, member().add("all_gather", 8).open());
  EXPECT_TRUE(describe_stall(ranks, {.other_hosts = true}).sure) << "these two never match";
}

// A skipped call shifts the numbers: the operations are the same, but their places are not.
TEST(StallTable, ASkippedCallShowsInThePlaces) {
  const std::vector<RankView> ranks = {rank_with(0, Calls()
                                                        .add("all_reduce", 8, "", 0x1100)
                                                        .add("all_reduce", 8, "", 0x1200)
                                                        .add("all_reduce", 8, "", 0x1300)
                                                        .open()),
                                       rank_with(1, Calls()
                                                        .add("all_reduce", 8, "", 0x1200)
                                                        .add("all_reduce", 8, "", 0x1300)
                                                        .add("finish", 0, "", 0x1400)
                                                        .open()),
                                       rank_with(2, Calls()
                                                        .add("all_reduce", 8, "", 0x1100)
                                                        .add("all_reduce", 8, "", 0x1200)
                                                        .add("all_reduce", 8, "", 0x1300)
                                                        .open())};
  const std::string text = ledger_table(ranks, 0);
  EXPECT_THAT(text, HasSubstr("first call that differs: #3"));
  EXPECT_THAT(text, HasSubstr("first call from another place of the program: #1\n"
                              "    ranks 0, 2: #1 all_reduce (Float, 8 B) at (none+0x100)\n"
                              "    rank 1: #1 all_reduce (Float, 8 B) at (none+0x200)"));
}

TEST(StallTable, RanksInTheSamePlaceShareAStack) {
  std::vector<RankView> ranks = {rank_with(0, {}), rank_with(1, {}), rank_with(2, {})};
  ranks[0].stack = ranks[2].stack = {"here", "main"};
  ranks[1].no_stack = "none, because it is stopped";
  EXPECT_THAT(describe_stall(ranks, {}).text,
              HasSubstr("\n  stack of ranks 0, 2:\n    here\n    main"
                        "\n  stack of rank 1: none, because it is stopped"));
}

TEST(StallTable, FramesOfLibrariesAreCountedAndAllOfThemAreInTheFullText) {
  std::vector<RankView> ranks = {rank_with(0, {})};
  ranks[0].stack = {"at::Tensor::backward()+0x1 (libtorch_cpu.so+0x2)",
                    "torch::autograd::f()+0x1 (libtorch_cpu.so+0x3)", "epoch()+0x1 (train+0x2)"};
  const StallReport report = describe_stall(ranks, {});
  EXPECT_THAT(report.text, HasSubstr("\n    ... 2 frames of LibTorch\n    epoch() (train+0x2)"));
  EXPECT_THAT(report.full_text, HasSubstr("\n    torch::autograd::f()+0x1 (libtorch_cpu.so+0x3)"));
}

TEST(StallTable, RanksThatCallDifferentOperationsAreGivenARemedy) {
  const std::vector<RankView> ranks = {rank_with(0, Calls().add("all_reduce", 8).open()),
                                       rank_with(1, Calls().add("barrier", 0).open())};
  EXPECT_THAT(describe_stall(ranks, {}).cause, HasSubstr("model.join()"));
  const std::vector<RankView> same = {rank_with(0, Calls().add("all_reduce", 8).open()),
                                      rank_with(1, Calls().add("all_reduce", 8).open())};
  EXPECT_THAT(describe_stall(same, {}).cause, ::testing::Not(HasSubstr("model.join()")));
}

TEST(StallTable, ASaveByOneRankAloneIsNamed) {
  std::vector<RankView> ranks = {
      rank_with(0, Calls().add("all_reduce", 8).add("all_gather", 64).open()),
      rank_with(1, Calls().add("all_reduce", 8).add("all_reduce", 32).open())};
  ranks[0].ledger.phase = ledger::Phase::kSaving;
  EXPECT_THAT(describe_stall(ranks, {}).cause,
              HasSubstr("Rank 0 waits for the others to save a checkpoint: every rank must call "
                        "save_checkpoint()"));
  ranks[1].ledger.phase = ledger::Phase::kSaving;
  EXPECT_THAT(describe_stall(ranks, {}).cause, Not(HasSubstr("save_checkpoint")));
}

TEST(StallTable, OnlyARankThatWaitsForNobodyIsBusy) {
  RankView view = rank_with(0, Calls().add("all_reduce", 8));
  view.cpu_share = 0.9;
  EXPECT_TRUE(view.busy());
  view.cpu_share = 0;
  EXPECT_FALSE(view.busy());
  view.process.state = 'R';
  EXPECT_TRUE(view.busy()) << "it would run if the machine had a core for it";
  view.ledger.records.back().state = State::kStarted;
  EXPECT_FALSE(view.busy()) << "it spins in a collective";
}

// nccl: what a rank has enqueued says nothing of its host, which may compute or wait.
TEST(StallTable, AnEnqueuedOperationKeepsWaitingWhileARankLacksIt) {
  const auto view = [](int rank, Calls calls, double cpu_share) {
    RankView seen = rank_with(rank, calls.open(State::kReleased));
    seen.cpu_share = cpu_share;
    return seen;
  };
  const Calls one = Calls().add("all_reduce", 8);
  const Calls two = Calls().add("all_reduce", 8).add("all_reduce", 8);
  std::vector<RankView> ranks = {view(0, two, 0.9), view(1, two, 0.9)};
  find_device_waits(ranks, false);
  for (const RankView& rank : ranks) {
    EXPECT_FALSE(rank.waits()) << "all have enqueued it";
    EXPECT_TRUE(rank.busy());
  }
  EXPECT_THAT(ranks_behind(ranks), ElementsAre(0, 1)) << "by themselves";

  ranks = {view(0, two, 0.9), view(1, one, 0.9)};
  find_device_waits(ranks, false);
  EXPECT_TRUE(ranks[0].waits() && !ranks[0].busy()) << "it spins until its device has finished";
  EXPECT_TRUE(ranks[1].busy() && !ranks[1].waits());
  EXPECT_THAT(describe_stall(ranks, {}).cause, HasSubstr("Rank 1 is behind: it is busy"));

  ranks = {view(0, two, 0.9), view(1, two, 0.9)};
  find_device_waits(ranks, true);
  EXPECT_TRUE(ranks[0].waits() && ranks[1].waits()) << "a rank of another host may lack it";

  ranks = {view(0, two, 0.9), view(1, Calls().add("all_reduce", 8).add("broadcast", 8), 0.9)};
  find_device_waits(ranks, false);
  EXPECT_TRUE(ranks[0].waits() && ranks[1].waits()) << "they do not fit together";

  ranks = {view(0, Calls().add("all_reduce", 8, "a"), 0.9), view(1, one, 0.9)};
  find_device_waits(ranks, false);
  EXPECT_FALSE(ranks[0].waits()) << "rank 1 is no member";
  EXPECT_TRUE(ranks[1].waits()) << "rank 0 has not called anything of the world";
}

// nccl on several hosts: a long evaluation looks like a wait for a rank of another host.
TEST(StallTable, AnEnqueuedOperationIsNoSureStallWhereOtherHostsAreNotSeen) {
  const auto view = [](int rank, ledger::Phase phase) {
    RankView seen = rank_with(
        rank, Calls().add("all_reduce", 8).add("all_reduce", 8).open(State::kReleased), 'R');
    seen.cpu_share = 0.99;
    seen.ledger.phase = phase;
    return seen;
  };
  using ledger::Phase;
  for (const Phase phase : {Phase::kEvaluation, Phase::kSaving, Phase::kForward}) {
    std::vector<RankView> ranks = {view(0, phase), view(1, phase)};
    find_device_waits(ranks, true);
    const StallReport report = describe_stall(ranks, {.other_hosts = true});
    EXPECT_FALSE(report.sure) << name(phase);
    EXPECT_THAT(report.cause, HasSubstr("of this host have left their last operation to their "
                                        "devices"));
  }
  std::vector<RankView> ranks = {view(0, Phase::kForward), view(1, Phase::kForward)};
  ranks[1].ledger.records.pop_back();
  find_device_waits(ranks, true);
  EXPECT_TRUE(describe_stall(ranks, {.other_hosts = true}).sure) << "rank 1 lacks a call";
  ranks = {view(0, Phase::kForward), view(1, Phase::kForward)};
  ranks[1].process.state = 'T';
  find_device_waits(ranks, true);
  EXPECT_TRUE(describe_stall(ranks, {.other_hosts = true}).sure) << "rank 1 is stopped";

  // A message has a number only on its own rank, so on one host it is just as unknown.
  ranks = {view(0, Phase::kForward), view(1, Phase::kForward)};
  for (RankView& rank : ranks) rank.ledger.records.back().message = true;
  find_device_waits(ranks, false);
  EXPECT_FALSE(describe_stall(ranks, {}).sure);
}

TEST(StallTable, AStartUpIsNoSureStall) {
  const Calls all = Calls().add("all_reduce", 8).open();
  std::vector<RankView> ranks = {rank_with(0, all), rank_with(1, {})};
  ranks[1].ledger.pid = 0;
  EXPECT_FALSE(describe_stall(ranks, {}).sure) << "rank 1 has not begun";
  ranks[1].ledger.pid = 101;
  EXPECT_FALSE(describe_stall(ranks, {}).sure) << "it has not connected";
  ranks = {rank_with(0, all), rank_with(1, all)};
  ranks[0].ledger.phase = ledger::Phase::kStartup;
  EXPECT_FALSE(describe_stall(ranks, {}).sure);
  ranks[0].ledger.phase = ledger::Phase::kNone;
  EXPECT_TRUE(describe_stall(ranks, {}).sure);
}

// nccl, after the network has broken: the hosts spin in the driver, which looks like work.
TEST(StallTable, RanksThatSpinInTheDriverAtTheSameCallAreNotBusy) {
  const auto view = [](int rank) {
    RankView seen = rank_with(
        rank, Calls().add("all_reduce", 8).add("all_reduce", 8).open(State::kReleased), 'R');
    seen.cpu_share = 0.99;
    seen.ledger.step = 7;
    seen.in_driver = true;
    return seen;
  };
  const auto stuck = [](std::vector<RankView> ranks) {
    find_device_waits(ranks, false);
    return find_stuck_devices(ranks);
  };
  std::vector<RankView> ranks = {view(0), view(1), view(2)};
  find_device_waits(ranks, false);
  EXPECT_TRUE(ranks[0].busy()) << "by the ledgers alone";
  EXPECT_TRUE(at_one_enqueued_call(ranks));
  ASSERT_TRUE(find_stuck_devices(ranks));
  const StallReport report = describe_stall(ranks, {.quiet_s = 31, .stall_s = 30});
  EXPECT_THAT(report.behind, IsEmpty());
  EXPECT_FALSE(report.sure);
  EXPECT_THAT(report.cause,
              HasSubstr("All ranks wait in the same operation, #2 all_reduce (Float, 8 B): the "
                        "network or a device is stuck"));
  EXPECT_THAT(report.text, Not(HasSubstr("busy")));

  std::vector<RankView> computes = {view(0), view(1), view(2)};
  computes[1].in_driver = false;
  EXPECT_FALSE(stuck(computes)) << "rank 1 does something else";
  computes[1].no_stack = "none, because it did not answer";
  EXPECT_TRUE(stuck(computes)) << "that says nothing against it";
  for (RankView& rank : computes) rank.no_stack = "none";
  EXPECT_FALSE(stuck(computes)) << "nothing is known";

  std::vector<RankView> ahead = {view(0), view(1)};
  ahead[1].ledger.step = 8;
  EXPECT_FALSE(stuck(ahead)) << "a step has ended since";
  std::vector<RankView> evaluates = {view(0), view(1)};
  evaluates[0].ledger.phase = ledger::Phase::kEvaluation;
  EXPECT_FALSE(stuck(evaluates)) << "that may take long";
  std::vector<RankView> behind = {view(0), view(1)};
  behind[1].ledger.records.pop_back();
  EXPECT_FALSE(stuck(behind)) << "rank 1 has not called it";
  EXPECT_FALSE(stuck({view(0)}));
}

TEST(StallTable, AFailureReportHasThePosition) {
  RankView view = rank_with(3, Calls().add("all_reduce", 5u << 20).open());
  view.ledger.step = 41;
  view.ledger.phase = ledger::Phase::kBackward;
  EXPECT_THAT(standing_of({view}, 3, 0),
              ElementsAre("step 41, backward", HasSubstr("operation #1 all_reduce (Float, 5.0 MiB)"
                                                         ": waits for 0.0 s at (none+0x100)")));
  EXPECT_THAT(standing_of({view}, 2, 0), IsEmpty());
  view.ledger.records.clear();  // a rank alone
  EXPECT_THAT(standing_of({view}, 3, 0), ElementsAre("step 41, backward"));
}

TEST(RankState, KnowsTheLibraryOfAnAddress) {
  const auto in_libc = reinterpret_cast<std::uint64_t>(::dlsym(RTLD_DEFAULT, "getpid"));
  ASSERT_NE(in_libc, 0u);
  EXPECT_TRUE(in_library(::getpid(), {0x10, in_libc}, {"libcuda", "libc."}));
  EXPECT_FALSE(in_library(::getpid(), {0x10, in_libc}, {"libcuda", "libnccl"}));
  EXPECT_FALSE(in_library(::getpid(), {}, {"libc."}));
  EXPECT_FALSE(in_library(-1, {in_libc}, {"libc."}));
}

TEST(RankState, KnowsThisProcess) {
  const RankState state = read_rank_state(::getpid(), ::getpid());
  EXPECT_EQ(state.state, 'R');
  EXPECT_EQ(state.text(), "R running");
  EXPECT_FALSE(state.stopped());
  EXPECT_FALSE(read_rank_state(-1, -1).known());
}

// ---------------------------------------------------------------- StallWatch

using std::chrono::milliseconds;

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
