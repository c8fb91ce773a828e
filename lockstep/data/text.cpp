// Texts as datasets: windows of token shards, and instructions.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <numeric>

#include "lockstep/core/error.h"
#include "lockstep/data/instruction.h"
#include "lockstep/data/token_shards.h"

namespace lockstep::data {
namespace {

// Seeds of the windows' shuffles, one per shard, distinct from the one that orders the shards.
std::uint64_t shard_seed(std::uint64_t seed, std::int64_t epoch, std::size_t shard) {
  return SampleRandom({seed, epoch}, static_cast<std::int64_t>(shard))();
}

class ShardSampler : public Sampler {
 public:
  ShardSampler(std::vector<std::int64_t> first_window, std::uint64_t seed)
      : first_window_(std::move(first_window)), seed_(seed) {}

  std::int64_t size() const override { return first_window_.back(); }

  std::vector<std::int64_t> order(std::int64_t epoch) const override {
    std::vector<std::int64_t> order;
    order.reserve(static_cast<std::size_t>(size()));
    const auto shards = static_cast<std::int64_t>(first_window_.size()) - 1;
    for (const std::int64_t shard : RandomSampler(shards, seed_).order(epoch)) {
      const auto s = static_cast<std::size_t>(shard);
      const std::int64_t windows = first_window_[s + 1] - first_window_[s];
      for (const std::int64_t window : RandomSampler(windows, shard_seed(seed_, epoch, s)).order(0))
        order.push_back(first_window_[s] + window);
    }
    return order;
  }

 private:
  std::vector<std::int64_t> first_window_;
  std::uint64_t seed_;
};

}  // namespace

TokenShards::TokenShards(const std::vector<std::string>& paths, std::int64_t seq_len,
                         TokenFormat format)
    : seq_len_(seq_len), first_window_{0} {
  if (seq_len < 1) throw UsageError("shards", "windows of {} tokens cannot be cut.", seq_len);
  if (paths.empty()) throw UsageError("shards", "no token files were named.");
  shards_.reserve(paths.size());
  std::uint64_t most = 0;
  for (const std::string& path : paths) {
    const TokenFile& shard = shards_.emplace_back(path, format);
    most = std::max(most, shard.size());
    // A window needs one token more, for the last target.
    const std::uint64_t windows =
        shard.size() == 0 ? 0 : (shard.size() - 1) / static_cast<std::uint64_t>(seq_len);
    first_window_.push_back(first_window_.back() + static_cast<std::int64_t>(windows));
  }
  if (size() == 0)
    throw UsageError("shards",
                     "none of {} token files holds a window of {} tokens and the one after it; the "
                     "largest has {}. Use a shorter sequence or more text.",
                     paths.size(), seq_len, most);
}

Example TokenShards::get(std::int64_t index, SampleRandom&) const {
  const Batch one = *get_batch({&index, 1}, {});
  return {one.data.select(0, 0), one.target.select(0, 0)};
}

std::optional<Batch> TokenShards::get_batch(Indices indices, const RandomKey&) const {
  const auto rows = static_cast<std::int64_t>(indices.size());
  Batch batch;
  batch.data = at::empty({rows, seq_len_}, at::kLong);
  batch.target = at::empty({rows, seq_len_}, at::kLong);
  std::int64_t* data = batch.data.mutable_data_ptr<std::int64_t>();
  std::int64_t* target = batch.target.mutable_data_ptr<std::int64_t>();
  for (const std::int64_t index : indices) {
    if (index < 0 || index >= size())
      throw UsageError("shards", "there is no window {} of {}.", index, size());
    const auto after = std::upper_bound(first_window_.begin(), first_window_.end(), index);
    const auto shard = static_cast<std::size_t>(after - first_window_.begin()) - 1;
    const auto first = static_cast<std::uint64_t>((index - first_window_[shard]) * seq_len_);
    const auto length = static_cast<std::size_t>(seq_len_);
    shards_[shard].copy_shifted(first, {data, length}, {target, length});
    data += seq_len_;
    target += seq_len_;
  }
  batch.tokens = rows * seq_len_;  // tokens are not negative: none is masked
  return batch;
}

std::uint64_t TokenShards::tokens() const {
  return std::accumulate(
      shards_.begin(), shards_.end(), std::uint64_t{0},
      [](std::uint64_t sum, const TokenFile& shard) { return sum + shard.size(); });
}

SamplerPtr TokenShards::sampler(std::uint64_t seed) const {
  return std::make_shared<ShardSampler>(first_window_, seed);
}

namespace {

Loader shard_loader(const DatasetLoaderOptions& options) {
  auto shards = std::make_shared<TokenShards>(token_files(options.dataset_dir, options.split),
                                              options.seq_len);
  if (options.num_processes > 0 && shards->size() / options.num_processes < options.batch)
    throw UsageError("shards",
                     "{} has {} windows of {} tokens, too few for one batch of {} on each of {} "
                     "processes. Use a smaller batch or more text.",
                     options.dataset_dir, shards->size(), options.seq_len, options.batch,
                     options.num_processes);
  LoaderOptions loader{.batch_size = options.batch, .drop_last = true, .seed = options.seed};
  if (options.shuffle) loader.sampler = shards->sampler(options.seed);
  loader.num_workers = options.device.is_cpu() ? 0 : 1;  // a thread to copy beside the computation
  loader.pin_memory = !options.device.is_cpu();
  return detail::make_loader(shards, {options.process_rank, options.num_processes, options.device},
                             std::move(loader));
}

}  // namespace

DatasetLoader::DatasetLoader(const DatasetLoaderOptions& options)
    : loader_(shard_loader(options)) {}

Batch DatasetLoader::next_batch() {
  // At most two rounds: the rest of one epoch may be empty, the next one is not.
  for (std::int64_t epoch = state().epoch;; ++epoch) {
    if (!under_way_) under_way_.reset(new Epoch(loader_.epoch(epoch)));
    if (auto batch = under_way_->next()) return std::move(*batch);
    under_way_.reset();
  }
}

void DatasetLoader::reset() {
  load_state({.epoch = 0, .cursor = 0, .seed = state().seed});
}

void DatasetLoader::load_state(const SamplerState& state) {
  under_way_.reset();
  loader_.load_state(state);
}

// ---------------------------------------------------------------- instructions

namespace {

// Padding at the end of a row, to `length`.
at::Tensor padded(const at::Tensor& row, std::int64_t length, std::int64_t with) {
  if (row.size(0) == length) return row;
  at::Tensor full = at::full({length}, with, at::kLong);
  full.narrow(0, 0, row.size(0)).copy_(row);
  return full;
}

}  // namespace

Example InstructionDataset::get(std::int64_t index, SampleRandom&) const {
  const bool packed = rows_.options().padding == Padding::kPacked;
  std::vector<std::int64_t> data;
  std::vector<std::int64_t> target;
  for (const InstructionRows::Sample& sample : rows_.row(index)) {
    const auto tokens = rows_.tokens(sample);
    const auto learned = rows_.learned(sample);
    for (std::size_t t = 0; t + 1 < tokens.size(); ++t) {
      data.push_back(tokens[t]);
      target.push_back(learned[t + 1] != 0 ? tokens[t + 1] : kIgnoredTarget);
    }
    if (!packed) continue;
    data.push_back(tokens.back());
    target.push_back(kIgnoredTarget);
  }
  return {at::tensor(data, at::kLong), at::tensor(target, at::kLong)};
}

Batch InstructionDataset::collate(std::vector<Example> examples) const {
  const InstructionOptions& options = rows_.options();
  std::int64_t length = options.max_length;
  if (options.padding == Padding::kLongest) {
    length = 0;
    for (const Example& example : examples) length = std::max(length, example.data.size(0));
    const std::int64_t multiple = options.pad_to_multiple_of;
    const std::int64_t longest = length;
    length = (length + multiple - 1) / multiple * multiple;
    if (options.pad_at_most > 0) length = std::min(length, std::max(longest, options.pad_at_most));
  }
  for (Example& example : examples) {
    example.data = padded(example.data, length, options.encoder.end_of_text);
    example.target = padded(example.target, length, kIgnoredTarget);
  }
  return stack(examples);
}

SamplerPtr InstructionDataset::length_grouped(std::int64_t batch, std::uint64_t seed) const {
  return std::make_shared<LengthGroupedSampler>(lengths(), batch, seed);
}

}  // namespace lockstep::data
