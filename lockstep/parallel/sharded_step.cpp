// What a rank does with the elements it owns: bring their gradients here, sum, update, hand out.
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/kernels/step.h"
#include "lockstep/optim/cpu_step.h"
#include "lockstep/optim/rule_state.h"
#include "lockstep/parallel/sharded_impl.h"

namespace lockstep::parallel {

namespace {

static_assert(kBlock == kernels::kNormBlock);

using optim::detail::has_kernel;

template <typename Body>
void by_type(c10::ScalarType dtype, const Body& body) {
  if (dtype == at::kFloat) return body(float{});
  LOCKSTEP_ASSERT(dtype == at::kDouble);
  body(double{});
}

// Pointers of one type to every rank's gradient, and to what follows its first elements.
template <typename T>
struct Sources {
  explicit Sources(const std::vector<at::Tensor>& tensors) {
    for (const auto& tensor : tensors) pointers.push_back(tensor.template const_data_ptr<T>());
  }
  Sources after(std::int64_t elements) const {
    Sources rest = *this;
    for (const T*& pointer : rest.pointers) pointer += elements;
    return rest;
  }
  std::vector<const T*> pointers;
};

// A piece begins at a block's start; threads share it out in whole blocks. body(first element,
// count)
template <typename Body>
void by_blocks(std::int64_t count, const Body& body) {
  optim::detail::share_out(kernels::norm_blocks(count), kBlock,
                           [&](std::int64_t begin, std::int64_t end) {
                             body(begin * kBlock, std::min(end * kBlock, count) - begin * kBlock);
                           });
}

// How the gradients of all ranks become one.
struct Combination {
  std::vector<at::Tensor> sources;
  double divisor = 1;
  double scale = 1;
};

template <typename T>
kernels::Gradient<T> gradient_of(const Sources<T>& sources, const Combination& how) {
  return {.sources = sources.pointers.data(),
          .count = static_cast<int>(how.sources.size()),
          .divisor = static_cast<T>(how.divisor),
          .scale = static_cast<T>(how.scale)};
}

// The same with ATen, for half types (summed in float and rounded once) and for devices.
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
    kernel({.gradient = gradient_of(rest, how),
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

// Where the owned pieces lie does not change any more.
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

// Without shared memory: every owner gets its share of everybody's gradients.
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
            const bool good = kernels::reduce_with_norms(gradient_of(rest, how),
                                                         out == nullptr ? out : out + begin, count,
                                                         blocks + begin / kBlock);
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
    owned.state[k] = optim::detail::make_state(
        domain.whole()
            ? specs[k]
            : optim::StateSpec{specs[k].name, {owned.piece.count}, specs[k].at_least_float},
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
                       .is_first_step = member.steps == 1};
  if (domain.whole()) {
    item.param = place_of(member);
    item.grad = item.grad.as_strided(member.slot.sizes(), member.slot.strides());
  }
  if (rule->counts_steps())
    item.step = at::full({}, member.steps, owned.param.options().dtype(at::kFloat));
  rule->update({item}, at::Tensor());
}

// Without shared memory: every rank hands its new parameters to all others.
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

}  // namespace lockstep::parallel
