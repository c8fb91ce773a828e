#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "lockstep/core/deadline.h"
#include "lockstep/core/device_rule.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/log.h"
#include "lockstep/core/text.h"

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
  const auto with = [](const char* text, auto read) {
    ::setenv("LOCKSTEP_TEST_X", text, 1);
    return read();
  };
  const auto number = [] { return env::get_int("LOCKSTEP_TEST_X", 0, 99); };
  const auto yes = [] { return env::get_bool("LOCKSTEP_TEST_X"); };
  EXPECT_EQ(with("12", number), 12);
  EXPECT_EQ(with("", number), std::nullopt);
  EXPECT_EQ(with("Yes", yes), true);
  for (const auto& [text, problem] :
       {std::pair{"12x", "LOCKSTEP_TEST_X='12x' is not an integer"},
        {"100", "out of range (0 to 99)"},
        {"18446744073709551615", "18446744073709551615 is out of range (0 to 99)"},
        {"18446744073709551615x", "is not an integer"}})
    EXPECT_THAT(message_of<UsageError>([&] { with(text, number); }), HasSubstr(problem));
  EXPECT_THAT(message_of<UsageError>([&] { with("maybe", yes); }),
              HasSubstr("neither true nor false"));
}

TEST(Log, InfoIsForRankZero) {
  log::set_rank(1, 2);
  EXPECT_FALSE(log::enabled(log::Level::kInfo));
  EXPECT_TRUE(log::enabled(log::Level::kWarning));
  log::set_rank(0, 2);
  EXPECT_TRUE(log::enabled(log::Level::kInfo));
  log::set_rank(0, 1);
}

TEST(Log, RemembersTheNewestErrorUntilAStepHasEnded) {
  log::error("test", "the {} one", "first");
  log::error("test", "the {} one", "second");
  log::warning("test", "less than an error");
  EXPECT_EQ(log::last_error(), "[test] the second one");
  ledger::count_step();
  EXPECT_EQ(log::last_error(), "");
  log::error("test", "the {} one", "third");
  EXPECT_EQ(log::last_error(), "[test] the third one");
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
  const std::string said = message_of<SystemError>(
      [&] { write_file_atomically(folder / "file", std::string(1000, 'x')); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, old);
  EXPECT_EQ(said, "[fd] cannot write " + (folder / "file").string() + " (File too large).");
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

// ---------------------------------------------------------------- the rule for devices

using ::testing::AllOf;

// A machine with some GPUs, and nothing in the environment that has a say.
class DeviceRuleTest : public ::testing::Test {
 protected:
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }
  static void clear() {
    for (const char* name : {"LOCKSTEP_DEVICE", "LOCKSTEP_BACKEND", "LOCKSTEP_SHARE_DEVICE"})
      ::unsetenv(name);
  }
  static DeviceRequest on(int gpus, int local_rank) {
    return {.local_rank = local_rank, .visible_gpus = [gpus] { return gpus; }};
  }
  static std::string refusal(const DeviceRequest& request) {
    return message_of([&] { apply_device_rule(request); });
  }
};

TEST_F(DeviceRuleTest, TheMachineDecides) {
  EXPECT_EQ(apply_device_rule(on(0, 0)).device(), "cpu");
  EXPECT_EQ(apply_device_rule(on(0, 0)).backend, "shm");
  EXPECT_TRUE(apply_device_rule(on(0, 0)).automatic) << "gloo between hosts";
  EXPECT_EQ(apply_device_rule(on(0, 0)).reason, "no CUDA device is visible");
  const DeviceRule second = apply_device_rule(on(2, 1));
  EXPECT_EQ(second.device(), "cuda:1");
  EXPECT_EQ(second.backend, "nccl");
  EXPECT_FALSE(second.automatic);
  EXPECT_EQ(second.problem, "");
  EXPECT_EQ(apply_device_rule(on(2, -1)).device(), "cuda:0") << "the local rank is not known yet";
  DeviceRequest request = on(1, 0);
  request.cuda_built = false;
  EXPECT_EQ(apply_device_rule(request).reason,
            "1 CUDA device is visible, but this build has no CUDA plug-in");
}

TEST_F(DeviceRuleTest, TheEnvironmentDecidesBeforeIt) {
  ::setenv("LOCKSTEP_BACKEND", "gloo", 1);
  EXPECT_EQ(apply_device_rule(on(2, 1)).device(), "cpu");
  ::setenv("LOCKSTEP_BACKEND", "shm", 1);
  EXPECT_FALSE(apply_device_rule(on(2, 1)).automatic) << "asked for: nothing takes its place";
  ::setenv("LOCKSTEP_BACKEND", "gloo", 1);
  ::setenv("LOCKSTEP_DEVICE", "cuda", 1);
  EXPECT_EQ(apply_device_rule(on(2, 1)).device(), "cuda:1");
  EXPECT_EQ(apply_device_rule(on(2, 1)).backend, "gloo");
  ::setenv("LOCKSTEP_DEVICE", "cuda:0", 1);
  EXPECT_EQ(apply_device_rule(on(2, 1)).device(), "cuda:0");
  EXPECT_EQ(apply_device_rule(on(2, 1)).reason, "LOCKSTEP_DEVICE=cuda:0");
}

TEST_F(DeviceRuleTest, TheProgramDecidesBeforeBoth) {
  ::setenv("LOCKSTEP_DEVICE", "cuda", 1);
  ::setenv("LOCKSTEP_BACKEND", "nccl", 1);
  DeviceRequest request = on(2, 1);
  request.device = "cpu";
  request.backend = "gloo";
  request.visible_gpus = [] {
    ADD_FAILURE() << "the driver is not asked for a CPU";
    return 0;
  };
  EXPECT_EQ(apply_device_rule(request).device(), "cpu");
  EXPECT_EQ(apply_device_rule(request).backend, "gloo");
}

TEST_F(DeviceRuleTest, MoreRanksThanGpus) {
  EXPECT_THAT(apply_device_rule(on(2, 3)).problem,
              HasSubstr("local rank 3 wants cuda:3, but 2 CUDA devices are visible."));
  EXPECT_THAT(apply_device_rule(on(1, 1)).problem, HasSubstr("but 1 CUDA device is visible."));
  DeviceRequest request = on(2, 3);
  request.share = true;
  EXPECT_EQ(apply_device_rule(request).device(), "cuda:1");
  EXPECT_EQ(apply_device_rule(request).problem, "");
  ::setenv("LOCKSTEP_SHARE_DEVICE", "1", 1);
  EXPECT_EQ(apply_device_rule(on(2, 2)).device(), "cuda:0");
}

TEST_F(DeviceRuleTest, WhatDoesNotExist) {
  DeviceRequest request = on(0, 0);
  request.backend = "nccl";
  EXPECT_THAT(apply_device_rule(request).problem,
              AllOf(HasSubstr("backend nccl needs a CUDA device"),
                    HasSubstr("(no CUDA device is visible). Use shm (ranks of one host) or gloo")));
  request.visible_gpus = [] { return 1; };
  request.cuda_built = false;
  EXPECT_THAT(apply_device_rule(request).problem,
              AllOf(HasSubstr("this build has no CUDA plug-in"), HasSubstr("Use shm")));
  request = on(0, 0);
  request.device = "cuda";
  request.backend = "nccl";
  EXPECT_THAT(apply_device_rule(request).problem, HasSubstr("(with backend shm or gloo)"));
  request = on(0, 0);
  request.backend = "mpi";
  EXPECT_THAT(refusal(request), HasSubstr("there is no backend 'mpi'"));
  for (const char* device : {"tpu", "cuda:", "cuda:x", "cuda:-1", "cuda:99999", "CPU"}) {
    ::setenv("LOCKSTEP_DEVICE", device, 1);
    EXPECT_THAT(refusal(on(0, 0)), HasSubstr("is not a device. Use cpu, cuda or cuda:N."));
  }
}

TEST(IdleGpus, AreSaidWithTheLaunchLineWhereALauncherWasForgotten) {
  EXPECT_THAT(idle_gpus_warning(1, false, 2),
              AllOf(HasSubstr("2 GPUs are visible but this is a world of one: 1 will be idle."),
                    HasSubstr("lockstep run --nproc-per-node=2 <program>")));
  EXPECT_THAT(idle_gpus_warning(1, false, 8), HasSubstr("7 will be idle. Start it with lockstep"));
  EXPECT_EQ(idle_gpus_warning(1, false, 1), "");
  EXPECT_EQ(idle_gpus_warning(1, false, 0), "") << "a rank on the CPU";
  EXPECT_EQ(idle_gpus_warning(2, false, 4), "") << "it was launched";
  EXPECT_EQ(idle_gpus_warning(1, true, 2), "") << "the program named its device";
}

}  // namespace

}  // namespace lockstep
