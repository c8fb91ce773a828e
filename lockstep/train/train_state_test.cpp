// The parts of training that need no torch: steps and intervals, the state on disk, metrics, stop
// signals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <limits>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/train/folder_owner.h"
#include "lockstep/train/metrics_log.h"
#include "lockstep/train/step_plan.h"
#include "lockstep/train/stop_signals.h"
#include "lockstep/train/trainer_state.h"

namespace lockstep::train {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Hugging Face's own numbers for these were read off transformers' Trainer.
TEST(StepPlan, BatchesBecomeStepsAndTheShortWindowIsOne) {
  TrainingArguments a;
  a.num_train_epochs = 2.5;
  const StepPlan plan = plan_steps(a, 10, 4);
  EXPECT_EQ(plan.steps_per_epoch, 3);
  EXPECT_EQ(plan.max_steps, 8);
  EXPECT_EQ(plan.num_train_epochs, 3);
}

TEST(StepPlan, MaxStepsWinsAndRatiosAreRoundedUp) {
  TrainingArguments a;
  a.max_steps = 33;
  a.logging_steps = 0.1;
  a.save_steps = 0.5;
  a.warmup_steps = 0.05;
  const StepPlan plan = plan_steps(a, 10, 1);
  EXPECT_EQ(plan.max_steps, 33);
  EXPECT_EQ(plan.num_train_epochs, 4);
  EXPECT_EQ(plan.logging_steps, 4);
  EXPECT_EQ(plan.eval_steps, 4);
  EXPECT_EQ(plan.save_steps, 17);
  EXPECT_EQ(plan.warmup_steps, 2);
}

// Products of values that are each valid, and what a checkpoint says, are not cast without a check.
TEST(StepPlan, MoreStepsThanARunCanTakeAreRefused) {
  TrainingArguments a;
  a.num_train_epochs = 1e6;
  const auto message = io::message_of<UsageError>([&] { plan_steps(a, std::int64_t{1} << 40, 1); });
  EXPECT_THAT(message, HasSubstr("the number of steps is 1.099511627776e+18, which is not from 0 "
                                 "to 1000000000000. Lower num_train_epochs."));
  a.max_steps = 30;
  const StepPlan plan = plan_steps(a, 24, 1);
  for (const double epoch : {1e300, std::numeric_limits<double>::infinity()})
    EXPECT_THAT(
        io::message_of<UsageError>([&] { replan_steps(a, plan, {.step = 1, .epoch = epoch}); }),
        HasSubstr("the number of epochs is "));
}

TEST(StepPlan, OtherRanksWalkTheRestOfTheEpochs) {
  TrainingArguments a;
  a.num_train_epochs = 3;
  // 12 steps per epoch then, 24 now; one epoch and a half are done.
  const StepPlan now = plan_steps(a, 24, 1);
  const StepPlan changed = replan_steps(a, now, {.step = 18, .epoch = 1.5});
  EXPECT_EQ(changed.max_steps, 18 + 36);
  a.max_steps = 30;
  const StepPlan fixed = replan_steps(a, plan_steps(a, 24, 1), {.step = 18, .epoch = 1.5});
  EXPECT_EQ(fixed.max_steps, 30);
  EXPECT_EQ(fixed.num_train_epochs, 2);
}

TEST(StepPlan, WhatIsDueAfterAStep) {
  TrainingArguments a;
  a.max_steps = 10;
  a.logging_steps = 4;
  a.save_steps = 5;
  a.eval_strategy = Interval::kSteps;
  a.eval_delay = 6;
  a.logging_first_step = true;
  const StepPlan plan = plan_steps(a, 100, 1);
  std::string events;
  for (int step = 1; step <= 10; ++step) {
    const Due due = due_after_step(a, plan, step);
    events += due.log ? 'l' : '.';
    events += due.evaluate ? 'e' : '.';
    events += due.save ? 's' : '.';
  }
  EXPECT_EQ(events, "l........l....s......le.....es");
}

TEST(TrainerState, ReadsWhatItWrites) {
  TrainerState state;
  state.global_step = 40;
  state.epoch = 1.0 / 3;
  state.max_steps = 100;
  state.best_metric = 0.125;
  state.best_global_step = 20;
  state.best_model_checkpoint = "out/checkpoint-20";
  state.patience_used = 2;
  state.num_input_tokens_seen = 123'456'789'012;
  state.log_history.push_back({.step = 10, .epoch = 0.1, .values = {{"loss", 1.0 / 7}}});
  state.log_history.push_back({.step = 20, .epoch = 0.2, .values = {{"loss", std::nan("")}}});
  const TrainerState read = parse_trainer_state(trainer_state_text(state), "state");
  EXPECT_EQ(read.global_step, 40);
  EXPECT_EQ(read.epoch, 1.0 / 3);
  EXPECT_EQ(read.best_metric, 0.125);
  EXPECT_EQ(read.best_global_step, 20);
  EXPECT_EQ(read.best_model_checkpoint, "out/checkpoint-20");
  EXPECT_EQ(read.patience_used, 2);
  EXPECT_EQ(read.num_input_tokens_seen, 123'456'789'012);
  ASSERT_EQ(read.log_history.size(), 2u);
  EXPECT_EQ(*find_metric(read.log_history[0].values, "loss"), 1.0 / 7);
  EXPECT_TRUE(std::isnan(*find_metric(read.log_history[1].values, "loss")));
  EXPECT_EQ(trainer_state_text(read), trainer_state_text(state));
}

TEST(TrainerState, APositionHasItsThreadsSinceTheyAreSaved) {
  const std::string text = data_position_text({.epoch = 3, .threads = 2});
  EXPECT_EQ(parse_data_position(text, "s.json").threads, 2);
  const std::string threads = ",\"threads\":2";
  std::string older = text;
  ASSERT_NE(older.find(threads), older.npos) << text;
  older.erase(older.find(threads), threads.size());
  EXPECT_EQ(parse_data_position(older, "s.json").epoch, 3);
  EXPECT_EQ(parse_data_position(older, "s.json").threads, 0);
}

TEST(TrainerState, RefusesWhatIsNone) {
  EXPECT_THAT(io::message_of<UsageError>([] { parse_trainer_state("{}", "x.json"); }),
              HasSubstr("[checkpoint] x.json: there is no global_step."));
  EXPECT_THAT(io::message_of<UsageError>([] { parse_data_position("{\"epoch\": 1}", "s.json"); }),
              HasSubstr("[checkpoint] s.json: there is no cursor."));
}

TEST(MetricsLog, AStepStandsOnceAfterResuming) {
  io::TemporaryDirectory dir;
  {
    MetricsLog metrics(dir.path());
    for (int step = 1; step <= 4; ++step) metrics.write({.step = step, .values = {{"loss", 1}}});
  }
  io::put(dir / "metrics.jsonl", io::get(dir / "metrics.jsonl") + "{\"step\": 5, \"lo");
  {
    MetricsLog metrics(dir.path(), {.resumed_at = 2});
    metrics.write({.step = 3, .values = {{"loss", 0.5}}});
  }
  EXPECT_EQ(io::get(dir / "metrics.jsonl"),
            "{\"step\":1,\"epoch\":0.0,\"loss\":1.0}\n"
            "{\"step\":2,\"epoch\":0.0,\"loss\":1.0}\n"
            "{\"step\":3,\"epoch\":0.0,\"loss\":0.5}\n");
  EXPECT_EQ(io::get(dir / "metrics.superseded.jsonl"),
            "{\"step\":3,\"epoch\":0.0,\"loss\":1.0}\n"
            "{\"step\":4,\"epoch\":0.0,\"loss\":1.0}\n");
  EXPECT_EQ(newest_with(dir / "metrics.jsonl", "loss")->step, 3);
  EXPECT_FALSE(newest_with(dir / "metrics.jsonl", "eval_loss"));
  MetricsLog fresh(dir.path());
  EXPECT_EQ(io::get(dir / "metrics.jsonl"), "");
  EXPECT_THAT(io::get(dir / "metrics.superseded.jsonl"), HasSubstr("\"loss\":0.5}"));
}

// Captures what is logged, through a pipe: a file would have the limit below.
class Logged {
 public:
  Logged() : before_(::dup(STDERR_FILENO)), pipe_(make_pipe()) {
    ::dup2(pipe_.write.get(), STDERR_FILENO);
  }
  ~Logged() { restore(); }
  std::string text() {
    restore();
    std::string all(1 << 16, '\0');
    const ssize_t size = ::read(pipe_.read.get(), all.data(), all.size());
    all.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
    return all;
  }

 private:
  void restore() {
    if (before_) ::dup2(before_.get(), STDERR_FILENO);
    before_.reset();
    pipe_.write.reset();
  }
  Fd before_;
  Pipe pipe_;
};

// The kernel writes what fits below the limit and answers EFBIG to the rest, as a full disk answers
// ENOSPC.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit now = before_;
    now.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &now);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, SIG_DFL);
  }

 private:
  rlimit before_{};
};

TEST(MetricsLog, ALineThatFindsNoRoomIsWrittenWholeLater) {
  io::TemporaryDirectory dir;
  const std::string line = "{\"step\":1,\"epoch\":0.0,\"loss\":1.0}\n";
  MetricsLog metrics(dir.path());
  metrics.write({.step = 1, .values = {{"loss", 1}}});
  Logged logged;
  {
    const FileSizeLimit full(line.size() + 10);
    metrics.write({.step = 2, .values = {{"loss", 1}}});
    metrics.write({.step = 3, .values = {{"loss", 1}}});
    EXPECT_EQ(io::get(dir / "metrics.jsonl"), line) << "no part of a line";
  }
  EXPECT_THAT(logged.text(),
              HasSubstr("Lines of metrics stay in memory until they can be written."));
  metrics.write({.step = 4, .values = {{"loss", 1}}});
  EXPECT_EQ(io::get(dir / "metrics.jsonl"), line +
                                                "{\"step\":2,\"epoch\":0.0,\"loss\":1.0}\n"
                                                "{\"step\":3,\"epoch\":0.0,\"loss\":1.0}\n"
                                                "{\"step\":4,\"epoch\":0.0,\"loss\":1.0}\n");
}

TEST(MetricsLog, LinesThatAreLostAreCounted) {
  io::TemporaryDirectory dir;
  Logged logged;
  {
    const FileSizeLimit full(10);
    MetricsLog metrics(dir.path());
    for (int step = 1; step <= 3; ++step) metrics.write({.step = step, .values = {{"loss", 1}}});
  }
  EXPECT_THAT(logged.text(), HasSubstr("3 lines of metrics could not be written to " +
                                       (dir / "metrics.jsonl") + " and are lost."));
  EXPECT_EQ(io::get(dir / "metrics.jsonl"), "");
}

TEST(MetricsLog, DoesNotWriteThroughLinks) {
  namespace fs = std::filesystem;
  const io::TemporaryDirectory dir, other;
  io::put(other / "precious", "kept");
  fs::create_symlink(other / "precious", dir / "metrics.jsonl");
  EXPECT_THAT(io::message_of<UsageError>([&] { MetricsLog(dir.path(), {}); }),
              HasSubstr("metrics.jsonl is a symbolic link"));
  fs::remove(dir / "metrics.jsonl");
  fs::create_directory(dir / "runs");
  fs::create_directory_symlink(other.path(), dir / "runs/a");
  EXPECT_THAT(io::message_of<UsageError>(
                  [&] { MetricsLog(dir.path(), {.tensorboard = true, .run_name = "a"}); }),
              HasSubstr("runs/a is a symbolic link"));
  EXPECT_EQ(io::get(other / "precious"), "kept");
}

TEST(MetricsLog, ARunsNameIsInEveryLineAndTensorBoardsFolder) {
  io::TemporaryDirectory dir;
  MetricsLog metrics(dir.path(), {.tensorboard = true, .run_name = "lr \"high\""});
  metrics.write({.step = 1, .values = {{"loss", 1}}});
  EXPECT_EQ(io::get(dir / "metrics.jsonl"),
            "{\"step\":1,\"epoch\":0.0,\"loss\":1.0,\"run_name\":\"lr \\\"high\\\"\"}\n");
  EXPECT_FALSE(std::filesystem::is_empty(dir / "runs/lr \"high\""));
}

// ---------------------------------------------------------------- what other runs have left

class UsedDirectory : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* step : {"5", "10", "15"}) add(step);
    io::put(dir_ / "metrics.jsonl", "{}\n");
  }
  void add(const std::string& step) const {
    std::filesystem::create_directory(dir_ / ("checkpoint-" + step));
    io::put(dir_ / ("checkpoint-" + step + "/file"), step);
  }
  static std::vector<std::int64_t> steps(const std::vector<io::NumberedDir>& dirs) {
    std::vector<std::int64_t> all;
    for (const io::NumberedDir& dir : dirs) all.push_back(dir.step);
    return all;
  }
  std::vector<std::int64_t> others(const RunStart& start) const {
    return steps(other_checkpoints(dir_.path(), start));
  }
  std::vector<std::int64_t> left() const {
    return steps(io::list_numbered(dir_.path(), kCheckpointPrefix));
  }
  static std::string refused(const LoopDirectory& own, std::int64_t step) {
    return io::message_of<UsageError>([&] { own.make_way(step, false); });
  }
  io::TemporaryDirectory dir_;
};

TEST_F(UsedDirectory, ARunContinuesWhatItResumesFromByAnyPath) {
  namespace fs = std::filesystem;
  EXPECT_THAT(others({}), ElementsAre(15, 10, 5));
  const io::TemporaryDirectory other;
  fs::create_directory(other / "checkpoint-10");
  EXPECT_THAT(others({.checkpoint = other / "checkpoint-10", .newest = true}),
              ElementsAre(15, 10, 5));
  // The checkpoint is on another disk, the directory has a second name, and both at once.
  fs::rename(dir_ / "checkpoint-10", other / "moved");
  fs::create_directory_symlink(other / "moved", dir_ / "checkpoint-10");
  fs::create_directory_symlink(dir_.path(), other / "link");
  for (const std::string& path :
       {dir_ / "checkpoint-10", dir_ / "checkpoint-10/", dir_ / "./checkpoint-15/../checkpoint-10",
        other / "link/checkpoint-10", other / "moved"}) {
    EXPECT_THAT(others({.checkpoint = path}), ElementsAre(15)) << path;
    EXPECT_THAT(others({.checkpoint = path, .newest = true}), ElementsAre()) << path;
    EXPECT_TRUE(continues_in(dir_.path(), {.checkpoint = path}));
    EXPECT_THAT(steps(other_checkpoints(other / "link", {.checkpoint = path})), ElementsAre(15));
  }
  EXPECT_FALSE(continues_in(dir_.path(), {}));
  EXPECT_THAT(other_checkpoints(dir_ / "nowhere", {}), ElementsAre());
}

TEST_F(UsedDirectory, OfALinkTheLinkIsRemoved) {
  const io::TemporaryDirectory other;
  std::filesystem::rename(dir_ / "checkpoint-10", other / "moved");
  std::filesystem::create_directory_symlink(other / "moved", dir_ / "checkpoint-10");
  remove_others(other_checkpoints(dir_.path(), {}));
  EXPECT_THAT(left(), ElementsAre());
  EXPECT_EQ(io::get(other / "moved/file"), "10");
  EXPECT_EQ(io::get(dir_ / "metrics.jsonl"), "{}\n");
}

TEST_F(UsedDirectory, OnlyTheRecordOfAnEarlierRunIsRemoved) {
  std::filesystem::create_directory(dir_ / "monitor");
  io::put(dir_ / "monitor/run.json", "{}");  // the launcher's, of this run
  remove_record(dir_.path());
  EXPECT_TRUE(std::filesystem::exists(dir_ / "monitor/run.json"));
  io::put(dir_ / "monitor/rank_0.jsonl", "{}");
  remove_record(dir_.path());
  EXPECT_FALSE(std::filesystem::exists(dir_ / "monitor"));
  remove_record(dir_ / "nowhere");
}

using LoopDirectoryOf = UsedDirectory;  // a user's own loop

TEST_F(LoopDirectoryOf, ARunThatContinuesHasWhatIsBelowItsStart) {
  LoopDirectory& own = LoopDirectory::hold(dir_.path());
  own.resumed({.checkpoint = dir_ / "checkpoint-10", .step = 10});
  EXPECT_THAT(refused(own, 20), HasSubstr("(checkpoint-15)"));
  own.make_way(20, true);
  EXPECT_THAT(left(), ElementsAre(10, 5));
  own.make_way(10, false);  // saved again where it was resumed
  // From the newest that is whole: what is damaged is replaced when its step is saved.
  add("15");
  own.saved(15);
  own.resumed({.checkpoint = dir_ / "checkpoint-10", .step = 10, .newest = true});
  own.make_way(11, false);
  EXPECT_THAT(left(), ElementsAre(15, 10, 5));
  // All of it stays the run's own when save_total_limit has deleted what it resumed from.
  own.saved(11);
  std::filesystem::remove_all(dir_ / "checkpoint-10");
  own.make_way(12, false);
  EXPECT_THAT(left(), ElementsAre(15, 5));
  EXPECT_EQ(own.first_step(), 10);
}

TEST_F(LoopDirectoryOf, LinksThatARunWouldWriteThroughAreRefused) {
  namespace fs = std::filesystem;
  const io::TemporaryDirectory other;
  fs::create_directory_symlink(other.path(), dir_ / "runs");
  EXPECT_THAT(io::message_of<UsageError>([&] { LoopDirectory::hold(dir_.path()); }),
              HasSubstr(dir_ / "runs is a symbolic link to " + other.path()));
  EXPECT_FALSE(fs::exists(dir_ / ".lockstep.lock"));
  fs::remove(dir_ / "runs");
  // The directory itself may be one.
  fs::create_directory_symlink(dir_.path(), other / "link");
  LoopDirectory::hold(other / "link");
  EXPECT_TRUE(fs::exists(dir_ / ".lockstep.lock"));
}

TEST_F(LoopDirectoryOf, IsAnotherProcessesUntilThatEnds) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    LoopDirectory::hold(dir_.path());
    const bool ready_sent = ::write(ready[1], "x", 1) == 1;
    for (int i = 0; ready_sent && i < 60; ++i) ::sleep(1);
    ::_exit(0);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_THAT(io::message_of<UsageError>([&] { LoopDirectory::hold(dir_.path()); }),
              HasSubstr("another run trains in output_dir " + dir_.path() + ": pid " +
                        std::to_string(child) + " on "));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  LoopDirectory::hold(dir_.path());
  // A Trainer in this process takes it over.
  EXPECT_TRUE(lock_output_dir(dir_.path(), new_lock_token()).held());
}

TEST(Progress, OneLineSaysEverything) {
  const LogEntry entry{.step = 50,
                       .epoch = 0.5,
                       .values = {{"loss", 1.25},
                                  {"learning_rate", 3e-4},
                                  {"grad_norm", 0.8125},
                                  {"samples_per_second", 512},
                                  {"mfu", 0.412},
                                  {"gpu_memory_gib", 31.5},
                                  {"gpu_memory_peak_gib", 60}}};
  EXPECT_EQ(progress_line(entry, 1000, 3723),
            "step 50/1000  epoch 0.50  loss 1.2500  lr 3.000e-04  |g| 0.812  512 samples/s  "
            "mfu 41.2 %  GPU 31.5 GiB  peak 60.0 GiB  eta 1:02:03");
  const double negative = std::copysign(std::numeric_limits<double>::quiet_NaN(), -1.0);
  EXPECT_EQ(progress_line({.step = 1, .epoch = 0, .values = {{"loss", negative}}}, 2, -1),
            "step 1/2  epoch 0.00  loss nan");
  EXPECT_EQ(duration_text(59.6), "1:00");
  EXPECT_EQ(duration_text(std::numeric_limits<double>::infinity()), "277777777777:46:40");
  EXPECT_EQ(duration_text(std::numeric_limits<double>::quiet_NaN()), "0:00");
}

// Waits until it is so, or half a minute has passed.
template <typename F>
bool soon(F&& holds) {
  for (int i = 0; i < 3000 && !holds(); ++i) std::this_thread::sleep_for(milliseconds(10));
  return holds();
}

TEST(StopSignals, TheFirstSignalIsRemembered) {
  StopSignals signals;
  EXPECT_EQ(signals.requested(), 0);
  ::raise(SIGUSR1);
  ::raise(SIGTERM);
  EXPECT_EQ(signals.requested(), SIGUSR1);
  signals.agreed();
}

TEST(StopSignals, NobodyAgreesAndTheDeadlineEndsTheWait) {
  std::atomic<bool> gave_up{false};
  std::string why;
  StopSignals signals({.deadline = milliseconds(50), .give_up = [&](const std::string& text) {
                         why = text;
                         gave_up = true;
                       }});
  signals.set_step_time(milliseconds(1));
  ::raise(SIGTERM);
  ASSERT_TRUE(soon([&] { return gave_up.load(); }));
  EXPECT_THAT(why, HasSubstr("[trainer] stop requested by SIGTERM was not agreed by all ranks "
                             "within 0.1 s. Another rank is probably stuck."));
}

TEST(StopSignals, ALongStepMakesTheDeadlineLonger) {
  std::atomic<bool> gave_up{false};
  StopSignals signals(
      {.deadline = milliseconds(10), .give_up = [&](const std::string&) { gave_up = true; }});
  signals.set_step_time(milliseconds(100'000));
  signals.set_step_time(milliseconds(1));  // the next may be a long one again
  ::raise(SIGUSR2);
  std::this_thread::sleep_for(milliseconds(500));
  EXPECT_FALSE(gave_up);
}

TEST(StopSignals, TheFirstStepMayTakeLong) {
  std::atomic<bool> gave_up{false};
  StopSignals signals(
      {.deadline = milliseconds(10), .give_up = [&](const std::string&) { gave_up = true; }});
  ::raise(SIGTERM);
  std::this_thread::sleep_for(milliseconds(500));
  EXPECT_FALSE(gave_up) << "nobody knows yet how long a step takes";
  signals.set_step_time(milliseconds(1));
  EXPECT_TRUE(soon([&] { return gave_up.load(); }));
}

TEST(StopSignals, HandlersComeBackAndTwoAreRefused) {
  struct sigaction before {
  }, after{};
  ::sigaction(SIGTERM, nullptr, &before);
  {
    StopSignals signals;
    EXPECT_THAT(io::message_of<UsageError>([] { StopSignals second; }),
                HasSubstr("two wait for stop signals in one process (StopRequest, or a Trainer)"));
    StopSignals none({.install = false});
    EXPECT_EQ(none.requested(), 0);
  }
  ::sigaction(SIGTERM, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
}

}  // namespace
}  // namespace lockstep::train
