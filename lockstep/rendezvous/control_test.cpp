#include "lockstep/rendezvous/control.h"

#include <fcntl.h>
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
#include <thread>

#include "lockstep/core/crash.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"
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
