#include "lockstep/data/window.h"

#include <ATen/ATen.h>

#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"

namespace lockstep::data {
namespace {

// The tokens that are weighed together: float64 on the device, at least 1.
at::Tensor total_of(std::int64_t tokens, World& ranks, WindowWeights weights) {
  at::Tensor total =
      at::full({}, static_cast<double>(tokens), at::dtype(at::kDouble).device(ranks.device()));
  if (weights == WindowWeights::kCounts && ranks.size() > 1) {
    const ledger::PhaseScope communication(ledger::Phase::kCommunication);
    ranks.all_reduce(total).wait();
  }
  return total.clamp_min_(1);
}

}  // namespace

Window::Window(std::vector<Batch> batches, World ranks, WindowWeights weights) {
  if (batches.empty())
    throw UsageError("Window",
                     "there are no micro-batches. Give a rank without data a batch whose tokens "
                     "are 0.");
  for (const Batch& batch : batches) {
    if (batch.tokens < 0)
      throw UsageError("Window", "a batch has {} tokens. Set how many its mean loss counts.",
                       batch.tokens);
    tokens_ += batch.tokens;
  }
  const at::Tensor total = total_of(tokens_, ranks, weights);
  // Gradients are averaged over the ranks.
  const int ranks_in_total = weights == WindowWeights::kCounts ? ranks.size() : 1;
  for (Batch& batch : batches) {
    // A mean over no targets is 0 / 0, and so is its derivative.
    if (batch.tokens == 0 && batch.target.defined()) batch.target = at::zeros_like(batch.target);
    const auto tokens = static_cast<double>(batch.tokens * ranks_in_total);
    const at::Tensor weight = at::full_like(total, tokens) / total;
    weight.unsafeGetTensorImpl()->set_wrapped_number(true);  // a product has the loss's type
    micro_batches_.push_back({std::move(batch), weight});
  }
  micro_batches_.back().last = true;
}

}  // namespace lockstep::data
