#include "lockstep/parallel/accumulation.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/parallel/backward_hooks.h"
#include "lockstep/parallel/replicas.h"

namespace lockstep {
namespace {

constexpr const char* kWho = "Accumulation";

void check_options(const AccumulationOptions& options) {
  if (options.steps < 1)
    throw UsageError(kWho, "steps = {} is not a window. Use 1 for a step after each backward.",
                     options.steps);
  if (options.expected_count < 0)
    throw UsageError(kWho,
                     "expected_count = {} is not a count. Give the samples or tokens of a usual "
                     "micro-batch, at least 1, or 0 to take the first one.",
                     options.expected_count);
}

// Ranks with windows of their own would wait for each other, or weigh by different numbers.
void agree_on(const AccumulationOptions& options, World& world, const std::exception_ptr& refusal) {
  constexpr const char* kWeights[] = {"kCounts", "kBatches", "kOwnCounts"};
  std::string text = fmt::format("steps: {}\nweights: {}\n", options.steps,
                                 kWeights[static_cast<std::size_t>(options.weights)]);
  if (options.weights == WindowWeights::kCounts)
    text += fmt::format("expected_count: {}\n", options.expected_count);
  const auto other = parallel::find_other_line(
      world, {.component = kWho, .what = "these options", .refusal = refusal}, text);
  if (!other) return;
  throw UsageError(kWho,
                   "rank {} has '{}', but rank 0 has '{}'. Windows begin and end together. Give "
                   "every rank the same options.",
                   other->rank, other->here, other->first);
}

// The numbers of a micro-batch that its arithmetic takes.
struct Numbers {
  double weight = 1;  // of its loss
  double count = 0;
  double seen = 0;    // the window's count with it
  double factor = 1;  // of the gradients: of the earlier ones (kOwnCounts), or of all at the end
};

}  // namespace

struct Accumulation::Impl {
  std::shared_ptr<Parallelism> parallelism;
  std::vector<at::Tensor> parameters;
  AccumulationOptions options;
  Window last;

  std::int64_t length = 0;     // micro-batches planned for this window
  std::int64_t done = 0;       // and those that have run
  std::int64_t remaining = 0;  // in the epoch; 0 where nobody knows
  bool epoch_known = false;
  double expected = 0;  // count of a micro-batch that weighs 1 / length
  double planned = 0;   // and of the whole window: what losses are divided by
  std::int64_t count = 0;
  at::Tensor loss_sum;
  // For a parallelism that runs a window as a whole.
  std::vector<std::pair<std::function<at::Tensor()>, MicroBatch>> queue;

  void plan_window() {
    length = epoch_known ? std::min(options.steps, remaining) : options.steps;
    count = 0;
    // An estimate of the rank's own count, which may have no target yet.
    planned = std::max(1.0, expected) * static_cast<double>(length);
    loss_sum = at::zeros({}, at::dtype(at::kDouble).device(parameters[0].device()));
  }

  // If counts are of all ranks, all must use the same divisor, so they agree on the first one; a
  // run that resumes elsewhere in the data sets it in the options, to have the same bits.
  void agree_on_expected(std::int64_t first) {
    if (expected > 0) return;
    const auto mine = static_cast<double>(first);
    const bool alone = options.weights == WindowWeights::kOwnCounts;
    expected =
        alone ? mine : std::max(1.0, all_reduce(parallelism->mesh().world(), mine, ReduceOp::kMax));
  }

  // Ranks that see different samples; the others count none of their own.
  World& batch() const { return parallelism->mesh().batch(); }

  // If the number of micro-batches is not known in advance, a rank may end its window while ranks
  // that compute every pass together with it do not. This refuses that on all of them.
  void agree_on_length(std::int64_t batches, bool ends) const {
    World& ranks = parallelism->pass_ranks();
    if (epoch_known || options.steps == 1 || ranks.size() == 1) return;
    const auto other = parallel::find_other_line(
        ranks, {.component = kWho, .what = "this window"},
        fmt::format("{} {} micro-batches in this window", ends ? "just" : "more than", batches));
    if (other)
      throw UsageError(kWho,
                       "rank {} has {}, but rank 0 has {}. Ranks that divide a model compute every "
                       "micro-batch together, and would wait for each other. Give all of them "
                       "equally many: begin_epoch() with the number, or a micro-batch with count = "
                       "0 where a rank has no more data.",
                       other->rank, other->here, other->first);
  }

  // The expected count of the whole window over all ranks.
  double wanted() const {
    return expected * static_cast<double>(length) * static_cast<double>(batch().size());
  }

  // The numbers of a micro-batch before which `before` was counted in the window.
  Numbers numbers_of(const MicroBatch& micro, std::int64_t before, bool ends) const {
    double divisor = planned;
    Numbers n{.count = static_cast<double>(micro.count),
              .seen = static_cast<double>(before + micro.count)};
    // The last count completes the rank's own, before gradients are mixed with other ranks': those
    // accumulated so far are scaled to that divisor, which the last micro-batch uses.
    if (options.weights == WindowWeights::kOwnCounts && ends && n.seen != 0) {
      n.factor = divisor / n.seen;
      divisor = n.seen;
    }
    const bool alone = batch().size() == 1;  // otherwise the ranks' counts decide
    if (options.weights == WindowWeights::kCounts && ends && alone && n.seen != 0)
      n.factor = wanted() / n.seen;
    n.weight = options.weights == WindowWeights::kBatches ? 1 / static_cast<double>(length)
                                                          : n.count / divisor;
    return n;
  }

  void run_backward(const at::Tensor& loss, const MicroBatch& micro, const Numbers& numbers,
                    bool ends) {
    const bool empty = micro.count == 0;
    const bool alone = parallelism->mesh().world().size() == 1 || !loss.requires_grad();
    if (empty && alone && !ends) return;
    at::Tensor weighed = empty ? loss * 0.0 : (numbers.weight == 1 ? loss : loss * numbers.weight);
    if (micro.scaler != nullptr) weighed = micro.scaler->scale(weighed);
    std::optional<parallel::FiniteBackward> finite;
    if (empty) finite.emplace(weighed);
    parallelism->backward(weighed, /*last=*/ends);
  }

  void add_to_window(const at::Tensor& loss, const MicroBatch& micro, const Numbers& numbers) {
    if (micro.count == 0) return;
    const at::NoGradGuard no_grad;
    count += micro.count;
    loss_sum.add_(share(loss, numbers));
  }

  // The loss's contribution to the window's sum.
  at::Tensor share(const at::Tensor& loss, const Numbers& numbers) const {
    const at::Tensor wide = loss.detach().to(loss_sum.device(), at::kDouble).reshape({});
    return options.weights == WindowWeights::kBatches ? wide : wide * numbers.count;
  }

  at::Tensor seen_count(const Numbers& numbers) const {
    return at::scalar_tensor(numbers.seen, loss_sum.options());
  }

  // With batches as weights, every rank's window is as long as planned, or all are equally short.
  void finish_batches() {
    last.batches = done;
    last.count = at::scalar_tensor(count, at::dtype(at::kLong).device(loss_sum.device()));
    last.loss = loss_sum / static_cast<double>(done);
    if (done != length) scale_averages(static_cast<double>(length) / static_cast<double>(done));
  }

  void finish_own_counts(const Numbers& numbers) {
    const at::Tensor seen = seen_count(numbers);
    last.batches = done;
    last.count = seen.to(at::kLong);
    last.loss = loss_sum / seen.clamp_min(1);
  }

  void finish_counts(const at::Tensor& totals, const Numbers& numbers) {
    last.batches = done;
    last.count = totals[0].to(at::kLong);
    last.loss = totals[1] / totals[0].clamp_min(1);  // of nothing: 0
    if (batch().size() == 1) {
      if (numbers.factor != 1) scale_averages(numbers.factor);
      return;
    }
    const double all = wanted();
    if (totals.is_cpu()) {
      const double seen = totals[0].item<double>();
      if (seen > 0 && seen != all) scale_averages(all / seen);
      return;
    }
    // On a GPU the host does not wait to learn whether the factor is one.
    const at::Tensor factor = all / totals[0].clamp_min(1);
    scale_gradients(at::where(totals[0] > 0, factor, at::ones_like(factor)));
  }

  // A sharded optimizer averages in its step, and rounds like this only if it multiplies after.
  void scale_averages(double factor) {
    if (!parallelism->scale_averages(factor)) scale_gradients(factor);
  }

  template <typename Factor>
  void scale_gradients(const Factor& factor) {
    std::map<std::string, std::vector<at::Tensor>> dense;  // by device and type
    for (const auto& parameter : parameters) {
      at::Tensor grad = parameter.grad();
      if (!grad.defined()) continue;
      if (grad.layout() == at::kStrided) {
        dense[grad.device().str() + c10::toString(grad.scalar_type())].push_back(grad);
      } else {
        grad.mul_(as(grad, factor));
      }
    }
    for (auto& [kind, grads] : dense) at::_foreach_mul_(grads, as(grads[0], factor));
  }

  static double as(const at::Tensor&, double factor) { return factor; }
  static at::Tensor as(const at::Tensor& grad, const at::Tensor& factor) {
    return factor.to(grad.device(), grad.scalar_type());
  }

  // Every weight is known before the first loss is.
  void run_queue() {
    const bool own = options.weights == WindowWeights::kOwnCounts;
    std::int64_t total = 0;
    for (const auto& [loss, micro] : queue) total += micro.count;
    if (own) planned = static_cast<double>(std::max<std::int64_t>(1, total));
    std::vector<Parallelism::Pass> passes;
    std::vector<Numbers> numbers;
    std::int64_t before = 0;
    for (const auto& [loss, micro] : queue) {
      numbers.push_back(numbers_of(micro, before, numbers.size() + 1 == queue.size()));
      before += micro.count;
      passes.push_back({.forward = loss,
                        .weigh =
                            [micro, weight = numbers.back().weight](const at::Tensor& mean) {
                              if (micro.count == 0) return at::Tensor();
                              const at::Tensor weighed = weight == 1 ? mean : mean * weight;
                              return micro.scaler ? micro.scaler->scale(weighed) : weighed;
                            },
                        .sizes = micro.sizes});
    }
    const std::vector<at::Tensor> losses = parallelism->run_window(passes);
    for (std::size_t i = 0; i < losses.size(); ++i)
      add_to_window(losses[i], queue[i].second, numbers[i]);
    const MicroBatch last_micro = queue.back().second;
    const at::NoGradGuard no_grad;
    // A rank that computes no loss needs the scale for its step all the same.
    if (last_micro.scaler != nullptr) last_micro.scaler->scale(losses.back());
    if (options.weights == WindowWeights::kCounts) {
      const at::Tensor totals = at::stack({seen_count(numbers.back()), loss_sum});
      if (batch().size() > 1) batch().all_reduce(totals).wait();
      finish_counts(totals, numbers.back());
    } else if (own) {
      finish_own_counts(numbers.back());
    } else {
      finish_batches();
    }
  }

  void check(const at::Tensor& loss, const MicroBatch& micro) const {
    if (loss.numel() != 1)
      throw UsageError(kWho,
                       "the loss has {} elements. It must be the mean over the micro-batch. Use a "
                       "reduction, or call mean().",
                       loss.numel());
    check(micro);
  }

  void check(const MicroBatch& micro) const {
    if (micro.count < 0)
      throw UsageError(kWho, "a micro-batch of {} samples. Pass the number the loss is a mean of.",
                       micro.count);
    if (epoch_known && remaining == 0)
      throw UsageError(
          kWho,
          "more micro-batches came than begin_epoch() was given. The window before "
          "was ended as the epoch's last. Call begin_epoch() at the start of each epoch.");
  }
};

Accumulation::Accumulation(std::shared_ptr<Parallelism> parallelism,
                           std::vector<at::Tensor> parameters, AccumulationOptions options)
    : impl_(std::make_unique<Impl>()) {
  std::unordered_set<at::TensorImpl*> seen;
  for (auto& parameter : parameters)
    if (seen.insert(parameter.unsafeGetTensorImpl()).second)
      impl_->parameters.push_back(std::move(parameter));
  agree_on(options, parallelism->mesh().world(), parallel::refusal_of([&] {
             check_options(options);
             if (!impl_->parameters.empty()) return;
             throw UsageError(
                 kWho, "there are no parameters to accumulate for. Pass model.parameters().");
           }));
  impl_->parallelism = std::move(parallelism);
  impl_->options = options;
  impl_->expected = static_cast<double>(options.expected_count);
}

Accumulation::~Accumulation() = default;

void Accumulation::begin_epoch(std::int64_t batches) {
  if (impl_->done != 0)
    throw UsageError(kWho,
                     "an epoch begins in the middle of a window ({} of {} micro-batches). Their "
                     "gradients would leak into it. End the window with last = true, or abandon() "
                     "it and call zero_grad().",
                     impl_->done, impl_->length);
  World& world = impl_->parallelism->mesh().world();
  if (world.size() > 1) {
    const double most = all_reduce(world, static_cast<double>(batches), ReduceOp::kMax);
    const double least = all_reduce(world, static_cast<double>(batches), ReduceOp::kMin);
    if (most != least)
      throw UsageError(kWho,
                       "ranks have between {} and {} micro-batches in this epoch. One would step "
                       "without the others. Let the loader give equally many (drop_last), or call "
                       "begin_epoch(0) and pass last = true.",
                       least, most);
  }
  impl_->epoch_known = batches > 0;
  impl_->remaining = batches;
}

namespace {
// If a sharded optimizer reduces in its step, this is the first wait for other ranks.
void wait_for_others(Work& exchange) {
  const ledger::PhaseScope communication(ledger::Phase::kCommunication);
  exchange.wait();
}
}  // namespace

bool Accumulation::backward(const at::Tensor& loss, const MicroBatch& micro) {
  Impl& self = *impl_;
  self.check(loss, micro);
  const bool counts = self.options.weights == WindowWeights::kCounts;
  const bool own = self.options.weights == WindowWeights::kOwnCounts;
  if (counts || own) self.agree_on_expected(micro.count);
  if (self.done == 0) self.plan_window();
  const bool ends = micro.last || self.done + 1 == self.length;
  self.agree_on_length(self.done + 1, ends);
  const Numbers numbers = self.numbers_of(micro, self.count, ends);
  self.add_to_window(loss, micro, numbers);
  if (ends && own && self.done > 0 && numbers.factor != 1) {
    const at::NoGradGuard no_grad;
    self.scale_gradients(numbers.factor);
  }
  const bool uncounted = !self.parallelism->counts_passes();
  if (uncounted) ledger::add(ledger::Counter::kMicroBatches);
  at::Tensor totals;
  Work exchange;
  if (ends && counts) {
    // Under way while backward computes.
    totals = at::stack({self.seen_count(numbers), self.loss_sum});
    if (self.batch().size() > 1) exchange = self.batch().all_reduce(totals);
  }
  try {
    self.run_backward(loss, micro, numbers, ends);
  } catch (...) {
    self.count -= micro.count;  // it may be repeated
    const at::NoGradGuard no_grad;
    if (micro.count > 0) self.loss_sum.sub_(self.share(loss, numbers));
    throw;
  }
  ++self.done;
  if (self.epoch_known) --self.remaining;
  if (!ends) return false;
  const at::NoGradGuard no_grad;
  if (counts) {
    wait_for_others(exchange);
    self.finish_counts(totals, numbers);
  } else if (own) {
    self.finish_own_counts(numbers);
  } else {
    self.finish_batches();
  }
  self.done = 0;
  if (uncounted) ledger::count_step();
  return true;
}

bool Accumulation::backward(std::function<at::Tensor()> loss, const MicroBatch& micro) {
  Impl& self = *impl_;
  if (!self.parallelism->takes_windows()) return backward(self.parallelism->watch(loss()), micro);
  self.check(micro);
  if (self.options.weights != WindowWeights::kBatches) self.agree_on_expected(micro.count);
  if (self.done == 0) {
    self.queue.clear();
    self.plan_window();
  }
  self.queue.emplace_back(std::move(loss), micro);
  ledger::add(ledger::Counter::kMicroBatches);
  ++self.done;
  if (self.epoch_known) --self.remaining;
  if (!micro.last && self.done != self.length) return false;
  try {
    self.agree_on_length(self.done, /*ends=*/true);
    self.run_queue();
  } catch (...) {
    abandon();
    throw;
  }
  abandon();
  ledger::count_step();
  return true;
}

std::int64_t Accumulation::steps() const {
  return impl_->options.steps;
}

bool Accumulation::at_boundary() const {
  return impl_->done == 0;
}

void Accumulation::abandon() {
  impl_->done = 0;
  impl_->queue.clear();
}

const Window& Accumulation::last_window() const {
  return impl_->last;
}

}  // namespace lockstep
