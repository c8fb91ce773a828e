#include "lockstep/core/crash.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/core/symbols.h"

namespace lockstep {
namespace {

// A sanitizer has signal handlers and an allocator of its own, and ends the process its own way.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

using child_for_test::Child;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

#if defined(__x86_64__)
constexpr int kBuiltinTrap = SIGILL;
void undefined_instruction() {
  asm volatile("ud2");
}
void breakpoint() {
  asm volatile("int3");
}
#elif defined(__aarch64__)
constexpr int kBuiltinTrap = SIGTRAP;
void undefined_instruction() {
  asm volatile(".inst 0");
}  // udf #0
void breakpoint() {
  asm volatile("brk #0");
}
#else
constexpr int kBuiltinTrap = SIGILL;
void undefined_instruction() {
  std::raise(SIGILL);
}
void breakpoint() {
  std::raise(SIGTRAP);
}
#endif

// Blocked by a filter, as in a sandbox; a machine without filters raises the same signal.
void blocked_system_call() {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_sethostname, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog program{static_cast<unsigned short>(std::size(code)), code};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
    std::raise(SIGSYS);
  ::syscall(SYS_sethostname, nullptr, 0);
}

[[gnu::noinline]] void throw_int() {
  throw 7;
}
constexpr int kIntThrownAt = __LINE__ - 2;

// Where the faults below happen; a stack must name it although it is not exported.
[[gnu::noinline]] int deepest_function(const std::string& kind) {
  static volatile int sink = 0;
  int* volatile nowhere = nullptr;
  if (kind == "segv") *nowhere = 1;
  if (kind == "abort") std::abort();
  if (kind == "raise") std::raise(SIGBUS);
  if (kind == "fpe") std::raise(SIGFPE);
  if (kind == "ill") undefined_instruction();
  if (kind == "trap") breakpoint();
  if (kind == "builtin trap") __builtin_trap();
  if (kind == "sys") blocked_system_call();
  if (kind == "raise sys") std::raise(SIGSYS);
  if (kind == "raise trap") std::raise(SIGTRAP);
  if (kind == "throw") throw std::runtime_error("the \"reason\"\n of \xff it");
  if (kind == "throw int") throw_int();
  if (kind == "call null") reinterpret_cast<void (*)()>(const_cast<int*>(nowhere))();
  if (kind == "heap") {
    // glibc notices this inside malloc, with its locks held: the report must not need them.
    volatile std::size_t size = 2000;
    char* a = static_cast<char*>(std::malloc(size));
    char* b = static_cast<char*>(std::malloc(size));
    for (std::size_t i = 0; i < size + 64; ++i) const_cast<volatile char*>(a)[i] = 0x41;
    std::free(b);
    sink = std::malloc(size * 10) != nullptr;
  }
  return sink + 1;
}

int overflow(int depth) {
  volatile char block[4096];
  std::memset(const_cast<char*>(block), depth, sizeof block);
  return depth < 0 ? 0 : overflow(depth + 1) + block[depth % 4096];
}

CHILD(crashes) {
  crash::install(5);
  const std::string kind = std::getenv("KIND");
  if (kind == "overflow") return overflow(0);
  if (kind == "noexcept") return [&]() noexcept { return deepest_function("throw"); }();
  if (kind == "thread") {
    std::thread([] { deepest_function("throw"); }).join();
    return 0;
  }
  if (kind == "caught") {
    try {
      deepest_function("throw");
    } catch (const std::exception& e) {
      return crash::report(e) ? 1 : 2;
    }
  }
  if (kind == "reported first") {
    crash::report({"the first cause", {}, false});
    std::abort();
  }
  if (kind == "consequence") {
    crash::report({"rank 1 ends because rank 0 failed", {"frame"}, true});
    return 1;
  }
  if (kind == "for a launcher") {
    crash::install(5, {.lockstep_run = true, .prints_all = true});
    crash::report({"the cause", {"frame"}, false});
    return 1;
  }
  if (kind == "terminate") std::terminate();
  if (kind == "two threads") {
    std::thread other([] { deepest_function("segv"); });
    deepest_function("segv");
    other.join();
  }
  return deepest_function(kind);
}

volatile std::sig_atomic_t g_continued = 0;

CHILD(continues_after_traps) {
  for (const int number : {SIGTRAP, SIGSYS})
    std::signal(number, [](int) { g_continued = g_continued + 1; });
  crash::install();
  std::raise(SIGTRAP);
  std::raise(SIGSYS);
  return g_continued == 2 ? 0 : 1;
}

struct Outcome {
  int status = 0;
  std::string output;
  nlohmann::json file;
  std::string message() const { return file.at("message").at("message"); }
  const nlohmann::json& info() const { return file.at("message").at("extraInfo"); }
  std::string stack() const { return info().at("cpp_stack").dump(); }
};

Outcome crash_by(const std::string& kind) {
  const std::string path = ::testing::TempDir() + "lockstep_error_" + std::to_string(::getpid());
  ::unlink(path.c_str());
  Child child("crashes", {{"KIND", kind}, {"TORCHELASTIC_ERROR_FILE", path}});
  Outcome outcome;
  outcome.status = child.wait();
  outcome.output = child.output();
  if (::access(path.c_str(), R_OK) == 0) {
    outcome.file = nlohmann::json::parse(read_file(path), nullptr, false);
  }
  ::unlink(path.c_str());
  return outcome;
}

struct SignalCase {
  std::string kind;
  int signal;
  std::string message;
};

TEST(Crash, FatalSignalsLeaveAReportAndStayWhatTheyWere) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer's own";
  for (const auto& [kind, signal, message] :
       std::vector<SignalCase>{{"segv", SIGSEGV, "killed by SIGSEGV at address 0x0"},
                               {"call null", SIGSEGV, "killed by SIGSEGV at address 0x0"},
                               {"two threads", SIGSEGV, "killed by SIGSEGV at address 0x0"},
                               {"abort", SIGABRT, "killed by SIGABRT"},
                               {"heap", SIGABRT, "killed by SIGABRT"},
                               {"raise", SIGBUS, "killed by SIGBUS"},
                               {"fpe", SIGFPE, "killed by SIGFPE"},
                               {"ill", SIGILL, "killed by SIGILL"},
                               {"trap", SIGTRAP, "killed by SIGTRAP"},
                               {"raise trap", SIGTRAP, "killed by SIGTRAP"},
                               {"builtin trap", kBuiltinTrap,
                                "killed by SIG" + std::string(::sigabbrev_np(kBuiltinTrap))},
                               {"sys", SIGSYS, "killed by SIGSYS"},
                               {"raise sys", SIGSYS, "killed by SIGSYS"}}) {
    const Outcome outcome = crash_by(kind);
    EXPECT_EQ(outcome.status, -signal) << kind << "\n" << outcome.output;
    ASSERT_TRUE(outcome.file.is_object()) << kind << "\n" << outcome.output;
    EXPECT_EQ(outcome.message(), message) << kind;
    EXPECT_EQ(outcome.info().at("rank"), 5) << kind;
    EXPECT_THAT(outcome.stack(), HasSubstr("deepest_function")) << kind;
    EXPECT_THAT(outcome.output, HasSubstr("lockstep: rank 5 on ")) << kind;
    EXPECT_THAT(outcome.output, HasSubstr(message + "\n    ")) << kind;
    EXPECT_THAT(outcome.output, HasSubstr("deepest_function(std::string const&)")) << kind;
  }
}

TEST(Crash, AHandlerThatContinuesAfterATrapStays) {
  Child child("continues_after_traps", {});
  EXPECT_EQ(child.wait(), 0) << child.output();
}

TEST(Crash, AnOverflowedStackIsReported) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer's own";
  const Outcome outcome = crash_by("overflow");
  EXPECT_EQ(outcome.status, -SIGSEGV);
  ASSERT_TRUE(outcome.file.is_object()) << outcome.output;
  EXPECT_THAT(outcome.stack(), HasSubstr("overflow(int)"));
}

TEST(Crash, TerminateNamesTheExceptionAndWhereItWasThrown) {
  for (const std::string kind : {"noexcept", "thread", "throw"}) {
    const Outcome outcome = crash_by(kind);
    EXPECT_EQ(outcome.status, -SIGABRT) << kind << outcome.output;
    ASSERT_TRUE(outcome.file.is_object()) << kind << outcome.output;
    EXPECT_THAT(outcome.message(), HasSubstr("uncaught std::runtime_error: the \"reason\"\n of "));
    EXPECT_THAT(outcome.stack(), HasSubstr("deepest_function")) << kind;
  }
  const Outcome number = crash_by("throw int");
  EXPECT_EQ(number.message(), "uncaught exception of type int");
  EXPECT_THAT(number.stack(), HasSubstr("deepest_function"));
  const Outcome bare = crash_by("terminate");
  EXPECT_EQ(bare.message(), "std::terminate was called without an exception");
}

bool throws_are_traced() {
  throw_trace::enable();
  try {
    throw std::runtime_error("probe");
  } catch (const std::exception&) {
  }
  return !throw_trace::find_latest().empty();
}

TEST(Crash, ACaughtExceptionStillKnowsWhereItWasThrown) {
  const Outcome outcome = crash_by("caught");
  EXPECT_EQ(outcome.status, 1);
  ASSERT_TRUE(outcome.file.is_object()) << outcome.output;
  EXPECT_THAT(outcome.message(), HasSubstr("std::runtime_error: the \"reason\"\n of "));
  if (!throws_are_traced()) GTEST_SKIP() << "linked with libstdc++.a, which keeps its own throw";
  EXPECT_THAT(outcome.info().at("cpp_stack").at(0).get<std::string>(),
              HasSubstr("deepest_function"));
  // What torchrun reads: seconds as text, and the text that it shows.
  const long stamp = std::stol(outcome.info().at("timestamp").get<std::string>());
  EXPECT_NEAR(static_cast<double>(stamp), static_cast<double>(std::time(nullptr)), 60);
  EXPECT_THAT(outcome.info().at("py_callstack").get<std::string>(), HasSubstr("\n    at "));
}

TEST(Crash, ThrowsAreTracedOnlyWhereALauncherOrTheUserAsks) {
  if (!throws_are_traced()) GTEST_SKIP() << "linked with libstdc++.a, which keeps its own throw";
  const auto output_with = [](std::map<std::string, std::string> variables) {
    variables["KIND"] = "caught";
    Child child("crashes", variables);
    EXPECT_EQ(child.wait(), 1);
    return child.output();
  };
  const std::string file = ::testing::TempDir() + "lockstep_traced_" + std::to_string(::getpid());
  EXPECT_THAT(output_with({}), Not(HasSubstr("\n    at ")));
  EXPECT_THAT(output_with({{"LOCKSTEP_TRACE_THROWS", "1"}}), HasSubstr("deepest_function"));
  EXPECT_THAT(output_with({{"TORCHELASTIC_ERROR_FILE", file}}), HasSubstr("deepest_function"));
  EXPECT_THAT(output_with({{"TORCHELASTIC_ERROR_FILE", file}, {"LOCKSTEP_TRACE_THROWS", "0"}}),
              Not(HasSubstr("\n    at ")));
  ::unlink(file.c_str());
}

TEST(Crash, AStackNamesTheLinesOfAProgramWithDebugInformation) {
  if (!throws_are_traced()) GTEST_SKIP() << "linked with libstdc++.a, which keeps its own throw";
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  if (std::system(fmt::format("addr2line -e '{}' 0 > /dev/null 2>&1", program).c_str()) != 0)
    GTEST_SKIP() << "no addr2line for this program is installed";
  const Outcome outcome = crash_by("throw int");
  const std::string line = fmt::format("lockstep/core/crash_test.cpp:{}", kIntThrownAt);
  EXPECT_THAT(outcome.info().at("cpp_stack").at(0).get<std::string>(), HasSubstr(line));
  EXPECT_THAT(outcome.output, HasSubstr(line + ")\n"));
  EXPECT_THAT(outcome.output, HasSubstr("of libc\n"));
  EXPECT_LE(std::count(outcome.output.begin(), outcome.output.end(), '\n'), 10);
}

TEST(Crash, WhatALauncherPrintsIsNotOnStderr) {
  const Outcome outcome = crash_by("for a launcher");
  EXPECT_EQ(outcome.message(), "the cause");
  EXPECT_EQ(outcome.output, "");
  Child child("crashes", {{"KIND", "for a launcher"}, {"TORCHELASTIC_ERROR_FILE", "/no/dir/e"}});
  EXPECT_EQ(child.wait(), 1);
  EXPECT_THAT(child.output(), HasSubstr("the cause"));
}

TEST(Crash, TheFirstReportWins) {
  const Outcome outcome = crash_by("reported first");
  EXPECT_EQ(outcome.status, -SIGABRT);
  EXPECT_EQ(outcome.message(), "the first cause");
  EXPECT_THAT(outcome.output, Not(HasSubstr("SIGABRT")));
}

TEST(Crash, AConsequenceIsOneLineAndLater) {
  const std::time_t before = std::time(nullptr);
  const Outcome outcome = crash_by("consequence");
  EXPECT_EQ(outcome.info().at("consequence"), true);
  EXPECT_GT(std::stol(outcome.info().at("timestamp").get<std::string>()), before);
  EXPECT_THAT(outcome.output, HasSubstr(": rank 1 ends because rank 0 failed\n"));
  EXPECT_EQ(std::count(outcome.output.begin(), outcome.output.end(), '\n'), 1);
}

TEST(Crash, StackNamesItsCaller) {
  const auto frames = crash::stack();
  ASSERT_FALSE(frames.empty());
  EXPECT_THAT(frames[0], HasSubstr("StackNamesItsCaller"));
  EXPECT_THAT(frames[0], HasSubstr("crash_test+0x"));
  EXPECT_EQ(crash::stack(1)[0], frames[1]);
}

TEST(Crash, DescribesByTypeAndText) {
  EXPECT_EQ(crash::describe(UsageError("x", "no {}", 1)), "lockstep::UsageError: [x] no 1");
}

// ---------------------------------------------------------------- what a person reads of a stack

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
