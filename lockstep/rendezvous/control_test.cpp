#include "lockstep/rendezvous/control.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <thread>

#include "lockstep/core/crash.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/rendezvous/startup.h"
#include "lockstep/rendezvous/store_client.h"

namespace lockstep {
namespace {

using child_for_test::Child;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr char kFailed[] =
    "{\"failed\": {\"rank\": 3, \"host\": \"n1\", \"cause\": \"killed by SIGKILL\"}}\n";

struct Launcher {
  Pipe pipe = make_pipe();
  std::map<std::string, std::string> variables() const {
    return {{"LOCKSTEP_CONTROL_FD", std::to_string(pipe.read.get())}};
  }
  void say(const std::string& text) { write_all(pipe.write.get(), text); }
};

void print(const std::string& text) {
  std::puts(text.c_str());
  std::fflush(stdout);
}

std::string text_of(const std::optional<control::PeerFailure>& failure) {
  return failure ? failure->text() : "none";
}

TEST(Control, TextNamesRankHostAndCause) {
  EXPECT_EQ((control::PeerFailure{3, "n1", "exit code 2"}).text(),
            "rank 3 on n1 failed: exit code 2");
  EXPECT_EQ((control::PeerFailure{0, "", "exit code 2"}).text(), "rank 0 failed: exit code 2");
  EXPECT_EQ((control::PeerFailure{-1, "", "the launcher ended"}).text(), "the launcher ended");
  EXPECT_EQ((control::PeerFailure{-1, "n1", "the launcher ended"}).text(),
            "the launcher ended on n1");
  EXPECT_EQ((control::PeerFailure{-1, "n1", "the launcher of node 1 on n1 is lost"}).text(),
            "the launcher of node 1 on n1 is lost");  // not twice
}

CHILD(waits_for_failure) {
  print("connected " + std::to_string(control::connected()));
  print("before: " + text_of(control::failure()));
  print("after: " + text_of(control::failure(seconds(60))));
  return 0;
}

TEST(Control, FailureArrivesWhileWaiting) {
  Launcher launcher;
  Child child("waits_for_failure", launcher.variables(), {launcher.pipe.read.get()});
  ASSERT_TRUE(child.says("before: none")) << child.output();
  launcher.say("{\"failed\": {\"rank\": 3, ");  // a line may come in pieces
  launcher.say("\"host\": \"n1\", \"cause\": \"killed by SIGKILL\"}}\n");
  EXPECT_EQ(child.wait(), 0);
  EXPECT_THAT(child.output(), HasSubstr("after: rank 3 on n1 failed: killed by SIGKILL\n"));
}

TEST(Control, AnEndWithoutAWordIsAFailure) {
  Launcher launcher;
  Child child("waits_for_failure", launcher.variables(), {launcher.pipe.read.get()});
  ASSERT_TRUE(child.says("before: none"));
  launcher.pipe.write.reset();
  EXPECT_EQ(child.wait(), 0);
  EXPECT_THAT(child.output(), HasSubstr("after: the launcher ended\n"));
}

TEST(Control, OddMessagesAreSurvived) {
  Launcher launcher;
  Child child("waits_for_failure", launcher.variables(), {launcher.pipe.read.get()});
  ASSERT_TRUE(child.says("before: none"));
  launcher.say("nonsense\n[1, 2]\n{\"later\": \"idea\"}\n{\"failed\": 7}\n");
  EXPECT_EQ(child.wait(), 0);
  EXPECT_THAT(child.output(), HasSubstr("cannot read 'nonsense'"));
  EXPECT_THAT(child.output(), HasSubstr("after: the launcher did not say why\n"));
}

TEST(Control, WithoutALauncherNothingIsAwaited) {
  const auto start = std::chrono::steady_clock::now();
  Child unset("waits_for_failure", {});
  EXPECT_EQ(unset.wait(), 0);
  EXPECT_THAT(unset.output(), HasSubstr("connected 0\nbefore: none\nafter: none\n"));
  // Processes inherit the variable but not the descriptor: its number may be closed, a file, or the
  // write end of a pipe.
  Launcher launcher;
  const Fd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  for (const int fd : {915, file.get(), launcher.pipe.write.get()}) {
    Child child("waits_for_failure", {{"LOCKSTEP_CONTROL_FD", std::to_string(fd)}}, {fd});
    EXPECT_EQ(child.wait(), 0);
    EXPECT_THAT(child.output(), HasSubstr("connected 0\nbefore: none\nafter: none\n")) << fd;
  }
  Child garbage("waits_for_failure", {{"LOCKSTEP_CONTROL_FD", "x"}});
  EXPECT_EQ(garbage.wait(), 0);
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(30));
}

CHILD(subscribes) {
  std::atomic<int> calls{0};
  std::atomic<bool> on_main{false};
  const auto main_thread = std::this_thread::get_id();
  auto subscription = control::subscribe([&](const control::PeerFailure& f) {
    on_main = std::this_thread::get_id() == main_thread;
    print("notified: " + f.text());
    ++calls;
  });
  auto dropped = control::subscribe([](const control::PeerFailure&) { print("wrong: dropped"); });
  dropped.reset();
  auto throwing =
      control::subscribe([](const control::PeerFailure&) { throw std::runtime_error("x"); });
  print("ready");
  // Whichever thread reads the message, the listening thread notifies: failure() in a loop must not
  // consume it.
  while (!control::failure()) std::this_thread::sleep_for(milliseconds(1));
  while (calls == 0) std::this_thread::sleep_for(milliseconds(1));
  auto late =
      control::subscribe([&](const control::PeerFailure& f) { print("late: " + f.text()); });
  print(on_main ? "on main" : "on the listening thread");
  return calls == 1 ? 0 : 1;
}

TEST(Control, SubscribersAreNotifiedOnce) {
  Launcher launcher;
  Child child("subscribes", launcher.variables(), {launcher.pipe.read.get()});
  ASSERT_TRUE(child.says("ready"));
  launcher.say(kFailed);
  EXPECT_EQ(child.wait(), 0);
  EXPECT_THAT(child.output(), HasSubstr("notified: rank 3 on n1 failed: killed by SIGKILL\n"));
  EXPECT_THAT(child.output(), HasSubstr("late: rank 3 on n1 failed: killed by SIGKILL\n"));
  EXPECT_THAT(child.output(), HasSubstr("on the listening thread"));
  EXPECT_THAT(child.output(), HasSubstr("a subscriber threw"));
  EXPECT_THAT(child.output(), ::testing::Not(HasSubstr("wrong")));
}

CHILD(drops_during_the_call) {
  std::atomic<bool> entered{false}, left{false};
  auto slow = control::subscribe([&](const control::PeerFailure&) {
    entered = true;
    std::this_thread::sleep_for(milliseconds(200));
    left = true;
  });
  print("ready");
  while (!entered) std::this_thread::sleep_for(milliseconds(1));
  slow.reset();
  if (!left) return 1;
  return 0;
}

CHILD(drops_its_own_token) {
  std::mutex mutex;
  control::Subscription token;
  std::atomic<bool> done{false};
  {
    const std::lock_guard lock(mutex);
    token = control::subscribe([&](const control::PeerFailure&) {
      const std::lock_guard inner(mutex);
      token.reset();
      done = true;
    });
  }
  print("ready");
  while (!done) std::this_thread::sleep_for(milliseconds(1));
  return 0;
}

// By another thread, which then waits for the call, and by the call.
TEST(Control, ATokenMayBeDroppedDuringItsCall) {
  for (const char* name : {"drops_during_the_call", "drops_its_own_token"}) {
    Launcher launcher;
    Child child(name, launcher.variables(), {launcher.pipe.read.get()});
    ASSERT_TRUE(child.says("ready"));
    launcher.say(kFailed);
    EXPECT_EQ(child.wait(), 0) << child.output();
  }
}

CHILD(faults_in_a_callback) {
  crash::install(5);
  auto token = control::subscribe([](const control::PeerFailure&) {
    volatile int* volatile nowhere = nullptr;
    *nowhere = 1;
  });
  print("ready");
  std::this_thread::sleep_for(seconds(60));
  return 0;
}

TEST(Control, AFaultOnTheListeningThreadIsReported) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer's own";
#endif
  Launcher launcher;
  Child child("faults_in_a_callback", launcher.variables(), {launcher.pipe.read.get()});
  ASSERT_TRUE(child.says("ready"));
  launcher.say(kFailed);
  EXPECT_EQ(child.wait(), -SIGSEGV);
  EXPECT_THAT(child.output(), HasSubstr("killed by SIGSEGV at address 0x0\n    at "));
}

CHILD(saves_on_sigterm) {
  // Like a program that saves when it is asked to stop: with a handler, or with a blocked signal.
  std::signal(SIGTERM, [](int) { (void)!::write(STDOUT_FILENO, "saving\n", 7); });
  if (std::getenv("BLOCK") != nullptr) {
    sigset_t term;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    ::pthread_sigmask(SIG_BLOCK, &term, nullptr);
  }
  auto token = control::subscribe([](const control::PeerFailure&) { print("notified"); });
  print("ready");
  for (int i = 0; i < 3000; ++i) std::this_thread::sleep_for(milliseconds(10));
  return 0;
}

TEST(Control, SigtermAfterAFailureIsNotARequestToSave) {
  for (const bool block : {false, true}) {
    Launcher launcher;
    auto variables = launcher.variables();
    if (block) variables["BLOCK"] = "1";
    Child child("saves_on_sigterm", variables, {launcher.pipe.read.get()});
    ASSERT_TRUE(child.says("ready"));
    if (!block) {
      ::kill(child.pid(), SIGTERM);
      ASSERT_TRUE(child.says("saving"));
    }
    launcher.say(kFailed);
    ASSERT_TRUE(child.says("notified"));
    ::kill(child.pid(), SIGTERM);
    EXPECT_EQ(child.wait(), -SIGTERM) << child.output();
  }
}

TEST(Control, AProcessThatContinuesIsEnded) {
  Launcher launcher;
  Child child("saves_on_sigterm", launcher.variables(), {launcher.pipe.read.get()});
  ASSERT_TRUE(child.says("ready"));
  launcher.say(kFailed);
  EXPECT_EQ(child.wait(), -SIGTERM) << child.output();
}

// The launcher's SIGTERM comes 100 ms after its line; a waiting rank must have reported by then.
void wait_and_say_when_it_ended(const std::function<void()>& wait) {
  control::connected();
  print("waits");
  try {
    wait();
  } catch (const CommError& error) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    print("ended at " + std::to_string(std::chrono::nanoseconds(now).count()));
    print(error.what());
  }
}

CHILD(waits_for_the_store) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return 1;
  const Fd launcher(ends[1]);
  const detail::StoreConnection connection{Fd(ends[0])};
  wait_and_say_when_it_ended(
      [&] { connection.receive_number<int>({"reading a key", Deadline::after(seconds(20))}); });
  return 0;
}

CHILD(waits_for_a_thread) {
  wait_and_say_when_it_ended([] {
    detail::run_with_deadline<int>("reading a key", Deadline::after(seconds(20)), [] {
      std::this_thread::sleep_for(seconds(60));
      return 0;
    });
  });
  std::_Exit(0);  // not waiting for that thread
}

TEST(Control, WaitsEndAsSoonAsAFailureIsAnnounced) {
  for (const char* name : {"waits_for_the_store", "waits_for_a_thread"}) {
    double best_ms = 1e9;  // the best of several: a busy machine may hold up any process
    for (int attempt = 0; attempt < 5; ++attempt) {
      Launcher launcher;
      Child child(name, launcher.variables(), {launcher.pipe.read.get()});
      ASSERT_TRUE(child.says("waits\n"));
      std::this_thread::sleep_for(milliseconds(10));  // it does now
      const auto said = std::chrono::steady_clock::now().time_since_epoch();
      launcher.say(kFailed);
      EXPECT_EQ(child.wait(), 0) << child.output();
      EXPECT_THAT(child.output(), HasSubstr("reading a key was given up: rank 3 on n1 failed: "));
      const char* const ended = std::strstr(child.output().c_str(), "ended at ");
      ASSERT_NE(ended, nullptr) << child.output();
      const auto took = std::chrono::nanoseconds(std::strtoll(ended + 9, nullptr, 10)) - said;
      best_ms = std::min(best_ms, std::chrono::duration<double, std::milli>(took).count());
    }
    EXPECT_LT(best_ms, 50) << name;
  }
}

CHILD(starts_a_child_of_its_own) {
  control::connected();
  print("before");
  const int fd = std::atoi(std::getenv("LOCKSTEP_CONTROL_FD"));
  return std::system(("test -e /proc/self/fd/" + std::to_string(fd)).c_str()) == 0 ? 1 : 0;
}

TEST(Control, ARanksOwnChildrenDoNotListen) {
  Launcher launcher;
  Child child("starts_a_child_of_its_own", launcher.variables(), {launcher.pipe.read.get()});
  EXPECT_EQ(child.wait(), 0) << child.output();
}

}  // namespace
}  // namespace lockstep

// ---------------------------------------------------------------- the start-up check
//
// The handshakes of ranks, and the contradictions that rank 0 finds in them.
namespace lockstep::detail {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<Handshake> world_of(int size) {
  std::vector<Handshake> handshakes;
  for (int rank = 0; rank < size; ++rank) {
    handshakes.push_back({.rank = rank,
                          .place = {rank, size, 0},
                          .world_size = std::to_string(size),
                          .program = "build 1",
                          .options = "same",
                          .device = "cpu with gloo",
                          .debug = "off",
                          .host = "n0",
                          .machine = "n0/boot",
                          .gpu = "",
                          .address = "127.0.0.1"});
  }
  return handshakes;
}

std::string problem_of(const std::vector<Handshake>& handshakes, bool share = false) {
  return contradictions(handshakes, share);
}

TEST(Handshake, TravelsAsText) {
  Handshake handshake = world_of(3)[2];
  handshake.place = {-1, 0, -1};
  handshake.gpu = "GPU-1";
  handshake.refusal = "[config] there is no file x.\n  Relative paths begin at /.";
  const Handshake back = Handshake::parse(handshake.text());
  EXPECT_EQ(back.rank, 2);
  EXPECT_EQ(back.place, handshake.place);
  EXPECT_FALSE(back.place.known());
  for (const auto field :
       {&Handshake::world_size, &Handshake::program, &Handshake::options, &Handshake::device,
        &Handshake::debug, &Handshake::host, &Handshake::machine, &Handshake::gpu,
        &Handshake::address, &Handshake::refusal})
    EXPECT_EQ(back.*field, handshake.*field);
  EXPECT_EQ(Handshake::parse("").rank, 0);
}

TEST(Handshake, RanksAreNamedShortly) {
  EXPECT_EQ(name_ranks({3}), "rank 3");
  EXPECT_EQ(name_ranks({4, 1}), "ranks 1, 4");
  EXPECT_EQ(name_ranks({2, 3, 5, 6, 7, 9}), "ranks 2, 3, 5-7, 9");
  std::vector<int> odd;
  for (int rank = 1; rank < 64; rank += 2) odd.push_back(rank);
  EXPECT_EQ(name_ranks(odd), "ranks 1, 3, 5, 7, 9, 11, 13, 15, 17, 19 and 22 more");
  std::vector<int> all(64);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(name_ranks(all), "ranks 0-63");
}

TEST(Handshake, EqualRanksFit) {
  EXPECT_EQ(problem_of(world_of(1)), "");
  EXPECT_EQ(problem_of(world_of(7)), "");
  EXPECT_FALSE(miscounted(world_of(7)));
}

TEST(Handshake, WhoRefusesIsNamedWithTheReasonAndNothingElse) {
  auto handshakes = world_of(8);
  // The rank does not know its options, device or place yet.
  handshakes[2] = {.rank = 2, .world_size = "8", .host = "n1", .refusal = "[config] no file x."};
  EXPECT_EQ(problem_of(handshakes), "rank 2 on n1 cannot take part: [config] no file x.");
  handshakes[0].refusal = "[config] no file x.";
  handshakes[5].refusal = "[config] 2 mistakes.";
  EXPECT_EQ(problem_of(handshakes),
            "rank 5 on n0 cannot take part: [config] 2 mistakes. And ranks 0, 2 on n0, n1 cannot "
            "take part: [config] no file x.");
  for (int rank = 0; rank < 8; ++rank)
    handshakes[static_cast<std::size_t>(rank)].refusal = fmt::format("reason {}.", rank);
  EXPECT_THAT(problem_of(handshakes),
              AllOf(HasSubstr("rank 3 on n0 cannot take part: reason 3."),
                    HasSubstr("And 4 more have other reasons."), Not(HasSubstr("reason 4."))));
}

TEST(Handshake, EveryRankThatDiffersIsNamed) {
  auto handshakes = world_of(4);
  handshakes[1].program = handshakes[3].program = "build 0";
  EXPECT_EQ(problem_of(handshakes),
            "ranks 1, 3 have program build 0, but rank 0 has build 1. Run the same build on every "
            "host.");
  handshakes[2].program = "";
  EXPECT_THAT(problem_of(handshakes), HasSubstr("ranks 1, 3 have program build 0 and rank 2 has "
                                                "program (none), but rank 0 has build 1."));
  handshakes = world_of(3);
  handshakes[1].world_size = handshakes[2].world_size = "5";
  EXPECT_THAT(problem_of(handshakes), HasSubstr("ranks 1, 2 have world size 5, but rank 0 has 3."));
  EXPECT_TRUE(miscounted(handshakes));
  // Which process came first makes no difference.
  std::swap(handshakes[0], handshakes[2]);
  EXPECT_THAT(problem_of(handshakes), HasSubstr("ranks 1, 2 have world size 5, but rank 0 has 3."));
  handshakes = world_of(4);
  handshakes[2].device = handshakes[3].device = "cuda with nccl";
  EXPECT_THAT(
      problem_of(handshakes),
      AllOf(HasSubstr("ranks 2, 3 have device cuda with nccl, but rank 0 has cpu with gloo."),
            HasSubstr("LOCKSTEP_BACKEND")));
  handshakes = world_of(3);
  handshakes[0].debug = "on";
  EXPECT_THAT(problem_of(handshakes),
              HasSubstr("ranks 1, 2 have debug mode off, but rank 0 has on."));
}

TEST(Handshake, SeveralDifferencesAreAllNamed) {
  auto handshakes = world_of(4);
  handshakes[1].program = "build 0";
  handshakes[2].options = "other";
  EXPECT_THAT(problem_of(handshakes),
              AllOf(HasSubstr("rank 1 has program build 0, but rank 0 has build 1."),
                    HasSubstr("And rank 2 has options other, but rank 0 has same.")));
}

TEST(Handshake, TheTextStaysShort) {
  auto handshakes = world_of(512);
  for (auto& handshake : handshakes) {
    if (handshake.rank > 0)
      handshake.program = std::to_string(handshake.rank % 100) + std::string(10'000, 'x');
    handshake.options = std::to_string(handshake.rank);
    handshake.gpu = "GPU";
  }
  const std::string text = problem_of(handshakes);
  EXPECT_LT(text.size(), 2000u) << text;
  EXPECT_THAT(text, HasSubstr("more ranks likewise"));
}

TEST(Handshake, RanksThatAreThereTwice) {
  auto handshakes = world_of(4);
  handshakes[2].rank = 1;
  handshakes[2].host = "n1";
  EXPECT_TRUE(miscounted(handshakes));
  EXPECT_THAT(problem_of(handshakes), HasSubstr("two processes say they are rank 1 (on n0, n1)."));
}

TEST(Handshake, GpusThatAreShared) {
  auto handshakes = world_of(5);
  for (auto& handshake : handshakes)
    handshake.gpu = handshake.rank < 4 ? fmt::format("GPU-{}", handshake.rank % 2) : "";
  EXPECT_THAT(problem_of(handshakes),
              AllOf(HasSubstr("ranks 0, 2 on n0 use the same GPU (GPU-0) and "
                              "ranks 1, 3 on n0 use the same GPU (GPU-1)."),
                    HasSubstr("LOCKSTEP_SHARE_DEVICE=1")));
  EXPECT_EQ(problem_of(handshakes, /*share=*/true), "");
  handshakes[2].host = handshakes[3].host = "n1";
  for (auto& handshake : handshakes) handshake.address = "";
  EXPECT_EQ(problem_of(handshakes), "");
}

TEST(Handshake, AddressesThatOnlyTheirOwnHostReaches) {
  auto handshakes = world_of(3);
  handshakes[2].host = "n1";
  EXPECT_THAT(problem_of(handshakes),
              AllOf(HasSubstr("ranks 0, 1 on n0 would listen on 127.0.0.1 and "
                              "rank 2 on n1 would listen on 127.0.0.1, which"),
                    HasSubstr("GLOO_SOCKET_IFNAME")));
}

// Two machines, filled alternately; nothing is known about places.
std::vector<Handshake> unplaced(int size) {
  auto handshakes = world_of(size);
  for (auto& handshake : handshakes) {
    handshake.place = {-1, 0, -1};
    handshake.machine = handshake.host = handshake.rank % 2 == 0 ? "n0" : "n1";
    handshake.address = "";
  }
  return handshakes;
}

TEST(Handshake, PlacesAreCounted) {
  const auto handshakes = unplaced(5);
  EXPECT_EQ(problem_of(handshakes), "");
  const auto places = count_ranks(handshakes);
  EXPECT_EQ(places.at(0), (RankInfo{0, 3, 0}));
  EXPECT_EQ(places.at(1), (RankInfo{0, 2, 1}));
  EXPECT_EQ(places.at(3), (RankInfo{1, 2, 1}));
  EXPECT_EQ(places.at(4), (RankInfo{2, 3, 0}));
}

TEST(Handshake, WhatWasSaidStays) {
  auto handshakes = unplaced(4);
  handshakes[3].place = {1, 0, 7};
  handshakes[2].place = {5, 6, 0};
  const auto places = count_ranks(handshakes);
  EXPECT_EQ(places.at(3), (RankInfo{1, 2, 7}));
  EXPECT_EQ(places.at(2), (RankInfo{5, 6, 0}));
}

TEST(Handshake, LocalRanksBeyondTheCount) {
  auto handshakes = unplaced(4);
  handshakes[1].place.local_rank = 2;
  handshakes[3].place.local_rank = 2;
  EXPECT_THAT(problem_of(handshakes), AllOf(HasSubstr("ranks 1, 3 have local rank 2 on n1, where 2 "
                                                      "ranks run."),
                                            HasSubstr("LOCAL_RANK"), Not(HasSubstr("n0"))));
  handshakes.erase(handshakes.begin() + 2);
  EXPECT_EQ(problem_of(handshakes), "") << "somebody is still on the way";
}

}  // namespace
}  // namespace lockstep::detail
