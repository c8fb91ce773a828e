// Samplers: which rank sees which sample, and in which order.
//
// An epoch has one order of samples, a function of (seed, epoch) that is equal on all ranks, and a
// cursor that counts how many of it have been used. Rank r of W takes every W-th from the cursor
// on. The cursor does not know W, so it can be saved at one world size and resumed at another, and
// each sample still comes once per epoch.
//
//   DistributedSampler sampler{1000, {.num_replicas = 4, .rank = 1}};   // PyTorch's, to the index
//   sampler.set_epoch(3);
//   for (std::int64_t index : sampler.indices()) ...
//
// Values and const functions: any thread may read. data::loader() (loader.h) does all of this.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace lockstep::data {

// The position in an epoch. The whole state of samplers and loaders.
struct SamplerState {
  std::int64_t epoch = 0;
  std::int64_t cursor = 0;  // samples of this epoch's order that were used, over all ranks
  std::uint64_t seed = 0;
  std::int64_t size = 0;   // size of the order; 0: not known, not checked
  std::int64_t order = 0;  // order_checksum() of the epoch's order; 0: not known, not checked

  bool operator==(const SamplerState&) const = default;
};

// The order of an epoch, over all ranks.
class Sampler {
 public:
  virtual ~Sampler() = default;
  virtual std::int64_t size() const = 0;  // size of each epoch's order
  virtual std::vector<std::int64_t> order(std::int64_t epoch) const = 0;
};
using SamplerPtr = std::shared_ptr<const Sampler>;

class SequentialSampler : public Sampler {
 public:
  explicit SequentialSampler(std::int64_t size);
  std::int64_t size() const override { return size_; }
  std::vector<std::int64_t> order(std::int64_t epoch) const override;

 private:
  std::int64_t size_;
};

// torch.randperm(size) of a generator seeded with seed + epoch: DistributedSampler's order.
class RandomSampler : public Sampler {
 public:
  RandomSampler(std::int64_t size, std::uint64_t seed);
  std::int64_t size() const override { return size_; }
  std::vector<std::int64_t> order(std::int64_t epoch) const override;

 private:
  std::int64_t size_;
  std::uint64_t seed_;
};

struct WeightedSamplerOptions {
  std::int64_t num_samples = 0;  // per epoch, over all ranks; 0: as many as there are weights
  bool replacement = true;
  std::uint64_t seed = 0;
};

// torch.multinomial over the weights: Python's WeightedRandomSampler with a generator seeded with
// seed + epoch, the same on all ranks, so that they share one draw instead of making the same one.
class WeightedSampler : public Sampler {
 public:
  // Throws UsageError for weights that are negative, not finite, all zero, or too few to draw
  // without replacement.
  WeightedSampler(const std::vector<double>& weights, WeightedSamplerOptions options = {});
  std::int64_t size() const override { return options_.num_samples; }
  std::vector<std::int64_t> order(std::int64_t epoch) const override;

 private:
  at::Tensor weights_;
  WeightedSamplerOptions options_;
};

// Random, but samples of similar length come together, so that there is little padding: Hugging
// Face's group_by_length, to the index. `batch` is what one update of one rank takes.
class LengthGroupedSampler : public Sampler {
 public:
  LengthGroupedSampler(std::vector<std::int64_t> lengths, std::int64_t batch, std::uint64_t seed);
  std::int64_t size() const override { return static_cast<std::int64_t>(lengths_.size()); }
  std::vector<std::int64_t> order(std::int64_t epoch) const override;

 private:
  std::vector<std::int64_t> lengths_;
  std::int64_t batch_;
  std::uint64_t seed_;
};

// The treatment of samples that do not divide evenly over the ranks.
enum class Tail {
  kRepeat,  // samples from the order's start fill up: equal counts, up to W - 1 duplicates
  kDrop,    // up to W - 1 samples are skipped: equal counts
  kUneven,  // each sample once; low ranks have one more. For evaluation: sums over ranks are exact
};

struct Share {
  int rank = 0;
  int ranks = 1;
  Tail tail = Tail::kRepeat;
};

// How many samples this rank gets from an order of `size` from `cursor` on, and the samples. Throws
// UsageError for a cursor or a rank outside of its range.
std::int64_t share_size(std::int64_t size, std::int64_t cursor, const Share& share);
std::vector<std::int64_t> share_of(const std::vector<std::int64_t>& order, std::int64_t cursor,
                                   const Share& share);

// Distinguishes orders: it depends on a sampler's seed, weights and sizes. Above 0.
std::int64_t order_checksum(const std::vector<std::int64_t>& order);

// UsageError when `state` was not saved by a run over the same order: seed, size, cursor.
void check_state(const SamplerState& state, std::int64_t size, std::uint64_t seed);

struct DistributedSamplerOptions {
  int num_replicas = 1;
  int rank = 0;
  bool shuffle = true;
  std::uint64_t seed = 0;
  bool drop_last = false;
};

// PyTorch's torch.utils.data.DistributedSampler: names, defaults and sequence. One thread.
class DistributedSampler {
 public:
  explicit DistributedSampler(std::int64_t size, DistributedSamplerOptions options = {});

  // Another epoch starts at its first sample; the same one keeps its cursor, so that a loop that
  // calls set_epoch() after load_state() continues where it was.
  void set_epoch(std::int64_t epoch);
  std::vector<std::int64_t> indices() const;  // from the cursor on
  std::int64_t size() const;                  // how many indices() has
  SamplerState state() const { return state_; }
  // After this rank has used `count` of indices(), and every other rank as many.
  void advance(std::int64_t count);
  // A state saved with any number of replicas. UsageError as in check_state().
  void load_state(const SamplerState& state);

 private:
  Share share() const;

  SamplerPtr order_;
  DistributedSamplerOptions options_;
  SamplerState state_;
};

}  // namespace lockstep::data
