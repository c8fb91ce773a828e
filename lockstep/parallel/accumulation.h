// Accumulation: several backward passes before a step, each weighted by its sample count.
//
//   lockstep::Accumulation accumulation{model, {.steps = 4}};
//   accumulation.begin_epoch(loader.batches_left(epoch));
//   for (auto& batch : loader.epoch(epoch)) {
//     auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);   // a mean
//     if (accumulation.backward(loss, {.count = batch.samples()})) {
//       optimizer.step();
//       optimizer.zero_grad();
//     }
//   }
//
// The gradient of a window is that of the mean over all of its samples, on all ranks, as if it had
// been one batch. A mean of means differs as soon as micro-batches differ in size: the last one of
// an epoch, or any batch counted in tokens. So each loss is weighted by its count, and at the
// window's end the gradients are scaled by the actual total of all ranks. If that is the expected
// one (equal counts, full window), the factor is exactly one and the scaling is skipped.
//
// Only the window's last backward synchronises (decided at backward, so forward may have run
// before). A window ends after `steps` micro-batches, at the epoch's last one if begin_epoch knows
// the number, and at `last`. Ranks may differ in counts and, if begin_epoch does not know the
// number, also in a window's micro-batches, unless they compute each of them together
// (Parallelism::pass_ranks()) and so compare that; but not in the number of windows, so this cannot
// be used inside join().
//
// Works with any Parallelism, and with ShardedOptimizer too. Holds the parallelism. One thread at a
// time; the constructor, begin_epoch() and the backward that ends a window communicate, on all
// ranks identically. Options that differ, or that one rank cannot take, are a UsageError on all.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "lockstep/optim/amp.h"
#include "lockstep/parallel/ddp.h"

namespace lockstep {

enum class WindowWeights {
  kCounts,   // by samples or tokens: exact for any sizes; one tiny exchange per window
  kBatches,  // every micro-batch counts the same: no exchange; for equal sizes on all ranks
  // Weights within a rank by samples or tokens, and all ranks equally: no exchange. Hugging Face's
  // average_tokens_across_devices: false.
  kOwnCounts,
};

struct AccumulationOptions {
  std::int64_t steps = 1;
  WindowWeights weights = WindowWeights::kCounts;
  // The usual count of a micro-batch, the same on every rank: one of that size is weighed by
  // exactly 1 / steps. At least 1; 0 takes the largest of the ranks' first ones (kOwnCounts: its
  // own); a run that is to have the same bits after resuming gives it (batch size, or batch size x
  // sequence length).
  std::int64_t expected_count = 0;
};

struct MicroBatch {
  std::int64_t count = 1;  // samples or tokens that this rank's loss is the mean of
  bool last = false;       // ends the window early (end of data)
  optim::GradScaler* scaler = nullptr;
  std::vector<std::int64_t> sizes{};  // of its samples, where a Pipeline sees several
};

// What the last complete window held. Tensors have one element, are on the model's device, and are
// the same on every rank with kCounts (otherwise this rank's own).
struct Window {
  std::int64_t batches = 0;  // micro-batches on this rank
  at::Tensor count;          // samples or tokens, int64
  at::Tensor loss;           // their mean loss, float64
};

class Accumulation {
 public:
  template <typename Module>
  explicit Accumulation(DistributedDataParallel<Module>& model, AccumulationOptions options = {})
      : Accumulation(model.parallelism(), model.parameters(), options) {}
  Accumulation(std::shared_ptr<Parallelism> parallelism, std::vector<at::Tensor> parameters,
               AccumulationOptions options = {});
  ~Accumulation();
  Accumulation(const Accumulation&) = delete;
  Accumulation& operator=(const Accumulation&) = delete;

  // The number of micro-batches to come, equal on every rank; 0 if it is unknown. Throws UsageError
  // in the middle of a window: its gradients would leak into the epoch.
  void begin_epoch(std::int64_t batches = 0);

  // Runs the backward of a loss that is a mean over `count`. True when it ended the window: the
  // gradients are final, step now. A micro-batch with count 0 adds nothing: its mean and derivative
  // may be 0 / 0, so values in its backward that are not finite become zero. If other ranks wait
  // for that backward, it runs all the same.
  [[nodiscard]] bool backward(const at::Tensor& loss, const MicroBatch& micro = {});
  // The same with a loss that is computed here, or by a parallelism that takes windows (Pipeline)
  // when all of the window's micro-batches are there.
  [[nodiscard]] bool backward(std::function<at::Tensor()> loss, const MicroBatch& micro = {});

  std::int64_t steps() const;  // of the options
  bool at_boundary() const;    // nothing is accumulated
  // Discards a window that was begun (after an exception); call zero_grad() too.
  void abandon();
  const Window& last_window() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
