// Windows of token shards and instruction data as batches.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <map>
#include <numeric>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/data/instruction.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/token_shards.h"
#include "lockstep/testing/worlds.h"

namespace lockstep::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using List = std::vector<std::int64_t>;

List list_of(const at::Tensor& tensor) {
  const auto flat = tensor.contiguous();
  const auto* first = flat.const_data_ptr<std::int64_t>();
  return {first, first + flat.numel()};
}

// A shard whose token k is `first` + k, so that every token says where it came from.
void put_shard(const std::string& path, std::uint32_t first, std::uint32_t count,
               TokenFormat format = TokenFormat::kLlmc32) {
  std::string bytes = token_header(format, count);
  for (std::uint32_t k = 0; k < count; ++k) {
    const std::uint32_t token = first + k;
    bytes.append(reinterpret_cast<const char*>(&token), format == TokenFormat::kLlmc32 ? 4 : 2);
  }
  io::put(path, bytes);
}

TEST(TokenShards, CutsWindowsThatDoNotOverlapAndDoNotCrossShards) {
  const io::TemporaryDirectory dir;
  put_shard(dir / "a.bin", 1000, 10);  // two windows of 4: 8 tokens and one more
  put_shard(dir / "b.bin", 2000, 4);   // none: the fifth token is missing
  put_shard(dir / "c.bin", 3000, 5);   // one
  put_shard(dir / "d.bin", 4000, 0);
  const TokenShards shards({dir / "a.bin", dir / "b.bin", dir / "c.bin", dir / "d.bin"}, 4);
  EXPECT_EQ(shards.size(), 3);
  EXPECT_EQ(shards.tokens(), 19u);
  EXPECT_THAT(shards.first_window(), ElementsAre(0, 2, 2, 3, 3));
  SampleRandom random({}, 0);
  const Example window = shards.get(1, random);
  EXPECT_THAT(list_of(window.data), ElementsAre(1004, 1005, 1006, 1007));
  EXPECT_THAT(list_of(window.target), ElementsAre(1005, 1006, 1007, 1008));
  const auto batch = shards.get_batch(List{2, 0}, {});
  EXPECT_THAT(list_of(batch->data), ElementsAre(3000, 3001, 3002, 3003, 1000, 1001, 1002, 1003));
  EXPECT_THAT(list_of(batch->target), ElementsAre(3001, 3002, 3003, 3004, 1001, 1002, 1003, 1004));
  EXPECT_EQ(batch->tokens, 8);
  EXPECT_EQ(batch->data.sizes(), at::IntArrayRef({2, 4}));

  EXPECT_THAT(message_of<UsageError>([&] { shards.get(3, random); }),
              HasSubstr("no window 3 of 3"));
  EXPECT_THAT(message_of<UsageError>([&] { shards.get_batch(List{-1}, {}); }),
              HasSubstr("no window -1"));
  EXPECT_THAT(
      message_of<UsageError>([&] { TokenShards({dir / "b.bin"}, 4); }),
      HasSubstr("none of 1 token files holds a window of 4 tokens and the one after it; the "
                "largest has 4"));
  EXPECT_THAT(message_of<UsageError>([&] { TokenShards({}, 4); }), HasSubstr("no token files"));
  EXPECT_THAT(message_of<UsageError>([&] { TokenShards({dir / "a.bin"}, 0); }),
              HasSubstr("windows of 0 tokens"));
}

TEST(TokenShards, ShuffledOrderGoesShardByShardAndHasEachWindowOnce) {
  const io::TemporaryDirectory dir;
  std::vector<std::string> paths;
  for (std::uint32_t i = 0; i < 5; ++i) {
    paths.push_back(dir / fmt::format("{}.bin", i));
    put_shard(paths.back(), 10'000 * i, 50 + 20 * i);
  }
  const TokenShards shards(paths, 3);
  const SamplerPtr sampler = shards.sampler(7);
  List everything(static_cast<std::size_t>(shards.size()));
  std::iota(everything.begin(), everything.end(), 0);
  std::vector<List> orders;
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    const List order = sampler->order(epoch);
    int changes = 0;
    const auto shard_of = [&](std::int64_t window) {
      const auto& first = shards.first_window();
      return std::upper_bound(first.begin(), first.end(), window) - first.begin();
    };
    for (std::size_t i = 1; i < order.size(); ++i)
      changes += shard_of(order[i]) != shard_of(order[i - 1]) ? 1 : 0;
    EXPECT_EQ(changes, 4);
    List sorted = order;
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(sorted, everything);
    EXPECT_NE(order, everything);
    EXPECT_EQ(shards.sampler(7)->order(epoch), order);
    for (const List& other : orders) EXPECT_NE(order, other);
    orders.push_back(order);
  }
  EXPECT_NE(shards.sampler(8)->order(0), orders[0]);
}

TEST(DatasetLoader, ProcessesNeverSeeTheSameWindow) {
  const io::TemporaryDirectory dir;
  put_shard(dir / "x_train_000001.bin", 10'000, 41);
  put_shard(dir / "x_train_000002.bin", 20'000, 61);
  put_shard(dir / "x_val_000000.bin", 90'000, 100);
  for (const bool shuffle : {false, true}) {
    std::map<std::int64_t, int> times;  // how often each first token came
    std::int64_t batches = -1;
    for (int rank = 0; rank < 3; ++rank) {
      DatasetLoader loader({.batch = 2,
                            .seq_len = 4,
                            .process_rank = rank,
                            .num_processes = 3,
                            .dataset_dir = dir.path(),
                            .shuffle = shuffle});
      if (batches < 0) batches = loader.batches_per_epoch();
      EXPECT_EQ(loader.batches_per_epoch(), batches);
      for (std::int64_t i = 0; i < batches; ++i) {
        const Batch batch = loader.next_batch();
        EXPECT_EQ(batch.data.sizes(), at::IntArrayRef({2, 4}));
        EXPECT_TRUE(torch::equal(batch.data + 1, batch.target));
        for (const std::int64_t token : list_of(batch.data)) ++times[token];
      }
    }
    EXPECT_EQ(batches, 4);                    // 25 windows: 8 for each of three
    EXPECT_EQ(times.size(), 3u * 4 * 2 * 4);  // no token came twice
    EXPECT_LT(times.rbegin()->first, 90'000);
  }
}

TEST(DatasetLoader, GoesRoundAndResumes) {
  const io::TemporaryDirectory dir;
  put_shard(dir / "train.bin", 0, 50, TokenFormat::kNanogpt);
  const DatasetLoaderOptions options{
      .batch = 2, .seq_len = 4, .dataset_dir = dir.path(), .shuffle = true, .seed = 3};
  DatasetLoader whole(options);
  EXPECT_EQ(whole.batches_per_epoch(), 6);
  std::vector<List> batches;
  std::vector<SamplerState> states;
  for (int i = 0; i < 20; ++i) {
    states.push_back(whole.state());
    batches.push_back(list_of(whole.next_batch().data));
  }
  EXPECT_EQ(whole.state().epoch, 3);
  for (const std::size_t from : {0u, 1u, 5u, 6u, 7u, 18u}) {
    DatasetLoader resumed(options);
    resumed.load_state(states[from]);
    for (std::size_t i = from; i < batches.size(); ++i)
      ASSERT_EQ(list_of(resumed.next_batch().data), batches[i]) << from << ' ' << i;
  }
  whole.reset();
  EXPECT_EQ(list_of(whole.next_batch().data), batches[0]);
  EXPECT_THAT(
      message_of<UsageError>([&] {
        DatasetLoader({.batch = 7, .seq_len = 4, .num_processes = 2, .dataset_dir = dir.path()});
      }),
      HasSubstr("12 windows of 4 tokens, too few for one batch of 7 on each of 2"));
}

// CPU time of this thread, without the time in which others had its core.
double thread_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The goal of 1 Gtoken/s per core; a loaded machine is given a tenth of it. LOCKSTEP_SOAK=1 tests
// the goal itself.
TEST(TokenShards, BatchesAreBuiltAtMemorySpeed) {
  const io::TemporaryDirectory dir;
  constexpr std::uint32_t kTokens = 1u << 22;
  put_shard(dir / "train.bin", 0, kTokens, TokenFormat::kNanogpt);
  put_shard(dir / "x.bin", 0, kTokens, TokenFormat::kLlmc32);
  const char* soak = std::getenv("LOCKSTEP_SOAK");
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr double kUsual = 1e7;  // every access is checked
#else
  constexpr double kUsual = 1e8;
#endif
  const double goal = soak != nullptr && std::string(soak) == "1" ? 1e9 : kUsual;
  for (const char* name : {"train.bin", "x.bin"}) {
    const TokenShards shards({dir / name}, 1024);
    const List order = RandomSampler(shards.size(), 0).order(0);
    double best = 0;
    for (int attempt = 0; attempt < 20 && best < goal; ++attempt) {
      const double start = thread_seconds();
      double tokens = 0;
      for (std::size_t at = 0; at + 8 <= order.size(); at += 8)
        tokens += static_cast<double>(shards.get_batch(Indices(order).subspan(at, 8), {})->tokens);
      best = std::max(best, tokens / (thread_seconds() - start));
    }
    EXPECT_GE(best, goal) << name;
    fmt::print("{}: {:.2f} Gtoken/s per core\n", name, best / 1e9);
  }
}

// Prompts and responses of single letters, so that lengths are plain to see.
InstructionOptions letters(std::int64_t max_length, Padding padding = Padding::kLongest) {
  InstructionOptions options;
  options.max_length = max_length;
  options.padding = padding;
  options.prompt = {.prompt = "{instruction}{input}",
                    .prompt_without_input = "{instruction}",
                    .response = "{output}"};
  return options;
}

constexpr std::int64_t kEnd = ByteTokenizer::kEndOfText;
constexpr std::int64_t kNot = kIgnoredTarget;

TEST(InstructionDataset, MasksThePromptAndShiftsTheTarget) {
  const std::vector<Instruction> items{{"PQ", "R", "ab", ""}, {"S", "", "c", ""}};
  const InstructionDataset dataset(items, letters(16));
  ASSERT_EQ(dataset.size(), 2);
  SampleRandom random({}, 0);
  const Example first = dataset.get(0, random);
  EXPECT_THAT(list_of(first.data), ElementsAre('P', 'Q', 'R', 'a', 'b'));
  EXPECT_THAT(list_of(first.target), ElementsAre(kNot, kNot, 'a', 'b', kEnd));
  EXPECT_THAT(dataset.lengths(), ElementsAre(5, 2));
  const Batch batch = dataset.collate({first, dataset.get(1, random)});
  EXPECT_THAT(list_of(batch.data[1]), ElementsAre('S', 'c', kEnd, kEnd, kEnd));
  EXPECT_THAT(list_of(batch.target[1]), ElementsAre('c', kEnd, kNot, kNot, kNot));
  EXPECT_EQ(batch.tokens, 5);
  EXPECT_EQ(dataset.counts().tokens, 9);

  auto all = letters(16);
  all.train_on_prompt = true;
  EXPECT_THAT(list_of(InstructionDataset(items, all).get(0, random).target),
              ElementsAre('Q', 'R', 'a', 'b', kEnd));
  EXPECT_THAT(message_of<UsageError>([&] { dataset.get(2, random); }),
              HasSubstr("no sample 2 of 2"));
}

TEST(InstructionDataset, CutsLongSamplesAndDropsThoseWithoutAResponse) {
  const std::vector<Instruction> items{
      {"PQ", "", "abcdef", ""}, {"PQRSTUVW", "", "a", ""}, {"P", "", "ab", ""}};
  const InstructionDataset dataset(items, letters(4, Padding::kMaxLength));
  EXPECT_EQ(dataset.size(), 2);
  EXPECT_EQ(dataset.counts().read, 3);
  EXPECT_EQ(dataset.counts().truncated, 1);
  EXPECT_EQ(dataset.counts().dropped, 1);
  SampleRandom random({}, 0);
  const Batch batch = dataset.collate({dataset.get(0, random), dataset.get(1, random)});
  EXPECT_THAT(list_of(batch.data), ElementsAre('P', 'Q', 'a', 'b', 'P', 'a', 'b', kEnd));
  EXPECT_THAT(list_of(batch.target), ElementsAre(kNot, 'a', 'b', 'c', 'a', 'b', kEnd, kNot));
  EXPECT_THAT(message_of<UsageError>([&] { InstructionDataset({items[1]}, letters(4)); }),
              HasSubstr("of 1 samples none has anything to learn from: 1 prompts"));
  EXPECT_THAT(message_of<UsageError>([&] { InstructionDataset(items, letters(1)); }),
              HasSubstr("max_length is 1"));
  auto by_file = letters(4);
  by_file.length_key = "max_seq_len";
  EXPECT_THAT(message_of<UsageError>([&] { InstructionDataset({items[1]}, by_file); }),
              HasSubstr("alone fill max_seq_len = 4. Raise max_seq_len."));
  auto multiple = letters(64);
  multiple.pad_to_multiple_of = 8;
  const InstructionDataset padded(items, multiple);
  EXPECT_EQ(padded.collate({padded.get(0, random), padded.get(1, random)}).data.size(1), 16);
  // As on a GPU: up to what the model has positions for, and never below the longest row.
  for (const std::int64_t most : {13, 2}) {
    multiple.pad_at_most = most;
    const InstructionDataset limited(items, multiple);
    const std::int64_t longest =
        std::max(limited.get(0, random).data.size(0), limited.get(1, random).data.size(0));
    EXPECT_EQ(limited.collate({limited.get(0, random), limited.get(1, random)}).data.size(1),
              std::max(longest, most));
  }
  multiple.pad_to_multiple_of = 0;
  EXPECT_THAT(message_of<UsageError>([&] { InstructionDataset(items, multiple); }),
              HasSubstr("pad_to_multiple_of is 0"));
}

TEST(InstructionDataset, PacksSamplesIntoFullRows) {
  std::vector<Instruction> items;
  std::int64_t whole = 0;
  for (int i = 0; i < 200; ++i) {
    const std::string text(static_cast<std::size_t>(1 + i * 7 % 25),
                           static_cast<char>('a' + i % 26));
    items.push_back({"P", "", text, ""});
    whole += 2 + static_cast<std::int64_t>(text.size());
  }
  const InstructionDataset dataset(items, letters(32, Padding::kPacked));
  // Rows are at least nine tenths full on average.
  EXPECT_LE(dataset.size(), whole * 10 / 9 / 32);
  std::multiset<std::string> texts;
  SampleRandom random({}, 0);
  for (std::int64_t row = 0; row < dataset.size(); ++row) {
    const Example example = dataset.get(row, random);
    const List data = list_of(example.data), target = list_of(example.target);
    ASSERT_LE(data.size(), 32u);
    EXPECT_EQ(dataset.lengths()[static_cast<std::size_t>(row)],
              static_cast<std::int64_t>(data.size()));
    std::string text;
    for (std::size_t t = 0; t < data.size(); ++t) {
      if (data[t] == 'P' && text.empty()) {
        text = "P";
      } else if (data[t] == kEnd) {
        texts.insert(text);
        text.clear();
        EXPECT_EQ(target[t], kNot);  // nothing is learned across the border
        continue;
      } else {
        text += static_cast<char>(data[t]);
      }
      EXPECT_EQ(target[t], data[t + 1]);
    }
    EXPECT_TRUE(text.empty());
  }
  std::multiset<std::string> wanted;
  for (const Instruction& item : items) wanted.insert("P" + item.output);
  EXPECT_EQ(texts, wanted);
  const Batch batch =
      dataset.collate({dataset.get(0, random), dataset.get(dataset.size() - 1, random)});
  EXPECT_EQ(batch.data.sizes(), at::IntArrayRef({2, 32}));
}

TEST(InstructionDataset, GroupingByLengthPadsLittle) {
  std::vector<Instruction> items;
  for (int i = 0; i < 640; ++i)
    items.push_back({"P", "", std::string(static_cast<std::size_t>(1 + i * 37 % 100), 'x'), ""});
  const auto dataset = std::make_shared<InstructionDataset>(items, letters(128));
  const auto padding = [&](LoaderOptions options) {
    Loader loader = data::loader(dataset, World{}, std::move(options));
    std::int64_t cells = 0;
    for (const auto& batch : loader.epoch(0)) cells += batch.data.numel();
    return cells;
  };
  const auto lengths = dataset->lengths();
  const std::int64_t needed = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  EXPECT_LT(padding({.batch_size = 8, .sampler = dataset->length_grouped(8, 1)}), needed * 1.1);
  EXPECT_GT(padding({.batch_size = 8, .shuffle = true}), needed * 1.4);
}

TEST(InstructionDataset, ReadsAFileAsPeopleHaveIt) {
  const io::TemporaryDirectory dir;
  io::put(dir / "commonsense.json",
          R"([{"instruction": "Is it so?\n\nAnswer format: true/false", "input": "",
               "output": "the correct answer is true", "answer": "true"}])");
  const InstructionDataset dataset(load_instructions(dir / "commonsense.json"));
  SampleRandom random({}, 0);
  const Example example = dataset.get(0, random);
  const List target = list_of(example.target);
  Tokens learned;
  for (const std::int64_t token : target)
    if (token != kNot) learned.push_back(static_cast<std::int32_t>(token));
  EXPECT_EQ(ByteTokenizer{}.decode(learned), "the correct answer is true");
  EXPECT_EQ(learned.back(), kEnd);
}

}  // namespace
}  // namespace lockstep::data
