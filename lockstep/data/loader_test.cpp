// The loader: who gets which batches, in which order, ahead of time, and what happens when it is
// left early, broken or resumed.
#include "lockstep/data/loader.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <numeric>
#include <random>
#include <thread>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/data/profile.h"
#include "lockstep/testing/worlds.h"

namespace lockstep::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using List = std::vector<std::int64_t>;

// Sample i is the number i, and its target 10 i.
DatasetPtr numbers(std::int64_t size) {
  return make_dataset(size, [](std::int64_t i, SampleRandom&) {
    return Example{torch::tensor(static_cast<float>(i)), torch::tensor(10 * i)};
  });
}

List numbers_of(const Batch& batch) {
  List list;
  for (std::int64_t i = 0; i < batch.data.size(0); ++i)
    list.push_back(batch.data[i].item().toLong());
  return list;
}

std::vector<List> epoch_of(Loader& loader, std::int64_t epoch) {
  std::vector<List> batches;
  for (const auto& batch : loader.epoch(epoch)) batches.push_back(numbers_of(batch));
  return batches;
}

Loader one_of(DatasetPtr dataset, int rank, int ranks, LoaderOptions options) {
  return detail::make_loader(std::move(dataset), {.rank = rank, .ranks = ranks},
                             std::move(options));
}

TEST(Loader, GivesTheSamplersIndicesInBatches) {
  for (const int workers : {0, 1, 3})
    for (const bool persistent : {false, true}) {
      Loader loader = one_of(numbers(23), 1, 2,
                             {.batch_size = 4,
                              .shuffle = true,
                              .seed = 9,
                              .num_workers = workers,
                              .persistent_workers = persistent});
      EXPECT_EQ(loader.batches_per_epoch(), 3);
      for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
        DistributedSampler sampler(23, {.num_replicas = 2, .rank = 1, .seed = 9});
        sampler.set_epoch(epoch);
        const List wanted = sampler.indices();
        List got;
        std::vector<std::size_t> sizes;
        for (const auto& batch : loader.epoch(epoch)) {
          EXPECT_EQ(numbers_of(batch), batch.indices);
          EXPECT_TRUE(torch::equal(batch.target, (10 * batch.data).to(torch::kLong)));
          EXPECT_EQ(batch.tokens, batch.samples());
          sizes.push_back(batch.indices.size());
          got.insert(got.end(), batch.indices.begin(), batch.indices.end());
        }
        EXPECT_EQ(got, wanted);
        EXPECT_THAT(sizes, ElementsAre(4, 4, 4));  // 23 samples are 24 with the repeat: 12 each
      }
    }
}

TEST(Loader, AllRanksHaveTheSameNumberOfBatches) {
  for (const std::int64_t n : {1, 5, 16, 31, 64, 100})
    for (const int ranks : {1, 2, 3, 4, 7})
      for (const std::int64_t batch : {1, 3, 8})
        for (const bool drop : {false, true}) {
          if (drop && n < ranks * batch) continue;  // refused, as below
          std::vector<std::size_t> counts;
          List seen;
          for (int rank = 0; rank < ranks; ++rank) {
            Loader loader =
                one_of(numbers(n), rank, ranks, {.batch_size = batch, .drop_last = drop});
            const auto batches = epoch_of(loader, 0);
            counts.push_back(batches.size());
            EXPECT_EQ(static_cast<std::int64_t>(batches.size()), loader.batches_per_epoch());
            for (const List& one : batches) {
              seen.insert(seen.end(), one.begin(), one.end());
              EXPECT_TRUE(!drop || static_cast<std::int64_t>(one.size()) == batch);
            }
          }
          EXPECT_EQ(std::count(counts.begin(), counts.end(), counts[0]), ranks);
          std::sort(seen.begin(), seen.end());
          const auto repeat = std::unique(seen.begin(), seen.end());
          if (drop) {
            EXPECT_EQ(repeat, seen.end());
          } else {
            EXPECT_EQ(repeat - seen.begin(), n) << "not every sample came";
          }
        }
}

// A loop over nothing would look like a run that was successful.
TEST(Loader, AnEpochWithoutABatchIsRefused) {
  const auto refusal = [](std::int64_t n, int rank, int ranks, LoaderOptions options) {
    return message_of<UsageError>([&] { one_of(numbers(n), rank, ranks, std::move(options)); });
  };
  for (const int ranks : {1, 2, 3, 4, 7})
    for (int rank = 0; rank < ranks; ++rank) {
      for (const bool evaluation : {false, true})
        EXPECT_THAT(refusal(0, rank, ranks, {.evaluation = evaluation}),
                    AllOf(HasSubstr("[loader] there is nothing to load: the dataset has no "
                                    "samples."),
                          HasSubstr("Check the path, split or filter")));
      EXPECT_THAT(
          refusal(5 * ranks - 1, rank, ranks, {.batch_size = 5, .drop_last = true}),
          HasSubstr(fmt::format("an epoch has no batch: {} samples over {} rank{} are 4 per "
                                "rank, fewer than batch_size 5, and drop_last skips",
                                5 * ranks - 1, ranks, ranks == 1 ? "" : "s")));
      Loader enough = one_of(numbers(5 * ranks), rank, ranks, {.batch_size = 5, .drop_last = true});
      EXPECT_EQ(epoch_of(enough, 0).size(), 1u);
      // In evaluation a single rank may have no batch.
      Loader share = one_of(numbers(1), rank, ranks, {.batch_size = 5, .evaluation = true});
      EXPECT_EQ(epoch_of(share, 0).size(), rank == 0 ? 1u : 0u);
    }
  EXPECT_THAT(refusal(3, 0, 1, {.sampler = std::make_shared<SequentialSampler>(0)}),
              HasSubstr("the sampler's order has no samples"));
  EXPECT_THAT(refusal(0, 0, 1, {.sampler = std::make_shared<SequentialSampler>(0)}),
              HasSubstr("the dataset has no samples"));
}

TEST(Loader, EvaluationHasEachSampleOnceOverAllRanks) {
  for (const int ranks : {1, 2, 3, 4, 7}) {
    List seen;
    std::int64_t most = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      Loader loader = one_of(numbers(29), rank, ranks, {.batch_size = 4, .evaluation = true});
      const std::int64_t promised = loader.batches_left(0);
      const auto batches = epoch_of(loader, 0);
      EXPECT_EQ(static_cast<std::int64_t>(batches.size()), promised);
      most = std::max(most, promised);
      for (const List& one : batches) seen.insert(seen.end(), one.begin(), one.end());
      EXPECT_GE(loader.batches_per_epoch(), promised);
      EXPECT_TRUE(rank != 0 || loader.batches_per_epoch() == promised);
    }
    std::sort(seen.begin(), seen.end());
    List all(29);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(seen, all);
  }
}

TEST(Loader, TheStateIsThatOfTheLastBatchHandedOutThoughWorkersAreAhead) {
  std::atomic<int> loaded{0};
  const auto dataset = make_dataset(40, [&](std::int64_t i, SampleRandom&) {
    ++loaded;
    return Example{torch::tensor(static_cast<float>(i)), {}};
  });
  const LoaderOptions options{
      .batch_size = 2, .shuffle = true, .seed = 4, .num_workers = 2, .prefetch_factor = 3};
  Loader whole = one_of(dataset, 0, 2, options);
  const auto all = epoch_of(whole, 6);
  ASSERT_EQ(all.size(), 10u);
  const std::int64_t order = order_checksum(RandomSampler(40, 4).order(6));
  EXPECT_EQ(whole.state(),
            (SamplerState{.epoch = 6, .cursor = 40, .seed = 4, .size = 40, .order = order}));
  for (std::size_t used = 0; used <= 10; ++used) {
    Loader first = one_of(dataset, 0, 2, options);
    std::size_t count = 0;
    {
      auto epoch = first.epoch(6);
      while (count < used && epoch.next()) ++count;
      EXPECT_EQ(first.state().cursor, static_cast<std::int64_t>(4 * used));
      EXPECT_EQ(first.batches_left(6), static_cast<std::int64_t>(10 - used));
      if (used == 1) {  // workers are ahead by now, and the state does not care
        for (int i = 0; loaded < 4 && i < 10'000; ++i)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        EXPECT_EQ(first.state().cursor, 4);
      }
    }
    Loader resumed = one_of(dataset, 0, 2, options);
    resumed.load_state(first.state());
    EXPECT_EQ(resumed.batches_left(6), static_cast<std::int64_t>(10 - used));
    EXPECT_EQ(epoch_of(resumed, 6),
              (std::vector<List>(all.begin() + static_cast<std::ptrdiff_t>(used), all.end())));
    EXPECT_EQ(epoch_of(resumed, 7).size(), 10u);  // and the epoch after it is whole
  }
}

// 2 -> 1 -> 4 -> 3 ranks within one epoch: each stops after some batches, the next continues.
TEST(Loader, AnEpochContinuesAtOtherWorldSizesWithEachSampleOnce) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 40; ++trial) {
    const auto n = static_cast<std::int64_t>(60 + random() % 200);
    const bool drop = trial % 2 == 1;
    std::map<std::int64_t, int> times;
    SamplerState state{.epoch = 2, .cursor = 0, .seed = 8};
    for (const int ranks : {2, 1, 4, 3}) {
      const std::int64_t batch = 1 + random() % 3;
      std::int64_t steps = random() % 5;
      SamplerState after;
      for (int rank = 0; rank < ranks; ++rank) {
        Loader loader = one_of(numbers(n), rank, ranks,
                               {.batch_size = batch,
                                .shuffle = true,
                                .drop_last = drop,
                                .seed = 8,
                                .num_workers = rank % 2});
        loader.load_state(state);
        // The last run goes to the end and gets nothing beyond it.
        const std::int64_t left = loader.batches_left(2);
        steps = ranks == 3 ? left : std::min(steps, left);
        auto epoch = loader.epoch(2);
        for (std::int64_t i = 0; i < steps; ++i) {
          const auto one = epoch.next();
          ASSERT_TRUE(one);
          for (const std::int64_t index : one->indices) ++times[index];
        }
        EXPECT_TRUE(ranks != 3 || !epoch.next());
        EXPECT_TRUE(rank == 0 || loader.state() == after);
        after = loader.state();
      }
      state = after;
    }
    EXPECT_EQ(state.cursor, n);
    std::int64_t repeats = 0;
    for (const auto& [index, count] : times) repeats += count - 1;
    const auto seen = static_cast<std::int64_t>(times.size());
    if (drop) {
      EXPECT_EQ(repeats, 0);
      EXPECT_GE(seen, n - 11);  // incomplete batches of three, on four ranks
    } else {
      EXPECT_EQ(seen, n);
      EXPECT_LE(repeats, 3);
    }
  }
}

TEST(Loader, LeavingTheLoopEarlyAndComingBackIsClean) {
  for (const bool persistent : {false, true}) {
    Loader loader = one_of(
        numbers(100), 0, 1,
        {.batch_size = 5, .shuffle = true, .num_workers = 3, .persistent_workers = persistent});
    const auto whole = epoch_of(loader, 3);
    for (int round = 0; round < 20; ++round) {
      int count = 0;
      for (const auto& batch : loader.epoch(3)) {
        EXPECT_EQ(numbers_of(batch), whole[static_cast<std::size_t>(count)]);
        if (count++ == round) break;
      }
      EXPECT_EQ(loader.state().cursor, std::min<std::int64_t>(100, 5 * (round + 1)));
    }
    EXPECT_EQ(epoch_of(loader, 3), whole);
  }
}

TEST(Loader, ALoopOverATemporaryLoaderWorks) {
  std::int64_t sum = 0;
  for (const auto& batch : one_of(numbers(10), 0, 1, {.batch_size = 3, .num_workers = 1}).epoch(0))
    sum += batch.data.sum().item().toLong();
  EXPECT_EQ(sum, 45);
}

TEST(Loader, AnExceptionNamesItsSampleAndTheLoaderLivesOn) {
  std::atomic<bool> broken{true};
  const auto dataset = make_dataset(20, [&](std::int64_t i, SampleRandom&) {
    if (i == 13 && broken) throw std::out_of_range("page 13 is torn");
    return Example{torch::tensor(static_cast<float>(i)), {}};
  });
  for (const int workers : {0, 2}) {
    broken = true;
    Loader loader = one_of(dataset, 0, 1, {.batch_size = 4, .num_workers = workers});
    std::size_t before = 0;
    try {
      for (const auto& batch : loader.epoch(0)) before += batch.indices.size();
      FAIL() << "no error";
    } catch (const SampleError& error) {
      EXPECT_STREQ(error.what(), "[loader] sample 13 could not be loaded: page 13 is torn");
      EXPECT_EQ(error.index(), 13);
      EXPECT_THROW(std::rethrow_exception(error.cause()), std::out_of_range);
    }
    EXPECT_EQ(before, 12u);  // batches before it came
    EXPECT_EQ(loader.state().cursor, 12);
    broken = false;
    EXPECT_EQ(epoch_of(loader, 0).size(), 5u);
  }
}

class BrokenBatches : public Dataset {
 public:
  std::int64_t size() const override { return 8; }
  Example get(std::int64_t index, SampleRandom&) const override {
    if (index == 6) throw 6;  // not even an exception
    return {torch::tensor(index), {}};
  }
  std::optional<Batch> get_batch(Indices, const RandomKey&) const override {
    throw std::runtime_error("the batch is broken");
  }
};

TEST(Loader, AnErrorOfABatchIsTracedToItsSample) {
  const auto failure = [](std::int64_t batch, std::int64_t skip) {
    Loader loader =
        one_of(std::make_shared<BrokenBatches>(), 0, 1, {.batch_size = batch, .num_workers = 1});
    loader.load_state({.cursor = skip});
    return message_of<SampleError>([&] { epoch_of(loader, 0); });
  };
  EXPECT_EQ(failure(8, 0), "[loader] sample 6 could not be loaded: the batch is broken");
  EXPECT_EQ(failure(4, 0),
            "[loader] the batch of 4 samples that begins with sample 0 could not be loaded, though "
            "each of them can: the batch is broken");
}

TEST(Loader, WaitsNoLongerThanItsTimeout) {
  std::atomic<bool> release{false}, at_second{false};
  const auto dataset = make_dataset(4, [&](std::int64_t i, SampleRandom&) {
    if (i == 2) at_second = true;
    for (int k = 0; i == 2 && !release && k < 60'000; ++k)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return Example{torch::tensor(i), {}};
  });
  Loader loader = one_of(dataset, 0, 1,
                         {.batch_size = 2,
                          .num_workers = 1,
                          .persistent_workers = true,
                          .timeout = std::chrono::milliseconds(50)});
  auto epoch = loader.epoch(0);
  // The worker is at the second batch, so the first one exists, however late it began.
  for (int k = 0; !at_second && k < 60'000; ++k)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(epoch.next());
  EXPECT_THAT(message_of<TimeoutError>([&] { epoch.next(); }),
              HasSubstr("[loader] batch 1 was not loaded within 50 ms"));
  release = true;
}

TEST(Loader, RandomNumbersOfASampleAreTheSameAnywhere) {
  const auto noisy = make_dataset(30, [](std::int64_t i, SampleRandom& random) {
    const auto noise = torch::randn({1}, generator(random));
    return Example{torch::stack({torch::tensor({static_cast<float>(i)}), noise}).flatten(), {}};
  });
  const auto draw = [&](int ranks, int workers, std::int64_t epoch, std::uint64_t seed) {
    std::map<std::int64_t, float> noise;
    for (int rank = 0; rank < ranks; ++rank) {
      Loader loader =
          one_of(noisy, rank, ranks,
                 {.batch_size = 4, .shuffle = true, .seed = seed, .num_workers = workers});
      for (const auto& batch : loader.epoch(epoch))
        for (std::int64_t i = 0; i < batch.samples(); ++i)
          noise[batch.data[i][0].item().toLong()] = batch.data[i][1].item().toFloat();
    }
    return noise;
  };
  const auto once = draw(1, 0, 0, 0);
  EXPECT_EQ(once.size(), 30u);
  EXPECT_EQ(draw(1, 3, 0, 0), once);
  EXPECT_EQ(draw(3, 2, 0, 0), once);
  EXPECT_NE(draw(1, 0, 1, 0), once);
  EXPECT_NE(draw(1, 0, 0, 1), once);
}

struct TorchNumbers : torch::data::datasets::Dataset<TorchNumbers> {
  explicit TorchNumbers(std::size_t n) : n_(n) {}
  torch::data::Example<> get(std::size_t i) override {
    // Not safe for two threads: the loader must give each its own copy.
    scratch_ = i;
    std::this_thread::yield();
    return {torch::tensor(static_cast<float>(scratch_)), torch::tensor(10 * long(scratch_))};
  }
  torch::optional<std::size_t> size() const override { return n_; }
  std::size_t n_;
  std::size_t scratch_ = 0;
};

struct RaggedNumbers : torch::data::datasets::Dataset<RaggedNumbers> {
  torch::data::Example<> get(std::size_t i) override {
    return {torch::zeros({static_cast<std::int64_t>(i) + 1}), torch::tensor(0)};
  }
  torch::optional<std::size_t> size() const override { return 4; }
};

struct UnsizedNumbers : TorchNumbers {
  using TorchNumbers::TorchNumbers;
  torch::optional<std::size_t> size() const override { return {}; }
};

TEST(Loader, TakesAnyDatasetOfTorch) {
  using torch::data::transforms::Stack;
  World alone;
  for (const int workers : {0, 3}) {
    const LoaderOptions options{.batch_size = 7, .shuffle = true, .num_workers = workers};
    Loader reference = loader(numbers(50), alone, options);
    const auto wanted = epoch_of(reference, 1);
    Loader plain = loader(TorchNumbers(50), alone, options);
    EXPECT_EQ(epoch_of(plain, 1), wanted);
    Loader stacked = loader(TorchNumbers(50).map(Stack<>()), alone, options);
    for (const auto& batch : stacked.epoch(1)) {
      EXPECT_EQ(batch.samples(), batch.data.size(0));
      EXPECT_TRUE(torch::equal(batch.target, (10 * batch.data).to(torch::kLong)));
    }
    EXPECT_EQ(epoch_of(stacked, 1), wanted);
    // Collate sees single samples of a dataset that stacks.
    auto options_with_collate = options;
    options_with_collate.collate = [](std::vector<Example> examples) {
      EXPECT_EQ(examples.front().data.dim(), 0);
      return stack(examples);
    };
    Loader collated = loader(TorchNumbers(50).map(Stack<>()), alone, options_with_collate);
    EXPECT_EQ(epoch_of(collated, 1), wanted);
    // Without targets.
    Loader tensors =
        loader(torch::data::datasets::TensorDataset(torch::arange(50)), alone, options);
    EXPECT_EQ(epoch_of(tensors, 1), wanted);
  }
  EXPECT_THAT(message_of<UsageError>([&] { make_dataset(UnsizedNumbers(3)); }),
              HasSubstr("does not know its size"));
}

TEST(Loader, TensorDatasetsGiveRows) {
  const auto data = torch::randn({10, 3}), target = torch::arange(10);
  Loader loader = one_of(std::make_shared<TensorDataset>(data, target), 0, 1,
                         {.batch_size = 4, .shuffle = true});
  for (const auto& batch : loader.epoch(0)) {
    const auto rows = torch::tensor(batch.indices);
    EXPECT_TRUE(torch::equal(batch.data, data.index_select(0, rows)));
    EXPECT_TRUE(torch::equal(batch.target, rows));
  }
  EXPECT_THAT(message_of<UsageError>([&] { TensorDataset(data, torch::arange(9)); }),
              HasSubstr("has 10 samples and 9 targets"));
  EXPECT_THAT(message_of<UsageError>([&] { TensorDataset(torch::tensor(1)); }),
              HasSubstr("first dimension counts samples"));
  SampleRandom random({}, 0);
  EXPECT_TRUE(torch::equal(TensorDataset(data).get(3, random).data, data[3]));
}

TEST(Loader, CollateAndTokens) {
  const auto ragged = make_dataset(4, [](std::int64_t i, SampleRandom&) {
    return Example{torch::zeros({i + 1}), torch::tensor(0)};
  });
  Loader refused = one_of(ragged, 1, 2, {.batch_size = 2, .num_workers = 1});
  EXPECT_THAT(message_of<SampleError>([&] { epoch_of(refused, 0); }),
              AllOf(HasSubstr("the batch that begins with sample 1 could not be collated"),
                    HasSubstr("samples 1 and 3 of the dataset cannot be stacked: their data "
                              "differ ([2] Float and [4] Float)")));
  Loader of_torch = one_of(make_dataset(RaggedNumbers()), 1, 2, {.batch_size = 2});
  EXPECT_THAT(message_of<SampleError>([&] { epoch_of(of_torch, 0); }),
              HasSubstr("samples 1 and 3 of the dataset cannot be stacked"));
  EXPECT_THAT(message_of<UsageError>(
                  [] { stack({Example{torch::zeros({1}), {}}, Example{torch::zeros({2}), {}}}); }),
              HasSubstr("samples 0 and 1 of a batch cannot be stacked"));
  Loader padded =
      one_of(ragged, 0, 1, {.batch_size = 4, .collate = [](std::vector<Example> examples) {
                              Batch batch;
                              batch.data = torch::zeros({4, 4});
                              batch.target = torch::full({4, 4}, kIgnoredTarget);
                              for (std::size_t i = 0; i < examples.size(); ++i)
                                batch.target[static_cast<std::int64_t>(i)]
                                    .narrow(0, 0, examples[i].data.size(0))
                                    .zero_();
                              return batch;
                            }});
  for (const auto& batch : padded.epoch(0)) EXPECT_EQ(batch.tokens, 10);
  Loader nothing = one_of(ragged, 0, 1, {.collate = [](std::vector<Example>) { return Batch{}; }});
  EXPECT_THAT(message_of<SampleError>([&] { nothing.epoch(0).next(); }), HasSubstr("has no data"));
  EXPECT_EQ(count_tokens(torch::rand({3, 2}), 3), 3);
  EXPECT_EQ(count_tokens(torch::tensor({std::int64_t{1}, kIgnoredTarget}), 2),
            2);  // classes, not sequences
  EXPECT_THAT(message_of<UsageError>([] { stack({}); }), HasSubstr("no samples"));
}

TEST(Loader, OneEpochAtATime) {
  Loader loader = one_of(numbers(10), 0, 1, {.batch_size = 2, .num_workers = 1});
  auto first = loader.epoch(0);
  EXPECT_TRUE(first.next());
  auto second = loader.epoch(1);
  EXPECT_THAT(message_of<UsageError>([&] { first.next(); }),
              HasSubstr("[loader] this epoch has ended: another one was asked for since"));
  EXPECT_TRUE(second.next());
  loader.load_state({.epoch = 4, .cursor = 6});
  EXPECT_THROW(second.next(), UsageError);
  EXPECT_THAT(message_of<UsageError>([&] { loader.epoch(0); }),
              HasSubstr("epoch 0 was asked for, but the loaded state is in epoch 4 at sample 6"));
  EXPECT_THAT(epoch_of(loader, 4), ElementsAre(ElementsAre(6, 7), ElementsAre(8, 9)));
  // At the end of an epoch: it is empty, and the next one whole.
  loader.load_state(loader.state());
  EXPECT_TRUE(epoch_of(loader, 4).empty());
  EXPECT_EQ(epoch_of(loader, 5).size(), 5u);
  // The next one may also be asked for at once, but none after it.
  const SamplerState ended = loader.state();
  loader.load_state(ended);
  EXPECT_EQ(loader.batches_left(6), 5);
  EXPECT_THAT(message_of<UsageError>([&] { loader.epoch(7); }), HasSubstr("is in epoch 5"));
  EXPECT_EQ(loader.state(), ended);
  EXPECT_EQ(epoch_of(loader, 6).size(), 5u);
}

class WildSampler : public Sampler {
 public:
  std::int64_t size() const override { return 2; }
  List order(std::int64_t) const override { return {0, 10}; }
};

TEST(Loader, RefusesOptionsThatCannotBe) {
  const auto refusal = [](LoaderOptions options) {
    return message_of<UsageError>([&] { one_of(numbers(10), 0, 1, std::move(options)).epoch(0); });
  };
  EXPECT_THAT(refusal({.batch_size = 0}), HasSubstr("batch_size is 0, and must be 1 or more"));
  EXPECT_THAT(refusal({.num_workers = -1}), HasSubstr("num_workers is -1"));
  EXPECT_THAT(refusal({.num_workers = 5000}), HasSubstr("num_workers is 5000"));
  EXPECT_THAT(refusal({.prefetch_factor = 0}), HasSubstr("prefetch_factor is 0"));
  EXPECT_THAT(refusal({.timeout = std::chrono::milliseconds(0)}), HasSubstr("timeout is 0"));
  EXPECT_THAT(refusal({.drop_last = true, .evaluation = true}),
              HasSubstr("evaluation and drop_last contradict"));
  EXPECT_THAT(refusal({.shuffle = true, .sampler = std::make_shared<SequentialSampler>(10)}),
              HasSubstr("shuffle and a sampler are both set"));
  EXPECT_THAT(refusal({.sampler = std::make_shared<WildSampler>()}),
              HasSubstr("the sampler gave index 10 for a dataset of 10 samples"));
  EXPECT_THAT(message_of<UsageError>([] { one_of(nullptr, 0, 1, {}); }), HasSubstr("no dataset"));
  EXPECT_THAT(message_of<UsageError>([] { one_of(numbers(1), 0, 1, {}).epoch(-1); }),
              HasSubstr("no epoch -1"));
  EXPECT_THAT(message_of<UsageError>([] { make_dataset(-1, GetExample()); }),
              HasSubstr("cannot have -1 samples"));
  EXPECT_THAT(message_of<UsageError>([] { make_dataset(1, GetExample()); }),
              HasSubstr("no function"));
}

TEST(Loader, OtherOrdersComeFromASampler) {
  std::vector<double> weights(10, 0.0);
  weights[3] = weights[8] = 1;
  Loader loader = one_of(numbers(10), 1, 2,
                         {.batch_size = 4,
                          .sampler = std::make_shared<WeightedSampler>(
                              weights, WeightedSamplerOptions{.num_samples = 40, .seed = 2})});
  EXPECT_EQ(loader.batches_per_epoch(), 5);
  for (const List& batch : epoch_of(loader, 0))
    for (const std::int64_t index : batch) EXPECT_TRUE(index == 3 || index == 8);
}

// What each of two ranks throws. Not run_threads_collecting, which releases the others at the first
// failure: a rank that is still being reported would hear of that instead.
std::vector<std::string> refusals(const std::function<void(World&)>& body) {
  std::vector<std::string> reported(2);
  testing::run_threads(2, [&](World& world) {
    try {
      body(world);
    } catch (const std::exception& error) {
      reported[static_cast<std::size_t>(world.rank())] = error.what();
    }
  });
  return reported;
}

TEST(Loader, RanksThatDifferAreReportedBeforeTheFirstStep) {
  const auto errors = testing::run_threads_collecting(3, [](World& world) {
    loader(numbers(world.rank() == 2 ? 11 : 10), world, {.batch_size = 2});
  });
  for (const std::string& error : errors)
    EXPECT_THAT(error, AllOf(HasSubstr("[loader] ranks differ"), HasSubstr("Rank 0: 10 samples"),
                             HasSubstr("Rank 2: 11 samples")));
  // A rank whose own options are refused does not leave the others waiting.
  const auto refused =
      refusals([](World& world) { loader(numbers(10), world, {.batch_size = world.rank()}); });
  EXPECT_THAT(refused[0], HasSubstr("batch_size is 0"));
  EXPECT_THAT(refused[1], HasSubstr("rank 0: [loader] batch_size is 0"));
}

SamplerPtr weighted(std::uint64_t seed) {
  return std::make_shared<WeightedSampler>(std::vector<double>(10, 1.0),
                                           WeightedSamplerOptions{.seed = seed});
}

// The loader's own seed is equal: what differs is the sampler's.
TEST(Loader, SamplersThatDifferBetweenRanksAreReported) {
  const auto errors = testing::run_threads_collecting(2, [](World& world) {
    const auto seed = 42 + static_cast<std::uint64_t>(world.rank());
    loader(numbers(10), world, {.batch_size = 2, .sampler = weighted(seed)});
  });
  for (const std::string& error : errors)
    EXPECT_THAT(error,
                AllOf(HasSubstr("[loader] ranks differ"), HasSubstr("a sampler with the order")));
  testing::run_threads(2, [](World& world) {
    loader(numbers(10), world, {.batch_size = 2, .sampler = weighted(42)});
  });
  // A sampler that cannot make its order does not leave the other rank waiting.
  struct Broken : Sampler {
    std::int64_t size() const override { return 10; }
    List order(std::int64_t) const override { throw std::runtime_error("no order today"); }
  };
  const auto broken = refusals([](World& world) {
    const SamplerPtr mine = world.rank() == 0 ? weighted(1) : std::make_shared<Broken>();
    loader(numbers(10), world, {.batch_size = 2, .sampler = mine});
  });
  EXPECT_THAT(broken[0], HasSubstr("rank 1: no order today"));
  EXPECT_THAT(broken[1], HasSubstr("no order today"));
}

TEST(Loader, AStateOfAnotherOrderIsRefused) {
  const auto made = [](SamplerPtr sampler) {
    return one_of(numbers(10), 0, 1, {.batch_size = 2, .sampler = std::move(sampler)});
  };
  Loader first = made(weighted(3));
  const auto all = epoch_of(first, 1);
  SamplerState state = first.state();
  state.cursor = 4;
  Loader same = made(weighted(3));
  same.load_state(state);
  EXPECT_EQ(epoch_of(same, 1), (std::vector<List>(all.begin() + 2, all.end())));
  for (const SamplerPtr& other : {weighted(4), SamplerPtr(std::make_shared<RandomSampler>(10, 3))})
    EXPECT_THAT(message_of<UsageError>([&] { made(other).load_state(state); }),
                HasSubstr("[sampler] the state was saved in another order of epoch 1's samples"));
  state.order = 0;  // an older state does not know it
  made(weighted(4)).load_state(state);
}

TEST(Loader, RanksOfAWorldShareTheSamples) {
  testing::run_threads(3, [](World& world) {
    Loader mine = loader(numbers(30), world, {.batch_size = 5, .shuffle = true, .num_workers = 1});
    double sum = 0, count = 0;
    for (const auto& batch : mine.epoch(0)) {
      sum += batch.data.sum().item().toDouble();
      count += static_cast<double>(batch.samples());
    }
    EXPECT_EQ(all_reduce(world, sum), 435);
    EXPECT_EQ(all_reduce(world, count), 30);
    // A single rank: a world of one, in which nobody else needs to take part.
    if (world.is_leader()) {
      Loader alone = loader(numbers(4), World{}, {});
      EXPECT_EQ(epoch_of(alone, 0).size(), 4u);
    }
  });
}

// The last one is shorter, and the samples are those of epoch().
TEST(Loader, WindowsDivideAnEpochAndContinueInIt) {
  for (const int workers : {0, 2}) {
    const auto make = [&] {
      return loader(numbers(19), World{},
                    {.batch_size = 2, .shuffle = true, .seed = 3, .num_workers = workers});
    };
    Loader batches = make(), windows = make();
    for (const std::int64_t epoch : {0, 1}) {
      std::vector<List> got;
      std::vector<std::size_t> sizes;
      for (auto& window : windows.windows(epoch, {.micro_batches = 4})) {
        sizes.push_back(window.size());
        for (auto& micro : window) {
          got.push_back(numbers_of(micro));
          EXPECT_EQ(micro.last, &micro == &window[window.size() - 1]);
        }
      }
      EXPECT_THAT(sizes, ElementsAre(4u, 4u, 2u));
      EXPECT_EQ(got, epoch_of(batches, epoch));
    }
    SamplerState state;
    for (auto& window : windows.windows(2, {.micro_batches = 4})) {
      EXPECT_EQ(window.tokens(), 8);
      state = windows.state();
      break;
    }
    Loader resumed = make();
    resumed.load_state(state);
    std::vector<std::int64_t> tokens;
    for (const auto& window : resumed.windows(2, {.micro_batches = 4}))
      tokens.push_back(window.tokens());
    EXPECT_THAT(tokens, ElementsAre(8, 3));
    EXPECT_EQ(resumed.state().cursor, 19);
  }
}

// Each rank has batches of 2 and 1 samples, of the 6 that both have.
TEST(Loader, WindowsAddUpTokensOverRanks) {
  testing::run_threads(2, [](World& world) {
    Loader some = loader(numbers(6), world, {.batch_size = 2});
    const auto weights = [&](WindowWeights by) {
      std::vector<double> all;
      for (auto& window : some.windows(0, {.micro_batches = 4, .weights = by}))
        for (auto& micro : window) all.push_back(micro.weight.item<double>());
      return all;
    };
    EXPECT_THAT(weights(WindowWeights::kCounts), ElementsAre(4.0 / 6, 2.0 / 6));
    EXPECT_THAT(weights(WindowWeights::kOwnCounts), ElementsAre(2.0 / 3, 1.0 / 3));
    EXPECT_THAT(message_of<UsageError>([&] { some.windows(0, {.micro_batches = 0}); }),
                HasSubstr("micro_batches is 0"));
    Loader odd = loader(numbers(5), world, {.evaluation = true});
    EXPECT_THAT(message_of<UsageError>([&] { odd.windows(0); }), HasSubstr("kOwnCounts"));
  });
}

// Workers hide loading behind the step. The goal (1 % and a p99 of 1 ms, over 1 000 steps) is that
// of `lockstep bench loader`, on a quiet machine; here one of twenty short runs must come near.
TEST(Loader, LoadingIsHiddenBehindTheStep) {
  const auto slow = make_dataset(60, [](std::int64_t i, SampleRandom&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    return Example{torch::tensor(i), {}};
  });
  double best = 1;
  for (int attempt = 0; attempt < 20 && best > 0.1; ++attempt) {
    Loader loader = one_of(slow, 0, 1, {.batch_size = 1, .num_workers = 2});
    const auto start = std::chrono::steady_clock::now();
    for (const auto& batch : loader.epoch(0)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      EXPECT_GE(loader.timing().last.load, 0.003);
      EXPECT_EQ(batch.samples(), 1);
    }
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    EXPECT_EQ(loader.timing().batches, 60);
    EXPECT_GE(loader.timing().total.load, 60 * 0.003);
    best = std::min(best, loader.timing().total.wait / seconds);
  }
  EXPECT_LE(best, 0.1);  // without workers it is 3 of 8 ms: 0.37
}

TEST(Profile, SaysWhereTheTimeGoesAndWhatToDo) {
  const auto advice = [](LoaderFigures figures) {
    return fmt::format("{}", fmt::join(loader_advice(figures), " | "));
  };
  EXPECT_EQ(advice({.load_ms = 3, .step_ms = 5, .wait_percent = 0.2, .num_workers = 2}),
            "Loading is hidden: the step waits 0.20 % of the time.");
  EXPECT_THAT(advice({.load_ms = 3, .wait_ms = 3, .step_ms = 5, .wait_percent = 37}),
              HasSubstr("loading runs in its own thread: set num_workers = 2."));
  EXPECT_THAT(
      advice({.load_ms = 40, .wait_ms = 3, .step_ms = 5, .wait_percent = 60, .num_workers = 2}),
      AllOf(HasSubstr("2 workers are too few: set num_workers = 9"),
            HasSubstr("Making a batch takes 40.0 ms, more than 10 ms")));
  EXPECT_THAT(
      advice({.load_ms = 3, .wait_ms = 1, .step_ms = 5, .wait_percent = 5, .num_workers = 4}),
      HasSubstr("some batches come late: raise prefetch_factor"));
  EXPECT_THAT(advice({.load_ms = 1, .collate_ms = 4, .step_ms = 5, .wait_percent = 5}),
              HasSubstr("Collating takes longer (4.0 ms)"));
  // Without a step there is nothing to compare a batch with.
  EXPECT_EQ(advice({.load_ms = 8, .wait_ms = 4, .wait_percent = 99, .num_workers = 2}),
            "No step was profiled, so it is not known how many workers hide loading: a batch takes "
            "8.0 ms to make and comes every 4.0 ms with num_workers = 2. Give the profile what "
            "training does with a batch (ProfileOptions::step).");
  EXPECT_THAT(advice({.transfer_ms = 11, .accelerator = true}),
              HasSubstr("takes 11.0 ms to reach the device, more than 10 ms: set pin_memory"));
  EXPECT_THAT(advice({.transfer_ms = 11, .pin_memory = true, .accelerator = true}),
              HasSubstr("send less"));

  const auto slow = make_dataset(6, [](std::int64_t i, SampleRandom&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(4));
    return Example{torch::tensor(i), {}};
  });
  Loader loader = one_of(slow, 0, 1, {.batch_size = 1});
  LoaderProfile profile;
  // What the machine takes between two waits counts as a step; in that case, try again.
  for (int attempt = 0; attempt < 5 && profile.wait_percent < 50; ++attempt) {
    int steps = 0;
    profile = profile_loader(loader, {.batches = 10, .step = [&](Batch&) { ++steps; }});
    EXPECT_EQ(steps, 10);  // over two epochs
  }
  ASSERT_EQ(profile.batches.size(), 10u);
  for (const BatchTiming& timing : profile.batches) {
    EXPECT_GE(timing.load, 0.004);
    EXPECT_GE(timing.wait, timing.load);
  }
  EXPECT_GE(profile.wait_p99_ms, 4);
  EXPECT_GE(profile.wait_percent, 50);
  EXPECT_THAT(profile.advice.front(), HasSubstr("set num_workers"));
  EXPECT_THAT(profile_loader(loader, {.batches = 2}).advice.front(),
              AllOf(HasSubstr("No step was profiled"), Not(HasSubstr("set num_workers"))));
  Loader none = one_of(numbers(1), 1, 2, {.evaluation = true});
  EXPECT_THAT(message_of<UsageError>([&] { profile_loader(none); }), HasSubstr("no batch"));
  EXPECT_THAT(message_of<UsageError>([&] { profile_loader(loader, {.batches = 0}); }),
              HasSubstr("a profile of 0 batches"));
}

}  // namespace
}  // namespace lockstep::data
