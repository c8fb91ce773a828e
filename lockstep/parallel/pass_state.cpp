#include "lockstep/parallel/pass_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"

namespace lockstep::parallel {

void PassState::expect(const std::vector<ParameterForm>& forms) {
  gradients_.resize(forms.size());
  for (std::size_t i = 0; i < forms.size(); ++i)
    gradients_[i].expected = forms[i].requires_grad ? 1 : 0;
}

void PassState::reset() {
  int waiting = 0;
  if (progress_.size() != buckets_.size()) progress_ = std::vector<BucketProgress>(buckets_.size());
  for (auto& bucket : progress_) bucket.pending = 0;
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    Gradient& g = gradients_[i];
    g.fired = 0;
    g.place = -1;
    g.counted = false;
    if (g.expected == 0) continue;
    ++waiting;
    if (buckets_.bucket_of(i) != kNoBucket) ++progress_[buckets_.bucket_of(i)].pending;
  }
  waiting_for_ = waiting;
  launched = 0;
  observed_ = 0;
  shadow = recorded = false;
  completed_ns_ = std::make_shared<std::vector<std::atomic<std::int64_t>>>(buckets_.size());
  task = -1;
  phase_ = Phase::kIdle;
}

void PassState::begin(bool synchronised) {
  sync = synchronised;
  start_ = Clock::now();
}

void PassState::begin_shadow() {
  begin(/*synchronised=*/true);
  shadow = true;
  last_gradient_ = start_;
  for (auto& bucket : progress_) {
    bucket.pending = 0;
    bucket.ready = start_;
  }
  waiting_for_ = 0;
  run();
}

void PassState::interrupt() {
  if (running() || launched > 0) phase_ = Phase::kInterrupted;
  shadow = false;
  task = -1;
}

bool PassState::arrived(std::size_t parameter) {
  Gradient& g = gradients_[parameter];
  ++g.fired;
  g.place = observed_.fetch_add(1);
  if (learns()) return false;
  if (g.counted || g.fired > g.expected) {
    const auto guard = lock();
    const std::size_t bucket = buckets_.bucket_of(parameter);
    const bool late = bucket == kNoBucket || bucket < launched;
    if (!late && !options_.static_graph) return false;  // added to its slot in time
    if (options_.static_graph)
      throw UsageError("reducer",
                       "step {}: parameter '{}' got {} gradients in one backward; the first step "
                       "had {}. The graph is not static; set find_unused_parameters instead.",
                       step, model_[parameter].name, g.fired, g.expected);
    throw UsageError("reducer",
                     "step {}: parameter '{}' got {} gradients in one backward, the last after its "
                     "bucket had been sent. It is probably used in two checkpointed blocks; set "
                     "static_graph = true.",
                     step, model_[parameter].name, g.fired);
  }
  return g.fired == g.expected && count(parameter);
}

bool PassState::count(std::size_t parameter) {
  gradients_[parameter].counted = true;
  bool ready = false;
  if (const std::size_t index = buckets_.bucket_of(parameter); index != kNoBucket) {
    BucketProgress& bucket = progress_[index];
    ready = bucket.pending.fetch_sub(1) == 1;
    if (ready) bucket.ready = Clock::now();
  }
  if (waiting_for_.fetch_sub(1) == 1) last_gradient_ = Clock::now();
  return ready;
}

std::vector<std::size_t> PassState::missing() const {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    if (gradients_[i].expected > 0 && !gradients_[i].counted) result.push_back(i);
  return result;
}

void PassState::refuse_missing(int rank, const std::vector<std::size_t>& without) const {
  constexpr std::size_t kNamed = 5;
  std::string names;
  for (std::size_t i = 0; i < std::min(kNamed, without.size()); ++i)
    names += (names.empty() ? "" : ", ") + model_[without[i]].name;
  throw UsageError("reducer",
                   "rank {}: {} of {} parameters got no gradient in step {}: {}{}. A "
                   "branch of forward() was probably skipped. Use them in the loss, or set "
                   "find_unused_parameters = true.",
                   rank, without.size(),
                   std::count_if(gradients_.begin(), gradients_.end(),
                                 [](const Gradient& g) { return g.expected > 0; }),
                   step, names, without.size() > kNamed ? ", ..." : "");
}

std::optional<std::size_t> PassState::next_ready() {
  if (launched == progress_.size() || progress_[launched].pending.load() != 0) return {};
  return launched++;
}

std::function<void()> PassState::stamp_completion(std::size_t index) const {
  return
      [times = completed_ns_, index] { (*times)[index] = Clock::now().time_since_epoch().count(); };
}

void PassState::wait_for_buckets(bool finish) {
  for (auto& bucket : progress_) {
    bucket.reduction.work.wait();
    if (finish && bucket.reduction.finish) bucket.reduction.finish();
    bucket.reduction = {};
  }
}

// Flags and orders travel as CPU tensors, so that no GPU is waited for.
std::vector<bool> PassState::used_anywhere(World& world) const {
  if (!options_.find_unused_parameters && !options_.static_graph) return {};
  std::vector<bool> used(gradients_.size());
  if (options_.static_graph && learned_) {
    for (std::size_t i = 0; i < used.size(); ++i) used[i] = gradients_[i].expected > 0;
    return used;
  }
  at::Tensor flags = at::zeros({static_cast<std::int64_t>(used.size())}, at::kInt);
  auto* flag = flags.data_ptr<int>();
  for (std::size_t i = 0; i < used.size() && !shadow; ++i) flag[i] = gradients_[i].used ? 1 : 0;
  world.all_reduce(flags, ReduceOp::kMax).wait();
  for (std::size_t i = 0; i < used.size(); ++i) used[i] = flag[i] != 0;
  return used;
}

// All ranks see all counts, so that a difference ends every rank.
void PassState::learn(World& world, int root) {
  constexpr int kNoCount = -1;  // of a rank that has run out of inputs
  at::Tensor mine = at::empty({static_cast<std::int64_t>(gradients_.size())}, at::kInt);
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    mine.data_ptr<int>()[i] = shadow ? kNoCount : gradients_[i].fired;
  const auto counts = world.all_gather(mine);
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    const auto fired_on = [&](int rank) {
      return counts[static_cast<std::size_t>(rank)].data_ptr<int>()[i];
    };
    gradients_[i].expected = fired_on(root);
    for (int rank = 0; rank < world.size(); ++rank) {
      if (fired_on(rank) == kNoCount || fired_on(rank) == fired_on(root)) continue;
      throw UsageError("reducer",
                       "static_graph: parameter '{}' got {} gradients on rank {} but {} "
                       "on rank {}. Ranks must run the same graph; use find_unused_parameters for "
                       "one that differs.",
                       model_[i].name, fired_on(rank), rank, fired_on(root), root);
    }
  }
  learned_ = true;
}

std::vector<std::size_t> PassState::observed(std::vector<std::size_t> order) const {
  // Parameters without a gradient come last, in their previous order.
  const auto place = [&](std::size_t i) { return static_cast<unsigned>(gradients_[i].place); };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return place(a) < place(b); });
  return order;
}

void PassState::record_timing() {
  const auto now = Clock::now();
  const auto ms = [&](Clock::time_point t) {
    return std::chrono::duration<double, std::milli>(t - start_).count();
  };
  timing.step = step;
  timing.last_gradient_ms = ms(last_gradient_);
  timing.finalized_ms = ms(now);
  timing.buckets.clear();
  for (std::size_t i = 0; i < progress_.size(); ++i) {
    const std::int64_t ns = (*completed_ns_)[i];
    const auto completed = ns != 0 ? Clock::time_point(Clock::duration(ns)) : now;
    const at::Tensor& flat = buckets_[i].flat;
    timing.buckets.push_back({ms(progress_[i].ready), ms(progress_[i].launched), ms(completed),
                              static_cast<std::int64_t>(flat.nbytes())});
    if (shadow) continue;
    ledger::add(ledger::Counter::kBuckets);
    ledger::add(ledger::Counter::kReducedBytes, flat.nbytes());
    const auto took = std::chrono::nanoseconds(completed - progress_[i].launched).count();
    if (flat.is_cpu() && took > 0)
      ledger::add(ledger::Counter::kReduceNs, static_cast<std::uint64_t>(took));
  }
}

void PassState::drop_used() {
  for (auto& g : gradients_) g.used = false;
}

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
