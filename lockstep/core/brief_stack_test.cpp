#include "lockstep/core/brief_stack.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/time.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "lockstep/core/symbols.h"

namespace lockstep {
namespace {

using ::testing::ElementsAre;

TEST(BriefStack, ShowsTheProgramAndCountsTheLibraries) {
  EXPECT_THAT(brief_stack({"at::native::add(at::Tensor const&)+0x20 (libtorch_cpu.so+0x9a10)",
                           "c10::impl::wrap<int, std::vector<long> >::call(int)+0x1 (train+0x77)",
                           "lockstep::Work::wait()+0x20 (train+0x9a10)",
                           "Net<at::Half, std::pair<int, int> >::loss(std::vector<float>&)+0x1c "
                           "(train+0x2f10) /src/net.cpp:41",
                           "(anonymous namespace)::epoch()+0x54 (train+0x31a4)", "(train+0x4000)",
                           "std::thread::_State::_M_run()+0x8 (libstdc++.so.6+0xd2)",
                           "start_thread+0x2 (libc.so.6+0x7)", "_start+0x30 (train+0x9)"}),
              ElementsAre("... 3 frames of LibTorch and Lockstep",
                          "Net<...>::loss(std::vector<...>&) "
                          "(/src/net.cpp:41)",
                          "(anonymous namespace)::epoch() (train+0x31a4)", "(train+0x4000)",
                          "... 3 frames of the C++ library and libc"));
  EXPECT_THAT(brief_stack({}), ElementsAre());
  EXPECT_THAT(brief_stack({"another form", "0xffff1234"}),
              ElementsAre("another form", "0xffff1234"));
}

TEST(BriefStack, OperatorsAndLambdasAreReadable) {
  EXPECT_THAT(
      brief_stack({"bool operator< <int>(Box<int> const&)+0x1 (a+0x1)",
                   "Box<int>::operator()(A<B> const&) const+0x1 (a+0x2)",
                   "std::ostream& operator<< <A<B> >(std::ostream&)+0x1 (a+0x3)",
                   "Box<A>::operator->() const+0x1 (a+0x4)",
                   "main::{lambda(lockstep::World&)#1}::operator()(lockstep::World&) const+0x4 "
                   "(a+0x5)"}),
      ElementsAre("bool operator< <...>(Box<...> const&) (a+0x1)",
                  "Box<...>::operator()(A<...> const&) const (a+0x2)",
                  "std::ostream& operator<< <...>(std::ostream&) (a+0x3)",
                  "Box<...>::operator->() const (a+0x4)",
                  "main::{lambda}::operator()(lockstep::World&) const (a+0x5)"));
}

TEST(BriefStack, ABodyInsideStdFunctionIsTheProgram) {
  const std::string invoke =
      "std::_Function_handler<void (lockstep::World&), main::{lambda(lockstep::World&)#1}>::"
      "_M_invoke(std::_Any_data const&, lockstep::World&)+0x8 (a+0x12)";
  EXPECT_THAT(brief_stack({invoke, "main+0x1 (a+0x2)"}),
              ElementsAre("main::{lambda} (a+0x12)", "main (a+0x2)"));
  EXPECT_THAT(
      brief_stack(
          {"std::_Function_handler<int (lockstep::World&), lockstep::RankBody::RankBody<"
           "train(int)::{lambda(lockstep::World&)#1}>(train(int)::{lambda("
           "lockstep::World&)#1})::{lambda(lockstep::World&)#1}>::_M_invoke()+0x8 (a+0x9)"}),
      ElementsAre("train(int)::{lambda} (a+0x9)"));
  // Compiled separately, it already has a frame.
  EXPECT_THAT(
      brief_stack({"main::{lambda(lockstep::World&)#1}::operator()(lockstep::World&) const+0x1 "
                   "(a+0x3)",
                   invoke}),
      ElementsAre("main::{lambda}::operator()(lockstep::World&) const (a+0x3)",
                  "... 1 frame of the C++ library"));
  EXPECT_THAT(
      brief_stack({"std::_Function_handler<int (), lockstep::Task>::_M_invoke()+0x1 (a+0x2)",
                   "f()+0x1 (a+0x3)"}),
      ElementsAre("... 1 frame of Lockstep", "f() (a+0x3)"));
}

TEST(BriefStack, WithoutFramesOfTheProgramAFewOthersAreShown) {
  const std::vector<std::string> library(5, "at::f()+0x1 (libtorch_cpu.so+0x1)");
  EXPECT_THAT(brief_stack(library),
              ElementsAre("at::f() (libtorch_cpu.so+0x1)", "at::f() (libtorch_cpu.so+0x1)",
                          "at::f() (libtorch_cpu.so+0x1)", "... 2 frames of LibTorch"));
  EXPECT_THAT(
      brief_stack({"abort+0x1 (libc.so.6+0x1)", "lockstep::f()+0x1 (a+0x1)", "main+0x1 (a+0x3)"}),
      ElementsAre("... 1 frame of libc", "lockstep::f() (a+0x1)", "main (a+0x3)"));
}

TEST(BriefStack, IsOneScreen) {
  const std::vector<std::string> recursion(60, "f(" + std::string(900, 'x') + ")+0x1 (a+0x1)");
  const auto lines = brief_stack(recursion);
  ASSERT_EQ(lines.size(), 13u);
  EXPECT_EQ(lines.back(), "... 48 frames of the program");
  for (const std::string& line : lines) EXPECT_LT(line.size(), 130u);
}

// ---------------------------------------------------------------- lines

std::string own_program() {
  return std::filesystem::read_symlink("/proc/self/exe").string();
}

Deadline soon() {
  return Deadline::after(std::chrono::seconds(60));
}

// A folder in which `addr2line` is this shell script, first in PATH.
class FakeTool {
 public:
  explicit FakeTool(const std::string& script) : before_(std::getenv("PATH")) {
    std::filesystem::create_directories(folder_);
    std::ofstream(folder_ + "/addr2line") << "#!/bin/sh\n" << script << "\n";
    std::filesystem::permissions(folder_ + "/addr2line", std::filesystem::perms::owner_all);
    ::setenv("PATH", (folder_ + ":" + before_).c_str(), 1);
  }
  ~FakeTool() {
    ::setenv("PATH", before_.c_str(), 1);
    std::filesystem::remove_all(folder_);
  }
  FakeTool(const FakeTool&) = delete;
  FakeTool& operator=(const FakeTool&) = delete;

 private:
  std::string before_;
  std::string folder_ = ::testing::TempDir() + "lockstep_tools_" + std::to_string(::getpid());
};

TEST(SourceLines, AreReadFromWhatTheToolPrints) {
  ASSERT_TRUE(symbols::has_line_numbers(own_program()));
  const FakeTool tool(R"(printf '/src/a b.cpp:41\n??:0\n/src/c.cpp:7 (discriminator 3)\n')"
                      "\nprintf '/src/d.cpp:?\\n'");
  EXPECT_THAT(symbols::source_lines(own_program(), {1, 2, 3, 4}, soon()),
              ElementsAre("/src/a b.cpp:41", "", "/src/c.cpp:7", ""));
  EXPECT_THAT(symbols::source_lines(own_program(), {1, 2}, soon()),
              ElementsAre("", ""));  // other answers
  EXPECT_THAT(symbols::source_lines("/bin/sh", {1}, soon()), ElementsAre(""));
  EXPECT_THAT(symbols::source_lines("/no/such/file", {1}, soon()), ElementsAre(""));
}

TEST(SourceLines, AToolThatHangsIsGivenUpAlsoAmongSignals) {
  const FakeTool tool("exec sleep 1000");
  struct sigaction ignoring {
  }, before{};
  ignoring.sa_handler = [](int) {};
  ignoring.sa_flags = SA_RESTART;
  ::sigaction(SIGALRM, &ignoring, &before);
  const itimerval often{{0, 20'000}, {0, 20'000}};
  ::setitimer(ITIMER_REAL, &often, nullptr);
  const auto began = std::chrono::steady_clock::now();
  EXPECT_THAT(
      symbols::source_lines(own_program(), {1}, Deadline::after(std::chrono::milliseconds(200))),
      ElementsAre(""));
  EXPECT_LT(seconds_since(began), 100);
  const itimerval never{};
  ::setitimer(ITIMER_REAL, &never, nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
}

}  // namespace
}  // namespace lockstep
