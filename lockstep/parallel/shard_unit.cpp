#include "lockstep/parallel/shard_unit.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/nn/fp8.h"
#include "lockstep/parallel/sharding.h"

namespace lockstep::parallel {
namespace {

c10::Storage storage_of(const std::string& name, const at::Tensor& tensor) {
  return nn::storage_that_throws(
      tensor.nbytes(), tensor.device(),
      fmt::format(
          "[{}] parameter '{}' was used while its rows are divided over ranks. Its block was "
          "probably called past nn::Block::run(), or the model without before_forward(). Call the "
          "block's forward(), or hold gathered() while you use parameters. An optimizer of "
          "torch::optim cannot step them: take that of make_optimizer().",
          kFullyShard, name));
}

// The parameter points at `from` before, and at `to` afterwards.
void set_storage(const ShardedParameter& p, const c10::Storage& from, const c10::Storage& to) {
  if (!p.tensor.storage().is_alias_of(from))
    throw UsageError(kFullyShard,
                     "parameter '{}' was given other memory (set_data), so that its rows cannot be "
                     "gathered or freed. Copy values into it instead, while gathered() is held. "
                     "For averages hold gathered() around Ema's swap().",
                     p.name);
  p.tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(to);
}

std::vector<std::int64_t> sizes_of_rows(const at::Tensor& tensor, std::int64_t rows) {
  if (tensor.dim() == 0) return rows == 1 ? std::vector<std::int64_t>{} : std::vector{rows};
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  sizes[0] = rows;
  return sizes;
}

void check_gradient(const ShardedParameter& p, const at::Tensor& grad) {
  if (grad.layout() != at::kStrided)
    throw UsageError(kFullyShard,
                     "parameter '{}' has a sparse gradient, which is not divided by rows. Make the "
                     "embedding dense (sparse = false).",
                     p.name);
  if (grad.sizes() != p.tensor.sizes())
    throw UsageError(kFullyShard,
                     "the gradient of parameter '{}' has shape [{}], and the parameter [{}]. It "
                     "was probably written between two backwards. Call zero_grad() instead.",
                     p.name, fmt::join(grad.sizes(), ", "), fmt::join(p.tensor.sizes(), ", "));
}

}  // namespace

// ---------------------------------------------------------------- copies beside the computation

namespace {

// One for a device: memory that was used on a stream is reused on it.
c10::Stream copy_stream(c10::Device device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, c10::Stream> streams;
  const std::lock_guard lock(mutex);
  const auto found = streams.find(device.index());
  if (found != streams.end()) return found->second;
  const c10::impl::VirtualGuardImpl guard(device.type());
  return streams.emplace(device.index(), guard.getStreamFromGlobalPool(device)).first->second;
}

c10::Stream computing_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Work enqueued on `after` from here on waits for the work enqueued on `before`.
void order_streams(const c10::Stream& before, const c10::Stream& after) {
  c10::Event event(before.device_type());
  event.record(before);
  event.block(after);
}

}  // namespace

void wait_for_copies(c10::Device device) {
  copy_stream(device).synchronize();
}

// ---------------------------------------------------------------- ShardUnit

ShardUnit::ShardUnit(std::string name, const Named& parameters, World& shard)
    : name_(std::move(name)), shard_(&shard) {
  const at::NoGradGuard no_grad;
  for (const auto& [its_name, tensor] : parameters) add(its_name, tensor, 0);
  for (Flat& flat : flats_) lay_out(flat);
  free();
}

void ShardUnit::complete(std::string name, const Named& all) {
  const at::NoGradGuard no_grad;
  name_ = std::move(name);
  const auto find = [](auto& list, const at::Tensor& tensor, auto of) {
    return std::ranges::find_if(list, [&](const auto& e) { return of(e).is_same(tensor); });
  };
  for (ShardedParameter& p : parameters_) {
    const auto found = find(all, p.tensor, [](const auto& named) { return named.second; });
    if (found == all.end())
      throw UsageError(kFullyShard,
                       "parameter '{}' of block '{}' is shared with another block, and was divided "
                       "with this one while the model was made. Make the model without "
                       "ShardedConstruction.",
                       p.name, name_);
    p.name = found->first;
    p.freed = storage_of(p.name, p.tensor);
    if (!whole_) p.tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(p.freed);
    p.shard.set_requires_grad(p.tensor.requires_grad());
  }
  const std::size_t members = parameters_.size(), flats = flats_.size();
  for (const auto& [its_name, tensor] : all)
    if (find(parameters_, tensor, [](const auto& p) { return p.tensor; }) == parameters_.end())
      add(its_name, tensor, flats);
  for (std::size_t f = flats; f < flats_.size(); ++f) lay_out(flats_[f]);
  for (std::size_t i = members; !whole_ && i < parameters_.size(); ++i) free(parameters_[i]);
}

// Parameters of one type on one device travel together, from the `first_flat` on.
void ShardUnit::add(const std::string& name, const at::Tensor& tensor, std::size_t first_flat) {
  own_memory(tensor);
  parameters_.push_back(
      {.name = name, .tensor = tensor, .cut = cut_rows(tensor.sizes(), shard_->size())});
  ShardedParameter& p = parameters_.back();
  p.storage = tensor.storage();
  p.freed = storage_of(name, tensor);
  auto flat = std::find_if(flats_.begin() + static_cast<std::ptrdiff_t>(first_flat), flats_.end(),
                           [&](const Flat& each) {
                             const at::Tensor& first = parameters_[each.members[0]].tensor;
                             return first.scalar_type() == tensor.scalar_type() &&
                                    first.device() == tensor.device();
                           });
  if (flat == flats_.end()) flat = flats_.insert(flat, Flat{});
  flat->members.push_back(parameters_.size() - 1);
}

// In a world of one the rows are the parameter itself, unless they lie elsewhere.
void ShardUnit::lay_out(Flat& flat) {
  if (stays_whole()) {
    for (const std::size_t i : flat.members) {
      ShardedParameter& p = parameters_[i];
      p.shard = alias_of(p.tensor.detach(), 0, p.tensor.sizes());
      p.shard.set_requires_grad(p.tensor.requires_grad());
      p.rows = c10::make_intrusive<nn::Rows>(alias_of(p.tensor.detach(), 0, {p.tensor.numel()}), 0);
    }
    return;
  }
  std::int64_t length = 0;
  for (const std::size_t i : flat.members) length += parameters_[i].cut.padded();
  at::TensorOptions options = parameters_[flat.members[0]].tensor.options().requires_grad(false);
  if (offloads_) options = options.device(at::kCPU).pinned_memory(true);
  flat.shard = at::zeros({length}, options);
  std::int64_t offset = 0;
  for (const std::size_t i : flat.members) {
    place_rows(parameters_[i], flat.shard, offset);
    offset += parameters_[i].cut.padded();
  }
}

// They are copied from where they are, at first from the whole parameter.
void ShardUnit::place_rows(ShardedParameter& p, const at::Tensor& memory, std::int64_t offset) {
  const std::int64_t count = p.cut.count(shard_->rank());
  const nn::RowsPtr before = std::exchange(
      p.rows, c10::make_intrusive<nn::Rows>(alias_of(memory, offset, {count * p.cut.row_size}),
                                            p.cut.begin(shard_->rank()) * p.cut.row_size));
  if (before)
    p.rows->values.copy_(before->values);
  else
    take(p);
  p.shard = alias_of(memory, offset, sizes_of_rows(p.tensor, count));
  p.shard.set_requires_grad(p.tensor.requires_grad());
  if (!whole_) nn::set_rows(p.tensor, p.rows);
}

void ShardUnit::offload() {
  const auto on_host = [](const ShardedParameter& p) { return p.tensor.is_cpu(); };
  if (offloads_ || parameters_.empty() || std::ranges::any_of(parameters_, on_host)) return;
  const at::NoGradGuard no_grad;
  offloads_ = true;
  for (Flat& flat : flats_) lay_out(flat);
  free();
}

void ShardUnit::share(const std::vector<at::Tensor>& places) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    ShardedParameter& p = parameters_[i];
    p.shared = places[i];
    place_rows(p, p.shared, p.rows->begin);
  }
  for (Flat& flat : flats_) flat.shard = at::Tensor();
  shares_ = true;
}

// Each parameter stands whole in one rank's part of the memory, and parts are equally large.
bool share_rows(std::vector<ShardUnit>& units, World& shard) {
  constexpr std::int64_t kLine = 64;
  if (shard.size() == 1 || !shard.shares_memory()) return false;
  std::vector<std::int64_t> sizes;
  for (ShardUnit& unit : units)
    for (const ShardedParameter& p : unit.parameters()) {
      if (!p.tensor.is_cpu()) return false;
      sizes.push_back((static_cast<std::int64_t>(p.tensor.nbytes()) + kLine - 1) / kLine * kLine);
    }
  const PartOffsets offsets = spread_over_parts(sizes, shard.size());
  if (offsets.part_size == 0) return false;
  const std::vector<at::Tensor> parts = shard.symmetric({offsets.part_size}, at::kByte);
  auto place = offsets.places.begin();
  for (ShardUnit& unit : units) {
    std::vector<at::Tensor> places;
    for (const ShardedParameter& p : unit.parameters()) {
      const auto bytes = static_cast<std::int64_t>(p.tensor.nbytes());
      places.push_back(parts[static_cast<std::size_t>(place->part)]
                           .narrow(0, place->offset, bytes)
                           .view(p.tensor.scalar_type()));
      ++place;
    }
    unit.share(places);
  }
  return true;
}

void ShardUnit::keep(bool by_blocks) {
  if (stays_whole()) return;
  const at::NoGradGuard no_grad;
  if (shares_) {
    free();
    gather_shared(/*copies=*/false);
  } else {
    gather_exactly();
  }
  keeps_ = true;
  for_computing_ = false;
  for (Flat& flat : flats_) flat.shard = at::Tensor();
  for (ShardedParameter& p : parameters_) {
    nn::set_rows(p.tensor, nullptr);
    if (by_blocks) p.cut = cut_blocks(p.tensor.numel(), shard_->size());
    const std::int64_t rows = p.cut.count(shard_->rank()), count = rows * p.cut.row_size;
    const std::int64_t begin = p.cut.begin(shard_->rank()) * p.cut.row_size;
    const at::Tensor whole = shares_ ? p.shared : p.tensor.detach();
    p.rows = c10::make_intrusive<nn::Rows>(alias_of(whole, begin, {count}), begin);
    p.shard =
        alias_of(whole, begin, by_blocks ? std::vector{count} : sizes_of_rows(p.tensor, rows));
    p.shard.set_requires_grad(p.tensor.requires_grad());
  }
}

bool ShardUnit::trains() const {
  return std::ranges::any_of(parameters_, [](const auto& p) { return p.tensor.requires_grad(); });
}

void ShardUnit::take_whole() {
  if (stays_whole() || !whole_) return;
  // The rows have the written values, and rounded values must not replace them.
  if (for_computing_) return free();
  const at::NoGradGuard no_grad;
  for (ShardedParameter& p : parameters_) take(p);
}

void ShardUnit::take(ShardedParameter& p) {
  const at::Tensor& mine = p.rows->values;
  mine.copy_(p.tensor.detach().view({-1}).narrow(0, p.rows->begin, mine.numel()));
}

// ---------------------------------------------------------------- gathering

void ShardUnit::set_products(const std::vector<std::vector<at::Tensor>>& products) {
  fp8_members_.clear();
  for (const std::vector<at::Tensor>& list : products) {
    const auto begin = static_cast<std::int64_t>(fp8_members_.size());
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (std::ranges::any_of(list,
                              [&](const auto& t) { return t.is_same(parameters_[i].tensor); }))
        found.push_back(i);
    // One that is tied to another unit's is not here, and the scale would not be that of the list.
    const bool covered = found.size() == list.size() && nn::fp8_covers(list);
    for (const std::size_t i : found) {
      parameters_[i].product = true;
      if (!covered) continue;
      parameters_[i].amax = {begin, static_cast<std::int64_t>(found.size())};
      fp8_members_.push_back(i);
    }
  }
}

std::vector<at::Tensor> ShardUnit::fp8_rows() const {
  std::vector<at::Tensor> rows;
  if (!shares_ && !offloads_ && !stays_whole())
    for (const std::size_t i : fp8_members_) rows.push_back(parameters_[i].rows->values);
  return rows;
}

void ShardUnit::begin_gather(const ProductType& computed) {
  if (whole_ && for_computing_ && !shares_ && computed != computed_) free();
  if (!gathers_.empty() && computed != computed_) forget_gathers();
  if (whole_ || shares_ || !gathers_.empty()) return;
  begin_gathers(types_, computed);
  // Others read and write slices through their rows, after which a gathered copy is old.
  for_computing_ |= std::ranges::any_of(
      parameters_, [](const ShardedParameter& p) { return p.rows->slice != nullptr; });
}

Packing ShardUnit::packing_of(const Flat& flat, const TravelTypes& types,
                              const ProductType& computed) const {
  std::vector<Packing::Piece> pieces;
  for (const std::size_t i : flat.members) {
    const ShardedParameter& p = parameters_[i];
    const at::ScalarType own = p.tensor.scalar_type();
    pieces.push_back({p.cut.padded(), own});
    const auto travels_in = [&](const std::optional<at::ScalarType>& type) {
      if (type && at::isFloatingType(own) && at::elementSize(*type) < at::elementSize(own))
        pieces.back().type = *type;
    };
    travels_in(types.gather);
    if (!p.product) continue;
    // Values that are later cast to fp8 must not be rounded to a wider type first.
    const bool cast = computed.fp8 && p.amax.length > 0;
    if (!types.gather && !cast) travels_in(computed.type);
    if (!cast || computed.fp8 != nn::Fp8Recipe::kTensorwise || !amax_.defined()) continue;
    travels_in(at::kFloat8_e4m3fn);
    if (pieces.back().type == at::kFloat8_e4m3fn)
      pieces.back().amax = amax_.narrow(0, p.amax.begin, p.amax.length).amax();
  }
  return {std::move(pieces), flat.shard.scalar_type()};
}

void ShardUnit::begin_gathers(const TravelTypes& types, const ProductType& computed) {
  const at::NoGradGuard no_grad;
  for_computing_ = false;
  computed_ = computed;
  for (const Flat& flat : flats_) {
    const c10::Device device = device_of(flat);
    const at::TensorOptions options = flat.shard.options().device(device);
    Packing packing = packing_of(flat, types, computed);
    for_computing_ |= packing.rounds();
    at::Tensor parts = at::empty({shard_->size(), packing.bytes()}, options.dtype(at::kByte));
    // The copy to the device overlaps computation too. It begins after the work already enqueued on
    // the device, and only then is the memory freed here reused.
    std::optional<c10::StreamGuard> beside;
    if (offloads_) {
      order_streams(computing_stream(device), copy_stream(device));
      beside.emplace(copy_stream(device));
    }
    const at::Tensor sent = packing.pack(flat.shard.to(options, /*non_blocking=*/true));
    const ledger::PhaseScope communication(ledger::Phase::kCommunication);  // shm copies here
    Work work = shard_->all_gather(parts, sent);
    gathers_.push_back({std::move(parts), std::move(packing), std::move(work)});
  }
}

// The memory goes back to the stream that computes, which may reuse it at once: not before the
// stream of the copies has written it.
void ShardUnit::forget_gathers() {
  for (std::size_t f = 0; offloads_ && f < gathers_.size(); ++f)
    order_streams(copy_stream(device_of(flats_[f])), computing_stream(device_of(flats_[f])));
  gathers_.clear();
}

void ShardUnit::gather_exactly() {
  if (exact()) return;
  forget_gathers();
  free();
  if (shares_) return gather_shared(/*copies=*/true);
  begin_gathers({}, {});
  end_gathers();
}

void ShardUnit::gather(const ProductType& computed) {
  begin_gather(computed);
  if (whole_) return;
  if (shares_) return gather_shared(/*copies=*/false);
  end_gathers();
}

// The rows of a parameter lie apart in what arrives, so they are copied once.
void ShardUnit::end_gathers() {
  const at::NoGradGuard no_grad;
  for (std::size_t f = 0; f < flats_.size(); ++f) {
    Gather& arrived = gathers_[f];
    {
      const ledger::PhaseScope communication(ledger::Phase::kCommunication);
      arrived.work.wait();
    }
    const c10::Device device = device_of(flats_[f]);
    if (offloads_) order_streams(copy_stream(device), computing_stream(device));
    for (std::size_t m = 0; m < flats_[f].members.size(); ++m) {
      ShardedParameter& p = parameters_[flats_[f].members[m]];
      at::Tensor fresh = at::empty(p.tensor.sizes(), p.tensor.options().requires_grad(false));
      arrived.packing.unpack(arrived.parts, m, p.cut, fresh);
      make_whole(p, std::move(fresh));
    }
    arrived.parts = at::Tensor();
  }
  gathers_.clear();
  whole_ = true;
}

// A caller that may write parameters gets a copy: shared memory would change on every rank.
void ShardUnit::gather_shared(bool copies) {
  const at::NoGradGuard no_grad;
  for_computing_ = !copies;
  for (ShardedParameter& p : parameters_)
    make_whole(p, copies ? p.shared.clone()
                         : at::from_blob(
                               p.shared.mutable_data_ptr(), p.shared.sizes(),
                               [memory = p.shared](void*) {}, p.shared.options()));
  whole_ = true;
}

void ShardUnit::make_whole(ShardedParameter& p, at::Tensor fresh) {
  nn::fill_storage(p.storage, std::move(fresh));
  set_storage(p, p.freed, p.storage);
  // Values for computation only, as slices are, are hidden: other code accesses the rows.
  nn::set_rows(p.tensor, for_computing_ || p.rows->slice ? p.rows : nullptr);
}

void ShardUnit::free() {
  if (stays_whole() || !whole_) return;
  for (ShardedParameter& p : parameters_) free(p);
  whole_ = false;
}

void ShardUnit::free(ShardedParameter& p) {
  set_storage(p, p.storage, p.freed);
  nn::empty_storage(p.storage);
  nn::set_rows(p.tensor, p.rows);
}

// ---------------------------------------------------------------- gradients

void ShardUnit::check_gradients() const {
  for (const ShardedParameter& p : parameters_)
    if (p.tensor.requires_grad() && p.tensor.grad().defined()) check_gradient(p, p.tensor.grad());
}

void ShardUnit::begin_reduce() {
  const at::NoGradGuard no_grad;
  for (const Flat& flat : flats_) {
    Reduce reduced = reduce(flat);
    if (!reduced.members.empty()) reduces_.push_back(std::move(reduced));
  }
}

// Every rank sends its gradients of every trained parameter, or zeros, and a flag whether it has
// one: a parameter that no rank used gets no gradient.
ShardUnit::Reduce ShardUnit::reduce(const Flat& flat) {
  Reduce reduced;
  std::int64_t length = 0;
  for (const std::size_t i : flat.members) {
    ShardedParameter& p = parameters_[i];
    if (!p.tensor.requires_grad()) continue;
    const at::Tensor grad = p.tensor.grad();
    if (grad.defined()) check_gradient(p, grad);
    reduced.members.push_back(i);
    reduced.had_gradient.push_back(grad.defined());
    length += p.cut.padded();
  }
  if (reduced.members.empty()) return reduced;
  const auto count = static_cast<std::int64_t>(reduced.members.size());
  at::TensorOptions options = parameters_[flat.members[0]].tensor.options().requires_grad(false);
  if (const auto type = types_.reduce ? types_.reduce : types_.gather;
      type && at::isFloatingType(parameters_[flat.members[0]].tensor.scalar_type()))
    options = options.dtype(*type);
  const at::Tensor parts = at::zeros({shard_->size(), length + count}, options);
  std::int64_t offset = 0;
  for (std::size_t m = 0; m < reduced.members.size(); ++m) {
    ShardedParameter& p = parameters_[reduced.members[m]];
    at::Tensor& grad = p.tensor.mutable_grad();
    if (grad.defined()) {
      copy_to_parts(p.cut, grad, parts.narrow(1, offset, p.cut.padded()));
      parts.narrow(1, length + static_cast<std::int64_t>(m), 1).fill_(1);
    }
    offset += p.cut.padded();
    grad = at::Tensor();
  }
  reduced.mine = at::empty({length + count}, options);
  {
    const ledger::PhaseScope communication(ledger::Phase::kCommunication);  // shm copies here
    reduced.work = shard_->reduce_scatter(reduced.mine, parts, ReduceOp::kAvg);
  }
  if (offloads_) order_streams(computing_stream(options.device()), copy_stream(options.device()));
  return reduced;
}

void ShardUnit::end_reduce(World& data) {
  const at::NoGradGuard no_grad;
  for (Reduce& reduced : reduces_) {
    // The host waits for this average alone, while the device computes the next block's.
    std::optional<c10::StreamGuard> beside;
    if (offloads_) beside.emplace(copy_stream(reduced.mine.device()));
    {
      const ledger::PhaseScope communication(ledger::Phase::kCommunication);
      reduced.work.wait();
      if (data.size() > 1) data.all_reduce(reduced.mine, ReduceOp::kAvg).wait();
    }
    if (offloads_) {
      const at::Tensor mine = std::exchange(
          reduced.mine, at::empty(reduced.mine.sizes(),
                                  reduced.mine.options().device(at::kCPU).pinned_memory(true)));
      reduced.mine.copy_(mine);
    }
    add_reduced(reduced);
  }
  reduces_.clear();
}

// Whether another rank had a gradient is read, which waits for a device, only where this one had
// none.
void ShardUnit::add_reduced(const Reduce& reduced) {
  const auto count = static_cast<std::int64_t>(reduced.members.size());
  const std::int64_t flags = reduced.mine.numel() - count;
  std::int64_t offset = 0;
  for (std::size_t m = 0; m < reduced.members.size(); ++m) {
    ShardedParameter& p = parameters_[reduced.members[m]];
    const std::int64_t here = std::exchange(offset, offset + p.cut.padded());
    const auto used = [&] {
      return reduced.mine[flags + static_cast<std::int64_t>(m)].item<double>() > 0;
    };
    if (!reduced.had_gradient[m] && !used()) continue;
    const at::Tensor rows =
        alias_of(reduced.mine, here, p.shard.sizes()).to(p.tensor.scalar_type());
    if (p.grad.defined())
      p.grad.add_(rows);
    else
      p.grad = rows;
  }
}

}  // namespace lockstep::parallel
