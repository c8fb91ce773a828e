// A dataset's sample (Example), the random numbers of its augmentation (SampleRandom), and the
// input of a training step (Batch).
//
// A batch knows its size. samples() and `tokens` weight losses and metrics over ranks; both
// are counted on the CPU before the batch moves to a device, so that no step waits for the
// device.
//
//   for (auto& batch : loader.epoch(0)) {
//     auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
//     total += loss.detach() * batch.samples();
//   }
//
// Plain values: copies share the tensors' memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace lockstep::data {

// The target that losses leave out (torch's ignore_index).
constexpr std::int64_t kIgnoredTarget = -100;

// One sample. The target may be undefined.
struct Example {
  at::Tensor data{};
  at::Tensor target{};
  std::int64_t index = -1;  // in the dataset; the loader sets it before collation
};

struct Batch {
  at::Tensor data{};
  at::Tensor target{};
  std::vector<std::int64_t> indices{};  // the samples' indices in the dataset
  // The divisor of a mean loss: where each sample has a sequence of integer targets, the number of
  // targets that are not kIgnoredTarget; otherwise the number of samples.
  std::int64_t tokens = 0;

  std::int64_t samples() const { return static_cast<std::int64_t>(indices.size()); }
  // The batch with its tensors on the device; itself if they already are.
  Batch to(c10::Device device, bool non_blocking = false) const;
};

// Stacks samples of one shape along a new first dimension, and counts tokens; `indices` stays
// empty. Throws UsageError naming the first two samples whose shapes differ.
Batch stack(const std::vector<Example>& examples);

// How many tokens a batch of `samples` with this target holds, as `Batch::tokens` says. The target
// must be on the CPU.
std::int64_t count_tokens(const at::Tensor& target, std::int64_t samples);

// The part of the random key that all samples of an epoch share.
struct RandomKey {
  std::uint64_t seed = 0;
  std::int64_t epoch = 0;
};

// Random numbers for one sample: an augmentation depends on (seed, epoch, index in the dataset)
// and on nothing else, so it is the same with any number of ranks or workers, and after a
// resume.
//
//   Example get(std::int64_t index, SampleRandom& random) const override {
//     return {random.uniform() < 0.5 ? image(index).flip({-1}) : image(index), label(index)};
//   }
//
// Also a generator for the distributions of <random>; generator() in dataset.h converts it to a
// torch generator. One thread at a time.
class SampleRandom {
 public:
  using result_type = std::uint64_t;

  SampleRandom(const RandomKey& key, std::int64_t index)
      : state_(mix(mix(mix(key.seed) + static_cast<std::uint64_t>(key.epoch)) +
                   static_cast<std::uint64_t>(index))) {}

  static constexpr result_type min() { return 0; }
  static constexpr result_type max() { return std::numeric_limits<result_type>::max(); }
  result_type operator()() {
    state_ += kStep;
    return mix(state_);
  }

  double uniform() { return static_cast<double>((*this)() >> 11) * 0x1p-53; }  // in [0, 1)
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  // In [0, bound); bound must not be 0. The bias is below bound / 2^64.
  std::uint64_t below(std::uint64_t bound) { return (*this)() % bound; }

 private:
  static constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio: SplitMix64

  static constexpr std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  std::uint64_t state_;
};

}  // namespace lockstep::data
