// Worlds of processes: start-up, failures, and what the survivors report.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <torch/cuda.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <thread>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/device.h"
#include "lockstep/comm/numbers.h"
#include "lockstep/comm/world.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::ProcessOptions;
using testing::RankResult;
using testing::run_bare_processes;
using testing::run_processes;
using testing::RunningRanks;
using Clock = std::chrono::steady_clock;

void expect_success(const std::vector<RankResult>& ranks) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    EXPECT_EQ(ranks[rank].exit_code, 0) << "rank " << rank << ": " << ranks[rank].output;
}

void say(const char* text) {
  std::printf("%s\n", text);
  std::fflush(stdout);
}

// Sleeps until the test ends this process, or up to a bound.
void sleep_long() {
  std::this_thread::sleep_for(seconds(60));
}

// All of these tests rest on this: a rank whose expectation fails, or that throws, fails.
TEST(ProcessRanks, FailWithTheirBodies) {
  const auto ranks = run_bare_processes(3, [] {
    EXPECT_EQ(env::get_int("RANK"), 1);
    if (env::get_int("RANK") == 2) throw 7;
  });
  EXPECT_EQ(ranks[0].exit_code, 1);
  EXPECT_THAT(ranks[0].output, HasSubstr("Failure"));
  EXPECT_EQ(ranks[1].exit_code, 0) << ranks[1].output;
  EXPECT_EQ(ranks[2].exit_code, 1);
  EXPECT_THAT(ranks[2].output, HasSubstr("an exception of unknown type"));
}

// A process with threads is not forked: its ranks are fresh programs that reach the same body.
TEST(ProcessRanks, OfATestWithThreads) {
  std::atomic<bool> over{false};
  std::thread other([&over] {
    while (!over) std::this_thread::sleep_for(milliseconds(1));
  });
  const pid_t own = ::getpid();
  const auto ranks = run_bare_processes(2, [own] { EXPECT_EQ(::getpid(), own); });
  over = true;
  other.join();
  expect_success(ranks);
}

TEST(ProcessWorld, ConnectsFromTheEnvironment) {
  for (const int size : {1, 2, 4}) {
    expect_success(run_processes(size,
                                 [size](World& world) {
                                   EXPECT_EQ(world.size(), size);
                                   EXPECT_EQ(all_reduce(world, world.rank() + 1),
                                             size * (size + 1) / 2.0);
                                   EXPECT_EQ(world.local_rank(), world.rank());
                                   EXPECT_EQ(world.device(), c10::Device(c10::kCPU));
                                 },
                                 {.env = {{"LOCKSTEP_DEVICE", "cpu"}}}));
  }
}

// What is chosen on one host unless the test is run for another one.
std::string usual_backend() {
  return env::get("LOCKSTEP_BACKEND").value_or("shm");
}

// How long a survivor may take, in the best of a few runs: 100 ms, unless the machine is busy with
// other tests.
double allowance_ms() {
  return env::get_bool("LOCKSTEP_SOAK").value_or(false) ? 100 : 3000;
}

TEST(ProcessWorld, ExplainsItsChoiceInOneLine) {
  const auto ranks =
      run_processes(2, [](World& world) { EXPECT_EQ(world.backend(), usual_backend()); },
                    {.env = {{"LOCKSTEP_DEVICE", "cpu"}}});
  expect_success(ranks);
  EXPECT_THAT(ranks[0].output,
              ContainsRegex("WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 device=cpu backend=" +
                            usual_backend() + " .*; LOCKSTEP_DEVICE=cpu"));
  EXPECT_THAT(ranks[1].output, Not(HasSubstr("backend=" + usual_backend())));
}

// A rank that may map next to no memory: all of them take gloo, and the line says why. Where shm
// was asked for by name, that is reported instead.
TEST(ProcessWorld, WithoutMemoryToShareTheyTakeGloo) {
  const auto poor = [](const char* backend) {
    return run_bare_processes(3,
                              [] {
                                if (env::get_int("RANK") == 1) {
                                  ::signal(SIGXFSZ, SIG_IGN);
                                  const rlimit files{0, RLIM_INFINITY};
                                  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &files), 0);
                                }
                                World world = World::from_env();
                                EXPECT_EQ(world.backend(), "gloo");
                                EXPECT_EQ(all_reduce(world, 1), 3);
                                auto pair = world.split(world.rank() == 1 ? 1 : 0);
                                EXPECT_EQ(pair->backend(), world.rank() == 1 ? "single" : "shm");
                                EXPECT_EQ(all_reduce(*pair, 1), world.rank() == 1 ? 1 : 2);
                                world.finish();
                              },
                              {.env = {{"LOCKSTEP_DEVICE", "cpu"}, {"LOCKSTEP_BACKEND", backend}}});
  };
  const auto ranks = poor("");
  expect_success(ranks);
  EXPECT_THAT(
      ranks[0].output,
      ContainsRegex("device=cpu backend=gloo .*; LOCKSTEP_DEVICE=cpu; not shm, because rank 1: "));
  for (const RankResult& refused : poor("shm")) {
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_THAT(refused.output, AllOf(HasSubstr("backend shm was asked for, but rank 1: "),
                                      HasSubstr(". Use backend gloo there.")));
  }
}

TEST(ProcessWorld, PortThatIsTaken) {
  ProcessOptions options;
  options.port_is_taken = true;
  options.env["LOCKSTEP_STARTUP_TIMEOUT_S"] = "2";
  const auto ranks = run_processes(2, [](World&) {}, options);
  EXPECT_EQ(ranks[0].exit_code, 1);
  EXPECT_THAT(ranks[0].output, AllOf(HasSubstr("rank 0 cannot open the store at 127.0.0.1:"),
                                     HasSubstr("MASTER_PORT")));
}

TEST(ProcessWorld, TwoWorldsInOneProcess) {
  expect_success(run_processes(3, [](World& world) {
    World second = World::from_env();
    EXPECT_EQ(all_reduce(second, 1), 3);
    EXPECT_EQ(all_reduce(world, 2), 6);
  }));
}

TEST(ProcessWorld, OneAfterTheOther) {
  expect_success(run_bare_processes(2, [] {
    for (int i = 0; i < 3; ++i) {
      World world = World::from_env();
      EXPECT_EQ(all_reduce(world, 1), 2);
    }
    // The last use of the store is over when this returns on every rank.
    World::from_env().finish();
  }));
}

// Rank 0 takes the store along, from which the others may still be learning that all are connected.
TEST(ProcessWorld, MayBeLeftAsSoonAsItIsMade) {
  ProcessOptions options;
  options.env = {{"LOCKSTEP_BACKEND", "gloo"}};
  for (int i = 0; i < 4; ++i)
    expect_success(run_bare_processes(3, [] { World::from_env(); }, options));
}

TEST(ProcessWorld, ForcedBackendOfOne) {
  expect_success(run_processes(1,
                               [](World& world) {
                                 EXPECT_EQ(world.backend(), "gloo");
                                 at::Tensor x = at::ones({3});
                                 world.all_reduce(x).wait();
                                 EXPECT_TRUE(at::equal(x, at::ones({3})));
                                 world.barrier();
                               },
                               {.env = {{"LOCKSTEP_BACKEND", "gloo"}}}));
}

TEST(ProcessWorld, LateRankIsWaitedFor) {
  for (const int late : {0, 1}) {
    expect_success(run_bare_processes(2, [late] {
      if (env::get_int("RANK") == late) std::this_thread::sleep_for(milliseconds(1500));
      World world = World::from_env();
      EXPECT_EQ(all_reduce(world, 1), 2);
      world.finish();
    }));
  }
}

TEST(ProcessWorld, AllRanksThatDifferAreNamed) {
  ProcessOptions options;
  options.rank_env = [](int rank) {
    return rank == 0 || rank == 2 ? testing::Variables{}
                                  : testing::Variables{{"LOCKSTEP_DEBUG", "1"}};
  };
  for (const auto& rank : run_bare_processes(4, [] { World::from_env(); }, options)) {
    EXPECT_EQ(rank.exit_code, 2);
    EXPECT_THAT(rank.output, HasSubstr("ranks 1, 3 have debug mode on, but rank 0 has off."));
  }
}

TEST(ProcessWorld, StartedByHandTheyCountWhoSharesTheHost) {
  // An address that does not say that everybody is here, and nothing about local ranks.
  ProcessOptions options;
  options.env = {{"MASTER_ADDR", "0.0.0.0"}, {"LOCAL_RANK", ""}, {"LOCAL_WORLD_SIZE", ""}};
  expect_success(run_processes(
      3,
      [](World& world) {
        EXPECT_EQ(world.local_rank(), world.rank());
        EXPECT_EQ(world.local_size(), 3);
        EXPECT_EQ(world.node_rank(), 0);
      },
      options));
  // RANK, WORLD_SIZE and the master address: nothing else.
  options.env["MASTER_ADDR"] = "127.0.0.1";
  expect_success(run_processes(
      2,
      [](World& world) {
        EXPECT_EQ(world.local_rank(), world.rank());
        EXPECT_EQ(world.local_size(), 2);
        EXPECT_EQ(world.node_rank(), 0);
      },
      options));
}

TEST(ProcessWorld, NoStoreEndsStartUp) {
  const auto ranks =
      run_bare_processes(2,
                         [] {
                           if (env::get_int("RANK") == 0) return;
                           World::from_env();
                         },
                         {.env = {{"LOCKSTEP_STARTUP_TIMEOUT_S", "1"}, {"MASTER_PORT", "9"}}});
  EXPECT_EQ(ranks[1].exit_code, 1);
  EXPECT_THAT(ranks[1].output, HasSubstr("rank 1: no store at 127.0.0.1:9 within 1 s"));
}

// The same clock in all processes.
double now_ms() {
  return std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count();
}

void say_whom(const char* when, const CommError& error) {
  std::printf("%s: peer %d at %.3f\n", when, error.context().peer, now_ms());
  std::fflush(stdout);
}

// When a rank's first error came.
double reported_at_ms(const RankResult& rank) {
  const std::string mark = "first: peer 2 at ";
  const std::size_t at = rank.output.find(mark);
  return at == std::string::npos ? INFINITY : std::stod(rank.output.substr(at + mark.size()));
}

// A rank that waits in a collective while its peer is killed.
std::vector<RankResult> kill_one_of_three(bool control, const std::string& announce,
                                          double* killed_ms) {
  ProcessOptions options;
  options.control = control;
  options.meanwhile = [announce, killed_ms](RunningRanks& ranks) {
    for (int rank = 0; rank < 3; ++rank) ranks.wait_for(rank, "ready");
    *killed_ms = now_ms();
    ranks.kill(2, SIGKILL);
    if (!announce.empty()) ranks.announce_failure(2, announce);
  };
  return run_processes(
      3,
      [](World& world) {
        world.barrier();
        at::Tensor x = at::ones({100}), y = at::ones({100});
        Work behind;
        // Under way before anyone is killed: after the launcher's report nothing can be started.
        if (world.rank() != 2) behind = world.all_reduce(x);
        say("ready");
        if (world.rank() == 2) sleep_long();
        try {
          world.all_reduce(y).wait();
        } catch (const CommError& error) {
          say_whom("first", error);
        }
        try {
          all_reduce(world, 1);
        } catch (const CommError& error) {
          say_whom("later", error);
        }
        behind.wait();
      },
      options);
}

// Runs `once`, which returns how late the last survivor knew, until that is in time. The machine
// may hold a rank up for seconds, which says nothing about us; every run must be right otherwise.
void expect_in_time(const std::function<double()>& once) {
  double best_ms = INFINITY;
  for (int attempt = 0; attempt < 4 && best_ms >= allowance_ms(); ++attempt)
    best_ms = std::min(best_ms, once());
  EXPECT_LT(best_ms, allowance_ms());
}

double without_launcher() {
  double killed_ms = 0, late_ms = 0;
  const auto ranks = kill_one_of_three(false, "", &killed_ms);
  EXPECT_EQ(ranks[2].signal, SIGKILL);
  for (const int rank : {0, 1}) {
    const auto& result = ranks[static_cast<std::size_t>(rank)];
    EXPECT_FALSE(result.timed_out);
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.output, AllOf(HasSubstr("all_reduce #2 (Float, 100 elements) failed after"),
                                     HasSubstr(" ms: ")));
    if (usual_backend() != "shm") continue;  // gloo knows that a connection broke, not whose
    EXPECT_THAT(result.output, AllOf(HasSubstr("first: peer 2"), HasSubstr("later: peer 2"),
                                     HasSubstr("rank 2 (process ")));
    late_ms = std::max(late_ms, reported_at_ms(result) - killed_ms);
  }
  return late_ms;
}

TEST(ProcessWorld, KilledPeerWithoutLauncher) {
  expect_in_time(without_launcher);
}

double with_the_launchers_report() {
  double killed_ms = 0, late_ms = 0;
  const auto ranks = kill_one_of_three(true, "killed by SIGKILL", &killed_ms);
  for (const int rank : {0, 1}) {
    const auto& result = ranks[static_cast<std::size_t>(rank)];
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.output, HasSubstr("rank 2 on here failed: killed by SIGKILL."));
    if (usual_backend() == "shm") {
      EXPECT_THAT(result.output, AllOf(HasSubstr("first: peer 2"), HasSubstr("later: peer 2")));
      late_ms = std::max(late_ms, reported_at_ms(result) - killed_ms);
    }
  }
  return late_ms;
}

TEST(ProcessWorld, KilledPeerWithTheLaunchersReport) {
  expect_in_time(with_the_launchers_report);
}

// Nobody died, so no launcher has anything to report. Its report is not waited for: that would take
// 1.5 s for every operation that has failed.
TEST(ProcessWorld, ADisagreementIsReportedAtOnceUnderALauncher) {
  if (usual_backend() != "shm") GTEST_SKIP() << "gloo does not compare what ranks call";
  ProcessOptions options;
  options.control = true;
  const auto ranks = run_processes(
      2,
      [](World& world) {
        world.barrier();
        const auto begin = Clock::now();
        std::vector<Work> works;
        for (int i = 0; i < 5; ++i) works.push_back(world.recv(at::ones({1}), 1 - world.rank()));
        works.push_back(world.all_reduce(at::ones({10 + world.rank()})));
        int reported = 0;
        for (Work& work : works) {
          try {
            work.wait();
          } catch (const CommError& error) {
            reported += error.context().peer >= 0 ? 1 : 0;
          }
        }
        const auto elapsed = std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
        std::printf("%d reported, %s\n", reported, elapsed < seconds(6) ? "soon" : "late");
        std::fflush(stdout);
      },
      options);
  for (const auto& rank : ranks) EXPECT_THAT(rank.output, HasSubstr("6 reported, soon"));
}

TEST(ProcessWorld, LaunchersReportEndsAWaitAtOnce) {
  ProcessOptions options;
  options.control = true;
  // Rank 1 is only stopped: no connection breaks, only the launcher reports it.
  options.meanwhile = [](RunningRanks& ranks) {
    ranks.wait_for(0, "ready");
    ranks.wait_for(1, "ready");
    ranks.kill(1, SIGSTOP);
    ranks.announce_failure(1, "stopped by SIGSTOP");
    ranks.wait_for(0, "after");
    ranks.kill(1, SIGKILL);
  };
  const auto ranks = run_processes(
      2,
      [](World& world) {
        world.barrier();
        Work receiving;
        if (world.rank() == 0) receiving = world.recv(at::zeros({1}), 1);
        say("ready");
        if (world.rank() == 1) sleep_long();
        const auto begin = Clock::now();
        try {
          receiving.wait();
        } catch (const CommError& e) {
          std::printf("after %d ms: %s\n", int((Clock::now() - begin) / milliseconds(1)), e.what());
          std::fflush(stdout);
          EXPECT_LT(Clock::now() - begin, seconds(30));
        }
        throw std::runtime_error("the world is gone");
      },
      options);
  EXPECT_THAT(ranks[0].output,
              AllOf(HasSubstr("recv #1"), HasSubstr("rank 1 on here failed: stopped by SIGSTOP.")));
}

TEST(ProcessWorld, LaunchersReportEndsStartUp) {
  ProcessOptions options;
  options.control = true;
  options.meanwhile = [](RunningRanks& ranks) {
    ranks.wait_for(0, "starting");
    ranks.announce_failure(1, "exit code 3");
  };
  const auto ranks = run_bare_processes(
      2,
      [] {
        if (env::get_int("RANK") == 1) return;
        say("starting");
        World::from_env();
      },
      options);
  EXPECT_EQ(ranks[0].exit_code, 1);
  EXPECT_THAT(ranks[0].output, AllOf(HasSubstr("was given up"), HasSubstr("exit code 3")));
}

TEST(ProcessWorld, DebugModePrintsBothSides) {
  const auto ranks = run_processes(3,
                                   [](World& world) {
                                     all_reduce(world, 1);
                                     at::Tensor x = at::ones({4, 2});
                                     at::Tensor y = at::ones({4, 3});
                                     if (world.rank() == 1) {
                                       world.broadcast(y, 0).wait();
                                     } else {
                                       world.all_reduce(x).wait();
                                     }
                                   },
                                   {.env = {{"LOCKSTEP_DEBUG", "1"}}});
  for (const auto& rank : ranks) {
    EXPECT_EQ(rank.exit_code, 1);
    EXPECT_THAT(rank.output, AllOf(HasSubstr("ranks call different operations"),
                                   HasSubstr("#2 all_reduce Float [4, 2] sum"),
                                   HasSubstr("rank 1: #2 broadcast Float [4, 3] root 0")));
  }
}

TEST(ProcessWorld, DebugModeLetsEqualCallsPass) {
  expect_success(run_processes(2,
                               [](World& world) {
                                 EXPECT_EQ(all_reduce(world, 1), 2);
                                 at::Tensor x = at::ones({3});
                                 world.all_reduce(x).wait();
                                 world.barrier();
                                 EXPECT_EQ(all_gather_bytes(world, "ab").size(), 2u);
                               },
                               {.env = {{"LOCKSTEP_DEBUG", "1"}}}));
}

TEST(ProcessWorld, DesyncEndsInTimeoutError) {
  const auto bin = env::get("LOCKSTEP_BIN");
  if (!bin) GTEST_SKIP() << "LOCKSTEP_BIN is not set";
  const auto ranks = testing::run_program(
      2, {*bin + "/tests/desync"},
      {.env = {{"LOCKSTEP_TIMEOUT_S", "1"}, {"LOCKSTEP_DEVICE", "cpu"}}, .timeout = seconds(60)});
  expect_success(ranks);
  EXPECT_THAT(ranks[0].output, HasSubstr("TimeoutError after"));
}

TEST(ProcessWorld, ConformanceQuickly) {
  const auto bin = env::get("LOCKSTEP_BIN");
  if (!bin) GTEST_SKIP() << "LOCKSTEP_BIN is not set";
  const auto ranks =
      testing::run_program(3, {*bin + "/tests/conformance", "--world-from-env", "--quick"},
                           {.env = {{"LOCKSTEP_DEVICE", "cpu"}}});
  expect_success(ranks);
  EXPECT_THAT(ranks[0].output, HasSubstr("conformance: passed"));
}

TEST(ProcessWorld, WrongPlugin) {
  if (!detail::nccl::built()) GTEST_SKIP() << "this build has no CUDA plug-in";
  const auto ranks = run_bare_processes(1, [] { load_cuda(); },
                                        {.env = {{"LOCKSTEP_CUDA_PLUGIN", "/nowhere/x.so"}}});
  EXPECT_EQ(ranks[0].exit_code, 2);
  EXPECT_THAT(ranks[0].output, AllOf(HasSubstr("[nccl] the CUDA plug-in cannot be loaded"),
                                     HasSubstr("LOCKSTEP_CUDA_PLUGIN")));
}

TEST(ProcessWorld, PluginBringsCuda) {
  const auto ranks = run_bare_processes(1, [] {
    load_cuda();
    EXPECT_EQ(static_cast<int>(torch::cuda::device_count()), cuda_device_count());
    EXPECT_EQ(torch::cuda::is_available(), cuda_device_count() > 0);
    EXPECT_TRUE(at::detail::getCUDAHooks().hasCUDART());
    say("loaded");
  });
  if (detail::nccl::built()) {
    expect_success(ranks);
    EXPECT_THAT(ranks[0].output, HasSubstr("loaded"));
  } else {
    EXPECT_EQ(ranks[0].exit_code, 2);
    EXPECT_THAT(ranks[0].output, HasSubstr("this build has no CUDA plug-in"));
  }
}

}  // namespace
}  // namespace lockstep
