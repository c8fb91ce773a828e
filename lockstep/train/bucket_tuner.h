// BucketTuner: `tune: bucket_cap_mb`. Measures bucket sizes in the first steps of a run and keeps
// the fastest one for the rest.
//
// The sizes take turns, a few steps each, in several rounds, so that other load on the machine
// slows all of them down. The first step of a turn, in new buckets, is not counted. Every rank
// takes the median of its own times, one exchange takes the slowest rank's of each size, and all
// choose by that.
//
//   auto tuner = BucketTuner::make(run, /*steps_left=*/1000);
//   if (tuner) tuner->begin_step();
//   ...                                              // backward and optimizer step
//   if (tuner && tuner->end_step()) tuner.reset();   // it has chosen
//
// Where a gradient lies does not change its average over two ranks, nor over ranks that share
// memory; gloo and nccl add those of three and more ranks in an order that depends on it.
// end_step() is a collective. One thread; run outlives it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/train/run_context.h"

namespace lockstep::train {

using BucketCap = std::optional<double>;  // MiB, as ddp_bucket_cap_mb

struct BucketTrial {
  BucketCap cap{};
  std::size_t buckets = 0;
  double step_ms = 0;
  double spread_ms = 0;  // between the quartiles of its steps
};

// `as_set` first, then what is measured beside it: sizes up to the first that holds all gradients.
// Empty: they fit into the smallest bucket.
std::vector<BucketCap> bucket_candidates(std::int64_t gradient_bytes, BucketCap as_set);
// The fastest one; the first, which is as set, unless another is faster by 1 % and by more than
// the steps of either vary.
std::size_t best_trial(const std::vector<BucketTrial>& trials);
// A line for each trial, and what to write into the training file.
std::string tuning_text(const std::vector<BucketTrial>& trials, std::size_t best);

class BucketTuner {
 public:
  // Nothing, with a log line that says why, where there is nothing to measure or too few steps are
  // left. Throws UsageError where something was asked for that has no buckets to change.
  static std::unique_ptr<BucketTuner> make(RunContext& run, std::int64_t steps_left);

  void begin_step();
  bool end_step();  // true: it has chosen, and said what

 private:
  using Clock = std::chrono::steady_clock;

  BucketTuner(RunContext& run, std::vector<BucketCap> caps, int rounds);
  void wait_for_device() const;
  void begin_turn(std::size_t trial);
  void choose();

  RunContext& run_;
  std::vector<BucketTrial> trials_;
  std::vector<std::vector<double>> times_ms_;  // one list per size
  int turns_left_;
  std::size_t trial_ = 0;
  int uncounted_;  // steps
  Clock::time_point began_;
};

}  // namespace lockstep::train
