// What a ShardedOptimizer holds of the model beside a step: the optimizer's state in and out, and
// parameters that something else than step() has written.
#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/optim/rule_state.h"
#include "lockstep/parallel/replicas.h"
#include "lockstep/parallel/sharded_impl.h"

namespace lockstep::parallel {

namespace {

// Between a tensor and its memory, flat: a parameter need not lie row by row (channels_last).
at::Tensor shaped(const at::Tensor& flat, const at::Tensor& like) {
  return flat.as_strided(like.sizes(), like.strides());
}
at::Tensor flattened(const at::Tensor& tensor, const at::Tensor& like) {
  return at::empty_strided(like.sizes(), like.strides(), tensor.options())
      .copy_(tensor)
      .as_strided({like.numel()}, {1});
}

}  // namespace

// ---------------------------------------------------------------- parameters

// The parameter's memory in its own shape. No view of it: a parameter must not be one.
at::Tensor ShardedImpl::place_of(const Member& member) {
  const at::Tensor& flat = member.flat;
  return at::empty({0}, flat.options())
      .set_(flat.storage(), flat.storage_offset(), member.slot.sizes(), member.slot.strides());
}

void ShardedImpl::remember_parameters() {
  writes_ = 0;
  announced_.reset();
  for (auto& member : members_) {
    member.data = member.tensor.const_data_ptr();
    member.version = member.tensor._version();
  }
}

// Whoever owns elements vouches for them: in debug mode it knows their bits from step to step.
void ShardedImpl::take_prints() {
  if (!debug_) return;
  for (auto& domain : domains_)
    for (auto& owned : domain.owned) owned.print = fingerprint(owned.param);
}

void ShardedImpl::check_prints() const {
  if (!debug_) return;
  for (const auto& domain : domains_) {
    for (const auto& owned : domain.owned) {
      if (fingerprint(owned.param) == owned.print) continue;
      throw UsageError(kComponent,
                       "elements {} to {} of parameter '{}' were written between steps, on this "
                       "rank or another one. Change parameters in step() only; after loading "
                       "weights on every rank call sync_from_model().",
                       owned.piece.begin, owned.piece.begin + owned.piece.count - 1,
                       members_[owned.piece.parameter].name);
    }
  }
}

// Ranks with memory of their own would differ, which verify_replicas() sees.
const ShardedImpl::Member* ShardedImpl::find_written() const {
  if (!shared_) return nullptr;
  for (const auto& member : members_)
    if (member.tensor._version() != member.version) return &member;
  return nullptr;
}

void ShardedImpl::check_versions() const {
  if (const Member* member = find_written())
    throw UsageError(
        kComponent,
        "parameter '{}' was written between steps, by something else than step(). All "
        "ranks share its memory, so another optimizer (torch::optim) must not step it. "
        "After loading weights on every rank call sync_from_model().",
        member->name);
}

void ShardedImpl::check_parameters() const {
  for (const auto& member : members_) {
    if (member.tensor.const_data_ptr() != member.data)
      throw UsageError(kComponent,
                       "parameter '{}' was moved or replaced after the optimizer was made. Move "
                       "the model first, then wrap it and make the optimizer; after torch::load on "
                       "every rank call sync_from_model().",
                       member.name);
  }
  check_versions();
}

void ShardedImpl::check_written() const {
  check_versions();
  check_prints();
}

// A single write is left to step(), where all ranks refuse it together. Who writes again after
// another backward has a loop that never steps here: nobody else would report it. If the others do
// step, they learn of it there.
void ShardedImpl::on_backward() {
  window_scale_ = 1;
  watch_.forget();
  const Member* written = find_written();
  if (written == nullptr) return;
  std::uint64_t writes = 0;
  for (const auto& member : members_)
    writes += static_cast<std::uint32_t>(member.tensor._version()) - member.version;
  const std::uint64_t before = std::exchange(writes_, writes);
  if (before == 0 || before == writes) return;
  const auto refusal = std::make_exception_ptr(UsageError(
      kComponent,
      "parameter '{}' is written between backward passes, and step() is not called. Perhaps a "
      "torch::optim optimizer steps the model: all ranks share its memory, and gradients are "
      "averaged in this optimizer's step() alone. Call that; after loading weights on every rank "
      "call sync_from_model().",
      written->name));
  announce(refusal);
  std::rethrow_exception(refusal);
}

// After reduce_now() gradients are averages, which anybody may write.
void ShardedImpl::on_backward_end() {
  if (world_.size() == 1 || reduced_) return;
  watch_.forget();
  for (const Member& member : members_) watch_.see(member.name, member.tensor);
}

void ShardedImpl::sync_from_model() {
  const torch::NoGradGuard no_grad;
  synchronize_ranks();  // what is shared has been written by now
  const Check check{
      .component = kComponent, .what = "sync_from_model()", .refusal = refusal_of([this] {
                                                              store_.check_unchanged();
                                                              store_.check_own_memory();
                                                            })};
  Fingerprints fingerprints;
  for (const auto& member : members_) fingerprints.add(member.name, member.tensor);
  if (const auto difference = find_difference(world_, check, fingerprints))
    throw UsageError(kComponent,
                     "sync_from_model(): parameter '{}' on {} is not what it is on rank 0. Perhaps "
                     "weights were loaded on some ranks only, or from different files. Load the "
                     "same ones on every rank.",
                     difference->name, show_ranks(difference->ranks));
  return_parameters();
  remember_parameters();
  take_prints();
}

// torch::load gives a parameter other memory. Its values, equal on all ranks, go to where step()
// and the other ranks look for them.
void ShardedImpl::return_parameters() {
  const auto away = [](const Member& member) {
    return member.tensor.const_data_ptr() != member.flat.const_data_ptr();
  };
  bool any = false;
  for (const auto& member : members_) any |= away(member);
  if (!any_rank(world_, any)) return;
  for (const auto& member : members_)
    if (away(member) && (!shared_ || world_.is_leader())) place_of(member).copy_(member.tensor);
  synchronize_ranks();
  for (auto& member : members_)
    if (away(member)) member.tensor.set_data(place_of(member));
}

// ---------------------------------------------------------------- state

std::vector<optim::StateSpec> ShardedImpl::state_of(const Member& member) const {
  return optimizer_.options(member.group)->state(member.tensor.sizes());
}

// Every element's state is on its owner; all send theirs to the ranks that want the whole.
optim::TensorDict ShardedImpl::gather_state(bool wanted) {
  std::vector<bool> to;
  for (const std::string& answer : all_gather_bytes(world_, wanted ? "+" : ""))
    to.push_back(!answer.empty());
  std::size_t most = 0;
  for (const Member& member : members_) most = std::max(most, state_of(member).size());
  optim::TensorDict state;
  for (std::size_t k = 0; k < most; ++k) {
    for (const auto& domain : domains_) {
      auto dtype = domain.dtype;  // one that holds the states of all members
      for (const std::size_t i : domain.members)
        if (const auto specs = state_of(members_[i]); specs.size() > k)
          dtype = at::promoteTypes(dtype, dtype_of(specs[k], domain.dtype));
      const auto count = [&](const Piece& piece) -> std::int64_t {
        const auto specs = state_of(members_[piece.parameter]);
        if (specs.size() <= k) return 0;
        return domain.whole() ? c10::multiply_integers(specs[k].sizes) : piece.count;
      };
      const auto put = [&](const Piece& piece, const at::Tensor& values) {
        const Member& member = members_[piece.parameter];
        const optim::StateSpec spec = state_of(member)[k];
        const auto own = dtype_of(spec, domain.dtype);
        at::Tensor& whole = state[member.name + "." + spec.name];
        if (domain.whole()) {
          whole = values.to(own, false, /*copy=*/true).view(spec.sizes);
          return;
        }
        if (!whole.defined())
          whole = at::empty({member.tensor.numel()}, values.options().dtype(own));
        whole.narrow(0, piece.begin, piece.count).copy_(values);
      };
      const auto of = [&](const Owned& owned) {
        if (owned.state.size() <= k) return at::zeros({count(owned.piece)}, dtype);
        return owned.state[k].cpu().contiguous().view(-1).to(dtype);
      };
      exchange_pieces(
          domain, {.device = at::kCPU, .dtype = dtype, .count = count, .of = of, .put = put}, to);
      for (const auto& owned : domain.owned)
        if (wanted && count(owned.piece) != 0) put(owned.piece, of(owned));
    }
  }
  return state;
}

optim::TensorDict ShardedImpl::state_dict(bool wanted) {
  const torch::NoGradGuard no_grad;
  optim::TensorDict state = gather_state(wanted);
  if (!wanted) return state;
  for (const auto& member : members_) {
    const optim::Rule& rule = optimizer_.options(member.group);
    const auto specs = state_of(member);
    for (const auto& spec : specs) {
      at::Tensor& whole = state[member.name + "." + spec.name];
      if (!whole.defined()) {  // a parameter without elements
        whole = at::zeros(spec.sizes, at::dtype(dtype_of(spec, member.tensor.scalar_type())));
      } else if (rule->granularity() == optim::Granularity::kElements) {
        whole = shaped(whole, member.slot).contiguous();
      }
    }
    // Rules that count no steps have 1 once there is state.
    const double most = rule->counts_steps() ? member.steps : specs.empty() ? 0 : 1;
    state[member.name + ".step"] = at::scalar_tensor(std::min(member.steps, most), at::kDouble);
  }
  return state;
}

void ShardedImpl::load_state_dict(const optim::TensorDict& state) {
  const torch::NoGradGuard no_grad;
  Fingerprints fingerprints;
  const auto look = [&] {
    optim::detail::StateReader reader(kComponent, state);
    for (const Member& member : members_) {
      for (const auto& spec : state_of(member)) {
        const std::string name = member.name + "." + spec.name;
        const auto dtype = dtype_of(spec, member.tensor.scalar_type());
        fingerprints.add(name, reader.tensor(name, spec.sizes).to(dtype));
      }
      const std::string step = member.name + ".step";
      fingerprints.add(step, reader.number(step).to(at::kDouble));
    }
    reader.finish();
  };
  const Check check{
      .component = kComponent, .what = "load_state_dict()", .refusal = refusal_of(look)};
  if (const auto difference = find_difference(world_, check, fingerprints))
    throw UsageError(
        kComponent,
        "load_state_dict(): '{}' on {} is not what it is on rank 0. Perhaps a rank has "
        "read another checkpoint. Load the same state on every rank.",
        difference->name, show_ranks(difference->ranks));
  for (auto& member : members_) member.steps = state.at(member.name + ".step").item<double>();
  for (auto& domain : domains_) {
    for (auto& owned : domain.owned) {
      const Member& member = members_[owned.piece.parameter];
      const auto specs = state_of(member);
      make_state(domain, owned);
      for (std::size_t k = 0; k < specs.size(); ++k) {
        at::Tensor loaded = state.at(member.name + "." + specs[k].name);
        if (!domain.whole())
          loaded = flattened(loaded, member.slot).narrow(0, owned.piece.begin, owned.piece.count);
        owned.state[k].copy_(loaded);
      }
    }
  }
}

std::int64_t ShardedImpl::state_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& domain : domains_) {
    for (const auto& owned : domain.owned)
      for (const at::Tensor& part : owned.state) bytes += static_cast<std::int64_t>(part.nbytes());
  }
  return bytes;
}

}  // namespace lockstep::parallel
