// Keys of a training file, each seen at work in a run. Where Hugging Face has the key, transformers
// 5 says what is right: trainer.py, trainer_callback.py.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <new>
#include <optional>
#include <regex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/core/log.h"
#include "lockstep/testing/worlds.h"
#include "lockstep/train/checkpoint.h"
#include "lockstep/train/disk_for_test.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/trainer_for_test.h"

namespace lockstep::train {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

using Indices = std::vector<std::int64_t>;

// Records the samples in the order in which they are trained on.
TrainerTask watched(TrainerTask task, Indices& seen) {
  task.loss = [&seen, loss = task.loss](const data::Batch& batch) {
    if (at::GradMode::is_enabled())
      seen.insert(seen.end(), batch.indices.begin(), batch.indices.end());
    return loss(batch);
  };
  return task;
}

// Every rank is the first one on a host of its own.
testing::ThreadOptions hosts_of_one_rank() {
  testing::ThreadOptions options;
  options.world.backend = "gloo";
  options.adjust = [](Identity& identity, WorldOptions&) {
    identity.local_rank = 0;
    identity.local_size = 1;
    identity.node = identity.rank;
  };
  return options;
}

// ---------------------------------------------------------------- evaluation and the best model

// As in Hugging Face: logged, passed to observers, and not judged.
TEST(Keys, EvalOnStart) {
  struct Order : Observer {
    std::string calls;
    void on_train_begin(Event&) override { calls += "B"; }
    void on_log(Event&) override { calls += "l"; }
    void on_evaluate(Event& event) override {
      calls += "E";
      EXPECT_NE(find_metric(event.entry->values, "eval_loss"), nullptr);
    }
    void on_epoch_begin(Event&) override { calls += "("; }
  };
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.eval_on_start = true;
  a.max_steps = 1;
  const auto order = std::make_shared<Order>();
  Trainer trainer(World{}, task_for(network(), dataset(64, 1), dataset(5, 2)), a);
  trainer.add(order);
  trainer.train();
  EXPECT_THAT(order->calls, StartsWith("BlE("));
  const LogEntry& first = trainer.state().log_history.front();
  EXPECT_EQ(first.step, 0);
  Trainer fresh(World{}, task_for(network(), nullptr, dataset(5, 2)), arguments(dir.path()));
  EXPECT_EQ(*find_metric(first.values, "eval_loss"), *find_metric(fresh.evaluate(), "eval_loss"));
  EXPECT_FALSE(trainer.state().best_metric);
}

// What EarlyStoppingCallback and _determine_best_metric do with the same scores: a gain counts from
// the best so far, which even a gain below the threshold moves.
TEST(Keys, GreaterIsBetterAndEarlyStoppingAndSavingTheBest) {
  struct Case {
    const char* metric;
    std::optional<bool> greater;
    std::optional<std::int64_t> patience;
    double threshold;
    std::vector<double> scores;
    std::int64_t best, end;
    Indices saved;  // with save_strategy: best, the newest first
  };
  const Case cases[] = {
      {"accuracy", {}, {}, 0, {1, 3, 2, 4, 4}, 4, 5, {4, 2, 1}},
      {"accuracy", true, {}, 0, {1, 3, 2, 4, 4}, 4, 5, {4, 2, 1}},
      {"accuracy", false, {}, 0, {3, 4, 2, 2, 1}, 5, 5, {5, 3, 1}},
      {"my_loss", {}, {}, 0, {3, 4, 2, 2, 1}, 5, 5, {5, 3, 1}},
      {"my_loss", true, {}, 0, {3, 4, 2, 2, 1}, 2, 5, {2, 1}},
      {"accuracy", {}, 2, 0, {1, 1.25, 1.25, 1.5, 1, 1, 9}, 4, 6, {4, 2, 1}},
      {"accuracy", {}, 2, 0.25, {1, 1.25, 1.5, 9}, 3, 3, {3, 2, 1}},
      {"accuracy", {}, 2, 0.25, {1, 1.25, 1.75, 1.75, 2, 9}, 5, 5, {5, 3, 2, 1}},
      {"my_loss", {}, 2, 0.25, {2, 1.75, 1.25, 1.25, 1.125, 0}, 5, 5, {5, 3, 2, 1}},
      {"my_loss", {}, 1, 0, {2, 1, 1, 0}, 2, 3, {2, 1}},
  };
  for (const Case& c : cases) {
    io::TemporaryDirectory dir;
    Scored run(dir.path(), c.scores);
    run.a.metric_for_best_model = c.metric;
    run.a.greater_is_better = c.greater;
    run.a.early_stopping_patience = c.patience;
    run.a.early_stopping_threshold = c.threshold;
    run.a.save_strategy = Interval::kBest;
    const TrainerState& state = run.train();
    const auto which = &c - cases;
    EXPECT_EQ(state.best_global_step, c.best) << which;
    EXPECT_EQ(state.best_metric, c.scores[static_cast<std::size_t>(c.best - 1)]) << which;
    EXPECT_EQ(run.result.global_step, c.end) << which;
    EXPECT_EQ(steps_in(dir.path()), c.saved) << which;
    EXPECT_EQ(state.best_model_checkpoint, checkpoint_path(dir.path(), c.best)) << which;
  }
}

// Rank 0 hears the signal, in its second batch; both leave the evaluation, and nothing is reported.
TEST(Keys, AStopSignalIsHeardInsideAnEvaluationOfTwoRanks) {
  io::TemporaryDirectory dir;
  std::mutex mutex;
  testing::run_threads(2, [&](World& world) {
    auto a = arguments(dir.path());
    a.enable_jit_checkpoint = world.is_leader();
    a.max_steps = 6;
    a.eval_strategy = Interval::kSteps;
    a.eval_steps = 2;
    a.per_device_eval_batch_size = 1;
    TrainerTask task = task_for(network(), dataset(64, 1), dataset(40, 2));
    int evaluated = 0;
    task.loss = [&, loss = task.loss](const data::Batch& batch) {
      if (!at::GradMode::is_enabled() && ++evaluated == 2 && world.is_leader()) ::raise(SIGTERM);
      return loss(batch);
    };
    Trainer trainer(world, task, a);
    const TrainResult result = trainer.train();
    const std::lock_guard lock(mutex);
    EXPECT_EQ(result.exit_code(), 143);
    EXPECT_EQ(result.global_step, 2);
    EXPECT_LT(evaluated, 20) << "it did not wait for the evaluation's end";
    for (const LogEntry& entry : trainer.state().log_history)
      EXPECT_EQ(find_metric(entry.values, "eval_loss"), nullptr);
  });
  EXPECT_THAT(steps_in(dir.path()), ElementsAre(2));
}

// ---------------------------------------------------------------- the step

// A task whose samples have 1 to 4 targets, each of which is a token.
TrainerTask uneven_task(torch::nn::Sequential net) {
  auto random = generator(5);
  const at::Tensor x = torch::randn({16, kFeatures}, random);
  at::Tensor y = torch::randint(kClasses, {16, 4}, random);
  for (std::int64_t i = 0; i < 16; ++i) y[i].narrow(0, 0, i % 4).fill_(data::kIgnoredTarget);
  TrainerTask task;
  task.module = net.ptr();
  task.train_data = std::make_shared<data::TensorDataset>(x, y);
  task.loss = [net](const data::Batch& batch) mutable {
    const at::Tensor logits = net->forward(batch.data).unsqueeze(1).expand({-1, 4, -1});
    return torch::cross_entropy_loss(logits.flatten(0, 1), batch.target.flatten());
  };
  return task;
}

data::Batch batch_of(const TrainerTask& task, const Indices& indices) {
  return *task.train_data->get_batch(indices, {});
}

// Two ranks, two micro-batches each: with the key all tokens of the window weigh the same, without
// it those of one rank do, and then the ranks weigh the same (num_items_in_batch is the rank's
// own).
TEST(Keys, AverageTokensAcrossDevices) {
  for (const bool across : {true, false}) {
    io::TemporaryDirectory dir;
    std::vector<Indices> seen(2);
    std::vector<at::Tensor> ends(2);
    Indices counted(2);
    testing::run_threads(2, [&](World& world) {
      const auto rank = static_cast<std::size_t>(world.rank());
      auto a = arguments(dir.path());
      a.average_tokens_across_devices = across;
      a.per_device_train_batch_size = 2;
      a.gradient_accumulation_steps = 2;
      a.max_steps = 1;
      a.optim = "sgd";
      a.learning_rate = 0.5;
      a.lr_scheduler_type = "constant";
      a.max_grad_norm = 0;
      a.logging_steps = 1;
      a.save_strategy = Interval::kSteps;
      auto net = network();
      Trainer trainer(world, watched(uneven_task(net), seen[rank]), a);
      trainer.train();
      ends[rank] = flat(*net);
      counted[rank] = trainer.state().num_input_tokens_seen;
    });
    auto net = network();
    TrainerTask task = uneven_task(net);
    Indices all = seen[0];
    all.insert(all.end(), seen[1].begin(), seen[1].end());
    const at::Tensor loss =
        across
            ? task.loss(batch_of(task, all)).loss
            : (task.loss(batch_of(task, seen[0])).loss + task.loss(batch_of(task, seen[1])).loss) /
                  2;
    loss.backward();
    const torch::NoGradGuard no_grad;
    for (at::Tensor& p : net->parameters()) p.sub_(p.grad(), 0.5);
    ASSERT_EQ(all.size(), 8u);
    // Float sums of at most 32 terms of about 1, in another order; other weights differ by 1e-2.
    for (const at::Tensor& end : ends)
      EXPECT_LT((end - flat(*net)).abs().max().item<double>(), 2e-6) << across;
    // What is computed, not what is learned: masked tokens, too.
    EXPECT_THAT(counted, Each(8 * 4));
    EXPECT_EQ(Checkpoint(dir / "checkpoint-1").state().num_input_tokens_seen, 8 * 4);
  }
}

// Counts are known before the first forward, so nothing is scaled afterwards.
TEST(Keys, ALossIsWeighedOnceByItsShareOfTheStep) {
  for (const bool across : {true, false}) {
    io::TemporaryDirectory dir;
    std::vector<std::vector<double>> tokens(2), weights(2);
    testing::run_threads(2, [&](World& world) {
      const auto rank = static_cast<std::size_t>(world.rank());
      auto a = arguments(dir.path());
      a.average_tokens_across_devices = across;
      a.per_device_train_batch_size = a.gradient_accumulation_steps = 2;
      a.max_steps = 1;
      TrainerTask task = uneven_task(network());
      task.loss = [&, rank, loss = task.loss](const data::Batch& batch) {
        const at::Tensor value = loss(batch).loss;
        tokens[rank].push_back(static_cast<double>(batch.tokens));
        value.register_hook([&, rank](const at::Tensor& gradient) {
          weights[rank].push_back(gradient.item<double>());
        });
        return value;
      };
      Trainer(world, task, a).train();
    });
    const double own[] = {tokens[0][0] + tokens[0][1], tokens[1][0] + tokens[1][1]};
    for (std::size_t i = 0; i < 4; ++i) {
      const double all = across ? (own[0] + own[1]) / 2 : own[i / 2];
      EXPECT_EQ(weights[i / 2].at(i % 2), static_cast<float>(tokens[i / 2][i % 2] / all));
    }
  }
}

// 24 tokens are two micro-batches of 2 samples x 3 tokens on each of two ranks.
TEST(Keys, TokensPerUpdate) {
  io::TemporaryDirectory dir;
  std::mutex mutex;
  testing::run_threads(2, [&](World& world) {
    auto a = arguments(dir.path());
    a.per_device_train_batch_size = 2;
    a.max_seq_len = 3;
    a.tokens_per_update = 24;
    a.max_steps = 3;
    a.logging_steps = 1;
    auto net = network();
    TrainerTask task;
    task.module = net.ptr();
    task.train_data = std::make_shared<data::TensorDataset>(at::ones({48, kFeatures}),
                                                            at::ones({48, 3}, at::kLong));
    task.loss = [net](const data::Batch& batch) mutable {
      return net->forward(batch.data).square().mean();
    };
    Indices seen;
    Trainer trainer(world, watched(task, seen), a);
    trainer.train();
    const std::lock_guard lock(mutex);
    EXPECT_EQ(seen.size(), 3u * 2 * 2);
    EXPECT_EQ(trainer.state().num_input_tokens_seen, 3 * 24);
  });
}

// The same four updates of the same 12 samples each at any number of ranks.
TEST(Keys, GlobalBatchSizeIsTheSameUpdateAtAnyNumberOfRanks) {
  std::vector<at::Tensor> ends;
  for (const int ranks : {1, 2, 3}) {
    io::TemporaryDirectory dir;
    at::Tensor end;
    testing::run_threads(ranks, [&](World& world) {
      auto a = arguments(dir.path());
      a.per_device_train_batch_size = 2;
      a.global_batch_size = 12;
      a.optim = "sgd";
      a.learning_rate = 0.5;
      a.num_train_epochs = 1;
      auto net = network();
      Trainer trainer(world, task_for(net, dataset(48, 1)), a);
      EXPECT_EQ(trainer.train().global_step, 4) << ranks;
      if (world.is_leader()) end = flat(*net);
    });
    ends.push_back(end);
  }
  // Float sums in another order; another batch or other samples differ by 1e-2.
  for (const at::Tensor& end : ends) EXPECT_LT((end - ends[0]).abs().max().item<double>(), 2e-6);
}

TEST(Keys, LearningRateIsLoggedOfTheStepThatWasTaken) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.learning_rate = 1;
  a.max_steps = 4;
  a.logging_steps = 1;
  Trainer trainer(World{}, task_for(network(), dataset(64, 1)), a);
  trainer.train();
  std::vector<double> rates;
  for (const LogEntry& entry : trainer.state().log_history)
    if (const double* rate = find_metric(entry.values, "learning_rate")) rates.push_back(*rate);
  EXPECT_THAT(rates, ElementsAre(1, 0.75, 0.5, 0.25));
}

TEST(Keys, LoggingNanInfFilter) {
  for (const bool filter : {true, false}) {
    io::TemporaryDirectory dir;
    auto a = arguments(dir.path());
    a.logging_nan_inf_filter = filter;
    a.max_steps = 4;
    a.logging_steps = 4;
    a.save_strategy = Interval::kSteps;
    TrainerTask task = task_for(network(), dataset(64, 1));
    std::vector<double> losses;
    task.loss = [&, loss = task.loss](const data::Batch& batch) {
      const at::Tensor value = loss(batch).loss;
      losses.push_back(value.item<double>());
      return losses.size() == 3 ? value * NAN : value;
    };
    Trainer trainer(World{}, task, a);
    const TrainResult result = trainer.train();
    const double logged = *find_metric(trainer.state().log_history.front().values, "loss");
    const std::string line = io::get(dir / "metrics.jsonl");
    if (filter) {
      EXPECT_NEAR(logged, (losses[0] + losses[1] + losses[3]) / 3, 1e-9) << "without the third";
    } else {
      EXPECT_TRUE(std::isnan(logged));
      EXPECT_TRUE(std::isnan(result.train_loss));
      EXPECT_THAT(line, HasSubstr("\"loss\":null")) << "NaN is not valid JSON";
    }
    a.resume_from_checkpoint = "auto";  // what was logged can be read again
    a.max_steps = 5;
    EXPECT_EQ(Trainer(World{}, task_for(network(), dataset(64, 1)), a).train().global_step, 5);
  }
}

// ---------------------------------------------------------------- data

TEST(Keys, DataSeed) {
  const auto order = [](std::int64_t seed, std::optional<std::int64_t> data_seed) {
    io::TemporaryDirectory dir;
    auto a = arguments(dir.path());
    a.seed = seed;
    a.data_seed = data_seed;
    a.num_train_epochs = 1;
    Indices seen;
    Trainer(World{}, watched(task_for(network(), dataset(64, 1)), seen), a).train();
    return seen;
  };
  const Indices seven = order(1, 7);
  EXPECT_EQ(seven.size(), 64u);
  EXPECT_EQ(order(2, 7), seven);
  EXPECT_NE(order(1, 8), seven);
  EXPECT_EQ(order(7, {}), seven) << "unset: seed";
}

// 16 steps per epoch, continued after 5: at the sixth, or with the whole epoch again; the steps
// taken still count in both.
TEST(Keys, IgnoreDataSkip) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir / "whole");
  a.num_train_epochs = 2;
  a.save_strategy = Interval::kSteps;
  a.save_steps = 5;
  Indices whole;
  Trainer(World{}, watched(task_for(network(), dataset(64, 1)), whole), a).train();
  ASSERT_EQ(whole.size(), 2u * 64);
  for (const bool ignore : {false, true}) {
    a.output_dir = dir / (ignore ? "again" : "on");
    a.resume_from_checkpoint = dir / "whole/checkpoint-5";
    a.ignore_data_skip = ignore;
    Indices seen;
    Trainer trainer(World{}, watched(task_for(network(), dataset(64, 1)), seen), a);
    EXPECT_EQ(trainer.train().global_step, 32);
    EXPECT_EQ(trainer.state().epoch, ignore ? 1 + 11.0 / 16 : 2.0);
    const auto from = whole.begin() + (ignore ? 0 : 20);
    EXPECT_EQ(seen, Indices(from, from + 27 * 4)) << ignore;
  }
}

// ---------------------------------------------------------------- who speaks

// Rank 1 is a replica, or the first of its host. Levels are the process's: rank 0 leaves them
// alone.
TEST(Keys, LogLevelReplicaAndLogOnEachNode) {
  struct Case {
    bool own_host, on_each_node;
    const char *level, *replica;
    log::Level lowest;  // the lowest level that rank 1 logs
  };
  const Case cases[] = {
      {false, true, "error", "debug", log::Level::kDebug},
      {false, true, "debug", "error", log::Level::kError},
      {false, true, "error", "info", log::Level::kInfo},
      {true, true, "error", "debug", log::Level::kError},
      {true, true, "info", "warning", log::Level::kInfo},
      {true, false, "error", "debug", log::Level::kDebug},
  };
  for (const Case& c : cases) {
    io::TemporaryDirectory dir;
    log::set_level(log::Level::kWarning);
    const auto body = [&](World& world) {
      auto a = arguments(dir.path());
      a.max_steps = 1;
      a.log_on_each_node = c.on_each_node;
      a.log_level = world.is_leader() ? "passive" : c.level;
      a.log_level_replica = c.replica;
      Trainer(world, task_for(network(), dataset(16, 1)), a).train();
    };
    testing::run_threads(2, body, c.own_host ? hosts_of_one_rank() : testing::ThreadOptions{});
    log::set_rank(1, 2);
    for (const auto level :
         {log::Level::kDebug, log::Level::kInfo, log::Level::kWarning, log::Level::kError})
      EXPECT_EQ(log::enabled(level), level >= c.lowest)
          << &c - cases << ", level " << static_cast<int>(level);
    log::set_rank(0, 1);
  }
  log::set_level(log::Level::kInfo);
}

// What a run prints on a terminal of so many columns.
std::string on_terminal(unsigned short columns, const std::function<void()>& run) {
  Fd terminal(::posix_openpt(O_RDWR | O_NOCTTY));
  EXPECT_TRUE(terminal && ::grantpt(terminal.get()) == 0 && ::unlockpt(terminal.get()) == 0);
  Fd inside(::open(::ptsname(terminal.get()), O_RDWR | O_NOCTTY));
  const winsize size{.ws_row = 24, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
  EXPECT_EQ(::ioctl(inside.get(), TIOCSWINSZ, &size), 0);
  std::string said;
  std::thread reader([&] {
    char bytes[4096];
    for (ssize_t n; (n = ::read(terminal.get(), bytes, sizeof bytes)) > 0;)
      said.append(bytes, static_cast<std::size_t>(n));
  });
  std::fflush(stdout);
  const Fd before(::dup(STDOUT_FILENO));
  ::dup2(inside.get(), STDOUT_FILENO);
  run();
  std::fflush(stdout);
  ::dup2(before.get(), STDOUT_FILENO);
  inside.reset();  // the reader comes to its end
  reader.join();
  return said;
}

TEST(Keys, DisableTqdmAndTheBarOnATerminalAlone) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.disable_tqdm = false;
  a.max_steps = 6;
  a.logging_steps = 2;
  const auto run = [&] { Trainer(World{}, task_for(network(), dataset(64, 1)), a).train(); };
  const std::regex line(
      R"(^ 66% (\[=+ +\] )?4/6 \d:\d\d<\d:\d\d  loss \d\.\d{4}  \|g\| \d+\.\d{3}  )"
      R"(lr \d\.\d{3}e-\d\d  \d+ samples/s(  data \d+ %)?$)");
  for (const unsigned short columns : {200, 80}) {
    const std::string said = on_terminal(columns, run);
    std::vector<std::string> drawn;
    for (std::size_t at = 0; (at = said.find("\r\x1b[K", at)) != std::string::npos; at += 4)
      drawn.push_back(said.substr(at + 4, said.find('\r', at + 4) - at - 4));
    EXPECT_TRUE(std::any_of(drawn.begin(), drawn.end(),
                            [&](const std::string& text) { return std::regex_match(text, line); }))
        << columns << ": " << said;
    for (const std::string& text : drawn) EXPECT_LT(text.size(), columns) << text;
    EXPECT_EQ(said.find('\n'), std::string::npos) << "one line, drawn again";
  }
  a.disable_tqdm = true;
  EXPECT_THAT(on_terminal(80, run), Not(HasSubstr("\x1b")));
  a.disable_tqdm = false;
  ::testing::internal::CaptureStdout();  // a file
  run();
  const std::string said = ::testing::internal::GetCapturedStdout();
  EXPECT_THAT(said, AllOf(HasSubstr("step 4/6  epoch 0.25  loss "), HasSubstr(" samples/s  data "),
                          HasSubstr(" %  eta 0:"), Not(HasSubstr("\r")), Not(HasSubstr("\x1b")),
                          Not(HasSubstr("66%"))));
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 4) << "three logs and the end's";
}

// ---------------------------------------------------------------- checkpoints

// One parameter by hand: v = 0.9 v + g, p -= lr v.
TEST(Keys, MomentumIsThatOfSgd) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.optim = "sgd";
  a.momentum = 0.9;
  a.learning_rate = 0.5;
  a.lr_scheduler_type = "constant";
  a.max_grad_norm = 0;
  a.max_steps = 3;
  torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
  torch::nn::init::constant_(net->weight, 1);
  TrainerTask task;
  task.module = net.ptr();
  task.loss = [net](const data::Batch& batch) mutable { return net(batch.data).mean(); };
  task.train_data = std::make_shared<data::TensorDataset>(at::ones({12, 1}));
  Trainer(World{}, task, a).train();
  float v = 0, p = 1;
  for (int step = 0; step < 3; ++step) {
    v = 0.9f * v + 1;
    p -= 0.5f * v;
  }
  EXPECT_FLOAT_EQ(net->weight.item<float>(), p);
}

TEST(Keys, OptimIsSavedAndResumedToTheBit) {
  struct Case {
    const char* optim;
    double momentum;
    std::size_t tensors;  // per parameter
  };
  for (const auto& [optim, momentum, tensors] :
       {Case{"sgd", 0, 1}, Case{"sgd", 0.9, 2}, Case{"adam", 0, 3}, Case{"adamw", 0, 3}}) {
    io::TemporaryDirectory dir;
    auto a = arguments(dir / "whole");
    a.optim = optim;
    a.momentum = momentum;
    a.weight_decay = 0.1;
    a.max_steps = 8;
    a.save_strategy = Interval::kSteps;
    a.save_steps = 3;
    auto whole = network(), again = network();
    Trainer(World{}, task_for(whole, dataset(64, 1)), a).train();
    a.output_dir = dir / "again";
    a.resume_from_checkpoint = dir / "whole/checkpoint-3";
    Trainer(World{}, task_for(again, dataset(64, 1)), a).train();
    EXPECT_TRUE(torch::equal(flat(*whole), flat(*again))) << optim;
    const auto one = Checkpoint(dir / "whole/checkpoint-8").optimizer();
    const auto other = Checkpoint(dir / "again/checkpoint-8").optimizer();
    EXPECT_EQ(one.size(), tensors * 4) << optim;
    ASSERT_EQ(other.size(), one.size()) << optim;
    for (const auto& [name, tensor] : one)
      EXPECT_TRUE(torch::equal(other.at(name), tensor)) << name;
  }
}

TEST(Keys, SaveOnlyModelCannotBeResumed) {
  io::TemporaryDirectory dir;
  auto a = arguments(dir.path());
  a.save_only_model = true;
  a.save_strategy = Interval::kSteps;
  a.max_steps = 2;
  auto net = network();
  EXPECT_EQ(Trainer(World{}, task_for(net, dataset(64, 1)), a).train().checkpoint,
            dir / "checkpoint-2");
  auto read = network();
  Checkpoint(dir / "checkpoint-2").load_model(*read);
  EXPECT_TRUE(torch::equal(flat(*net), flat(*read)));
  a.resume_from_checkpoint = "auto";
  a.max_steps = 4;
  for (const int ranks : {1, 2}) {
    const auto said = testing::run_threads_collecting(ranks, [&](World& world) {
      Trainer(world, task_for(network(), dataset(64, 1)), a).train();
    });
    EXPECT_THAT(said, Contains(HasSubstr("checkpoint-2 holds weights only (save_only_model): the "
                                         "optimizer's state, the schedule, the random generators "
                                         "and the position in the data are missing")));
  }
  EXPECT_THAT(steps_in(dir.path()), ElementsAre(2)) << "it stays where it is";
}

TEST(Keys, SaveOnEachNode) {
  for (const bool each : {false, true}) {
    io::TemporaryDirectory dir;
    testing::run_threads(
        2,
        [&](World& world) {
          auto a = arguments(dir / std::to_string(world.rank()));
          a.save_on_each_node = each;
          a.save_strategy = Interval::kSteps;
          a.max_steps = 2;
          EXPECT_EQ(Trainer(world, task_for(network(), dataset(64, 1)), a).train().durable_step, 2);
        },
        hosts_of_one_rank());
    EXPECT_THAT(steps_in(dir / "0"), ElementsAre(2));
    EXPECT_EQ(steps_in(dir / "1"), each ? Indices{2} : Indices{}) << each;
  }
}

TEST(Keys, SaveOnEachNodeIsRefusedWhereNoHostHasTheWholeModel) {
  io::TemporaryDirectory dir;
  testing::run_threads(
      2,
      [&](World& world) {
        auto a = arguments(dir / std::to_string(world.rank()));
        a.save_on_each_node = true;
        a.save_strategy = Interval::kSteps;
        const auto expect_refused = [&](Mesh mesh, const std::string& what) {
          Trainer trainer(std::move(mesh), task_for(network(), dataset(64, 1)), a);
          EXPECT_THAT(io::message_of<UsageError>([&] { trainer.train(); }),
                      HasSubstr("on every host, and " + what + " has it nowhere"));
          EXPECT_EQ(trainer.state().global_step, 0) << what;
        };
        expect_refused(Mesh(world, {{"shard", 2}}), "fsdp");
        a.fsdp = "full_shard";
        expect_refused(world, "fsdp");
        a.fsdp.reset();
        a.pipeline_parallel_degree = 2;
        expect_refused(world, "a pipeline");
        a.pipeline_parallel_degree = 1;
        a.tensor_parallel_degree = 2;
        expect_refused(world, "tensor parallelism");
      },
      hosts_of_one_rank());
}

TEST(Keys, ShardDegreesThatDoNotDivideTheRanksAreRefused) {
  testing::run_threads(4, [](World& world) {
    TrainingArguments a;
    a.fsdp = "full_shard";
    a.data_parallel_shard_degree = 3;
    const auto refused = [&] { return io::message_of<UsageError>([&] { mesh_for(world, a); }); };
    EXPECT_THAT(refused(), HasSubstr("data_parallel_shard_degree is 3, and the run has 4 ranks. "
                                     "Start a multiple of 3, or write 4."));
    a.pipeline_parallel_degree = 2;
    EXPECT_THAT(refused(), HasSubstr("is 3, and 2 ranks hold the same part of the model."));
  });
}

// A full disk is survived and reported; one that is broken ends the run, and what is whole stays.
TEST(Keys, ASaveThatFailsIsAnErrorOrAnAlert) {
  struct Listener : Observer {
    void on_alert(Event& event) override { heard.push_back(*event.text); }
    std::vector<std::string> heard;
  };
  struct Case {
    int error;
    const char* path;
    Indices left;
  };
  const Case cases[] = {
      {EIO, "/checkpoint-2.", {}}, {EIO, "/checkpoint-4.", {2}}, {ENOSPC, "/checkpoint-2.", {4}}};
  for (const Case& c : cases) {
    io::TemporaryDirectory dir;
    auto a = arguments(dir.path());
    a.save_strategy = Interval::kSteps;
    a.save_steps = 2;
    a.max_steps = 4;
    const auto listener = std::make_shared<Listener>();
    disk().error = c.error;
    disk().fails_for = c.path;
    std::string said;
    {
      Trainer trainer(World{}, task_for(network(), dataset(64, 1)), a);
      trainer.add(listener);
      said = io::message_of<SystemError>([&] { trainer.train(); });
    }
    disk().fails_for = nullptr;
    disk().error = ENOSPC;
    EXPECT_EQ(steps_in(dir.path()), c.left) << c.path;
    if (c.error == ENOSPC) {
      EXPECT_EQ(said, "(nothing thrown)");
      EXPECT_THAT(listener->heard, ElementsAre(HasSubstr("was not saved; training continues.")));
      continue;
    }
    EXPECT_THAT(
        said, AllOf(HasSubstr("[io] cannot "), HasSubstr(c.path), HasSubstr("Input/output error")));
    EXPECT_THAT(listener->heard, ElementsAre());
    a.resume_from_checkpoint = "auto";
    Trainer(World{}, task_for(network(), dataset(64, 1)), a).train();
    EXPECT_THAT(steps_in(dir.path()), ElementsAre(4, 2));
  }
}

// ---------------------------------------------------------------- memory

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // such an allocator ends the process
#else
constexpr bool kSanitized = false;
#endif

// More than any address space has: the text is that of LibTorch's CPU allocator itself.
void ask_for_too_much() {
  TORCH_CHECK(!kSanitized, "DefaultCPUAllocator: can't allocate memory");
  at::empty({std::int64_t{1} << 50}, at::kByte);
}

TEST(Keys, AutoFindBatchSizeAndOutOfMemoryMessages) {
  const std::pair<void (*)(), const char*> ways[] = {
      {[] { throw std::bad_alloc(); }, "std::bad_alloc"},
      {ask_for_too_much, "DefaultCPUAllocator: "}};
  for (const auto& [fail, text] : ways) {
    for (const std::int64_t step : {1, 3}) {
      io::TemporaryDirectory dir;
      TrainerTask task = task_for(network(), dataset(64, 1));
      task.loss = [&, loss = task.loss, calls = 0, fail = fail](const data::Batch& batch) mutable {
        if (++calls == step) fail();
        return loss(batch);
      };
      Trainer trainer(World{}, task, arguments(dir.path()));
      EXPECT_THAT(
          io::message_of<Error>([&] { trainer.train(); }),
          AllOf(HasSubstr("[trainer] rank 0: out of memory in step " + std::to_string(step) + " ("),
                HasSubstr(text), HasSubstr("Try per_device_train_batch_size: 3")));
    }
    io::TemporaryDirectory dir;
    auto a = arguments(dir.path());
    a.auto_find_batch_size = true;
    a.max_steps = 1;
    TrainerTask task = task_for(network(), dataset(64, 1));
    task.loss = [loss = task.loss, fail = fail](const data::Batch& batch) {
      if (batch.samples() > 2) fail();
      return loss(batch);
    };
    Trainer trainer(World{}, task, a);
    trainer.train();
    EXPECT_EQ(trainer.state().train_batch_size, 2) << text;
  }
}

TEST(Keys, MemoryThatIsFullOnOneRankInTheFirstStepEndsAll) {
  io::TemporaryDirectory dir;
  const auto said = testing::run_threads_collecting(2, [&](World& world) {
    TrainerTask task = task_for(network(), dataset(64, 1));
    task.loss = [&, loss = task.loss](const data::Batch& batch) {
      if (world.rank() == 1) throw std::bad_alloc();
      return loss(batch);
    };
    Trainer(world, task, arguments(dir.path())).train();
  });
  EXPECT_THAT(said[1], AllOf(HasSubstr("rank 1: out of memory in step 1 (std::bad_alloc)."),
                             HasSubstr("effective batch 8 = 4 per device x 1 accumulation x 2")));
  EXPECT_THAT(said[0], HasSubstr("rank 1 of the test failed: "));
}

// Trials change running means and draw from generators before they fail; none of it is left.
TEST(Keys, AutoFindBatchSizeLeavesNoTrace) {
  const auto ended = [](bool search) {
    io::TemporaryDirectory dir;
    torch::manual_seed(3);
    torch::nn::Sequential net(torch::nn::Linear(kFeatures, 8), torch::nn::BatchNorm1d(8),
                              torch::nn::Dropout(0.5), torch::nn::Linear(8, kClasses));
    auto a = arguments(dir.path());
    a.auto_find_batch_size = search;
    a.per_device_train_batch_size = search ? 14 : 2;
    a.gradient_accumulation_steps = search ? 1 : 7;
    a.max_steps = 3;
    TrainerTask task = task_for(net, dataset(64, 1));
    task.loss = [loss = task.loss](const data::Batch& batch) {
      const at::Tensor value = loss(batch).loss;
      if (batch.samples() > 3) throw std::bad_alloc();
      return value;
    };
    Trainer trainer(World{}, task, a);
    trainer.train();
    EXPECT_EQ(trainer.state().train_batch_size, 2);
    std::vector<at::Tensor> all{flat(*net)};
    for (const at::Tensor& buffer : net->buffers())
      all.push_back(buffer.flatten().to(at::kFloat).clone());
    return at::cat(all);
  };
  const at::Tensor found = ended(true), reported = ended(false);
  EXPECT_TRUE(torch::equal(found, reported));
  EXPECT_TRUE(at::isfinite(found).all().item<bool>());
}

}  // namespace
}  // namespace lockstep::train
