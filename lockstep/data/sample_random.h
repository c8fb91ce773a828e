// Random numbers for one sample: what an augmentation draws depends on (seed, epoch, index in the
// dataset) and on nothing else, so it is the same with any number of ranks or workers, and after a
// resume.
//
//   Example get(std::int64_t index, SampleRandom& random) const override {
//     return {random.uniform() < 0.5 ? image(index).flip({-1}) : image(index), label(index)};
//   }
//
// No torch here; generator() in dataset.h turns it into one of torch's. One thread at a time.
#pragma once

#include <cstdint>
#include <limits>

namespace lockstep::data {

// What all samples of one epoch share.
struct RandomKey {
  std::uint64_t seed = 0;
  std::int64_t epoch = 0;
};

// Also a generator for the distributions of <random>.
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
