// The parts of the supervisor, each alone; how they work together is in tests/launch.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>

#include "launcher/console.h"
#include "launcher/event_loop.h"
#include "launcher/node_connection.h"
#include "launcher/node_link.h"
#include "launcher/output.h"
#include "launcher/plan.h"
#include "launcher/process.h"
#include "launcher/report.h"
#include "launcher/run_observer.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"

namespace lockstep::launch {

namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// ---------------------------------------------------------------- EventLoop

TEST(EventLoop, AnEventForADescriptorForgottenInTheSameBatchIsDropped) {
  EventLoop loop;
  Pipe one = make_pipe();
  Pipe two = make_pipe();
  int calls = 0;
  const auto forget_both = [&](std::uint32_t) {
    ++calls;
    loop.forget(one.read.get());
    loop.forget(two.read.get());
  };
  loop.watch(one.read.get(), EPOLLIN, forget_both);
  loop.watch(two.read.get(), EPOLLIN, forget_both);
  write_all(one.write.get(), "x");
  write_all(two.write.get(), "x");
  loop.after(milliseconds(50), [&] { loop.stop(); });
  loop.run();
  EXPECT_EQ(calls, 1);
}

TEST(EventLoop, TimersFireInOrderAndCancelledOnesDoNot) {
  EventLoop loop;
  std::vector<int> fired;
  loop.after(milliseconds(30), [&] { fired.push_back(3); });
  loop.after(milliseconds(10), [&] { fired.push_back(1); });
  EventLoop::TimerId never = loop.after(milliseconds(20), [&] { fired.push_back(2); });
  loop.cancel(never);
  EXPECT_EQ(never, EventLoop::TimerId());
  loop.cancel(never);
  loop.after(milliseconds::max(), [] {});  // must not overflow into the past
  loop.after(milliseconds(60), [&] { loop.stop(); });
  loop.run();
  EXPECT_THAT(fired, ElementsAre(1, 3));
}

TEST(EventLoop, PostedTasksThatPostAgainDoNotStarveDescriptors) {
  EventLoop loop;
  Pipe pipe = make_pipe();
  std::function<void()> again = [&] { loop.post(again); };
  loop.post(again);
  loop.watch(pipe.read.get(), EPOLLIN, [&](std::uint32_t) { loop.stop(); });
  write_all(pipe.write.get(), "x");
  loop.run();
}

TEST(EventLoop, WhatADescriptorSaidInTimeIsHeardBeforeTheTimer) {
  EventLoop loop;
  Pipe slow = make_pipe();
  Pipe news = make_pipe();
  std::vector<std::string> order;
  // On a busy machine the event may come while the process is delayed beyond the timer.
  loop.watch(slow.read.get(), EPOLLIN, [&](std::uint32_t) {
    loop.forget(slow.read.get());
    write_all(news.write.get(), "x");
    ::usleep(50'000);
  });
  loop.watch(news.read.get(), EPOLLIN, [&](std::uint32_t) {
    loop.forget(news.read.get());
    order.emplace_back("news");
  });
  loop.after(milliseconds(30), [&] {
    order.emplace_back("timer");
    loop.stop();
  });
  write_all(slow.write.get(), "x");
  loop.run();
  EXPECT_THAT(order, ElementsAre("news", "timer"));
}

TEST(EventLoop, TimersWaitForEveryoneWhoIsReady) {
  EventLoop loop;
  constexpr int kMany = 150;  // more than one epoll_wait() returns
  std::vector<Pipe> pipes;
  int heard = 0;
  int at_timer = 0;
  for (int i = 0; i < kMany; ++i) {
    const Pipe& pipe = pipes.emplace_back(make_pipe());
    const int fd = pipe.read.get();
    loop.watch(fd, EPOLLIN, [&loop, &heard, fd](std::uint32_t) {
      loop.forget(fd);
      ++heard;
    });
    write_all(pipe.write.get(), "x");
  }
  loop.after(milliseconds(1), [&] {
    at_timer = heard;
    loop.stop();
  });
  ::usleep(20'000);
  loop.run();
  EXPECT_EQ(at_timer, kMany);
}

// ---------------------------------------------------------------- processes

std::vector<std::string> plain_environment() {
  return {"PATH=/usr/bin:/bin"};
}

std::optional<Ending> wait_for(Process& process) {
  for (int i = 0; i < 6000; ++i) {
    if (auto ending = process.reap()) return ending;
    ::usleep(10'000);
  }
  return std::nullopt;
}

Process start(const std::string& script) {
  ProcessRequest request;
  request.argv = {"sh", "-c", script};
  request.environment = plain_environment();
  return start_process(request);
}

TEST(Process, SaysHowItEnded) {
  Process one = start("exit 7");
  EXPECT_EQ(wait_for(one)->text(), "exited with code 7");
  EXPECT_FALSE(one.alive());
  Process two = start("kill -TERM $$");
  const auto ending = wait_for(two);
  EXPECT_EQ(ending->text(), "killed by SIGTERM");
  EXPECT_EQ(ending->exit_code(), 143);
}

TEST(Process, LeadsASessionAndFeelsGroupSignals) {
  Process process = start("sleep 300 & wait");
  EXPECT_EQ(session_of(process.pid()), process.pid());
  EXPECT_EQ(group_of(process.pid()), process.pid());
  process.signal_group(SIGKILL);
  EXPECT_EQ(wait_for(process)->exit_code(), 137);
  process.signal_group(SIGKILL);  // a no-op, because it was reaped
}

TEST(Process, AProgramThatCannotBeExecutedIsNamed) {
  ProcessRequest request;
  request.argv = {"/no/such/program"};
  request.environment = plain_environment();
  EXPECT_THAT(message_of<SystemError>([&] { start_process(request); }),
              HasSubstr("cannot execute '/no/such/program': No such file"));
  for (const char* name : {"/no/such/program", "no_such_program", "/"})
    EXPECT_EQ(find_program(name, std::nullopt), std::nullopt) << name;
  EXPECT_NE(find_program("sh", std::nullopt), std::nullopt);
}

TEST(Process, OnlyWhatIsBelowIsSignalled) {
  Process outer = start("sleep 300 & echo; wait");
  std::vector<pid_t> below;
  for (int i = 0; i < 500 && below.empty(); ++i) {
    below = descendants_of(outer.pid());
    ::usleep(10'000);
  }
  ASSERT_EQ(below.size(), 1u);
  EXPECT_FALSE(signal_below(below[0], outer.pid(), 0));  // above, not below
  EXPECT_FALSE(signal_below(outer.pid(), ::getppid(), 0));
  EXPECT_TRUE(signal_below(outer.pid(), below[0], 0));
  EXPECT_TRUE(signal_below(::getpid(), below[0], SIGKILL));
  EXPECT_TRUE(descendants_of(::getpid(), {outer.pid()}).empty());
  EXPECT_TRUE(wait_for(outer));
}

// ---------------------------------------------------------------- console and output

class ConsoleTest : public ::testing::Test {
 protected:
  std::string read_all() {
    std::string text;
    char buffer[65536];
    ssize_t n;
    while ((n = ::read(out_.read.get(), buffer, sizeof buffer)) > 0)
      text.append(buffer, static_cast<std::size_t>(n));
    return text;
  }
  void run_for(milliseconds time) {
    loop_.after(time, [this] { loop_.stop(); });
    loop_.run();
  }
  void SetUp() override { set_nonblocking(out_.read.get()); }

  EventLoop loop_;
  Pipe out_ = make_pipe();
  Pipe err_ = make_pipe();
};

TEST_F(ConsoleTest, AStuckConsoleIsGivenUpAtTheEnd) {
  Console console(loop_, out_.write.get(), err_.write.get());
  for (int i = 0; i < 200; ++i) console.put({Console::kOut, 1, "", std::string(1000, 'x'), true});
  bool done = false;
  console.finish(milliseconds(50), [&] {
    done = true;
    loop_.stop();
  });
  loop_.run();
  EXPECT_TRUE(done);
}

TEST_F(ConsoleTest, ALineThatCannotBeOneIsShownInPieces) {
  Console console(loop_, out_.write.get(), err_.write.get());
  OutputStream stream(loop_, console, {Console::kOut, 1, {true, "[0] ", "", {}, -1, ""}});
  const std::string half(OutputStream::kLongestLineBytes / 2 + 1, 'y');
  std::string sent = half + half;
  std::string text;
  for (int i = 0; i < 5000 && text.size() < sent.size(); ++i) {
    const std::string part = sent.substr(std::min<std::size_t>(sent.size(), 4096u * i), 4096);
    write_all(stream.child_end(), part);
    run_for(milliseconds(0));
    text += read_all();
  }
  EXPECT_EQ(text.substr(0, 5), "[0] y");
  EXPECT_EQ(text.find('\n'), std::string::npos);
  EXPECT_GE(text.size(), OutputStream::kLongestLineBytes);
}

// ---------------------------------------------------------------- error files

class ErrorFileTest : public ::testing::Test {
 protected:
  void write(const std::string& text) { write_file_atomically(path_, text); }
  void TearDown() override { ::unlink(path_.c_str()); }
  std::string path_ = ::testing::TempDir() + fmt::format("lockstep_error_file_{}.json", ::getpid());
};

TEST_F(ErrorFileTest, MissingAndEmptyOnesAreNone) {
  EXPECT_FALSE(read_error_file(path_).present);
  write("");
  EXPECT_FALSE(read_error_file(path_).present);
}

TEST_F(ErrorFileTest, ExactTimesAreBelievedAndWholeSecondsAreRefined) {
  const char* form = R"({{"message": {{"message": "m", "extraInfo": {{"timestamp": "{}"}}}}}})";
  write(fmt::format(fmt::runtime(form), "1000.25"));
  EXPECT_DOUBLE_EQ(read_error_file(path_).time, 1000.25);
  write(fmt::format(fmt::runtime(form), "1000"));
  EXPECT_DOUBLE_EQ(read_error_file(path_).time, 1000);  // written long after: not the same event
  const timeval modified[2] = {{1000, 700'000}, {1000, 700'000}};
  ASSERT_EQ(::utimes(path_.c_str(), modified), 0);
  EXPECT_NEAR(read_error_file(path_).time, 1000.7, 1e-6);
}

TEST_F(ErrorFileTest, WhatCannotBeATimeIsTheFilesOwn) {
  for (const char* text : {"1e999", "-5", "nan", "1e300"}) {
    write(fmt::format(R"({{"message": {{"extraInfo": {{"timestamp": "{}"}}}}}})", text));
    const timeval modified[2] = {{2000, 0}, {2000, 0}};
    ASSERT_EQ(::utimes(path_.c_str(), modified), 0);
    EXPECT_DOUBLE_EQ(read_error_file(path_).time, 2000) << text;
  }
}

TEST_F(ErrorFileTest, OddContentsNeverThrow) {
  for (const char* text :
       {"{", "[]", "null", "3", "{\"message\": null}", "\xff\xfe",
        "{\"message\": {\"extraInfo\": 3}}", "{\"message\": {\"message\": []}}",
        "{\"message\": {\"extraInfo\": {\"timestamp\": {}, \"cpp_stack\": 1}}}"}) {
    write(text);
    const ErrorFile file = read_error_file(path_);
    EXPECT_TRUE(file.present) << text;
    RankFailure failure;
    failure.rank = 1;
    add_error_file(failure, file);
    EXPECT_THAT(failure_report(failure), HasSubstr("rank 1")) << text;
    EXPECT_EQ(control_line(failure).back(), '\n');
    EXPECT_EQ(pass_on_error_file(failure, path_, path_ + ".own"), "") << text;
    ::unlink((path_ + ".own").c_str());
  }
  EXPECT_THAT(pass_on_error_file(RankFailure{}, "", "/no/such/place/error.json"),
              HasSubstr("was not written"));
}

TEST_F(ErrorFileTest, LinesAndTheirNumberAreBounded) {
  const std::string line(100'000, 'f');
  for (const std::string& stack : {fmt::format(R"("cpp_stack": ["{}", "short"])", line),
                                   fmt::format(R"("py_callstack": "{}\nshort")", line),
                                   fmt::format(R"("cpp_stack": [{{"{}": 1}}, "short"])", line)}) {
    write(fmt::format(R"({{"message": {{"message": "m", "extraInfo": {{{}}}}}}})", stack));
    const ErrorFile file = read_error_file(path_);
    ASSERT_EQ(file.stack.size(), 2u);
    EXPECT_EQ(file.stack[0].size(), 1000u);
    EXPECT_EQ(file.stack[1], "short");
  }
}

TEST(Report, WhatTheMessageAndTheStackSayIsNotRepeated) {
  RankFailure failure;
  failure.rank = 1;
  failure.message = "std::runtime_error: the reason\nin two lines";
  failure.stack = {"f()+0x1 (train+0x2)", "main+0x1 (train+0x3)", std::string(600, 'x')};
  add_last_lines(failure,
                 {"a warning", "lockstep: rank 1 on n1: std::runtime_error: the reason",
                  "in two lines", "    at f()+0x1 (train+0x2)", "    at main+0x1 (train+0x3)",
                  "    at " + std::string(493, 'x'), "    ... 40 more frames", "last line"},
                 20);
  EXPECT_THAT(failure.last_lines, ElementsAre("a warning", "last line"));
  add_last_lines(failure, {"a", "b", "c"}, 2);
  EXPECT_THAT(failure.last_lines, ElementsAre("b", "c"));
  const RankFailure silent;
  RankFailure other = silent;
  add_last_lines(other, {"    at f()+0x1 (train+0x2)", ""}, 20);
  EXPECT_EQ(other.last_lines.size(), 2u);
}

TEST(Report, AMistakeOfAllRanksIsPrintedOnce) {
  RankFailure failure;
  failure.rank = 0;
  for (const std::string& first : {std::string("[config] no key 'x'."), std::string(3000, 'x')}) {
    failure.message = first + "\nmore";
    failure.others = {with_message("rank 1 with exit code 2, 0.08 s later", failure.message),
                      "rank 2 with exit code 1, 0.09 s later: another reason"};
    EXPECT_THAT(failure_report(failure),
                HasSubstr("\n    rank 1 with exit code 2, 0.08 s later: the same\n    rank 2 with "
                          "exit code 1, 0.09 s later: another reason"));
  }
}

TEST(Report, OneLineOfAMessageKeepsItsRemedy) {
  const std::string line = "[data] " + std::string(600, 'x') + ". Free some space.";
  EXPECT_EQ(with_message("exited with code 1", line + "\nmore"), "exited with code 1: " + line);
  EXPECT_EQ(with_message("exited with code 1", ""), "exited with code 1");
  RankFailure failure;
  failure.rank = 1;
  failure.cause = "exited with code 1";
  for (int i = 0; i < 600; ++i) failure.message += "\u00e9";  // two bytes
  const auto heard = parse_json(control_line(failure), "line").at("failed").at("cause").text;
  EXPECT_THAT(heard, ::testing::EndsWith("\u00e9 ..."));
  EXPECT_LT(heard.size(), 1010u);
}

TEST(Report, AMismatchThatGlooNoticedPointsToTheDebugMode) {
  RankFailure failure;
  failure.rank = 0;
  failure.cause = "killed by SIGABRT";
  failure.message =
      "uncaught gloo::EnforceNotMet: [enforce fail at pair.cc] op.preamble.length <= op.nbytes. 64 "
      "vs 4. Received data size doesn't match expected size. Is there a distributed collective "
      "mismatch in your code?";
  EXPECT_THAT(
      failure_report(failure),
      ::testing::MatchesRegex(".*killed by SIGABRT\\. The ranks have [^\n]*LOCKSTEP_DEBUG=1 "
                              "compares every call[^\n]*\n  message:\n    uncaught.*"));
  failure.message = "killed by SIGABRT";
  EXPECT_THAT(failure_report(failure), ::testing::Not(HasSubstr("LOCKSTEP_DEBUG")));
}

TEST(Report, SaysTheSignalOnce) {
  RankFailure failure;
  failure.rank = 0;
  failure.cause = "killed by SIGSEGV (core dumped)";
  failure.message = "killed by SIGSEGV at address 0x0\nat f()";
  EXPECT_THAT(failure_report(failure),
              HasSubstr(" failed: killed by SIGSEGV (core dumped) at address 0x0\n    at f()"));
  EXPECT_EQ(with_message("killed by SIGABRT", "killed by SIGABRT"), "killed by SIGABRT");
  EXPECT_EQ(with_message("exited with code 1", "killed by SIGSEGV"),
            "exited with code 1: killed by SIGSEGV");
}

TEST(Report, SignalsOfFaultsHaveAHint) {
  RankFailure failure;
  failure.rank = 0;
  for (const auto& [signal, hint] :
       std::map<std::string, std::string>{{"SIGBUS", "/dev/shm"},
                                          {"SIGILL", "newer processor"},
                                          {"SIGSEGV", "under a debugger"},
                                          {"SIGSYS", "seccomp"},
                                          {"SIGTRAP", "under a debugger"}}) {
    failure.cause = "killed by " + signal;
    const std::string report = failure_report(failure);
    EXPECT_THAT(report.substr(0, report.find('\n')), HasSubstr(hint)) << signal;
  }
}

TEST(Report, TheFirstLineHasCauseAndRemedy) {
  RankFailure failure;
  failure.rank = 1;
  failure.host = "n1";
  failure.cause = "exited with code 2";
  failure.message = "[config] a.yaml:9:1: there is no key 'x'. Did you mean y?";
  EXPECT_THAT(failure_report(failure),
              ::testing::StartsWith("[launch] rank 1 on n1 failed: exited with code 2: " +
                                    failure.message + "\n  rank 1 "));
  failure.message = "[config] 2 mistakes:\n  one\n  two";
  EXPECT_THAT(failure_report(failure), HasSubstr("code 2: [config] 2 mistakes:\n      one\n"
                                                 "      two\n  rank 1 "));
  failure.message = "c10::Error: DefaultCPUAllocator: not enough memory: you tried 8 bytes.";
  EXPECT_THAT(failure_report(failure), HasSubstr("tried 8 bytes.\n  hint: The host, or the limit"));
}

TEST(Report, NumbersThatAreNoIntsAreRefused) {
  const auto refusal = [](const std::string& line) { return message_of([&] { decode(line); }); };
  EXPECT_THAT(refusal(R"({"lockstep": 1e300})"), HasSubstr("not a number from"));
  Message message;
  message.failure = RankFailure{};
  std::string line = encode(message);
  EXPECT_EQ(refusal(line), "(nothing thrown)");
  const auto swapped = [&](const std::string& from, const std::string& to) {
    std::string changed = line;
    const auto at = changed.find(from);
    EXPECT_NE(at, std::string::npos) << line;
    return changed.replace(at, from.size(), to);
  };
  EXPECT_THAT(refusal(swapped(R"("node":0)", R"("node":4294967296)")), HasSubstr("4294967296"));
  EXPECT_THAT(refusal(swapped(R"(\"rank\":-1)", R"(\"rank\":-1e10)")), HasSubstr("-10000000000"));
  // A time that cannot be one is skipped; the rest of the failure still counts.
  const Message late = decode(swapped(R"(\"time\":0.0)", R"(\"time\":1e300)"));
  EXPECT_EQ(late.failure->time, 0);
}

TEST(Report, AFailureSurvivesTheWayToAnotherHost) {
  RankFailure failure;
  failure.rank = 3;
  failure.host = "n2";
  failure.cause = "killed by SIGKILL";
  failure.code = 137;
  failure.message = "caf\xc3\xa9 \xff";
  failure.last_lines = {"a", "b"};
  failure.ended_before = {0, 2};
  failure.restartable = false;
  Message message;
  message.kind = Message::Kind::kFailed;
  message.failure = failure;
  const std::string line = encode(message);
  EXPECT_EQ(line.find('\n'), line.size() - 1);
  const Message copy = decode(line);
  ASSERT_TRUE(copy.failure);
  EXPECT_EQ(copy.kind, Message::Kind::kFailed);
  EXPECT_EQ(copy.failure->headline(), "rank 3 on n2 failed: killed by SIGKILL");
  EXPECT_EQ(copy.failure->code, 137);
  EXPECT_FALSE(copy.failure->restartable);
  EXPECT_THAT(copy.failure->last_lines, ElementsAre("a", "b"));
  EXPECT_THAT(failure_report(*copy.failure), HasSubstr("ranks 0, 2 had ended with exit code 0"));
}

TEST(Report, NamesProgramErrorFileAndAStop) {
  RankFailure failure;
  failure.rank = 1;
  failure.host = "n1";
  failure.cause = "exited with code 143";
  failure.stopped = true;
  failure.program = shell_text({"./train", "--lr=0.1", "it's", "a\nb", ""});
  failure.error_file = "/logs/error.json";
  const RankFailure copy = failure_from_json(failure_to_json(failure));
  EXPECT_EQ(copy.program, R"(./train --lr=0.1 'it'\''s' 'a b' '')");
  EXPECT_EQ(copy.headline(), "rank 1 on n1 stopped on request: exited with code 143");
  EXPECT_THAT(failure_report(copy), HasSubstr("\n  error file: /logs/error.json"));
  const std::string text =
      shell_text({std::string(299, 'x') + "\u00e9"});  // two bytes, cut between
  EXPECT_EQ(text, "'" + std::string(299, 'x') + " ...");
}

TEST(NodeLink, WhatIsNotAMessageIsRefused) {
  EXPECT_THAT(message_of<UsageError>([] { decode("GET / HTTP/1.0"); }),
              HasSubstr("not a launcher's message"));
  const Message foreign = decode(R"({"lockstep": 99})");
  EXPECT_EQ(foreign.kind, Message::Kind::kOtherVersion);
  EXPECT_THAT(foreign.text, HasSubstr("different versions of Lockstep (protocols 99 and 5)"));
  EXPECT_THAT(message_of<UsageError>([] { decode(R"({"lockstep": 5, "kind": "dance"})"); }),
              HasSubstr("unknown message 'dance'"));
  EXPECT_THAT(message_of<UsageError>([] { failure_from_json("{}"); }),
              HasSubstr("a failure that cannot be read"));
}

// ---------------------------------------------------------------- supervise()

TEST(Supervise, ReturnsTheCodeToAProgramThatCallsIt) {
  LaunchPlan plan;
  plan.nproc_per_node = 2;
  plan.command = {"sh", "-c", "exit $((RANK * 5))"};
  EXPECT_EQ(supervise(plan), 5);
  plan.command = {"true"};
  EXPECT_EQ(supervise(plan), 0);
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);  // no child is left to this process
}

// ---------------------------------------------------------------- failure reports

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
  failure.logs = "/my logs";
  failure.standing = {"operation #5 all_reduce: finished 0.1 s ago"};
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
  EXPECT_TRUE(text.ends_with("\n  logs: /my logs (lockstep ledger '/my logs')")) << text;
  failure.standing.clear();  // no ledger
  EXPECT_TRUE(failure_report(failure).ends_with("\n  logs: /my logs"));
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

// ---------------------------------------------------------------- RunObserver

// The calls that an observer gets for real ranks. It runs in the supervising process, a fork of the
// test, so it writes everything to a file.

class Notes : public RunObserver {
 public:
  explicit Notes(std::string path) : path_(std::move(path)) {}

  void run_started(const LaunchPlan& plan) override { note("run of " + plan.command[0]); }
  void attempt_started(const AttemptStarted& attempt) override {
    note(fmt::format("attempt {}: {} of {} ranks from {}", attempt.attempt, attempt.local_ranks,
                     attempt.world_size, attempt.first_rank));
  }
  void rank_started(const RankStarted& rank) override {
    note(fmt::format("rank {} started, pid {}, ledger {}, files '{}' '{}'", rank.rank,
                     rank.pid > 0 ? "known" : "unknown", rank.ledger ? "there" : "missing",
                     fs::path(rank.out_file).filename().string(),
                     fs::path(rank.err_file).filename().string()));
  }
  void output_line(int rank, OutputKind kind, std::string_view line) override {
    note(fmt::format("rank {} {}: {}", rank, kind == OutputKind::kOut ? "out" : "err",
                     line.substr(0, 100)));
    if (line == "throw") throw std::runtime_error("an observer's mistake");
  }
  void output_progress(int rank, OutputKind, std::string_view line) override {
    note(fmt::format("rank {} shows: {}", rank, line.substr(0, 40)));
    if (line.size() > 4096) note("too long");
  }
  void rank_ended(const RankEnded& rank) override {
    note(fmt::format("rank {} {}{}", rank.rank, rank.outcome, rank.failed ? ", failed" : ""));
  }
  void attempt_ended(int attempt) override { note(fmt::format("attempt {} ended", attempt)); }
  std::vector<std::string> tick() override { return std::exchange(lines_, {}); }
  std::vector<std::string> run_ended(const RunEnded& run) override {
    note(fmt::format("run ended with {}: {}", run.code, run.cause));
    return {"the observer's last line"};
  }

 private:
  void note(const std::string& text) {
    std::ofstream(path_, std::ios::app) << text << std::endl;
    if (text.find("run of") == 0) lines_.push_back("the observer's first line");
  }

  const std::string path_;
  std::vector<std::string> lines_;
};

class RunObserverTest : public testing::Test {
 protected:
  RunObserverTest() {
    plan_.nproc_per_node = 2;
    plan_.stall_timeout = std::chrono::milliseconds(0);
    plan_.shutdown_timeout = std::chrono::milliseconds(5000);
  }

  // The exit code; what was noted and printed is in notes_ and said_.
  int run(const std::string& script) {
    plan_.command = {"bash", "-c", script};
    Notes observer(folder_ / "notes");
    testing::internal::CaptureStderr();
    const int code = supervise(plan_, &observer);
    said_ = testing::internal::GetCapturedStderr();
    notes_ = read_file(folder_ / "notes");
    return code;
  }

  LaunchPlan plan_;
  TemporaryDirectory folder_;
  std::string notes_;
  std::string said_;
};

TEST_F(RunObserverTest, SeesEveryRankItsLinesAndItsEnd) {
  EXPECT_EQ(run("test -n \"$LOCKSTEP_LEDGER\" || exit 9; printf 'be'; sleep 0.5; echo gun $RANK; "
                "printf 'no newline' >&2"),
            0);
  EXPECT_THAT(notes_, HasSubstr("run of bash\nattempt 0: 2 of 2 ranks from 0\n"));
  for (const char* rank : {"0", "1"}) {
    EXPECT_THAT(notes_, HasSubstr(fmt::format(
                            "rank {} started, pid known, ledger there, files '' ''\n", rank)));
    // A line that came to the console in two parts is one.
    EXPECT_THAT(notes_, HasSubstr(fmt::format("rank {0} out: begun {0}\n", rank)));
    EXPECT_THAT(notes_, HasSubstr(fmt::format("rank {} err: no newline\n", rank)));
    EXPECT_THAT(notes_, HasSubstr(fmt::format("rank {} exited with code 0\n", rank)));
  }
  EXPECT_THAT(notes_, ContainsRegex("attempt 0 ended\nrun ended with 0: \n$"));
  EXPECT_THAT(said_, HasSubstr("the observer's first line\n"));
  EXPECT_THAT(said_, HasSubstr("the observer's last line\n"));
}

TEST_F(RunObserverTest, SeesALineThatHasNotEndedAsATerminalShowsIt) {
  plan_.nproc_per_node = 1;
  plan_.local_ranks_filter = {7};  // not on the console
  // One bar ends with the return, one begins with it; a line without any comes in two parts.
  EXPECT_EQ(run("for i in 10 20 30; do printf \"$i of 30\\r\"; sleep 0.5; done; printf 'end\\n'; "
                "for i in 1 2; do printf \"\\rbar $i\" >&2; sleep 0.5; done; "
                "printf 'load'; sleep 0.5; printf 'ing\\n'; "
                "printf 'x%.0s' {1..5000}; sleep 6"),
            0);
  EXPECT_THAT(notes_, HasSubstr("rank 0 shows: 10 of 30\n"));
  EXPECT_THAT(notes_, HasSubstr("rank 0 shows: 30 of 30\n"));
  EXPECT_THAT(notes_, ContainsRegex("rank 0 shows: bar 1\n(.*\n)*rank 0 shows: bar 2\n"));
  EXPECT_THAT(notes_, HasSubstr("rank 0 shows: load\nrank 0 out: loading\n"));
  EXPECT_THAT(notes_, HasSubstr("rank 0 shows: xxxxxxxx"));
  EXPECT_THAT(notes_, Not(HasSubstr("too long")));
}

// Each return ends what came before it: the launcher holds one state of the bar, not all of them.
TEST_F(RunObserverTest, ABarThatNeverEndsIsNotHeld) {
  plan_.nproc_per_node = 1;
  plan_.local_ranks_filter = {7};  // not on the console
  EXPECT_EQ(run("yes 'a state of the bar' | head -c 12000000 | tr '\\n' '\\r'"), 0);
  EXPECT_THAT(notes_, HasSubstr("rank 0 out: a state of the bar\n"));
  const std::string_view notes = notes_;
  const std::size_t line = notes.find("rank 0 out: ");
  EXPECT_EQ(notes.find("rank 0 out: ", line + 1), notes.npos) << "cut where it was too long";
}

TEST_F(RunObserverTest, SeesAFailureAndTheAttemptAfterIt) {
  plan_.max_restarts = 1;
  EXPECT_EQ(run("if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then exit 0; fi; "
                "if [ $RANK = 1 ]; then kill -9 $$; fi; sleep 60"),
            0);
  EXPECT_THAT(notes_, HasSubstr("rank 1 killed by SIGKILL, failed\n"));
  EXPECT_THAT(notes_, HasSubstr("rank 0 killed by SIGTERM\n")) << "stopped by us: it did not fail";
  EXPECT_THAT(notes_, HasSubstr("attempt 0 ended\nattempt 1: 2 of 2 ranks from 0\n"));
  EXPECT_THAT(notes_, ContainsRegex("attempt 1 ended\nrun ended with 0: \n$"));
}

TEST_F(RunObserverTest, HearsWhyTheRunFailed) {
  EXPECT_EQ(run("if [ $RANK = 1 ]; then exit 3; fi; sleep 60"), 3);
  EXPECT_THAT(notes_, ContainsRegex("run ended with 3: rank 1 on .* failed: exited with code 3\n"));
  // What the launcher itself has to say comes last.
  EXPECT_LT(said_.find("the observer's last line"), said_.find("exited with code 3"));
}

TEST_F(RunObserverTest, AnExceptionEndsTheObservationNotTheRun) {
  EXPECT_EQ(run("echo throw; sleep 0.3; echo later; exit 0"), 0);
  EXPECT_THAT(notes_, Not(HasSubstr("later")));
  EXPECT_THAT(notes_, Not(HasSubstr("ended")));
  const std::string report = "which failed: an observer's mistake\n";
  EXPECT_THAT(said_, HasSubstr(report));
  EXPECT_EQ(said_.find(report), said_.rfind(report)) << said_;
}

TEST_F(RunObserverTest, FilesThatTheRankWritesAreNamed) {
  plan_.log_dir = folder_ / "logs";
  plan_.redirects.all = Streams::kOut;
  EXPECT_EQ(run("echo to the file; echo to the pipe >&2"), 0);
  EXPECT_THAT(notes_, HasSubstr("rank 0 started, pid known, ledger there, files 'stdout.log' ''"));
  EXPECT_THAT(notes_, Not(HasSubstr("to the file")));
  EXPECT_THAT(notes_, HasSubstr("rank 0 err: to the pipe\n"));
}

TEST_F(RunObserverTest, WithoutOneThereAreNoLedgersWhereNoneWasAskedFor) {
  plan_.command = {"bash", "-c", "test -z \"$LOCKSTEP_LEDGER\""};
  EXPECT_EQ(supervise(plan_), 0);
}

}  // namespace

}  // namespace lockstep::launch
