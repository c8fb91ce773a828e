#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "lockstep/core/deadline.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/log.h"
#include "lockstep/core/printable.h"
#include "lockstep/core/terminal.h"
#include "lockstep/core/thrown_for_test.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

TEST(Error, CarriesComponentAndValues) {
  EXPECT_EQ(message_of<UsageError>([] { throw UsageError("world", "rank {} of {}.", 4, 4); }),
            "[world] rank 4 of 4.");
  EXPECT_STREQ(SystemError("io", "cannot write a.b. Try another disk.", ENOSPC).what(),
               "[io] cannot write a.b: No space left on device. Try another disk.");
  EXPECT_STREQ(SystemError("io", "Nothing was saved.", ENOSPC).what(),
               "[io] Nothing was saved: No space left on device.");
  EXPECT_THAT(message_of<SystemError>([] { read_file("/no/such/file"); }),
              HasSubstr("No such file"));
}

TEST(Error, AssertionsStayOnInRelease) {
  EXPECT_THAT(message_of<InternalError>([] { LOCKSTEP_ASSERT(1 + 1 == 3); }),
              HasSubstr("`1 + 1 == 3` failed at lockstep/core/core_test.cpp"));
}

TEST(Error, TimeoutIsACommError) {
  const TimeoutError e("comm", "late", {.rank = 1, .peer = 2, .operation = "all_reduce"});
  const CommError& base = e;
  EXPECT_EQ(base.context().peer, 2);
}

TEST(Deadline, CountsDownAndNeverOverflows) {
  const Deadline far = Deadline::after(std::chrono::hours(1));
  EXPECT_FALSE(far.expired());
  EXPECT_GT(far.remaining_ms(), 0);
  const Deadline d = Deadline::after(milliseconds(20));
  std::this_thread::sleep_for(milliseconds(25));
  EXPECT_TRUE(d.expired());
  EXPECT_EQ(d.remaining_ms(), 0);
  EXPECT_GE(d.elapsed(), milliseconds(25));
  EXPECT_FALSE(Deadline::after(milliseconds::max()).expired());
}

TEST(Terminal, IsKnownThroughTheLaunchersPipeAlone) {
  const Pipe pipe = make_pipe();
  const Pipe other = make_pipe();
  EXPECT_EQ(terminal::columns(pipe.write.get()), 0);
  ::setenv(terminal::kVariable, terminal::describe_pipe(pipe.write.get(), 72).c_str(), 1);
  EXPECT_EQ(terminal::columns(pipe.write.get()), 72);
  EXPECT_EQ(terminal::columns(other.write.get()), 0);
  EXPECT_EQ(terminal::columns(-1), 0);
  EXPECT_EQ(terminal::describe_pipe(pipe.write.get(), 0), "");
  EXPECT_EQ(terminal::describe_pipe(-1, 80), "");
  const std::string text = terminal::describe_pipe(pipe.write.get(), 72);
  for (const std::string& bad : {text + "x", text + "999999999999", text.substr(0, 1)}) {
    ::setenv(terminal::kVariable, bad.c_str(), 1);
    EXPECT_EQ(terminal::columns(pipe.write.get()), 0) << bad;
  }
  ::unsetenv(terminal::kVariable);
}

TEST(Env, ReadsStrictly) {
  ::setenv("LOCKSTEP_TEST_X", "12", 1);
  EXPECT_EQ(env::get_int("LOCKSTEP_TEST_X"), 12);
  ::setenv("LOCKSTEP_TEST_X", "12x", 1);
  EXPECT_THAT(message_of<UsageError>([] { env::get_int("LOCKSTEP_TEST_X"); }),
              HasSubstr("LOCKSTEP_TEST_X='12x' is not an integer"));
  ::setenv("LOCKSTEP_TEST_X", "99", 1);
  EXPECT_THAT(message_of<UsageError>([] { env::get_int("LOCKSTEP_TEST_X", 0, 9); }),
              HasSubstr("out of range (0 to 9)"));
  ::setenv("LOCKSTEP_TEST_X", "18446744073709551615", 1);
  EXPECT_THAT(message_of<UsageError>([] { env::get_int("LOCKSTEP_TEST_X", 0); }),
              HasSubstr("18446744073709551615 is out of range (0 to 9223372036854775807)"));
  ::setenv("LOCKSTEP_TEST_X", "18446744073709551615x", 1);
  EXPECT_THAT(message_of<UsageError>([] { env::get_int("LOCKSTEP_TEST_X", 0); }),
              HasSubstr("is not an integer"));
  ::setenv("LOCKSTEP_TEST_X", "Yes", 1);
  EXPECT_EQ(env::get_bool("LOCKSTEP_TEST_X"), true);
  ::setenv("LOCKSTEP_TEST_X", "maybe", 1);
  EXPECT_THAT(message_of<UsageError>([] { env::get_bool("LOCKSTEP_TEST_X"); }),
              HasSubstr("neither true nor false"));
  ::setenv("LOCKSTEP_TEST_X", "", 1);
  EXPECT_EQ(env::get_int("LOCKSTEP_TEST_X"), std::nullopt);
}

TEST(Log, InfoIsForRankZero) {
  log::set_rank(1, 2);
  EXPECT_FALSE(log::enabled(log::Level::kInfo));
  EXPECT_TRUE(log::enabled(log::Level::kWarning));
  log::set_rank(0, 2);
  EXPECT_TRUE(log::enabled(log::Level::kInfo));
  log::set_rank(0, 1);
}

TEST(Fd, ClosesAndMoves) {
  Pipe pipe = make_pipe();
  const int raw = pipe.write.get();
  write_all(raw, "hello");
  Fd moved = std::move(pipe.write);
  EXPECT_FALSE(pipe.write);
  moved.reset();
  EXPECT_EQ(::write(raw, "x", 1), -1);
  char buffer[8];
  EXPECT_EQ(::read(pipe.read.get(), buffer, sizeof buffer), 5);
}

TEST(Fd, AnAtomicFileThatDoesNotFitLeavesNothing) {
  const auto folder = std::filesystem::path(::testing::TempDir()) /
                      fmt::format("lockstep_does_not_fit_{}", ::getpid());
  std::filesystem::create_directories(folder);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{100, before.rlim_max};
  const auto old = ::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &small);
  EXPECT_THROW(write_file_atomically(folder / "file", std::string(1000, 'x')), SystemError);
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, old);
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  ::rmdir(folder.c_str());
}

TEST(Fd, AtomicFileReplacesWhole) {
  const std::string path = ::testing::TempDir() + "lockstep_atomic_test";
  write_file_atomically(path, "one");
  write_file_atomically(path, "two");
  EXPECT_EQ(read_file(path), "two");
  EXPECT_THROW(read_file(path, 2), UsageError);
  ::unlink(path.c_str());
}

TEST(Printable, TextOfOthersCannotCommandATerminal) {
  EXPECT_EQ(printable_lines("a\tb\nc caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"),
            "a\tb\nc caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
  EXPECT_EQ(printable("\x1b[2J\r\b\x7f"), R"(\x1b[2J\x0d\x08\x7f)");
  EXPECT_EQ(printable(std::string_view("\0", 1)), R"(\x00)");
  EXPECT_EQ(printable("\xc2\x9b"
                      "2J"),
            R"(\u009b2J)");  // the one-character escape
  EXPECT_EQ(printable("\xe2\x80\xae"
                      "cba"),
            R"(\u202ecba)");                                // right to left
  EXPECT_EQ(printable("\x9b\xff\xc3"), R"(\x9b\xff\xc3)");  // not UTF-8
  EXPECT_EQ(printable("\xe0\x82\x9b"), R"(\xe0\x82\x9b)");  // written too long
  EXPECT_EQ(printable(printable("\x1b\xc2\x9b\xff")), printable("\x1b\xc2\x9b\xff"));
  EXPECT_EQ(printable("a\tb\n[launch] c"), "a b [launch] c");
}

}  // namespace
}  // namespace lockstep
