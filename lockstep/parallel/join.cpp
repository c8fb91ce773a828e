// Uneven inputs: a rank that has run out continues taking part, with zeros, until all have. With a
// ShardedOptimizer it continues stepping its share instead.
#include <torch/torch.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel/reducer_impl.h"

namespace lockstep::parallel {

// Every rank says whether it is about to reduce; so all know who still trains. Precedes each
// synchronised pass while a join is in progress.
std::vector<int> ReducerImpl::exchange_active(bool active) {
  at::Tensor flags = at::zeros({world_.size()}, at::kInt);
  flags.data_ptr<int>()[world_.rank()] = active ? 1 : 0;
  world_.all_reduce(flags).wait();
  std::vector<int> ranks;
  for (int rank = 0; rank < world_.size(); ++rank)
    if (flags.data_ptr<int>()[rank] != 0) ranks.push_back(rank);
  const bool uneven = !ranks.empty() && static_cast<int>(ranks.size()) < world_.size();
  if (uneven && joining_->throw_on_early_termination) {
    joining_.reset();
    throw UsageError("join",
                     "{} of {} ranks still have inputs and the others have run out; "
                     "throw_on_early_termination is set.",
                     ranks.size(), world_.size());
  }
  if (!ranks.empty()) {
    active_ = ranks;
    root_ = ranks.back();  // as PyTorch: the highest rank that still trains
  }
  return ranks;
}

// What a sum over ranks is divided by.
double ReducerImpl::divisor() const {
  const bool initial = !joining_ || joining_->divide_by_initial_world_size;
  return initial ? world_.size() : static_cast<double>(active_.size());
}

void ReducerImpl::join(const std::function<void()>& body, const JoinOptions& options) {
  if (joining_) throw UsageError("join", "join was called inside join. One at a time per model.");
  if (passive_) {
    body();
    return;
  }
  joining_ = options;
  active_.clear();
  try {
    body();
    while (!exchange_active(false).empty()) {
      if (owner_.idle_step) {
        owner_.idle_step();
      } else {
        shadow_pass();
      }
    }
    if (deferred_) {
      // Parameters are equal after every step, or the same memory.
      broadcast_buffers(root_);
    } else {
      broadcast_model(root_);
    }
  } catch (...) {
    joining_.reset();
    root_ = 0;
    throw;
  }
  joining_.reset();
  root_ = 0;
}

// The same operations, in the same order, as a rank that trains.
void ReducerImpl::shadow_pass() {
  torch::NoGradGuard no_grad;
  stale_ = changed();
  try {
    if (stale_) plan_anew_together();
    phase_ = Phase::kRunning;
    sync_ = shadow_ = true;
    pass_start_ = last_gradient_ = Clock::now();
    const Zeros zeros(*this);
    for (auto& bucket : buckets_) {
      bucket->pending = 0;
      bucket->ready = pass_start_;
    }
    waiting_for_ = 0;
    finalize();
  } catch (...) {
    // As after a backward that threw: what was sent is remembered, and the rest is forgotten.
    shadow_ = false;
    interrupted();
    throw;
  }
}

}  // namespace lockstep::parallel
