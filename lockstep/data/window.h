// Window: the micro-batches of one optimizer step, each with the weight of its loss.
//
//   for (auto& window : loader.windows(epoch, {.micro_batches = 4})) {
//     for (auto& micro : window) {
//       const auto loss = torch::cross_entropy_loss(model(micro.data), micro.target);  // a mean
//       model.backward(loss * micro.weight, micro.last);
//     }
//     optimizer.step();
//     optimizer.zero_grad();
//   }
//
// The gradient of a step is that of the mean over all tokens of its window, on all ranks, as if it
// had been one batch. A mean of means differs as soon as micro-batches differ in size: the last one
// of an epoch, or any batch counted in tokens. So all batches of a step are loaded, and their
// tokens counted over the ranks, before its first forward. Only its last backward synchronises.
//
// The mean loss of a window is the sum of `loss * micro.weight`, averaged over the ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/data/batch.h"

namespace lockstep::data {

struct MicroBatch : Batch {
  // What its mean loss is multiplied by: a number on the ranks' device, which takes the loss's
  // type.
  at::Tensor weight{};
  bool last = false;  // of its window: its backward averages the gradients over the ranks
};

enum class WindowWeights {
  // tokens * ranks / tokens of all ranks: every token weighs the same. One exchange of one number,
  // which the host does not read.
  kCounts,
  // tokens / tokens of this rank: all ranks weigh the same. No exchange. Hugging Face's
  // average_tokens_across_devices: false.
  kOwnCounts,
};

struct WindowOptions {
  std::int64_t micro_batches = 1;  // of a window; the last one of an epoch may have fewer
  WindowWeights weights = WindowWeights::kCounts;
};

// Made by Loader::windows(), or of batches of your own, whose `tokens` are set:
//
//   Window window({first, second}, world);
//
// `ranks` are those that see different samples and average their gradients. Unless weights are
// kOwnCounts, every one of them makes a Window for every step, so not inside join(). Where ranks
// compute each micro-batch together (FullyShard, SyncBatchNorm), they give equally many batches. A
// rank without data gives one without tokens, but with a sample: a mean over no rows is not a
// number.
//
// A batch without tokens gets zeros as targets and the weight 0: its loss and gradients stay finite
// and add nothing, and its backward still runs, because other ranks may wait for it.
class Window {
 public:
  explicit Window(std::vector<Batch> batches, World ranks = {},
                  WindowWeights weights = WindowWeights::kCounts);

  auto begin() { return micro_batches_.begin(); }
  auto begin() const { return micro_batches_.begin(); }
  auto end() { return micro_batches_.end(); }
  auto end() const { return micro_batches_.end(); }
  std::size_t size() const { return micro_batches_.size(); }
  const MicroBatch& operator[](std::size_t i) const { return micro_batches_[i]; }
  std::int64_t tokens() const { return tokens_; }  // of this rank

 private:
  std::vector<MicroBatch> micro_batches_;
  std::int64_t tokens_ = 0;
};

namespace detail {
// An iterator over a range that makes its items one by one and holds the current one.
template <typename Range, typename Item>
class RangeIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = Item;
  using difference_type = std::ptrdiff_t;
  using pointer = Item*;
  using reference = Item&;

  explicit RangeIterator(Range* range) : range_(range) { ++*this; }
  Item& operator*() const { return *range_->current_; }
  Item* operator->() const { return &*range_->current_; }
  RangeIterator& operator++() {
    range_->current_.reset();  // the next one may take its memory
    range_->current_ = range_->next();
    return *this;
  }
  void operator++(int) { ++*this; }
  bool operator==(std::default_sentinel_t) const { return !range_->current_; }

 private:
  Range* range_;
};
}  // namespace detail

}  // namespace lockstep::data
