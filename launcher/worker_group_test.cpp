// The parts of a group of ranks, each alone; how they work together is in tests/launch.
#include "launcher/worker_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>

#include "launcher/worker.h"
#include "lockstep/core/helpers_for_test.h"

namespace lockstep::launch {
namespace {

using std::chrono::milliseconds;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Key;
using ::testing::Not;
using ::testing::Pair;

// For what must not happen.
void run_for(EventLoop& loop, milliseconds time) {
  loop.after(time, [&loop] { loop.stop(); });
  loop.run();
}

// For what must happen, however busy the machine is.
template <typename Done>
void run_until(EventLoop& loop, const Done& done) {
  for (int i = 0; i < 10'000 && !done(); ++i) run_for(loop, milliseconds(1));
}

// ---------------------------------------------------------------- Timer

TEST(Timer, FiresOnceAndCanBeStartedAgainByItsOwnTask) {
  EventLoop loop;
  Timer timer(loop);
  int fired = 0;
  timer.start(milliseconds(1000), [&] { fired += 100; });
  timer.start(milliseconds(1), [&] {  // in place of the one before
    EXPECT_FALSE(timer.pending());
    ++fired;
    timer.start(milliseconds(1), [&] { ++fired; });
  });
  EXPECT_TRUE(timer.pending());
  run_until(loop, [&] { return fired >= 2; });
  EXPECT_EQ(fired, 2);
  EXPECT_FALSE(timer.pending());
}

TEST(Timer, ItsTaskMayDestroyIt) {
  EventLoop loop;
  auto timer = std::make_unique<Timer>(loop);
  bool fired = false;
  const auto shared = std::make_shared<int>(7);
  timer->start(milliseconds(1), [&fired, &timer, shared] {
    timer.reset();
    fired = *shared == 7;
  });
  run_until(loop, [&] { return fired; });
  EXPECT_TRUE(fired);
  EXPECT_EQ(shared.use_count(), 1);
}

TEST(Timer, EndsWithItsOwner) {
  EventLoop loop;
  bool fired = false;
  {
    Timer(loop).start(milliseconds(1), [&] { fired = true; });
  }
  run_for(loop, milliseconds(20));
  EXPECT_FALSE(fired);
}

// ---------------------------------------------------------------- RankLife

TEST(RankLife, HasTheTransitionsOfItsHeader) {
  using L = RankLife;
  const std::vector<L::State> all = {L::kNew,       L::kRunning, L::kFailed,      L::kNotified,
                                     L::kSignalled, L::kEnded,   L::kExitedEarly, L::kAbandoned};
  const std::map<L::State, std::set<L::State>> allowed = {
      {L::kNew, {L::kRunning}},
      {L::kRunning, {L::kFailed, L::kNotified, L::kSignalled, L::kEnded, L::kExitedEarly}},
      {L::kFailed, {L::kNotified, L::kSignalled, L::kEnded, L::kExitedEarly}},
      {L::kNotified, {L::kSignalled, L::kEnded, L::kExitedEarly}},
      {L::kSignalled, {L::kSignalled, L::kEnded, L::kExitedEarly, L::kAbandoned}}};
  const std::map<L::State, std::vector<L::State>> ways = {
      {L::kNew, {}},
      {L::kRunning, {L::kRunning}},
      {L::kFailed, {L::kRunning, L::kFailed}},
      {L::kNotified, {L::kRunning, L::kNotified}},
      {L::kSignalled, {L::kRunning, L::kSignalled}},
      {L::kEnded, {L::kRunning, L::kEnded}},
      {L::kExitedEarly, {L::kRunning, L::kExitedEarly}},
      {L::kAbandoned, {L::kRunning, L::kSignalled, L::kAbandoned}}};
  for (const auto& [state, way] : ways) {
    L life;
    for (const L::State step : way) life.move(step);
    ASSERT_EQ(life.now(), state);
    for (const L::State next : all)
      EXPECT_EQ(life.may_move(next),
                allowed.count(state) != 0 && allowed.at(state).count(next) != 0)
          << state << " -> " << next;
  }
}

// ---------------------------------------------------------------- StopSequence

class StopSequenceTest : public ::testing::Test {
 protected:
  EventLoop loop_;
  std::vector<std::string> steps_;
  StopSequence stop_{loop_,
                     {.terminate = [this] { steps_.emplace_back("terminate"); },
                      .overdue =
                          [this] {
                            steps_.emplace_back("overdue");
                            stop_.kill();
                          },
                      .abandon = [this] { steps_.emplace_back("abandon"); }}};
};

TEST_F(StopSequenceTest, TakesItsStepsInOrder) {
  EXPECT_EQ(stop_.time_left(), std::nullopt);
  stop_.begin(milliseconds(20), milliseconds(40));
  EXPECT_EQ(stop_.stage(), StopSequence::Stage::kNotified);
  EXPECT_THAT(steps_, IsEmpty());
  run_until(loop_, [this] { return steps_.size() >= 2; });
  EXPECT_THAT(steps_, ElementsAre("terminate", "overdue"));
  EXPECT_TRUE(stop_.killed());
  EXPECT_EQ(stop_.time_left(), milliseconds(0));
}

TEST_F(StopSequenceTest, WithoutAHeadStartTheCallerSignals) {
  stop_.begin(milliseconds(0), milliseconds(20));
  EXPECT_EQ(stop_.stage(), StopSequence::Stage::kTerminated);
  run_until(loop_, [this] { return !steps_.empty(); });
  EXPECT_THAT(steps_, ElementsAre("overdue"));
}

TEST_F(StopSequenceTest, ARequestMeanwhileEndsTheHeadStartButNotTheGrace) {
  stop_.begin(milliseconds(30), milliseconds(60'000));
  const auto before = *stop_.time_left();
  stop_.skip_head_start();
  EXPECT_EQ(stop_.stage(), StopSequence::Stage::kTerminated);
  EXPECT_LE(*stop_.time_left(), before);
  EXPECT_GT(*stop_.time_left(), milliseconds(50'000));
  run_for(loop_, milliseconds(80));
  EXPECT_THAT(steps_, IsEmpty());
}

TEST_F(StopSequenceTest, KillsFromAnyStageAndNeverGoesBack) {
  stop_.begin(milliseconds(10), milliseconds(20));
  stop_.kill();
  stop_.begin(milliseconds(10), milliseconds(20));
  stop_.skip_head_start();
  EXPECT_TRUE(stop_.killed());
  run_for(loop_, milliseconds(60));
  EXPECT_THAT(steps_, IsEmpty());  // abandon comes after kKillTimeout
}

TEST_F(StopSequenceTest, GivesUpWhatSigkillDoesNotEnd) {
  stop_.kill();
  run_until(loop_, [this] { return !steps_.empty(); });
  EXPECT_THAT(steps_, ElementsAre("abandon"));
}

// ---------------------------------------------------------------- who is to blame

class FirstCause : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int rank = 0; rank < 4; ++rank) {
      ranks_.push_back({.rank = 4 + rank,
                        .local_rank = rank,
                        .pid = 100 + rank,
                        .error_file = directory_ / std::to_string(rank)});
      ranks_.back().life.move(RankLife::kRunning);
    }
  }

  RankRecord& end(int index, Ending ending, double when) {
    RankRecord& rank = ranks_[static_cast<std::size_t>(index)];
    rank.ending = ending;
    rank.ended_at = when;
    rank.life.move(RankLife::kEnded);
    return rank;
  }
  void move(int index, RankLife::State state) {
    ranks_[static_cast<std::size_t>(index)].life.move(state);
  }
  void write_error(int index, double when, bool consequence, const char* text = "boom") {
    std::ofstream(ranks_[static_cast<std::size_t>(index)].error_file)
        << R"({"message": {"message": ")" << text << R"(", "extraInfo": {"timestamp": )" << when
        << R"(, "consequence": )" << (consequence ? "true" : "false") << "}}}";
  }
  int blamed() const {
    const RankRecord* rank = first_to_fail(ranks_);
    return rank == nullptr ? -1 : rank->local_rank;
  }
  int blamed_for_stop(std::set<int> requests, bool killed = false) const {
    const RankRecord* rank = failed_stopping(ranks_, requests, killed);
    return rank == nullptr ? -1 : rank->local_rank;
  }

  static constexpr Ending kOk{};
  static constexpr Ending kError{false, 3, false};
  static constexpr Ending kKilled{true, SIGKILL, false};
  static constexpr Ending kCrashed{true, SIGSEGV, false};
  static constexpr Ending kObeyed{true, SIGTERM, false};

  TemporaryDirectory directory_;
  std::vector<RankRecord> ranks_;
};

TEST_F(FirstCause, TheEarliestOfThoseThatEndedByThemselves) {
  end(2, kError, 11);
  end(1, kError, 10);
  move(3, RankLife::kSignalled);
  end(3, kObeyed, 5);
  EXPECT_EQ(blamed(), 1);
}

TEST_F(FirstCause, AKilledRankIsHeardOfLate) {
  end(1, kError, 10);
  end(2, kKilled, 10.2);
  EXPECT_EQ(blamed(), 2);
}

TEST_F(FirstCause, AConsequenceIsTheCauseOnlyWhereNoOtherIsKnown) {
  end(1, kError, 10);
  write_error(1, 1000.5, true);
  EXPECT_EQ(blamed(), 1);
  end(2, kError, 2000);
  EXPECT_EQ(blamed(), 2);
}

TEST_F(FirstCause, ARankThatWroteItsFileBeforeItWasStopped) {
  move(1, RankLife::kSignalled);
  write_error(1, 1000.5, false);
  end(1, kObeyed, 2000);
  end(2, kError, 1500);
  EXPECT_EQ(blamed(), 1);
  EXPECT_EQ(describe(ranks_[1], {}).cause, "reported an error and was stopped");
  EXPECT_EQ(describe(ranks_[1], {}).code, 1);
  // Its victim ended first, and the launcher stopped it before it could end with its own code.
  write_error(1, 1000.5, false, "lockstep::UsageError: [train] no such thing");
  EXPECT_EQ(describe(ranks_[1], {}).code, kUsageCode);
  EXPECT_FALSE(describe(ranks_[1], {}).restartable);
}

TEST_F(FirstCause, ARankThatLeftAndOneThatWasFailedAlive) {
  ranks_[3].ending = kOk;
  ranks_[3].ended_at = 10;
  move(3, RankLife::kExitedEarly);
  EXPECT_EQ(blamed(), 3);
  EXPECT_EQ(describe(ranks_[3], {}).cause, kEarlyExitCause);
  ranks_[0].cause = "stalled.";
  ranks_[0].code = 5;
  ranks_[0].ended_at = 9;
  move(0, RankLife::kFailed);
  EXPECT_EQ(blamed(), 0);
  EXPECT_EQ(describe(ranks_[0], {}).cause, "stalled.");
  EXPECT_EQ(describe(ranks_[0], {}).code, 5);
}

TEST_F(FirstCause, AStopIsFailedByWhoDoesNotObey) {
  for (int i = 0; i < 4; ++i) move(i, RankLife::kSignalled);
  end(0, kObeyed, 10);
  end(1, {false, 143, false}, 10);
  EXPECT_EQ(blamed_for_stop({SIGTERM}), -1);
  end(2, kError, 9);
  EXPECT_EQ(blamed_for_stop({SIGTERM}), 2);
  EXPECT_EQ(blamed_for_stop({SIGTERM, SIGINT}), -1);  // an interrupted program may say anything
  end(3, kCrashed, 12);
  EXPECT_EQ(blamed_for_stop({SIGTERM}), 3);  // takes others with it
}

TEST_F(FirstCause, AStopIsNotFailedByWhoWasKilledOrLostAPeer) {
  for (int i = 0; i < 4; ++i) move(i, RankLife::kSignalled);
  end(0, kObeyed, 10);
  end(1, kError, 11);  // lost rank 0
  EXPECT_EQ(blamed_for_stop({SIGTERM}), -1);
  end(2, kKilled, 12);
  EXPECT_EQ(blamed_for_stop({SIGTERM}, true), -1);
  EXPECT_EQ(blamed_for_stop({SIGTERM}, false), 2);
}

// ---------------------------------------------------------------- the environment of a rank

using Environment = std::map<std::string, std::string>;

Variables variables_of(Environment environment) {
  return [environment](const std::string& name) -> std::optional<std::string> {
    const auto found = environment.find(name);
    if (found == environment.end()) return std::nullopt;
    return found->second;
  };
}

LaunchPlan two_by_four() {
  LaunchPlan plan;
  plan.nnodes = 2;
  plan.node_rank = 1;
  plan.nproc_per_node = 4;
  plan.run_id = "job";
  plan.role = "trainer";
  plan.max_restarts = 3;
  return plan;
}

WorkerInfo third() {
  WorkerInfo place;
  place.local_rank = 2;
  place.layout = {.first_rank = 4, .world_size = 8, .first_role_rank = 1, .role_world_size = 5};
  place.attempt = 1;
  place.master_addr = "127.0.0.1";
  place.master_port = 1234;
  place.error_file = "/logs/error.json";
  place.control_fd = 7;
  place.store_channel = "9:123:2:4:1234";
  place.interface = "eth0";
  place.threads = 6;
  place.ledger = "11:456";
  return place;
}

TEST(WorkerEnvironment, WhatTheFileSaysYieldsToWhatIsSet) {
  LaunchPlan plan = two_by_four();
  plan.environment = {{"CUDA_VISIBLE_DEVICES", "4,5,6,7"}, {"LOCKSTEP_DEBUG", "1"}};
  const Environment set =
      worker_environment(plan, third(), variables_of({{"LOCKSTEP_DEBUG", "0"}}));
  EXPECT_THAT(set, Contains(Pair("CUDA_VISIBLE_DEVICES", "4,5,6,7")));
  EXPECT_THAT(set, Not(Contains(Key("LOCKSTEP_DEBUG"))));
  plan.virtual_local_rank = true;
  EXPECT_EQ(worker_environment(plan, third(), variables_of({})).at("CUDA_VISIBLE_DEVICES"), "6");
}

TEST(WorkerEnvironment, GlooIsReplacedWhereItIsAskedForAndInheritedElsewhere) {
  LaunchPlan plan = two_by_four();
  const auto off = variables_of({{"LOCKSTEP_REPLACE_GLOO", "0"}});
  EXPECT_THAT(worker_environment(plan, third(), off), Not(Contains(Key("LOCKSTEP_REPLACE_GLOO"))));
  plan.replace_gloo = true;
  EXPECT_EQ(worker_environment(plan, third(), off).at("LOCKSTEP_REPLACE_GLOO"), "1");
}

TEST(WorkerEnvironment, IsTorchrunsAndTheLauncherHostsTheStore) {
  const Environment stale = {{"RANK", "99"}, {"WORLD_SIZE", "99"}, {"MASTER_PORT", "1"}};
  const Environment set = worker_environment(two_by_four(), third(), variables_of(stale));
  const Environment expected = {{"RANK", "6"},
                                {"LOCAL_RANK", "2"},
                                {"ROLE_RANK", "3"},
                                {"GROUP_RANK", "1"},
                                {"WORLD_SIZE", "8"},
                                {"LOCAL_WORLD_SIZE", "4"},
                                {"ROLE_WORLD_SIZE", "5"},
                                {"GROUP_WORLD_SIZE", "2"},
                                {"ROLE_NAME", "trainer"},
                                {"MASTER_ADDR", "127.0.0.1"},
                                {"MASTER_PORT", "1234"},
                                {"TORCHELASTIC_RESTART_COUNT", "1"},
                                {"TORCHELASTIC_MAX_RESTARTS", "3"},
                                {"TORCHELASTIC_RUN_ID", "job"},
                                {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                {"TORCHELASTIC_ERROR_FILE", "/logs/error.json"},
                                {"TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"},
                                {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
                                {"OMP_NUM_THREADS", "6"},
                                {"GLOO_SOCKET_IFNAME", "eth0"},
                                {"NCCL_SOCKET_IFNAME", "=eth0"},
                                {"LOCKSTEP_RUN", "job"},
                                {"LOCKSTEP_CONTROL_FD", "7"},
                                {"LOCKSTEP_TERMINAL", ""},
                                {"LOCKSTEP_LEDGER", "11:456"},
                                {"LOCKSTEP_STORE_CHANNEL", "9:123:2:4:1234"}};
  EXPECT_EQ(set, expected);
}

TEST(WorkerEnvironment, KeepsWhatTheCallerChose) {
  const Environment chosen = {{"OMP_NUM_THREADS", "2"},
                              {"GLOO_SOCKET_IFNAME", "ib0"},
                              {"NCCL_SOCKET_IFNAME", "ib"},
                              {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"}};
  const Environment set = worker_environment(two_by_four(), third(), variables_of(chosen));
  for (const auto& [name, value] : chosen) EXPECT_THAT(set, Not(Contains(Key(name)))) << name;
  // An empty variable counts as unset.
  EXPECT_THAT(worker_environment(two_by_four(), third(), variables_of({{"OMP_NUM_THREADS", ""}})),
              Contains(Pair("OMP_NUM_THREADS", "6")));
}

TEST(WorkerEnvironment, WithoutDescriptorsTheirVariablesAreRemoved) {
  WorkerInfo place = third();
  place.control_fd = -1;
  place.ledger = "";
  place.interface = "";
  place.threads = 0;
  const Environment set = worker_environment(two_by_four(), place, variables_of({}));
  EXPECT_THAT(set, Contains(Pair("LOCKSTEP_CONTROL_FD", "")));
  EXPECT_THAT(set, Contains(Pair("LOCKSTEP_LEDGER", "")));
  EXPECT_THAT(set, Not(Contains(Key("GLOO_SOCKET_IFNAME"))));
  EXPECT_THAT(set, Not(Contains(Key("OMP_NUM_THREADS"))));
}

TEST(WorkerEnvironment, VirtualLocalRankShowsOneDevice) {
  LaunchPlan plan = two_by_four();
  plan.virtual_local_rank = true;
  const Environment plain = worker_environment(plan, third(), variables_of({}));
  EXPECT_THAT(plain, Contains(Pair("LOCAL_RANK", "0")));
  EXPECT_THAT(plain, Contains(Pair("RANK", "6")));
  EXPECT_THAT(plain, Contains(Pair("CUDA_VISIBLE_DEVICES", "2")));
  const Environment visible = {{"CUDA_VISIBLE_DEVICES", "4, GPU-abc ,7"}};
  EXPECT_THAT(worker_environment(plan, third(), variables_of(visible)),
              Contains(Pair("CUDA_VISIBLE_DEVICES", "7")));
  for (const char* few : {"4,5", ""}) {
    const Environment devices = {{"CUDA_VISIBLE_DEVICES", few}};
    EXPECT_THAT(message_of([&] { worker_environment(plan, third(), variables_of(devices)); }),
                HasSubstr("--virtual-local-rank: local rank 2 has no GPU"));
  }
}

TEST(WorkerEnvironment, TimeoutsAreSetWhereTheyWereGiven) {
  LaunchPlan plan = two_by_four();
  plan.timeout = std::chrono::seconds(60);
  const Environment callers = {{"LOCKSTEP_TIMEOUT_S", "7"}, {"LOCKSTEP_STARTUP_TIMEOUT_S", "8"}};
  const Environment set = worker_environment(plan, third(), variables_of(callers));
  EXPECT_THAT(set, Contains(Pair("LOCKSTEP_TIMEOUT_S", "60")));
  EXPECT_THAT(set, Not(Contains(Key("LOCKSTEP_STARTUP_TIMEOUT_S"))));
  plan.startup_timeout = std::chrono::seconds(20);
  EXPECT_THAT(worker_environment(plan, third(), variables_of(callers)),
              Contains(Pair("LOCKSTEP_STARTUP_TIMEOUT_S", "20")));
}

TEST(WorkerEnvironment, SignalsAreGivenByName) {
  LaunchPlan plan = two_by_four();
  plan.signals_to_handle = {SIGTERM, SIGUSR1};
  EXPECT_THAT(worker_environment(plan, third(), variables_of({})),
              Contains(Pair("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGUSR1")));
}

}  // namespace

}  // namespace lockstep::launch
