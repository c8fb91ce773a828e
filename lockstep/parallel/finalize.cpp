// The end of a pass: wait for what was launched, hand the averages to .grad, keep buffers equal.
#include <torch/csrc/autograd/function.h>
#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/parallel/reducer_impl.h"

namespace lockstep::parallel {

void ReducerImpl::on_task_end(int /*task*/) {
  if (phase_ != Phase::kRunning) return;
  if (!sync_) {
    if (hooks_lost_) install_hooks();
    close_pass();
    return;
  }
  // Inside a node of another backward: a nested one that nobody announced has ended.
  const auto outer = torch::autograd::get_current_node();
  if (!outer && unseen_outers_ > 0)
    throw UsageError("reducer",
                     "an earlier backward did not finish after a nested one had computed gradients "
                     "of this model. It probably threw. Call zero_grad() and repeat the step.");
  const bool undecided = options_.static_graph && !learned_;
  if (!complete() || undecided) {
    if (outer && leave_end_to(*outer)) return;
    if (!undecided && !options_.find_unused_parameters) refuse_missing_gradients();
    for (auto& p : parameters_) {
      if (!p.form.requires_grad || p.counted) continue;
      if (p.fired > 0) {
        count_down(p);
      } else {
        count_as_unused(p);
      }
    }
  }
  finalize();
}

void ReducerImpl::refuse_missing_gradients() const {
  constexpr int kNamed = 5;
  std::string names;
  int missing = 0;
  int total = 0;
  for (const auto& p : parameters_) {
    if (!p.form.requires_grad || p.expected == 0) continue;
    ++total;
    if (p.counted) continue;
    if (missing++ < kNamed) names += (names.empty() ? "" : ", ") + p.name;
  }
  throw UsageError("reducer",
                   "rank {}: {} of {} parameters got no gradient in step {}: {}{}. A "
                   "branch of forward() was probably skipped. Use them in the loss, or set "
                   "find_unused_parameters = true.",
                   world_.rank(), missing, total, step_, names, missing > kNamed ? ", ..." : "");
}

void ReducerImpl::finalize() {
  torch::NoGradGuard no_grad;
  launch_ready();
  LOCKSTEP_ASSERT(next_launch_ == buckets_.size());
  if (buckets_.empty()) send_change_flag();
  if (received_change_flag().ne(0).item<bool>()) refuse_change_of_another();
  const std::vector<bool> used = globally_used();
  wait_for_buckets();
  publish_gradients(used);
  reduce_sparse(used);
  if (options_.broadcast_buffers) broadcast_buffers(root_);
  record_timing();
  if (options_.static_graph && !learned_) learn_static_graph();
  rebuild_from_observed_order();
  if (hooks_lost_) install_hooks();
  for (auto& p : parameters_) p.used = false;
  ++step_;
  close_pass();
}

void ReducerImpl::wait_for_buckets() {
  for (auto& bucket : buckets_) {
    bucket->reduction.work.wait();
    if (bucket->reduction.finish) bucket->reduction.finish();
    bucket->reduction = {};
  }
}

// Which parameters any rank used. Empty: all of them. Issued after the last bucket on every rank.
// Flags and orders travel as CPU tensors, so that no GPU is waited for.
std::vector<bool> ReducerImpl::globally_used() {
  if (!options_.find_unused_parameters && !options_.static_graph) return {};
  std::vector<bool> used(parameters_.size());
  if (options_.static_graph && learned_) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) used[i] = parameters_[i].expected > 0;
    return used;
  }
  at::Tensor flags = at::zeros({static_cast<std::int64_t>(parameters_.size())}, at::kInt);
  auto* flag = flags.data_ptr<int>();
  for (std::size_t i = 0; i < parameters_.size() && !shadow_; ++i)
    flag[i] = parameters_[i].used ? 1 : 0;
  world_.all_reduce(flags, ReduceOp::kMax).wait();
  for (std::size_t i = 0; i < parameters_.size(); ++i) used[i] = flag[i] != 0;
  return used;
}

void ReducerImpl::publish_gradients(const std::vector<bool>& used) {
  if (shadow_) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    if (p.bucket == kNoBucket) continue;
    at::Tensor& grad = p.tensor.mutable_grad();
    if (!used.empty() && !used[i]) {
      // No rank used it: .grad stays as it was, bit by bit, also when it lies in the bucket.
      if (p.previous.defined() && grad.is_same(p.slot)) p.slot.copy_(p.previous);
    } else if (options_.gradient_as_bucket_view) {
      if (!grad.is_same(p.slot)) grad = p.slot;
    } else if (grad.defined()) {
      grad.copy_(p.slot);
    } else {
      grad = p.slot.clone();
    }
  }
}

// A sparse gradient is gathered from all ranks and summed by its indices, in rank order.
void ReducerImpl::reduce_sparse(const std::vector<bool>& used) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    if (!p.sparse || !p.form.requires_grad) continue;
    if (!used.empty() && !used[i]) continue;  // by no rank: .grad stays as it was
    at::Tensor& grad = p.tensor.mutable_grad();
    at::Tensor indices = at::empty({0, 1}, p.tensor.options().dtype(at::kLong));
    auto rows = p.form.sizes;
    rows[0] = 0;
    at::Tensor values = at::empty(rows, p.tensor.options());
    if (grad.defined() && !shadow_) {
      const at::Tensor local = grad.coalesce();
      indices = local.indices().t().contiguous();
      values = local.values().div(divisor());
    }
    const auto all_indices = world_.all_gather_v(indices);
    const auto all_values = world_.all_gather_v(values);
    if (shadow_) continue;
    const at::Tensor merged_indices = at::cat(all_indices).t();
    if (merged_indices.size(1) == 0 && !grad.defined()) continue;
    grad = at::sparse_coo_tensor(merged_indices, at::cat(all_values), p.form.sizes).coalesce();
  }
}

// static_graph: how often each parameter gets a gradient in one backward. All ranks see all counts,
// so that a difference ends every rank.
void ReducerImpl::learn_static_graph() {
  constexpr int kNoCount = -1;  // of a rank that has run out of inputs
  at::Tensor mine = at::empty({static_cast<std::int64_t>(parameters_.size())}, at::kInt);
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    mine.data_ptr<int>()[i] = shadow_ ? kNoCount : parameters_[i].fired;
  const auto counts = world_.all_gather(mine);
  const int* expected = counts[static_cast<std::size_t>(root_)].data_ptr<int>();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    p.expected = expected[i];
    for (int rank = 0; rank < world_.size(); ++rank) {
      const int fired = counts[static_cast<std::size_t>(rank)].data_ptr<int>()[i];
      if (fired == kNoCount || fired == p.expected) continue;
      throw UsageError("reducer",
                       "static_graph: parameter '{}' got {} gradients on rank {} but {} "
                       "on rank {}. Ranks must run the same graph; use find_unused_parameters for "
                       "one that differs.",
                       p.name, fired, rank, p.expected, root_);
    }
  }
  learned_ = true;
}

// The order in which gradients really came, as rank `root_` saw it, is better than the guess the
// first plan was made from. With unused parameters there is no one order, and without overlap it
// does not matter.
void ReducerImpl::rebuild_from_observed_order() {
  if (rebuilt_ || options_.find_unused_parameters || !overlap_) return;
  rebuilt_ = true;
  auto order = dense_parameters();
  std::reverse(order.begin(), order.end());
  // Those without a gradient come last, as they were.
  const auto place = [&](std::size_t i) { return static_cast<unsigned>(parameters_[i].place); };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return place(a) < place(b); });
  at::Tensor agreed = at::tensor(std::vector<std::int64_t>(order.begin(), order.end()), at::kLong);
  world_.broadcast(agreed, root_).wait();
  const auto* first = agreed.data_ptr<std::int64_t>();
  plan(std::vector<std::size_t>(first, first + agreed.numel()));
}

void ReducerImpl::close_pass() {
  int waiting = 0;
  for (auto& bucket : buckets_) bucket->pending = 0;
  for (auto& p : parameters_) {
    p.fired = 0;
    p.place = -1;
    p.counted = false;
    p.previous = at::Tensor();
    if (!p.form.requires_grad || p.expected == 0) continue;
    ++waiting;
    if (p.bucket != kNoBucket) ++buckets_[p.bucket]->pending;
  }
  waiting_for_ = waiting;
  next_launch_ = 0;
  observed_ = 0;
  shadow_ = false;
  forget_outer();
  completed_ns_ = std::make_shared<std::vector<std::atomic<std::int64_t>>>(buckets_.size());
  queued_task_ = -1;
  phase_ = Phase::kIdle;
}

void ReducerImpl::record_timing() {
  const auto now = Clock::now();
  const auto ms = [&](Clock::time_point t) {
    return std::chrono::duration<double, std::milli>(t - pass_start_).count();
  };
  timing_.step = step_;
  timing_.last_gradient_ms = ms(last_gradient_);
  timing_.finalized_ms = ms(now);
  timing_.buckets.clear();
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    const BucketState& bucket = *buckets_[i];
    const std::int64_t ns = (*completed_ns_)[i];
    const auto completed = ns != 0 ? Clock::time_point(Clock::duration(ns)) : now;
    timing_.buckets.push_back({ms(bucket.ready), ms(bucket.launched), ms(completed),
                               static_cast<std::int64_t>(bucket.flat.nbytes())});
  }
}

}  // namespace lockstep::parallel
