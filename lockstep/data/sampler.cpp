#include "lockstep/data/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "lockstep/core/error.h"
#include "lockstep/core/text.h"

namespace lockstep::data {
namespace {

std::vector<std::int64_t> to_vector(const at::Tensor& indices) {
  const std::int64_t* first = indices.const_data_ptr<std::int64_t>();
  return {first, first + indices.numel()};
}

// Equivalent to Python's torch.Generator().manual_seed(seed + epoch).
at::Generator epoch_generator(std::uint64_t seed, std::int64_t epoch) {
  return at::make_generator<at::CPUGeneratorImpl>(seed + static_cast<std::uint64_t>(epoch));
}

std::vector<std::int64_t> random_order(std::int64_t size, const at::Generator& generator) {
  return to_vector(at::randperm(size, generator, at::TensorOptions(at::kLong)));
}

void check_size(std::int64_t size) {
  if (size < 0) throw UsageError("sampler", "an order cannot have {} samples.", size);
}

void check_share(std::int64_t size, std::int64_t cursor, const Share& share) {
  if (share.ranks < 1 || share.rank < 0 || share.rank >= share.ranks)
    throw UsageError("sampler", "rank {} of {} does not exist. Ranks count from 0.", share.rank,
                     share.ranks);
  if (cursor < 0 || cursor > size)
    throw UsageError("sampler",
                     "the cursor {} lies outside of an order of {} samples. The state was probably "
                     "saved with another dataset.",
                     cursor, size);
}

}  // namespace

SequentialSampler::SequentialSampler(std::int64_t size) : size_(size) {
  check_size(size);
}

std::vector<std::int64_t> SequentialSampler::order(std::int64_t) const {
  std::vector<std::int64_t> order(static_cast<std::size_t>(size_));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

RandomSampler::RandomSampler(std::int64_t size, std::uint64_t seed) : size_(size), seed_(seed) {
  check_size(size);
}

std::vector<std::int64_t> RandomSampler::order(std::int64_t epoch) const {
  return random_order(size_, epoch_generator(seed_, epoch));
}

WeightedSampler::WeightedSampler(const std::vector<double>& weights, WeightedSamplerOptions options)
    : weights_(at::tensor(weights, at::kDouble)), options_(options) {
  const auto count = static_cast<std::int64_t>(weights.size());
  if (options_.num_samples == 0) options_.num_samples = count;
  check_size(options_.num_samples);
  std::int64_t positive = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!std::isfinite(weights[i]) || weights[i] < 0)
      throw UsageError("sampler",
                       "weight {} is {}. Weights must be finite and not negative; they need not "
                       "sum to one.",
                       i, weights[i]);
    positive += weights[i] > 0 ? 1 : 0;
  }
  if (positive == 0)
    throw UsageError("sampler", "none of {} weights is above zero, so nothing can be drawn.",
                     count);
  if (!options_.replacement && options_.num_samples > positive)
    throw UsageError("sampler",
                     "{} samples cannot be drawn without replacement from {} weights above zero. "
                     "Draw fewer, or set replacement = true.",
                     options_.num_samples, positive);
}

std::vector<std::int64_t> WeightedSampler::order(std::int64_t epoch) const {
  return to_vector(at::multinomial(weights_, options_.num_samples, options_.replacement,
                                   epoch_generator(options_.seed, epoch)));
}

LengthGroupedSampler::LengthGroupedSampler(std::vector<std::int64_t> lengths, std::int64_t batch,
                                           std::uint64_t seed)
    : lengths_(std::move(lengths)), batch_(batch), seed_(seed) {
  if (batch < 1) throw UsageError("sampler", "a batch of {} cannot be grouped by length.", batch);
}

std::vector<std::int64_t> LengthGroupedSampler::order(std::int64_t epoch) const {
  std::vector<std::int64_t> order = random_order(size(), epoch_generator(seed_, epoch));
  if (order.empty()) return order;
  // Sorted in groups of up to 50 batches: similar inside a batch, still random over the epoch.
  const std::int64_t batches = std::clamp<std::int64_t>(size() / (batch_ * 4), 1, 50);
  const auto group = static_cast<std::size_t>(batches * batch_);
  const auto length = [this](std::int64_t i) { return lengths_[static_cast<std::size_t>(i)]; };
  std::size_t longest = 0;
  for (std::size_t begin = 0; begin < order.size(); begin += group) {
    const std::size_t end = std::min(begin + group, order.size());
    std::stable_sort(order.begin() + static_cast<std::ptrdiff_t>(begin),
                     order.begin() + static_cast<std::ptrdiff_t>(end),
                     [&](std::int64_t a, std::int64_t b) { return length(a) > length(b); });
    if (length(order[begin]) > length(order[longest])) longest = begin;
  }
  // The longest sample first: if memory is too small, that shows in the first step.
  std::swap(order.front(), order[longest]);
  return order;
}

std::int64_t share_size(std::int64_t size, std::int64_t cursor, const Share& share) {
  check_share(size, cursor, share);
  const std::int64_t left = size - cursor;
  switch (share.tail) {
    case Tail::kRepeat:
      return (left + share.ranks - 1) / share.ranks;
    case Tail::kDrop:
      return left / share.ranks;
    case Tail::kUneven:
      return (left - share.rank + share.ranks - 1) / share.ranks;
  }
  return 0;
}

std::vector<std::int64_t> share_of(const std::vector<std::int64_t>& order, std::int64_t cursor,
                                   const Share& share) {
  const auto size = static_cast<std::int64_t>(order.size());
  std::vector<std::int64_t> mine(static_cast<std::size_t>(share_size(size, cursor, share)));
  std::int64_t at = cursor + share.rank;
  for (std::int64_t& index : mine) {
    // Past the end PyTorch continues from the order's start, as often as is needed.
    index = order[static_cast<std::size_t>(at < size ? at : (at - size) % size)];
    at += share.ranks;
  }
  return mine;
}

std::int64_t order_checksum(const std::vector<std::int64_t>& order) {
  // 63 bits, because it is saved as a signed integer.
  const std::uint64_t print = fingerprint(order.data(), order.size() * sizeof order[0]);
  const auto sum = static_cast<std::int64_t>(print >> 1);
  return std::max<std::int64_t>(1, sum);
}

void check_state(const SamplerState& state, std::int64_t size, std::uint64_t seed) {
  if (state.seed != seed)
    throw UsageError("sampler",
                     "the state was saved with seed {}, and this run has seed {}: the order would "
                     "be another one. Set the seed to {} to resume.",
                     state.seed, seed, state.seed);
  if (state.size != 0 && state.size != size)
    throw UsageError(
        "sampler",
        "the state was saved with {} samples per epoch, and now there are {}. Resume "
        "with the same dataset, or without the position in it: leave the loader out of "
        "the parts of resume() (Trainer: ignore_data_skip: true).",
        state.size, size);
  check_share(size, state.cursor, {});
  if (state.epoch < 0) throw UsageError("sampler", "a state of epoch {}.", state.epoch);
}

DistributedSampler::DistributedSampler(std::int64_t size, DistributedSamplerOptions options)
    : options_(options), state_{.epoch = 0, .cursor = 0, .seed = options.seed, .size = size} {
  check_size(size);
  check_share(size, 0, share());
  if (options.shuffle)
    order_ = std::make_shared<RandomSampler>(size, options.seed);
  else
    order_ = std::make_shared<SequentialSampler>(size);
}

Share DistributedSampler::share() const {
  return {options_.rank, options_.num_replicas, options_.drop_last ? Tail::kDrop : Tail::kRepeat};
}

void DistributedSampler::set_epoch(std::int64_t epoch) {
  if (epoch == state_.epoch) return;
  state_.epoch = epoch;
  state_.cursor = 0;
}

std::vector<std::int64_t> DistributedSampler::indices() const {
  return share_of(order_->order(state_.epoch), state_.cursor, share());
}

std::int64_t DistributedSampler::size() const {
  return share_size(order_->size(), state_.cursor, share());
}

void DistributedSampler::advance(std::int64_t count) {
  if (count < 0 || count > size())
    throw UsageError("sampler", "cannot advance by {}: {} samples are left on this rank.", count,
                     size());
  // The last samples may be repeats; samples that drop_last leaves out are skipped here.
  state_.cursor = count == size() ? order_->size() : state_.cursor + count * options_.num_replicas;
}

void DistributedSampler::load_state(const SamplerState& state) {
  check_state(state, order_->size(), options_.seed);
  state_ = state;
  state_.size = order_->size();
  state_.order = 0;  // a loader's affair: here size and seed say it all
}

}  // namespace lockstep::data
