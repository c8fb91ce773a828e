// save_checkpoint() and resume() in loops that are not the Trainer's. Random
// generators and signals belong to a process, so examples/05_own_loop/own_loop_test.py tests those
// with real ranks.
#include "lockstep/train/save_resume.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/core/ledger.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/manifest.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/testing/worlds.h"
#include "lockstep/train/run_log.h"
#include "lockstep/train/trainer_for_test.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using train::flat;

// What a user's loop has: a model with buffers, two parameter groups, a schedule, a loader.
torch::nn::Sequential network_with_buffers() {
  torch::nn::Sequential net = train::network();
  net->push_back(torch::nn::BatchNorm1d(train::kClasses));
  return net;
}

std::vector<at::Tensor> but_first(const torch::nn::Module& module) {
  const std::vector<at::Tensor> all = module.parameters();
  return {all.begin() + 1, all.end()};
}

struct OwnLoop {
  explicit OwnLoop(World ranks,
                   std::int64_t samples = 60)  // no batch of one, which BatchNorm refuses
      : world(std::move(ranks)),
        loader(data::loader(train::dataset(samples, 1), world,
                            {.batch_size = 3, .shuffle = true, .seed = 9})) {}

  CheckpointParts parts() {
    return {.module = net.get(),
            .optimizer = &optimizer,
            .loader = &loader,
            .schedule = &schedule,
            .scaler = &scaler,
            .rng = false};
  }
  std::string save(const std::string& directory, SaveOptions options = {}) {
    options.step = step;
    return save_checkpoint(directory, world, parts(), options);
  }
  std::optional<Resumed> resume_from(const std::string& directory) {
    const auto resumed = resume(directory, world, parts());
    if (resumed) {
      step = resumed->step;
      epoch = resumed->epoch;
    }
    return resumed;
  }

  // Trains until `last` steps are done, wherever in an epoch that is.
  void train_to(std::int64_t last) {
    for (; step < last; ++epoch) {
      for (auto& batch : loader.epoch(epoch)) {
        seen.insert(seen.end(), batch.indices.begin(), batch.indices.end());
        optimizer.set_lr(0, 0.01 * schedule.factor(step));
        optimizer.set_lr(1, 0.02 * schedule.factor(step));
        torch::cross_entropy_loss(model(batch.data), batch.target).backward();
        optimizer.step();
        optimizer.zero_grad();
        if (++step == last) return;
      }
    }
  }

  World world;
  torch::nn::Sequential net = network_with_buffers();
  optim::AdamW optimizer{{optim::AdamW::group({net->parameters()[0]}, {.lr = 0.01}),
                          optim::AdamW::group(but_first(*net), {.lr = 0.02, .weight_decay = 0})}};
  data::Loader loader;
  optim::Schedule schedule =
      optim::make_schedule({.name = "cosine", .warmup_steps = 3, .total_steps = 40, .lr = 0.01});
  optim::GradScaler scaler{world};
  DistributedDataParallel<torch::nn::Sequential> model{
      net, world, {.find_unused_parameters = true}};
  std::int64_t step = 0, epoch = 0;
  std::vector<std::int64_t> seen;
};

at::Tensor buffers(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const auto& b : module.buffers()) all.push_back(b.to(at::kDouble).flatten());
  return at::cat(all);
}

// A model in which one layer is trained and saved, under a name of its own.
TEST(OwnLoop, SavesAPartOfTheModel) {
  const io::TemporaryDirectory out;
  testing::run_threads(2, [&](World& world) {
    const auto make = [] {
      torch::nn::Sequential net = train::network();
      for (auto& parameter : net->parameters()) parameter.requires_grad_(false);
      net->parameters()[0].requires_grad_(true);
      return net;
    };
    torch::nn::Sequential net = make(), other = make();
    const auto parts_of = [](torch::nn::Sequential& module, optim::AdamW& optimizer) {
      return CheckpointParts{
          .module = module.get(),
          .optimizer = &optimizer,
          .rng = false,
          .model_files = {.stem = "adapter_model", .config = "adapter_config.json", .tensors = [&] {
                            return train::NamedTensors{{"first", module->parameters()[0]}};
                          }}};
    };
    {
      const torch::NoGradGuard no_grad;
      net->parameters()[0].fill_(2 + world.rank());
      other->parameters()[1].fill_(5);
    }
    optim::AdamW optimizer{net->parameters(), {.lr = 0.1}};
    optim::AdamW again{other->parameters(), {.lr = 0.1}};
    const std::string path = save_checkpoint(out.path(), world, parts_of(net, optimizer),
                                             {.step = 3, .model_config = "{}"});
    EXPECT_TRUE(std::filesystem::exists(path + "/adapter_model.safetensors"));
    EXPECT_TRUE(std::filesystem::exists(path + "/adapter_config.json"));
    EXPECT_FALSE(std::filesystem::exists(path + "/model.safetensors"));
    ASSERT_TRUE(resume(out.path(), world, parts_of(other, again)));
    EXPECT_EQ(other->parameters()[0].min().item<float>(), 2);  // rank 0's
    EXPECT_EQ(other->parameters()[1].min().item<float>(), 5);
    CheckpointParts whole = parts_of(other, again);
    whole.model_files = {};
    EXPECT_THAT(io::message_of<UsageError>([&] { resume(out.path(), world, whole); }),
                HasSubstr("holds adapter_model.safetensors, and model.safetensors is wanted. It "
                          "was saved by a run with adapters"));
  });
}

// ---------------------------------------------------------------- resuming

class SaveResume : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SaveResume, ::testing::Values(1, 2, 3, 4, 7));

// In the middle of the second epoch.
TEST_P(SaveResume, ContinuesAsIfItHadNeverEnded) {
  io::TemporaryDirectory dir;
  testing::run_threads(GetParam(), [&](World& world) {
    const std::int64_t per_epoch = OwnLoop(world).loader.batches_per_epoch();
    OwnLoop whole(world);
    whole.train_to(per_epoch * 3);
    {
      OwnLoop first(world);
      EXPECT_FALSE(first.resume_from(dir.path()));
      first.train_to(per_epoch + 1);
      EXPECT_EQ(first.save(dir.path()), train::checkpoint_path(dir.path(), per_epoch + 1));
    }
    OwnLoop second(world);
    const auto resumed = second.resume_from(dir.path());
    ASSERT_TRUE(resumed);
    EXPECT_EQ(resumed->step, per_epoch + 1);
    EXPECT_EQ(resumed->epoch, 1);
    EXPECT_EQ(resumed->world_size, world.size());
    EXPECT_EQ(second.optimizer.lr(1), 0.02 * second.schedule.factor(per_epoch));
    second.train_to(per_epoch * 3);
    EXPECT_TRUE(torch::equal(flat(*whole.net), flat(*second.net)));
    EXPECT_TRUE(torch::equal(buffers(*whole.net), buffers(*second.net)));
    const std::vector<std::int64_t> rest(whole.seen.end() - std::ssize(second.seen),
                                         whole.seen.end());
    EXPECT_EQ(second.seen, rest);
  });
  EXPECT_THAT(io::verify(train::checkpoint_path(dir.path(), train::steps_in(dir.path())[0])),
              ::testing::IsEmpty());
}

TEST(SaveResumeRanks, AtAnotherNumberOfRanksEverySampleComesOncePerEpoch) {
  io::TemporaryDirectory dir;
  std::mutex mutex;
  std::multiset<std::int64_t> seen;
  const auto note = [&](const OwnLoop& loop) {
    const std::lock_guard lock(mutex);
    seen.insert(loop.seen.begin(), loop.seen.end());
  };
  constexpr std::int64_t kSamples = 60;  // divides by all of the ranks
  at::Tensor weights, lr;
  testing::run_threads(3, [&](World& world) {
    OwnLoop loop(world, kSamples);
    loop.train_to(2);
    loop.save(dir.path());
    note(loop);
    if (world.is_leader()) weights = flat(*loop.net).clone();
  });
  for (const int ranks : {2, 4}) {
    testing::run_threads(ranks, [&](World& world) {
      OwnLoop loop(world, kSamples);
      const auto resumed = loop.resume_from(dir.path());
      ASSERT_TRUE(resumed);
      EXPECT_EQ(resumed->world_size, ranks == 2 ? 3 : 2);
      if (ranks == 2) {
        EXPECT_TRUE(torch::equal(weights, flat(*loop.net)));
      }
      const std::int64_t left = loop.loader.batches_left(0);
      loop.train_to(ranks == 2 ? loop.step + 3 : loop.step + left);
      note(loop);
      loop.save(dir.path());
    });
  }
  EXPECT_EQ(seen.size(), static_cast<std::size_t>(kSamples));
  EXPECT_EQ(std::set<std::int64_t>(seen.begin(), seen.end()).size(),
            static_cast<std::size_t>(kSamples));
}

TEST(SaveResumeRanks, AfterACompleteEpochTheNextOneFollows) {
  io::TemporaryDirectory dir;
  testing::run_threads(2, [&](World& world) {
    OwnLoop first(world);
    const std::int64_t per_epoch = first.loader.batches_per_epoch();
    first.train_to(per_epoch);
    first.save(dir.path(), {.metrics = {{"loss", 0.25}}});
    OwnLoop second(world);
    const auto resumed = second.resume_from(dir.path());
    ASSERT_TRUE(resumed);
    EXPECT_EQ(resumed->epoch, 1);
    EXPECT_EQ(second.loader.batches_left(1), per_epoch);
    EXPECT_EQ(steps_left(second.parts(), resumed->epoch, 3), 2 * per_epoch);
    ASSERT_NE(train::find_metric(resumed->metrics, "loss"), nullptr);
    EXPECT_EQ(*train::find_metric(resumed->metrics, "loss"), 0.25);
    second.train_to(2 * per_epoch);
    EXPECT_EQ(second.epoch, 1);
    first.epoch = 1;
    first.train_to(2 * per_epoch);
    EXPECT_TRUE(torch::equal(flat(*first.net), flat(*second.net)));
  });
}

TEST(SaveResume, TheScalerComesBack) {
  io::TemporaryDirectory dir;
  OwnLoop first(World{});
  first.scaler.load_state_dict({.scale = 512, .growth_tracker = 7});
  first.save(dir.path());
  OwnLoop second(World{});
  ASSERT_TRUE(second.resume_from(dir.path()));
  EXPECT_EQ(second.scaler.state_dict().scale, 512);
  EXPECT_EQ(second.scaler.state_dict().growth_tracker, 7);
}

TEST(SaveResume, DamagedFoldersAreSkipped) {
  io::TemporaryDirectory dir;
  testing::run_threads(2, [&](World& world) {
    OwnLoop loop(world);
    loop.train_to(2);
    loop.save(dir.path());
    const at::Tensor saved = flat(*loop.net).clone();
    loop.train_to(4);
    const std::string newest = loop.save(dir.path());
    leader_first(world, [&] {
      if (world.is_leader()) std::filesystem::resize_file(newest + "/model.safetensors", 100);
    });
    OwnLoop second(world);
    ASSERT_TRUE(second.resume_from(dir.path()));
    EXPECT_EQ(second.step, 2);
    EXPECT_TRUE(torch::equal(saved, flat(*second.net)));
    // What is saved now is the newest, not the one that is damaged.
    second.train_to(3);
    second.save(dir.path());
    OwnLoop third(world);
    ASSERT_TRUE(third.resume_from(dir.path()));
    EXPECT_EQ(third.step, 3);
  });
  // It stays until its own step is saved.
  EXPECT_THAT(train::steps_in(dir.path()), ElementsAre(4, 3, 2));
}

// The one that is damaged has its size still, so the limit counts it, and deletes the one that the
// run has resumed from before it.
TEST(SaveResume, ADamagedFolderDoesNotStopALaterSave) {
  io::TemporaryDirectory dir;
  OwnLoop loop(World{});
  loop.train_to(2);
  loop.save(dir.path());
  loop.train_to(4);
  const std::string damaged = loop.save(dir.path()) + "/model.safetensors";
  std::string bytes = io::get(damaged);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  io::put(damaged, bytes);
  OwnLoop second(World{});
  ASSERT_TRUE(second.resume_from(dir.path()));
  EXPECT_EQ(second.step, 2);
  second.train_to(5);  // past the step of the damaged one
  second.save(dir.path(), {.save_total_limit = 2});
  EXPECT_THAT(train::steps_in(dir.path()), ElementsAre(5, 4));
  for (const std::int64_t step : {6, 7}) {
    second.train_to(step);
    second.save(dir.path(), {.save_total_limit = 2});
    EXPECT_THAT(train::steps_in(dir.path()), ElementsAre(step, step - 1));
  }
}

TEST(SaveResume, AFolderMayBeNamed) {
  io::TemporaryDirectory dir;
  OwnLoop loop(World{});
  loop.train_to(1);
  const std::string first = loop.save(dir.path());
  loop.train_to(2);
  loop.save(dir.path());
  const auto resumed = resume(dir.path(), World{}, loop.parts(), {.checkpoint = first});
  ASSERT_TRUE(resumed);
  EXPECT_EQ(resumed->step, 1);
}

TEST(SaveResume, TheLimitRetainsTheNewestAndTheBest) {
  io::TemporaryDirectory dir;
  OwnLoop loop(World{});
  std::string best;
  for (int step = 1; step <= 5; ++step) {
    loop.train_to(step);
    const std::string path = loop.save(dir.path(), {.save_total_limit = 2, .retain = best});
    if (step == 2) best = path;
  }
  EXPECT_THAT(train::steps_in(dir.path()), ElementsAre(5, 2));
}

// ---------------------------------------------------------------- other optimizers and the Trainer

TEST(SaveResume, ShardedAndReplicatedResumeEachOther) {
  struct Ranks {
    Ranks(World& world, bool shard)
        : model(parallelize(*net, world, {.shard_optimizer = shard})),
          optimizer(model->make_optimizer({{net->parameters(), optim::AdamWOptions{.lr = 0.01}}})) {
    }
    CheckpointParts parts() {
      return {.module = net.get(), .optimizer = optimizer.get(), .rng = false};
    }
    at::Tensor four_steps(int from) {
      for (int step = from; step < from + 4; ++step) {
        const int rank = model->mesh().world().rank();
        const at::Tensor x =
            torch::randn({8, train::kFeatures}, train::generator(10 * step + rank));
        model->before_forward();
        model->backward(model->watch(net->forward(x).square().mean()), true);
        optimizer->step();
        optimizer->zero_grad();
      }
      return flat(*net).clone();
    }
    torch::nn::Sequential net = train::network();
    std::shared_ptr<Parallelism> model;
    std::unique_ptr<optim::Optimizer> optimizer;
  };
  io::TemporaryDirectory dir;
  testing::run_threads(2, [&](World& world) {
    Ranks sharded(world, true), replicated(world, false);
    sharded.four_steps(0);
    save_checkpoint(dir.path(), world, sharded.parts(), {.step = 4, .epoch = 2});
    const auto resumed = resume(dir.path(), world, replicated.parts());
    ASSERT_TRUE(resumed);
    EXPECT_EQ(resumed->epoch, 2);
    EXPECT_TRUE(torch::equal(sharded.four_steps(4), replicated.four_steps(4)));

    // And back: the sharded optimizer takes steps that the replicated one has not.
    save_checkpoint(dir.path(), world, replicated.parts(), {.step = 8});
    sharded.four_steps(20);
    ASSERT_TRUE(resume(dir.path(), world, sharded.parts()));
    EXPECT_TRUE(torch::equal(sharded.four_steps(8), replicated.four_steps(8)));
    sharded.model->verify_parameters();
  });
}

TEST(SaveResume, TheTrainerContinuesFromALoopAndALoopFromTheTrainer) {
  io::TemporaryDirectory dir;
  auto a = train::arguments(dir.path());
  a.save_strategy = Interval::kSteps;
  a.save_steps = 5;
  a.max_steps = 5;
  torch::nn::Sequential trained = train::network();
  Trainer(World{}, train::task_for(trained, train::dataset(64, 1)), a).train();

  const auto parts = [](torch::nn::Sequential& net, optim::AdamW& optimizer, data::Loader& loader) {
    return CheckpointParts{.module = net.get(), .optimizer = &optimizer, .loader = &loader};
  };
  torch::nn::Sequential net = train::network();
  optim::AdamW optimizer{net->parameters(), {.lr = 1e-2}};
  data::Loader loader =
      data::loader(train::dataset(64, 1), World{}, {.batch_size = 4, .shuffle = true, .seed = 42});
  const auto resumed = resume(dir.path(), World{}, parts(net, optimizer, loader));
  ASSERT_TRUE(resumed);
  EXPECT_EQ(resumed->step, 5);
  EXPECT_TRUE(torch::equal(flat(*net), flat(*trained)));
  EXPECT_EQ(loader.state().cursor, 20);
  for (auto& batch : loader.epoch(0)) {
    torch::cross_entropy_loss(net->forward(batch.data), batch.target).backward();
    optimizer.step();
    break;
  }
  save_checkpoint(dir.path(), World{}, parts(net, optimizer, loader), {.step = 6});

  a.max_steps = 9;
  a.resume_from_checkpoint = "auto";
  torch::nn::Sequential continued = train::network();
  const TrainResult result =
      Trainer(World{}, train::task_for(continued, train::dataset(64, 1)), a).train();
  EXPECT_EQ(result.first_step, 6);
  EXPECT_EQ(result.global_step, 9);
}

TEST(SaveResume, TheEffectiveBatchCountsTheAccumulation) {
  io::TemporaryDirectory dir;
  OwnLoop loop(World{});
  CheckpointParts parts = loop.parts();
  parts.accumulation = 4;
  save_checkpoint(dir.path(), World{}, parts, {.step = 1});
  EXPECT_EQ(train::Checkpoint(dir / "checkpoint-1").position().accumulation, 4);
  const auto said = [&] {
    ::testing::internal::CaptureStderr();
    EXPECT_TRUE(resume(dir.path(), World{}, parts));
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_THAT(said(), Not(HasSubstr("effective batch")));
  parts.accumulation = 2;
  EXPECT_THAT(
      said(),
      HasSubstr("made with 1 data parallel rank x batch 3 x accumulation 4, now 1 x 3 x 2: the "
                "samples come in the same order, each once per epoch; the "
                "effective batch is 6 instead of 12."));
}

// Sums of floats depend on how many threads divide them.
TEST(SaveResume, AnotherNumberOfThreadsIsAWarning) {
  io::TemporaryDirectory dir;
  const int before = at::get_num_threads();
  OwnLoop loop(World{});
  at::set_num_threads(1);
  loop.save(dir.path());
  EXPECT_EQ(train::Checkpoint(dir / "checkpoint-0").position().threads, 1);
  const auto said = [&](const CheckpointParts& parts, World world) {
    ::testing::internal::CaptureStderr();
    EXPECT_TRUE(resume(dir.path(), std::move(world), parts));
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_THAT(said(loop.parts(), World{}), Not(HasSubstr("thread")));
  at::set_num_threads(3);
  EXPECT_THAT(said(loop.parts(), World{}),
              HasSubstr("checkpoint-0 was saved with 1 intra-op thread on each rank, and this run "
                        "has 3. Sums are divided over threads, so the weights will not have the "
                        "bits of an uninterrupted run. Start with OMP_NUM_THREADS=1 for those."));
  at::set_num_threads(before);
  // With a different number of ranks the bits differ anyway, and so do the threads of a rank.
  ::testing::internal::CaptureStderr();
  testing::run_threads(2, [&](World& world) {
    OwnLoop other(world);
    EXPECT_TRUE(other.resume_from(dir.path()));
  });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(HasSubstr("intra-op")));
}

// A scheduler of torch's has no state_dict(): without its count it would decay at other steps.
TEST(SaveResume, ASchedulerOfTorchContinues) {
  const auto train = [](const io::TemporaryDirectory& dir, OwnLoop& loop, std::int64_t last,
                        bool listed) {
    torch::optim::StepLR scheduler(loop.optimizer, /*step_size=*/4, /*gamma=*/0.5);
    CheckpointParts parts = loop.parts();
    parts.schedule = nullptr;
    if (listed) parts.scheduler = &scheduler;
    std::vector<double> rates;
    if (const auto resumed = resume(dir.path(), loop.world, parts)) loop.step = resumed->step;
    for (; loop.step < last; ++loop.step) {
      rates.push_back(loop.optimizer.lr(1));
      scheduler.step();
    }
    save_checkpoint(dir.path(), loop.world, parts, {.step = loop.step});
    return rates;
  };
  const io::TemporaryDirectory one, two;
  OwnLoop whole(World{}), first(World{}), second(World{});
  const std::vector<double> expected = train(one, whole, 16, true);
  EXPECT_EQ(expected.back(), 0.02 / 8);
  std::vector<double> rates = train(two, first, 6, true);
  const std::vector<double> rest = train(two, second, 16, true);
  rates.insert(rates.end(), rest.begin(), rest.end());
  EXPECT_EQ(rates, expected);

  OwnLoop without(World{});
  ::testing::internal::CaptureStderr();
  train(two, without, 17, false);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("checkpoint-16/scheduler.json was saved with a torch::optim::LRScheduler, "
                        "and the parts of this run have none."));
  OwnLoop late(World{});
  EXPECT_THAT(io::message_of<UsageError>([&] { train(two, late, 18, true); }),
              HasSubstr("it was saved without a torch::optim::LRScheduler. Leave the scheduler out "
                        "of the parts; it then begins at its first step."));
}

// What the launcher shows and reports counts on from there.
TEST(SaveResume, TheLedgerCountsFromTheResumedStep) {
  io::TemporaryDirectory dir;
  OwnLoop loop(World{});
  loop.step = 438;
  loop.save(dir.path());
  OwnLoop resumed(World{});
  ASSERT_TRUE(resumed.resume_from(dir.path()));
  EXPECT_EQ(ledger::step(), 438);
}

// On 2 ranks and then on 3: as many steps as were predicted when the run was resumed.
TEST(SaveResume, TheStepsThatAreLeftAreThoseOfTheRanksOfToday) {
  io::TemporaryDirectory dir;
  constexpr std::int64_t kEpochs = 3;
  const auto train = [&](World& world, std::int64_t stop) {
    OwnLoop loop(world);
    CheckpointParts parts = loop.parts();
    parts.accumulation = 3;
    if (const auto resumed = loop.resume_from(dir.path())) {
      EXPECT_EQ(resumed->step, 5);
    }
    const std::int64_t total = loop.step + steps_left(parts, loop.epoch, kEpochs);
    for (; loop.epoch < kEpochs; ++loop.epoch) {
      for (auto& window : loop.loader.windows(loop.epoch, {.micro_batches = 3})) {
        for (auto& micro : window)
          loop.model.backward(
              torch::cross_entropy_loss(loop.model(micro.data), micro.target) * micro.weight,
              micro.last);
        loop.optimizer.step();
        loop.optimizer.zero_grad();
        if (++loop.step != stop) continue;
        save_checkpoint(dir.path(), world, parts, {.step = stop});
        return;
      }
    }
    EXPECT_EQ(loop.step, total) << world.size() << " ranks";
    EXPECT_EQ(steps_left(parts, kEpochs, kEpochs), 0);
  };
  testing::run_threads(2, [&](World& world) { train(world, -1); });
  testing::run_threads(2, [&](World& world) { train(world, 5); });
  testing::run_threads(3, [&](World& world) { train(world, -1); });
  EXPECT_THAT(io::message_of<UsageError>([] { steps_left({}, 0, 1); }),
              HasSubstr("the parts have no loader"));
}

// Peak resident memory in KiB since it was last reset.
std::int64_t peak_memory() {
  const std::string status = read_file("/proc/self/status");
  return std::stoll(status.substr(status.find("VmHWM:") + 6));
}

TEST(SaveResume, ASaveThatIsWaitedForCopiesNothing) {
  io::TemporaryDirectory dir;
  torch::nn::Linear large(4096, 4096);  // 64 MiB
  io::put("/proc/self/clear_refs", "5");
  const std::int64_t before = peak_memory();
  save_checkpoint(dir.path(), World{}, {.module = large.get(), .rng = false}, {.step = 1});
  EXPECT_LT(peak_memory() - before, 32 << 10);
}

// ---------------------------------------------------------------- whose directory it is

// A used directory that another process has left: this process has no part in it.
void leave_run_in(const std::string& directory, const std::vector<std::int64_t>& steps) {
  io::TemporaryDirectory place;
  OwnLoop loop(World{});
  for (const std::int64_t step : steps) {
    loop.train_to(step);
    loop.save(place.path());
  }
  std::filesystem::copy(place.path(), directory, std::filesystem::copy_options::recursive);
}

TEST(SaveResumeFolder, AForeignFolderOfTheStepIsNotReplaced) {
  io::TemporaryDirectory dir;
  std::filesystem::create_directory(dir / "checkpoint-2");
  io::put(dir / "checkpoint-2/pytorch_model.bin", "somebody's");
  testing::run_threads(2, [&](World& world) {
    OwnLoop loop(world);
    loop.train_to(2);
    EXPECT_THAT(io::message_of<UsageError>([&] { loop.save(dir.path()); }),
                HasSubstr("output_dir " + dir.path() + " has a checkpoint of another run"));
    EXPECT_THAT(io::message_of<UsageError>([&] { RunLog(dir.path(), world); }),
                HasSubstr("overwrite_output_dir: true"));
  });
  EXPECT_EQ(io::get(dir / "checkpoint-2/pytorch_model.bin"), "somebody's");
  EXPECT_FALSE(std::filesystem::exists(dir / "metrics.jsonl"));
}

TEST(SaveResumeFolder, AFreshRunRemovesTheCheckpointsOfTheOneBeforeOnRequestAlone) {
  io::TemporaryDirectory dir;
  leave_run_in(dir.path(), {2, 3, 5});
  const std::string before = io::get(dir / "checkpoint-3/SHA256SUMS");
  OwnLoop loop(World{});
  loop.train_to(3);
  const auto again = [&](bool overwrite) {
    loop.save(dir.path(),
              {.save_total_limit = 1, .metrics = {{"run", 2}}, .overwrite_output_dir = overwrite});
  };
  EXPECT_THAT(io::message_of<UsageError>([&] { again(false); }),
              HasSubstr("(checkpoint-2 to checkpoint-5)"));
  EXPECT_EQ(io::get(dir / "checkpoint-3/SHA256SUMS"), before);
  again(true);
  EXPECT_THAT(train::steps_in(dir.path()), ElementsAre(3));
  EXPECT_NE(io::get(dir / "checkpoint-3/SHA256SUMS"), before);
  // What this run has written is its own: saved again it is replaced, later its limit deletes it.
  again(false);
  loop.train_to(4);
  again(false);
  EXPECT_THAT(train::steps_in(dir.path()), ElementsAre(4));
  // Of a lower step the next run would not resume.
  loop.step = 2;
  EXPECT_THAT(io::message_of<UsageError>([&] { again(false); }), HasSubstr("(checkpoint-4)"));
  again(true);
  EXPECT_THAT(train::steps_in(dir.path()), ElementsAre(2));
}

TEST(SaveResumeFolder, ARunThatContinuesHasWhatIsBelowItsStart) {
  io::TemporaryDirectory dir, other;
  leave_run_in(dir.path(), {2, 3, 5});
  std::filesystem::create_directory_symlink(dir / "checkpoint-3", other / "link");
  OwnLoop loop(World{});
  ASSERT_TRUE(resume(dir.path(), World{}, loop.parts(), {.checkpoint = other / "link"}));
  loop.step = 6;
  EXPECT_THAT(io::message_of<UsageError>([&] { loop.save(dir.path()); }),
              HasSubstr("(checkpoint-5)"));
  ASSERT_TRUE(resume(dir.path(), World{}, loop.parts()));
  loop.save(dir.path());
  EXPECT_THAT(train::steps_in(dir.path()), ElementsAre(6, 5, 3, 2));
}

TEST(SaveResumeFolder, IsRefusedOnAllRanksWhileAnotherRunHasIt) {
  io::TemporaryDirectory dir;
  io::FolderLock other(dir.path(), "another run", std::chrono::milliseconds(0));
  const auto expected = AllOf(HasSubstr("another run trains in output_dir " + dir.path()),
                              HasSubstr(": pid " + std::to_string(::getpid()) + " on "),
                              HasSubstr("or choose another output_dir."));
  testing::run_threads(2, [&](World& world) {
    OwnLoop loop(world);
    EXPECT_THAT(io::message_of<UsageError>([&] { loop.save(dir.path()); }), expected);
    EXPECT_THAT(io::message_of<UsageError>([&] { loop.resume_from(dir.path()); }), expected);
    leader_first(world, [&] {
      if (world.is_leader()) other = io::FolderLock();
    });
    EXPECT_FALSE(loop.resume_from(dir.path()));
  });
  EXPECT_THAT(train::steps_in(dir.path()), ElementsAre());
  EXPECT_THAT(io::FolderLock(dir.path(), "a third", std::chrono::milliseconds(0)).holder(),
              HasSubstr("pid " + std::to_string(::getpid())));
}

// ---------------------------------------------------------------- failures

TEST(SaveResume, WhatOneRankCannotDoFailsOnAll) {
  io::TemporaryDirectory dir;
  testing::run_threads(3, [&](World& world) {
    OwnLoop loop(world);
    loop.train_to(1);
    loop.save(dir.path());

    torch::nn::Sequential other(torch::nn::Linear(2, 2));
    CheckpointParts parts = loop.parts();
    if (world.rank() == 1) parts.module = other.get();
    const std::string text = io::message_of<UsageError>([&] { resume(dir.path(), world, parts); });
    EXPECT_THAT(text, HasSubstr(world.rank() == 1 ? "'0.weight' is [8, 6]" : "rank 1: "));
    EXPECT_THAT(text, Not(HasSubstr("training_args.json")));  // only a Trainer writes it

    if (world.rank() == 2) parts.module = nullptr;
    if (world.rank() == 1) parts.module = loop.net.get();
    EXPECT_THAT(
        io::message_of<UsageError>([&] { save_checkpoint(dir.path(), world, parts, {.step = 2}); }),
        HasSubstr("the parts have no module"));
    EXPECT_THAT(io::message_of<UsageError>([&] {
                  save_checkpoint(dir.path(), world, loop.parts(), {.step = 5 + world.rank()});
                }),
                HasSubstr("rank 0 saves step 5 and rank 1 step 6"));
    // The world still works.
    EXPECT_EQ(all_reduce(world, 1), 3);
    EXPECT_TRUE(loop.resume_from(dir.path()));
  });
}

TEST(SaveResume, ADirectoryThatCannotBeWrittenFailsOnAllRanks) {
  io::TemporaryDirectory dir;
  io::put(dir / "file", "not a directory");
  const auto texts = testing::run_threads_collecting(2, [&](World& world) {
    OwnLoop loop(world);
    loop.save(dir / "file");
  });
  EXPECT_THAT(texts, Each(HasSubstr(dir / "file")));
}

TEST(SaveResume, RefusesWhatItCannotName) {
  using Part = decltype(CheckpointParts::optimizer);
  static_assert(!std::is_convertible_v<torch::optim::Adam*, Part>);
  static_assert(!std::is_convertible_v<torch::optim::Optimizer*, Part>);
  static_assert(std::is_convertible_v<optim::SGD*, Part>);

  io::TemporaryDirectory dir;
  OwnLoop loop(World{});
  save_checkpoint(dir.path(), World{}, {.module = loop.net.get(), .rng = false}, {.step = 1});
  EXPECT_THAT(io::message_of<UsageError>([&] {
                CheckpointParts parts{.module = loop.net.get(), .loader = &loop.loader};
                resume(dir.path(), World{}, parts);
              }),
              HasSubstr("it was saved without a loader"));
  // Weights alone are enough to resume weights alone.
  EXPECT_TRUE(resume(dir.path(), World{}, {.module = loop.net.get()}));
}

TEST(SaveResume, RatesThatDifferNeedAsManyParameterGroups) {
  io::TemporaryDirectory dir;
  OwnLoop loop(World{});
  loop.train_to(2);
  loop.save(dir.path());
  optim::AdamW one{loop.net->parameters(), {.lr = 0.1}};
  EXPECT_THAT(io::message_of<UsageError>([&] {
                resume(dir.path(), World{}, {.module = loop.net.get(), .optimizer = &one});
              }),
              HasSubstr("learning rates for 2 parameter groups, and the optimizer has 1"));
}

TEST(SaveResume, SeparateModelsAreNotSavedAsOne) {
  io::TemporaryDirectory dir;
  testing::run_threads(3, [&](World& world) {
    const torch::NoGradGuard no_grad;
    torch::nn::Sequential net = network_with_buffers();
    for (at::Tensor& buffer : net->buffers()) buffer.fill_(world.rank());  // which may differ
    const CheckpointParts parts{.module = net.get(), .rng = false};
    save_checkpoint(dir.path(), world, parts, {.step = 1});
    if (world.rank() == 2) net->parameters()[1].add_(1e-6);
    EXPECT_THAT(
        io::message_of<UsageError>([&] { save_checkpoint(dir.path(), world, parts, {.step = 2}); }),
        HasSubstr("parameter '0.bias' of rank 2 is not that of rank 0"));
  });
}

// A checkpoint has no gradients: those of the passes before it would be lost.
TEST(SaveResume, AStepWhosePassesAreNotCompleteIsNotSaved) {
  for (const int ranks : {1, 2}) {
    io::TemporaryDirectory dir;
    testing::run_threads(ranks, [&](World& world) {
      torch::nn::Sequential net = train::network();
      DistributedDataParallel model{net, world};
      const CheckpointParts parts{.module = net.get(), .rng = false};
      const auto save = [&](std::int64_t step) {
        save_checkpoint(dir.path(), world, parts, {.step = step});
      };
      const std::vector<std::int64_t> indices{0, 1, 2};
      const auto loss = [&] { return model(train::dataset(3, 1)->get_batch(indices, {})->data); };
      model.backward(loss().sum(), /*last=*/false);
      EXPECT_THAT(io::message_of<UsageError>([&] { save(1); }),
                  HasSubstr("a step's backward passes are not complete"));
      model.backward(loss().sum(), /*last=*/true);
      save(1);
      model.backward(loss().sum(), /*last=*/false);
      model.module()->zero_grad();  // a window that is given up
      save(2);
    });
  }
}

// One rank's optimizer has a parameter that the module does not have: rank 0 would write.
TEST(SaveResume, ARefusalOfTheOptimizersStateIsEverybodys) {
  io::TemporaryDirectory dir;
  testing::run_threads(3, [&](World& world) {
    torch::nn::Sequential net = train::network(), other = train::network();
    optim::AdamW optimizer{(world.rank() == 0 ? other : net)->parameters(), {.lr = 0.1}};
    const CheckpointParts parts{.module = net.get(), .optimizer = &optimizer};
    EXPECT_THAT(
        io::message_of<UsageError>([&] { save_checkpoint(dir.path(), world, parts, {.step = 1}); }),
        HasSubstr("has no name"));
    EXPECT_EQ(all_reduce(world, 1), 3);
  });
}

}  // namespace
}  // namespace lockstep
