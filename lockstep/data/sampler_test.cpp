// Samplers against Python's, and what holds at any number of ranks.
#include "lockstep/data/sampler.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/data/batch.h"
#include "lockstep/testing/worlds.h"

namespace lockstep::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using List = std::vector<std::int64_t>;

struct Request {
  std::string json;
  std::function<List()> ours;
};

Request distributed_request(std::mt19937_64& random) {
  const auto below = [&](std::uint64_t n) { return static_cast<std::int64_t>(random() % n); };
  // Small sizes are where ranks outnumber samples; a few are large.
  const std::int64_t n = below(10) == 0 ? below(20) : below(50) == 0 ? below(100'000) : below(2000);
  DistributedSamplerOptions options;
  options.num_replicas = static_cast<int>(1 + below(17));
  options.rank = static_cast<int>(below(static_cast<std::uint64_t>(options.num_replicas)));
  options.shuffle = below(4) != 0;
  options.drop_last = below(2) == 0;
  options.seed = static_cast<std::uint64_t>(below(3) == 0 ? below(1ull << 40) : below(100));
  const std::int64_t epoch = below(1000);
  return {fmt::format(R"({{"kind": "distributed", "n": {}, "replicas": {}, "rank": {}, )"
                      R"("shuffle": {}, "drop_last": {}, "seed": {}, "epoch": {}}})",
                      n, options.num_replicas, options.rank, options.shuffle, options.drop_last,
                      options.seed, epoch),
          [=] {
            DistributedSampler sampler(n, options);
            sampler.set_epoch(epoch);
            const List indices = sampler.indices();
            EXPECT_EQ(sampler.size(), static_cast<std::int64_t>(indices.size()));
            return indices;
          }};
}

Request weighted_request(std::mt19937_64& random) {
  const auto n = static_cast<std::int64_t>(5 + random() % 200);
  std::vector<double> weights;
  for (std::int64_t i = 0; i < n; ++i) weights.push_back(static_cast<double>(i * 7 % 11) / 4);
  const bool replacement = random() % 2 == 0;
  const auto samples = static_cast<std::int64_t>(1 + random() % (replacement ? 400 : n / 2));
  const WeightedSamplerOptions options{samples, replacement, random() % 100};
  const auto epoch = static_cast<std::int64_t>(random() % 50);
  return {fmt::format(R"({{"kind": "weighted", "n": {}, "num_samples": {}, "replacement": {}, )"
                      R"("seed": {}, "epoch": {}}})",
                      n, samples, replacement, options.seed, epoch),
          [=] { return WeightedSampler(weights, options).order(epoch); }};
}

Request grouped_request(std::mt19937_64& random) {
  const auto n = static_cast<std::int64_t>(1 + random() % 3000);
  List lengths;
  for (std::int64_t i = 0; i < n; ++i) lengths.push_back(i * 37 % 101);
  const auto batch = static_cast<std::int64_t>(1 + random() % 40);
  const std::uint64_t seed = random() % 100;
  const auto epoch = static_cast<std::int64_t>(random() % 50);
  return {fmt::format(R"({{"kind": "grouped", "n": {}, "batch": {}, "seed": {}, "epoch": {}}})", n,
                      batch, seed, epoch),
          [=] { return LengthGroupedSampler(lengths, batch, seed).order(epoch); }};
}

TEST(Samplers, GivePythonsIndicesOnTwoThousandConfigurations) {
  const char* python = std::getenv("LOCKSTEP_PYTHON");
  const char* source = std::getenv("LOCKSTEP_SOURCE");
  ASSERT_TRUE(python != nullptr && source != nullptr) << "run by ctest";
  std::mt19937_64 random(1);
  std::vector<Request> requests;
  for (int i = 0; i < 2000; ++i) requests.push_back(distributed_request(random));
  for (int i = 0; i < 100; ++i) requests.push_back(weighted_request(random));
  for (int i = 0; i < 100; ++i) requests.push_back(grouped_request(random));

  const io::TemporaryDirectory dir;
  std::string lines;
  for (const Request& request : requests) lines += request.json + "\n";
  io::put(dir / "requests.jsonl", lines);
  const std::string command =
      fmt::format("'{}' '{}/lockstep/data/sampler_oracle.py' '{}' '{}'", python, source,
                  dir / "requests.jsonl", dir / "answers.bin");
  ASSERT_EQ(std::system(command.c_str()), 0);
  const std::string answers = io::get(dir / "answers.bin");
  std::size_t at = 0;
  const auto read = [&] {
    std::int64_t value = -1;
    EXPECT_LE(at + sizeof(value), answers.size());
    if (at + sizeof(value) <= answers.size()) std::memcpy(&value, answers.data() + at, 8);
    at += sizeof(value);
    return value;
  };
  for (const Request& request : requests) {
    List theirs(static_cast<std::size_t>(std::max<std::int64_t>(0, read())));
    for (std::int64_t& index : theirs) index = read();
    ASSERT_EQ(request.ours(), theirs) << request.json;
  }
  EXPECT_EQ(at, answers.size());
}

// One epoch that is interrupted and resumed with different numbers of ranks: which samples came,
// and how often.
std::map<std::int64_t, int> epoch_over(std::int64_t n, const std::vector<int>& worlds, bool drop,
                                       std::mt19937& random) {
  std::map<std::int64_t, int> times;
  SamplerState state{.epoch = 5, .cursor = 0, .seed = 3};
  for (std::size_t part = 0; part < worlds.size(); ++part) {
    const bool last = part + 1 == worlds.size();
    std::vector<SamplerState> states;
    std::int64_t count = -1;
    for (int rank = 0; rank < worlds[part]; ++rank) {
      DistributedSampler sampler(
          n, {.num_replicas = worlds[part], .rank = rank, .seed = 3, .drop_last = drop});
      sampler.load_state(state);
      sampler.set_epoch(5);  // as a loop does; the cursor stays
      if (count < 0) {
        const std::int64_t left = sampler.size();
        count = last || left == 0 ? left : static_cast<std::int64_t>(random()) % left;
      }
      const List indices = sampler.indices();
      for (std::int64_t i = 0; i < count; ++i) ++times[indices[static_cast<std::size_t>(i)]];
      sampler.advance(count);
      states.push_back(sampler.state());
    }
    for (const SamplerState& other : states) EXPECT_EQ(other, states[0]);
    state = states[0];
  }
  EXPECT_EQ(state.cursor, n);
  return times;
}

TEST(Samplers, AnEpochSplitOverOtherWorldSizesHasEachSampleOnce) {
  std::mt19937 random(11);
  const std::vector<int> worlds{2, 1, 4, 3};
  for (int i = 0; i < 200; ++i) {
    const auto n = static_cast<std::int64_t>(100 + random() % 500);
    // Padded: each sample is there, and at most the last world's size - 1 come twice.
    const auto padded = epoch_over(n, worlds, false, random);
    EXPECT_EQ(static_cast<std::int64_t>(padded.size()), n);
    int repeats = 0;
    for (const auto& [index, times] : padded) repeats += times - 1;
    EXPECT_LE(repeats, 2);
    // Dropped: none appears twice, and at most the largest world's size - 1 are missing.
    const auto dropped = epoch_over(n, worlds, true, random);
    for (const auto& [index, times] : dropped) EXPECT_EQ(times, 1) << index;
    EXPECT_GE(static_cast<std::int64_t>(dropped.size()), n - 3);
  }
}

TEST(Samplers, ResumingAtTheSameWorldSizeContinuesWherePythonWould) {
  for (const bool drop : {false, true})
    for (int rank = 0; rank < 3; ++rank) {
      DistributedSampler whole(100, {.num_replicas = 3, .rank = rank, .drop_last = drop});
      const List indices = whole.indices();
      for (std::int64_t used = 0; used <= whole.size(); ++used) {
        DistributedSampler first(100, {.num_replicas = 3, .rank = rank, .drop_last = drop});
        first.advance(used);
        DistributedSampler resumed(100, {.num_replicas = 3, .rank = rank, .drop_last = drop});
        resumed.load_state(first.state());
        EXPECT_EQ(resumed.indices(), List(indices.begin() + used, indices.end()));
      }
    }
}

TEST(Samplers, EvaluationHasEachSampleOnceAtAnyWorldSize) {
  for (const int ranks : {1, 2, 3, 4, 7})
    for (std::int64_t n : {0, 1, 2, 6, 7, 50, 101}) {
      List all;
      for (int rank = 0; rank < ranks; ++rank) {
        const Share share{.rank = rank, .ranks = ranks, .tail = Tail::kUneven};
        const List mine = share_of(SequentialSampler(n).order(0), 0, share);
        EXPECT_EQ(share_size(n, 0, share), static_cast<std::int64_t>(mine.size()));
        EXPECT_TRUE(std::is_sorted(mine.begin(), mine.end()));
        all.insert(all.end(), mine.begin(), mine.end());
      }
      std::sort(all.begin(), all.end());
      EXPECT_EQ(all, SequentialSampler(n).order(0));
    }
}

TEST(Samplers, SmallOnesByHand) {
  DistributedSampler sampler(5, {.num_replicas = 3, .rank = 2, .shuffle = false});
  EXPECT_THAT(sampler.indices(), ElementsAre(2, 0));                          // 0 fills up
  EXPECT_THAT(share_of({7, 8}, 0, {.rank = 4, .ranks = 5}), ElementsAre(7));  // round twice
  EXPECT_THAT(share_of({7, 8, 9}, 1, {.rank = 1, .ranks = 2, .tail = Tail::kUneven}),
              ElementsAre(9));
}

TEST(Samplers, RefusalsSayWhy) {
  const auto refusal = [](auto&& f) { return message_of<UsageError>(f); };
  EXPECT_THAT(refusal([] { DistributedSampler(5, {.num_replicas = 2, .rank = 2}); }),
              HasSubstr("[sampler] rank 2 of 2 does not exist"));
  EXPECT_THAT(refusal([] { SequentialSampler(-1); }), HasSubstr("-1 samples"));
  EXPECT_THAT(refusal([] { DistributedSampler(5).advance(6); }),
              HasSubstr("cannot advance by 6: 5 samples are left"));
  EXPECT_THAT(refusal([] { DistributedSampler(5).load_state({.seed = 4}); }),
              HasSubstr("saved with seed 4, and this run has seed 0"));
  EXPECT_THAT(refusal([] { DistributedSampler(5).load_state({.size = 6}); }),
              AllOf(HasSubstr("saved with 6 samples per epoch, and now there are 5"),
                    HasSubstr("leave the loader out of the parts of resume()")));
  EXPECT_THAT(refusal([] { DistributedSampler(5).load_state({.cursor = 6}); }),
              HasSubstr("the cursor 6 lies outside of an order of 5"));
  EXPECT_THAT(refusal([] { DistributedSampler(5).load_state({.epoch = -1}); }),
              HasSubstr("a state of epoch -1"));
  EXPECT_THAT(refusal([] { WeightedSampler({1, -2}); }), HasSubstr("weight 1 is -2"));
  EXPECT_THAT(refusal([] { WeightedSampler({0, 0}); }), HasSubstr("none of 2 weights"));
  EXPECT_THAT(refusal([] { WeightedSampler({0, 1}, {.replacement = false}); }),
              HasSubstr("2 samples cannot be drawn without replacement from 1 weights"));
  EXPECT_THAT(refusal([] { LengthGroupedSampler({1}, 0, 0); }), HasSubstr("a batch of 0"));
}

TEST(SampleRandom, DependsOnSeedEpochAndIndexAndNothingElse) {
  const auto draw = [](std::uint64_t seed, std::int64_t epoch, std::int64_t index) {
    return SampleRandom({seed, epoch}, index)();
  };
  EXPECT_EQ(draw(1, 2, 3), draw(1, 2, 3));
  std::vector<std::uint64_t> all;
  for (int seed = 0; seed < 10; ++seed)
    for (int epoch = 0; epoch < 10; ++epoch)
      for (int index = 0; index < 100; ++index)
        all.push_back(draw(static_cast<std::uint64_t>(seed), epoch, index));
  std::sort(all.begin(), all.end());
  EXPECT_EQ(std::unique(all.begin(), all.end()), all.end());
  // Mean and spread of neighbours' first numbers, as independent ones have them: 10 000 uniform
  // numbers have a mean of 0.5 with a deviation of 0.0029, and 0.02 is seven of those.
  double sum = 0, squares = 0;
  for (int index = 0; index < 10'000; ++index) {
    const double x = SampleRandom({7, 0}, index).uniform();
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / 10'000, 0.5, 0.02);
  EXPECT_NEAR(squares / 10'000, 1.0 / 3, 0.02);
  SampleRandom random({0, 0}, 0);
  for (int i = 0; i < 1000; ++i) EXPECT_LT(random.below(7), 7u);
  std::uniform_int_distribution<int> dice(1, 6);
  for (int i = 0; i < 100; ++i) EXPECT_GE(dice(random), 1);
}

}  // namespace
}  // namespace lockstep::data
