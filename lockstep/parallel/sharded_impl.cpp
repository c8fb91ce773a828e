// What a rank does with the elements it owns. In a step: bring their gradients here, sum, update,
// hand out. Beside a step: load and save the optimizer's state, and take parameters that were
// written by other code than step().
#include "lockstep/parallel/sharded_impl.h"

#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/kernels/step.h"
#include "lockstep/optim/cpu_step.h"
#include "lockstep/optim/rule_state.h"
#include "lockstep/parallel/replicas.h"

namespace lockstep::parallel {
namespace {

static_assert(kBlock == kernels::kNormBlock);

using Combination = optim::SplitGradient;
using optim::detail::has_kernel;
using optim::detail::Sources;

template <typename Body>
void by_type(c10::ScalarType dtype, const Body& body) {
  if (dtype == at::kFloat) return body(float{});
  LOCKSTEP_ASSERT(dtype == at::kDouble);
  body(double{});
}

// Calls body(first element, count) on several threads, each for whole blocks of a piece.
template <typename Body>
void by_blocks(std::int64_t count, const Body& body) {
  optim::detail::share_out(kernels::norm_blocks(count), kBlock,
                           [&](std::int64_t begin, std::int64_t end) {
                             body(begin * kBlock, std::min(end * kBlock, count) - begin * kBlock);
                           });
}

// The gradients of all ranks as one, with ATen: for half types (summed in float and rounded once)
// and for devices.
at::Tensor combine(const Combination& how) {
  const at::Tensor& first = how.sources[0];
  const bool half = first.scalar_type() == at::kHalf || first.scalar_type() == at::kBFloat16;
  at::Tensor sum = first.to(half ? at::kFloat : first.scalar_type(), false, /*copy=*/true);
  for (std::size_t i = 1; i < how.sources.size(); ++i) sum.add_(how.sources[i]);
  if (how.divisor != 1) sum.div_(how.divisor);
  sum = sum.to(first.scalar_type());
  if (how.scale != 1) sum.mul_(how.scale);
  return sum;
}

template <typename T>
void update_with_kernel(const optim::SpanKernels& kernels, const Combination& how,
                        const optim::detail::Memory<T>& memory, const kernels::Slice& slice,
                        double steps) {
  const Sources<T> sources(how.sources);
  const kernels::SpanKernel<T> kernel = optim::detail::kernel_of<T>(kernels);
  by_blocks(slice.count, [&](std::int64_t begin, std::int64_t count) {
    const Sources<T> rest = sources.after(begin);
    const optim::detail::Memory<T> here = memory.after(begin);
    kernel({.gradient = rest.gradient(how),
            .param = here.param,
            .state = here.state.data(),
            .slice = {slice.tensor_size, slice.begin + begin, count},
            .step = steps},
           kernels.options);
  });
}

// Square sums of blocks on any device, as the kernels define them up to rounding.
at::Tensor block_sums(const at::Tensor& values) {
  const std::int64_t rest = values.numel() % kBlock;
  at::Tensor squares = values.to(at::kDouble).square();
  if (rest != 0) squares = at::constant_pad_nd(squares, {0, kBlock - rest});
  return squares.view({-1, kBlock}).sum(1).cpu();
}

}  // namespace

// The addresses of the owned pieces are fixed from here on.
void ShardedImpl::find_pieces() {
  for (auto& domain : domains_) {
    for (auto& owned : domain.owned) {
      const Member& member = members_[owned.piece.parameter];
      const auto& bucket = buckets_[member.bucket];
      const std::int64_t begin = member.offset + owned.piece.begin;
      owned.mine = bucket.mine.narrow(0, begin, owned.piece.count);
      owned.param = member.flat.narrow(0, owned.piece.begin, owned.piece.count);
      for (const auto& part : bucket.parts)
        owned.shared.push_back(part.narrow(0, begin, owned.piece.count));
    }
  }
}

// Without shared memory: every owner gets its share of all ranks' gradients.
void ShardedImpl::bring_gradients(Domain& domain) {
  if (shared_ || reduced_ || world_.size() == 1) return;
  const ledger::PhaseScope communication(ledger::Phase::kCommunication);
  std::vector<at::Tensor> outgoing;
  for (const auto& share : domain.shares) {
    std::vector<at::Tensor> pieces{at::empty({0}, at::dtype(domain.dtype).device(domain.device))};
    for (const Piece& piece : share) {
      const Member& member = members_[piece.parameter];
      pieces.push_back(
          buckets_[member.bucket].mine.narrow(0, member.offset + piece.begin, piece.count));
    }
    outgoing.push_back(at::cat(pieces));
  }
  const auto mine = static_cast<std::size_t>(world_.rank());
  domain.received.clear();
  for (int rank = 0; rank < world_.size(); ++rank)
    domain.received.push_back(at::empty_like(outgoing[mine]));
  world_.all_to_all(domain.received, outgoing).wait();
}

std::vector<at::Tensor> ShardedImpl::sources_of(const Domain& domain, const Owned& owned) const {
  if (reduced_ || world_.size() == 1) return {owned.mine};
  if (shared_) return owned.shared;
  std::vector<at::Tensor> sources;
  for (const auto& received : domain.received)
    sources.push_back(received.narrow(0, owned.place, owned.piece.count));
  return sources;
}

// Whether the second of two passes sums the gradients again instead of reading what the first one
// wrote. Writing the sum and reading it back is three passes over memory (a line is read before
// it is written) and takes memory of its own; summing again is as many as there are sources, and
// pays up to two. Unscaling and clipping are two roundings, of which the kernels do one.
bool ShardedImpl::sums_twice(const Domain& domain) const {
  constexpr int kMaxSources = 2;
  return has_kernel(domain.dtype, domain.device) && settings_.gradient_scale() == 1 &&
         (reduced_ || world_.size() <= kMaxSources);
}

// The first of two passes: the owned gradients, reduced, and the norm over all parameters. .grad
// stays as it is: a second step without zero_grad() must find what this one found.
ShardedImpl::Norm ShardedImpl::reduce_owned() {
  at::Tensor sums = at::zeros({blocks_ + 1}, at::kDouble);
  auto* sum = sums.mutable_data_ptr<double>();
  std::atomic<bool> finite{true};
  for (auto& domain : domains_) {
    const bool norm_alone = sums_twice(domain);
    for (auto& owned : domain.owned) {
      const Member& member = members_[owned.piece.parameter];
      if (!member.used) continue;
      Combination how{sources_of(domain, owned), 1, settings_.gradient_scale()};
      how.divisor = reduced_ ? 1 : divisor_;
      if (norm_alone) {
        owned.reduced = at::Tensor();
      } else if (!owned.reduced.defined()) {
        owned.reduced = at::empty_like(owned.mine);
      }
      double* const blocks = sum + member.first_block + owned.piece.begin / kBlock;
      if (has_kernel(domain.dtype, domain.device)) {
        by_type(domain.dtype, [&]<typename T>(T) {
          const Sources<T> sources(how.sources);
          T* const out = norm_alone ? nullptr : owned.reduced.mutable_data_ptr<T>();
          by_blocks(owned.piece.count, [&](std::int64_t begin, std::int64_t count) {
            const Sources<T> rest = sources.after(begin);
            const bool good =
                kernels::reduce_with_norms(rest.gradient(how), out == nullptr ? out : out + begin,
                                           count, blocks + begin / kBlock);
            if (!good) finite = false;
          });
        });
      } else {
        owned.reduced.copy_(combine(how));
        if (!at::isfinite(owned.reduced).all().item<bool>()) finite = false;
        const at::Tensor part = block_sums(owned.reduced);
        std::copy_n(part.const_data_ptr<double>(), part.numel(), blocks);
      }
    }
  }
  sum[blocks_] = finite ? 0 : 1;
  if (world_.size() > 1) {
    const ledger::PhaseScope communication(ledger::Phase::kCommunication);
    world_.all_reduce(sums).wait();
  }
  return {std::sqrt(kernels::add_blocks(sum, blocks_)), sum[blocks_] == 0};
}

void ShardedImpl::make_state(const Domain& domain, Owned& owned) {
  const Member& member = members_[owned.piece.parameter];
  const auto specs = state_of(member);
  // Never fewer: momentum that is switched off and on again continues.
  if (owned.state.size() < specs.size()) owned.state.resize(specs.size());
  for (std::size_t k = 0; k < specs.size(); ++k) {
    if (owned.state[k].defined()) continue;
    owned.state[k] =
        optim::detail::make_state(domain.whole() ? specs[k]
                                                 : optim::StateSpec{specs[k].name,
                                                                    {owned.piece.count},
                                                                    specs[k].at_least_float,
                                                                    specs[k].bfloat16},
                                  domain.whole() ? place_of(member) : owned.param);
  }
}

void ShardedImpl::update(Domain& domain, Owned& owned, double clip) {
  const bool two_passes = settings_.two_passes();
  const Member& member = members_[owned.piece.parameter];
  if (!member.used) return;
  make_state(domain, owned);
  Combination how{{owned.reduced}, 1, clip};
  if (!two_passes || sums_twice(domain)) {
    how.sources = sources_of(domain, owned);
    how.divisor = reduced_ ? 1 : divisor_;
    how.scale = two_passes ? clip : settings_.gradient_scale();
  }
  const optim::Rule& rule = optimizer_.options(member.group);
  const optim::SpanKernels kernels = rule->kernels();
  if (optim::detail::covered(kernels, owned.param, owned.mine, owned.state)) {
    const kernels::Slice slice{member.tensor.numel(), owned.piece.begin, owned.piece.count};
    by_type(domain.dtype, [&]<typename T>(T) {
      update_with_kernel<T>(kernels, how, {owned.param, owned.state}, slice, member.steps);
    });
    return;
  }
  optim::StepItem item{.param = owned.param,
                       .grad = combine(how),
                       .state = owned.state,
                       .step = {},
                       .is_first_step = member.steps == 1,
                       .origin = {optim::origin_named(member.name), owned.piece.begin}};
  if (domain.whole()) {
    item.param = place_of(member);
    item.grad = item.grad.as_strided(member.slot.sizes(), member.slot.strides());
  }
  if (rule->counts_steps())
    item.step = at::full({}, member.steps, owned.param.options().dtype(at::kFloat));
  rule->update({item}, at::Tensor());
}

// Without shared memory: every rank sends its new parameters to all others.
void ShardedImpl::publish(const Domain& domain) {
  const ledger::PhaseScope communication(ledger::Phase::kCommunication);
  const Pieces parameters{
      .device = domain.device,
      .dtype = domain.dtype,
      .count = [](const Piece& piece) { return piece.count; },
      .of = [](const Owned& owned) { return owned.param; },
      .put =
          [this](const Piece& piece, const at::Tensor& values) {
            members_[piece.parameter].flat.narrow(0, piece.begin, piece.count).copy_(values);
          }};
  exchange_pieces(domain, parameters,
                  std::vector<bool>(static_cast<std::size_t>(world_.size()), true));
}

// Every rank sends what it owns to the ranks that `to` marks, and these put what the others sent.
void ShardedImpl::exchange_pieces(const Domain& domain, const Pieces& pieces,
                                  const std::vector<bool>& to) {
  if (world_.size() == 1) return;
  const auto options = at::dtype(pieces.dtype).device(pieces.device);
  const auto mine = static_cast<std::size_t>(world_.rank());
  const at::Tensor nothing = at::empty({0}, options);
  std::vector<at::Tensor> own{nothing};
  for (const auto& owned : domain.owned)
    if (pieces.count(owned.piece) != 0) own.push_back(pieces.of(owned));
  const at::Tensor all = at::cat(own);
  std::vector<at::Tensor> outgoing, incoming;
  for (std::size_t rank = 0; rank < to.size(); ++rank) {
    std::int64_t count = 0;
    for (const Piece& piece : domain.shares[rank])
      if (to[mine]) count += pieces.count(piece);
    outgoing.push_back(to[rank] ? all : nothing);
    incoming.push_back(at::empty({count}, options));
  }
  world_.all_to_all(incoming, outgoing).wait();
  for (std::size_t rank = 0; rank < to.size() && to[mine]; ++rank) {
    std::int64_t place = 0;
    for (const Piece& piece : domain.shares[rank]) {
      const std::int64_t length = pieces.count(piece);
      if (rank == mine || length == 0) continue;
      pieces.put(piece, incoming[rank].narrow(0, place, length));
      place += length;
    }
  }
}

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

// An owner verifies its elements: in debug mode it remembers their bits between steps.
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
