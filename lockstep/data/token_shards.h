// Windows of tokens for language models, cut out of memory-mapped shards.
//
// Sample i is the i-th window of seq_len tokens, counted through all shards; windows do not overlap
// and do not cross shards. data is the window, target the same one token later.
//
//   auto shards = std::make_shared<TokenShards>(token_files("data/fineweb", "train"), 1024);
//   auto loader = data::loader(shards, world, {.batch_size = 8, .sampler = shards->sampler(42)});
//   for (auto& batch : loader.epoch(0)) train_step(batch);    // data and target: int64 {8, 1024}
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/data/loader.h"
#include "lockstep/data/shard_format.h"

namespace lockstep::data {

class TokenShards : public Dataset {
 public:
  // Throws UsageError for a file that is not what its header says, or when no shard holds a window.
  TokenShards(const std::vector<std::string>& paths, std::int64_t seq_len,
              TokenFormat format = TokenFormat::kAuto);

  std::int64_t size() const override { return first_window_.back(); }
  Example get(std::int64_t index, SampleRandom& random) const override;
  std::optional<Batch> get_batch(Indices indices, const RandomKey& key) const override;

  std::int64_t seq_len() const { return seq_len_; }
  std::uint64_t tokens() const;
  const std::vector<TokenFile>& shards() const { return shards_; }
  // Windows of shard s are [first_window()[s], first_window()[s + 1]).
  const std::vector<std::int64_t>& first_window() const { return first_window_; }

  // Shards in random order, and windows in random order inside each: almost a full shuffle, but the
  // disk is read shard by shard.
  SamplerPtr sampler(std::uint64_t seed) const;

 private:
  std::vector<TokenFile> shards_;
  std::int64_t seq_len_;
  std::vector<std::int64_t> first_window_;
};

struct DatasetLoaderOptions {
  std::int64_t batch = 1;
  std::int64_t seq_len = 1024;
  int process_rank = 0;
  int num_processes = 1;
  std::string dataset_dir{};
  std::string split = "train";
  c10::Device device{c10::kCPU};
  bool shuffle = false;
  std::uint64_t seed = 0;
};

// A loader without epochs: next_batch() goes through the shards of a folder again and again. Each
// of num_processes gets windows that no other gets. One thread.
class DatasetLoader {
 public:
  explicit DatasetLoader(const DatasetLoaderOptions& options);

  Batch next_batch();
  void reset();  // to the first batch of epoch 0
  SamplerState state() const { return loader_.state(); }
  void load_state(const SamplerState& state);
  std::int64_t batches_per_epoch() const { return loader_.batches_per_epoch(); }

 private:
  Loader loader_;
  std::unique_ptr<Epoch> under_way_{};
};

}  // namespace lockstep::data
