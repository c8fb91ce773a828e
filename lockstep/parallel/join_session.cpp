#include "lockstep/parallel/join_session.h"

#include <ATen/ATen.h>

#include "lockstep/core/error.h"

namespace lockstep::parallel {

void JoinSession::begin(const JoinOptions& options) {
  if (active()) throw UsageError("join", "join was called inside join. One at a time per model.");
  options_ = options;
  training_ = 0;
}

void JoinSession::end() {
  options_.reset();
  root_ = 0;
}

bool JoinSession::exchange(bool has_inputs) {
  at::Tensor flags = at::zeros({world_.size()}, at::kInt);
  auto* const flag = flags.data_ptr<int>();
  flag[world_.rank()] = has_inputs ? 1 : 0;
  world_.all_reduce(flags).wait();
  int training = 0, last = 0;
  for (int rank = 0; rank < world_.size(); ++rank) {
    if (flag[rank] == 0) continue;
    ++training;
    last = rank;
  }
  if (training == 0) return false;
  if (training < world_.size() && options_->throw_on_early_termination) {
    options_.reset();
    throw UsageError("join",
                     "{} of {} ranks still have inputs and the others have run out; "
                     "throw_on_early_termination is set.",
                     training, world_.size());
  }
  training_ = training;
  root_ = last;  // as PyTorch: the highest rank that still trains
  return true;
}

double JoinSession::divisor() const {
  return divides_by_active() ? training_ : world_.size();
}

}  // namespace lockstep::parallel
