#include "lockstep/parallel/sharded_optimizer.h"

#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "lockstep/comm/device.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/log.h"
#include "lockstep/optim/rule_state.h"
#include "lockstep/parallel/replicas.h"
#include "lockstep/parallel/sharded_impl.h"

namespace lockstep {
namespace parallel {

namespace {

bool is_shared(const std::vector<GradientBucket>& buckets) {
  return std::all_of(buckets.begin(), buckets.end(),
                     [](const GradientBucket& bucket) { return !bucket.parts.empty(); });
}

}  // namespace

ShardedImpl::ShardedImpl(std::shared_ptr<Reducer> reducer, optim::Optimizer& optimizer)
    : reducer_(std::move(reducer)),
      world_(reducer_->world()),
      optimizer_(optimizer),
      debug_(env::get_bool("LOCKSTEP_DEBUG").value_or(false)) {
  bool has_gradients = false;
  try {
    agree_on_making(refusal_of([&] {
      check_options();
      buckets_ = store_.hand_over(*this);
      has_gradients = true;
      collect_members();
    }));
    make_domains();
    bind_parameters();
    find_pieces();
    remember_parameters();
    take_prints();
  } catch (...) {
    if (has_gradients) store_.take_back();  // otherwise another optimizer may have them
    throw;
  }
}

// The others would wait for a rank that could not continue. Nor would they ever see that each steps
// its share with options of its own.
void ShardedImpl::agree_on_making(const std::exception_ptr& refusal) {
  std::string members;
  for (const auto& member : members_)
    members += fmt::format("{} in group {}\n", member.name, member.group);
  agreement_.agree_on_making(refusal, members);
}

ShardedImpl::~ShardedImpl() {
  try {
    store_.take_back();  // before anything that can fail: it would continue asking this one
    const torch::NoGradGuard no_grad;
    for (auto& member : members_)
      if (shared_ && member.tensor.const_data_ptr() == member.data)
        member.tensor.set_data(member.tensor.detach().clone(at::MemoryFormat::Preserve));
  } catch (const std::exception& e) {
    log::warning(kComponent, "the model could not be given its own memory back: {}", e.what());
  }
}

// Parameters in the groups, which torch's functions may change.
std::size_t ShardedImpl::count_listed() const {
  std::size_t count = 0;
  for (const auto& group : optimizer_.param_groups()) count += group.params().size();
  return count;
}

void ShardedImpl::check_options() const {
  optim::detail::check_groups(kComponent, optimizer_.param_groups());
  if (count_listed() != listed_)
    throw UsageError(
        kComponent,
        "the groups have {} parameters instead of {}: some were added or removed. Each "
        "rank has its share of the first ones. Make a new optimizer.",
        count_listed(), listed_);
  optim::detail::check(optim::StepOptions{.max_grad_norm = settings_.max_grad_norm});
}

void ShardedImpl::collect_members() {
  const auto& groups = optimizer_.param_groups();
  const auto group_of = [&](const at::Tensor& tensor) -> std::optional<std::size_t> {
    std::optional<std::size_t> found;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const auto& params = groups[g].params();
      const bool here = std::any_of(params.begin(), params.end(),
                                    [&](const at::Tensor& p) { return p.is_same(tensor); });
      if (here && found)
        throw UsageError(kComponent,
                         "a parameter of shape [{}] is in groups {} and {}. Put it into one.",
                         fmt::join(tensor.sizes(), ", "), *found, g);
      if (here) found = g;
    }
    return found;
  };
  std::vector<std::string> skipped;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    for (const auto& slot : buckets_[b].slots) {
      const auto group = group_of(slot.parameter);
      if (!group) {
        skipped.push_back(slot.name);
        continue;
      }
      (void)optimizer_.options(*group)->state(
          slot.parameter.sizes());  // refuses what it cannot step
      members_.push_back({.name = slot.name,
                          .index = slot.index,
                          .tensor = slot.parameter,
                          .slot = slot.gradient,
                          .bucket = b,
                          .offset = slot.offset,
                          .group = *group});
    }
  }
  if (members_.empty())
    throw UsageError(kComponent,
                     "none of the given parameters is a trainable, dense parameter of the wrapped "
                     "model. Pass model.parameters().");
  for (const auto& group : groups) {
    for (const auto& tensor : group.params()) {
      const bool known = std::any_of(members_.begin(), members_.end(), [&](const Member& member) {
        return member.tensor.is_same(tensor);
      });
      if (tensor.requires_grad() && !known)
        throw UsageError(kComponent,
                         "a parameter of shape [{}] is not among those the model's wrapper keeps "
                         "equal (ignored_parameters?). Leave it out, or step it with an optimizer "
                         "of its own.",
                         fmt::join(tensor.sizes(), ", "));
    }
  }
  // Backward averages none of the model's gradients from now on: who stepped these otherwise would
  // do so with this rank's own.
  if (!skipped.empty())
    throw UsageError(kComponent,
                     "{} of the model's trainable parameters {} in no group ('{}'{}), so nobody "
                     "would average {} gradient. Put all into groups (lr = 0 leaves one as it is), "
                     "or freeze the others or list them in ignored_parameters before wrapping.",
                     skipped.size(), skipped.size() == 1 ? "is" : "are", skipped[0],
                     skipped.size() == 1 ? "" : ", ...", skipped.size() == 1 ? "its" : "their");
}

// Tensors of one dtype and device travel and are stepped together, those of rules over elements
// apart from those of rules over whole tensors.
void ShardedImpl::make_domains() {
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const at::Tensor& tensor = members_[i].tensor;
    const optim::Granularity granularity = optimizer_.options(members_[i].group)->granularity();
    auto found = std::find_if(domains_.begin(), domains_.end(), [&](const Domain& d) {
      return d.dtype == tensor.scalar_type() && d.device == tensor.device() &&
             d.granularity == granularity;
    });
    if (found == domains_.end()) {
      domains_.push_back(
          {.dtype = tensor.scalar_type(), .device = tensor.device(), .granularity = granularity});
      found = domains_.end() - 1;
    }
    found->members.push_back(i);
  }
  // Norms are added in the model's order, which does not depend on buckets.
  std::vector<Member*> in_order;
  for (auto& member : members_) in_order.push_back(&member);
  std::sort(in_order.begin(), in_order.end(),
            [](const Member* a, const Member* b) { return a->index < b->index; });
  for (Member* member : in_order) {
    member->first_block = blocks_;
    blocks_ += (member->tensor.numel() + kBlock - 1) / kBlock;
  }
  for (auto& domain : domains_) {
    std::vector<std::int64_t> sizes;
    std::vector<double> costs;
    for (const std::size_t i : domain.members) {
      sizes.push_back(members_[i].tensor.numel());
      costs.push_back(optimizer_.options(members_[i].group)->cost(members_[i].tensor.sizes()));
    }
    domain.shares = domain.whole() ? deal_tensors(sizes, costs, world_.size())
                                   : cut_into_shares(sizes, world_.size());
    for (auto& share : domain.shares)
      for (auto& piece : share) piece.parameter = domain.members[piece.parameter];
    std::int64_t place = 0;
    for (const Piece& piece : domain.shares[static_cast<std::size_t>(world_.rank())]) {
      domain.owned.push_back({.piece = piece, .place = place});
      place += piece.count;
    }
  }
}

// Parameters move into flat memory laid out as their gradients: shared by all ranks where there is
// such memory, this rank's own elsewhere.
void ShardedImpl::bind_parameters() {
  const torch::NoGradGuard no_grad;
  shared_ = is_shared(buckets_);
  std::vector<at::Tensor> flats;
  if (shared_) {
    std::vector<std::int64_t> bytes;
    for (const auto& bucket : buckets_)
      bytes.push_back((static_cast<std::int64_t>(bucket.mine.nbytes()) + 63) / 64 * 64);
    const PartOffsets offsets = spread_over_parts(bytes, world_.size());
    const auto parts = world_.symmetric({offsets.part_size}, at::kByte);
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      const auto& bucket = buckets_[b];
      const PartOffset& offset = offsets.places[b];
      flats.push_back(parts[static_cast<std::size_t>(offset.part)]
                          .narrow(0, offset.offset, static_cast<std::int64_t>(bucket.mine.nbytes()))
                          .view(bucket.mine.scalar_type()));
    }
  } else {
    for (const auto& bucket : buckets_) flats.push_back(at::zeros_like(bucket.mine));
  }
  std::vector<at::Tensor> places;
  for (auto& member : members_) {
    const at::Tensor& flat = flats[member.bucket];
    member.flat = flat.narrow(0, member.offset, member.tensor.numel());
    places.push_back(place_of(member));
    // Every rank has the same values; on shared memory one of them writes.
    if (!shared_ || world_.is_leader()) places.back().copy_(member.tensor);
  }
  synchronize_ranks();
  for (std::size_t i = 0; i < members_.size(); ++i) members_[i].tensor.set_data(places[i]);
}

// A tiny exchange that every rank passes only when all have come.
void ShardedImpl::synchronize_ranks() {
  if (world_.size() == 1) return;
  const ledger::PhaseScope communication(ledger::Phase::kCommunication);
  at::Tensor token = at::zeros({1}, at::kByte);
  world_.all_reduce(token, ReduceOp::kMax).wait();
}

// ---------------------------------------------------------------- a step

optim::StepResult ShardedImpl::step(const optim::StepOptions& wanted) {
  idle_ = false;
  settings_ = StepSettings::of(wanted);
  const Outcome outcome = take_step(store_.begin_step(/*has_inputs=*/true));
  if (wanted.scaler != nullptr && wanted.scaler->enabled()) {
    wanted.scaler->record_step(&optimizer_, outcome.skipped);
    wanted.scaler->update();
  }
  optim::StepResult result;
  if (settings_.max_grad_norm > 0 || settings_.want_grad_norm)
    result.grad_norm = at::scalar_tensor(outcome.grad_norm, at::kDouble);
  if (settings_.skip_non_finite)
    result.skipped = at::full({1}, outcome.skipped ? 1.0 : 0.0, at::kFloat);
  return result;
}

void ShardedImpl::idle_step() {
  idle_ = true;  // the settings are the others' from here on
  zero_grad();   // what a backward without a step has left is not theirs
  take_step(store_.begin_step(/*has_inputs=*/false));
}

// A rank that has run out sets no learning rate any more, but its elements need the others'.
void ShardedImpl::share_settings(int root) {
  at::Tensor values = at::tensor(agreement_.numbers(), at::kDouble);
  world_.broadcast(values, root).wait();
  if (idle_) agreement_.take(values.const_data_ptr<double>());
}

ShardedImpl::Outcome ShardedImpl::take_step(const StepTurn& how) {
  const torch::NoGradGuard no_grad;
  divisor_ = how.divisor;
  if (how.joining) share_settings(how.root);
  agree_on_gradients();
  Outcome outcome;
  double clip = 1;
  const auto mark = [&](ledger::Phase phase) { mark_device_phase(phase, world_.device()); };
  mark(ledger::Phase::kCommunication);
  for (auto& domain : domains_) bring_gradients(domain);
  mark(ledger::Phase::kOptimizer);
  if (settings_.two_passes()) {
    const Norm norm = reduce_owned();
    outcome = {.grad_norm = norm.value, .skipped = settings_.skip_non_finite && !norm.finite};
    // As torch clips: a norm that is not a number stays one.
    const double coefficient = settings_.max_grad_norm / (norm.value + 1e-6);
    if (settings_.max_grad_norm > 0) clip = coefficient > 1 ? 1 : coefficient;
  }
  if (!outcome.skipped) {
    for (auto& member : members_)
      if (member.used) ++member.steps;
    for (auto& domain : domains_)
      for (auto& owned : domain.owned) update(domain, owned, clip);
    mark(ledger::Phase::kCommunication);
    if (!shared_)
      for (auto& domain : domains_) publish(domain);
  }
  mark(ledger::Phase::kNone);
  take_prints();
  // Nobody reads shared parameters, or clears shared gradients, before all owners are done. The
  // exchange of the norm has said that the gradients are, and a step that is skipped writes
  // nothing.
  if (shared_ && !outcome.skipped) synchronize_ranks();
  for (auto& domain : domains_) domain.received.clear();
  reduced_ = false;
  for (auto& member : members_) member.tensor.unsafeGetTensorImpl()->bump_version();
  remember_parameters();
  store_.end_step(/*has_inputs=*/!idle_);
  return outcome;
}

void ShardedImpl::check_gradients() const {
  watch_.refuse_written(kComponent);
  for (const auto& member : members_) {
    const at::Tensor& grad = member.tensor.grad();
    if (reduced_ && grad.defined() &&
        (!grad.is_same(member.slot) || grad._version() != member.reduced_version))
      throw UsageError(kComponent,
                       "'{}' got another gradient after reduce_now(). Call step() or zero_grad() "
                       "before the next backward.",
                       member.name);
  }
}

// Before anything is changed that a user can see. The same exchange says which parameters any rank
// has a gradient for.
void ShardedImpl::agree_on_gradients() {
  Check check{.component = kComponent, .what = "this step"};
  if (announced_) {
    Announced announced = std::move(*announced_);
    announced_.reset();
    check.refusal = announced.refusal;
    announced.work.wait();
    refuse_with(check, std::move(announced.refusals));
  }
  check.refusal = find_refusal();
  at::Tensor flags = at::zeros({static_cast<std::int64_t>(members_.size())}, at::kByte);
  if (!check.refusal) place_gradients(flags.mutable_data_ptr<std::uint8_t>());
  flags = agreement_.exchange(check, flags);
  const auto* const used = flags.const_data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < members_.size(); ++i) members_[i].used = used[i] != 0;
}

// Takes this rank's part in the next agree_on_gradients() without waiting for the others: they come
// there in their step(), and learn it. In a join other exchanges come before, and under
// LOCKSTEP_DEBUG every exchange waits.
void ShardedImpl::announce(const std::exception_ptr& refusal) {
  if (world_.size() == 1 || announced_ || debug_ || store_.joining()) return;
  const at::Tensor flags =
      StepAgreement::refusal_message(static_cast<std::int64_t>(members_.size()));
  try {
    Work work = world_.all_reduce(flags, ReduceOp::kMax);
    announced_ = {.refusal = refusal, .work = work, .refusals = gather_refusals(world_, refusal)};
  } catch (const CommError&) {
    // They are gone, and say so themselves; the refusal stands.
  }
}

std::exception_ptr ShardedImpl::find_refusal() const {
  return refusal_of([this] {
    check_options();
    store_.check_unchanged();
    check_parameters();
    check_prints();
    check_gradients();
    if (world_.size() > 1 && !idle_) store_.check_all_used();
  });
}

// This rank's gradients lie in their slots from here on.
void ShardedImpl::place_gradients(std::uint8_t* has_gradient) {
  watch_.reset();
  for (std::size_t i = 0; i < members_.size(); ++i) {
    Member& member = members_[i];
    const at::Tensor& grad = member.tensor.grad();
    if (!grad.defined()) {
      if (!reduced_) member.slot.zero_();
    } else if (!grad.is_same(member.slot)) {
      member.slot.copy_(grad);
    }
    has_gradient[i] = grad.defined() ? 1 : 0;
  }
}

void ShardedImpl::zero_grad() {
  watch_.reset();
  reduced_ = false;
  for (auto& member : members_) {
    at::Tensor& grad = member.tensor.mutable_grad();
    if (grad.defined()) grad = at::Tensor();
  }
}

void ShardedImpl::reduce_now() {
  const torch::NoGradGuard no_grad;
  if (reduced_) return;
  if (store_.joining())
    throw UsageError(kComponent,
                     "reduce_now() was called inside join(), where ranks that have run out follow "
                     "step() alone. Look at averaged gradients outside of it.");
  idle_ = false;
  settings_ = {};
  agree_on_gradients();
  for (auto& bucket : buckets_) {
    if (world_.size() > 1) world_.all_reduce(bucket.mine, ReduceOp::kAvg).wait();
  }
  for (auto& member : members_) {
    if (!member.used) continue;
    member.tensor.mutable_grad() = member.slot;
    member.reduced_version = member.slot._version();
  }
  reduced_ = true;
}

}  // namespace parallel

ShardedOptimizer::ShardedOptimizer(std::shared_ptr<Reducer> reducer,
                                   const std::vector<optim::ParamGroup>& groups)
    : Optimizer(groups),
      impl_(std::make_unique<parallel::ShardedImpl>(std::move(reducer), *this)) {}
ShardedOptimizer::~ShardedOptimizer() = default;

optim::StepResult ShardedOptimizer::step(const optim::StepOptions& options) {
  const ledger::PhaseScope optimizer(ledger::Phase::kOptimizer);
  optim::StepResult result = impl_->step(options);
  ledger::count_step();
  return result;
}
void ShardedOptimizer::zero_grad() {
  impl_->zero_grad();
}
void ShardedOptimizer::reduce_now() {
  impl_->reduce_now();
}
optim::TensorDict ShardedOptimizer::state_dict(const optim::StateDictOptions& options) {
  return impl_->state_dict(options.wanted);
}
void ShardedOptimizer::load_state_dict(const optim::TensorDict& state) {
  impl_->load_state_dict(state);
}
void ShardedOptimizer::sync_from_model() {
  impl_->sync_from_model();
}
std::int64_t ShardedOptimizer::state_bytes() const {
  return impl_->state_bytes();
}

}  // namespace lockstep
