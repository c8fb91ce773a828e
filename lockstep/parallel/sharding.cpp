#include "lockstep/parallel/sharding.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/kernels/step.h"
#include "lockstep/nn/fp8.h"

namespace lockstep::parallel {

std::vector<int> deal_tensors(const std::vector<std::int64_t>& sizes,
                              const std::vector<double>& costs, int shares) {
  std::vector<int> owners(sizes.size(), -1);
  std::vector<double> spent(static_cast<std::size_t>(shares), 0);
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return costs[a] > costs[b]; });
  for (const std::size_t i : order) {
    if (sizes[i] == 0) continue;
    const auto least = std::min_element(spent.begin(), spent.end());
    owners[i] = static_cast<int>(least - spent.begin());
    *least += costs[i];
  }
  return owners;
}

PartOffsets spread_over_parts(const std::vector<std::int64_t>& sizes, int parts) {
  PartOffsets offsets;
  offsets.places.resize(sizes.size());
  std::vector<std::int64_t> filled(static_cast<std::size_t>(parts), 0);
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  // The largest first, each into the emptiest part.
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return sizes[a] > sizes[b]; });
  for (const std::size_t i : order) {
    const auto emptiest = std::min_element(filled.begin(), filled.end());
    offsets.places[i] = {static_cast<int>(emptiest - filled.begin()), *emptiest};
    *emptiest += sizes[i];
  }
  for (const std::int64_t size : filled) offsets.part_size = std::max(offsets.part_size, size);
  return offsets;
}

std::int64_t RowCut::begin(int rank) const {
  return std::min(rows, rank * chunk);
}

std::int64_t RowCut::count(int rank) const {
  return std::min(rows, (rank + 1) * chunk) - begin(rank);
}

RowCut cut_rows(at::IntArrayRef sizes, int ranks) {
  RowCut cut{.rows = sizes.empty() ? 1 : sizes[0], .row_size = 1};
  for (std::size_t i = 1; i < sizes.size(); ++i) cut.row_size *= sizes[i];
  cut.chunk = (cut.rows + ranks - 1) / ranks;
  return cut;
}

RowCut cut_blocks(std::int64_t elements, int ranks) {
  constexpr std::int64_t kBlock = kernels::kNormBlock;
  const std::int64_t blocks = (elements + kBlock - 1) / kBlock;
  return {.rows = elements,
          .row_size = 1,
          .chunk = std::min(elements, (blocks + ranks - 1) / ranks * kBlock)};
}

namespace {

// Calls copy(piece of `whole`, piece of `parts`) with pieces of one size: first for all ranks that
// have a full chunk of rows, then for the one that has the rest.
template <typename Copy>
void each_piece(const RowCut& cut, const at::Tensor& whole, const at::Tensor& parts, Copy&& copy) {
  if (cut.padded() == 0) return;
  const at::Tensor flat = whole.view({-1});
  const std::int64_t full = cut.rows / cut.chunk, covered = full * cut.padded();
  if (full > 0)
    copy(flat.narrow(0, 0, covered).view({full, cut.padded()}), parts.narrow(0, 0, full));
  const std::int64_t rest = flat.numel() - covered;
  if (rest > 0) copy(flat.narrow(0, covered, rest), parts[full].narrow(0, 0, rest));
}

}  // namespace

void copy_to_parts(const RowCut& cut, const at::Tensor& whole, const at::Tensor& parts) {
  each_piece(cut, whole.contiguous(), parts,
             [](const at::Tensor& from, const at::Tensor& to) { to.copy_(from); });
}

void copy_from_parts(const RowCut& cut, const at::Tensor& parts, const at::Tensor& whole) {
  each_piece(cut, whole, parts,
             [](const at::Tensor& to, const at::Tensor& from) { to.copy_(from); });
}

at::Tensor alias_of(const at::Tensor& flat, std::int64_t offset, at::IntArrayRef sizes) {
  at::Tensor alias = at::empty({0}, flat.options());
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return alias.set_(flat.storage(), flat.storage_offset() + offset, sizes, strides);
}

// ---------------------------------------------------------------- messages

namespace {

constexpr std::int64_t kPieceAlignment = 16;  // bytes, for vectors of a device's copies

std::int64_t size_of(const Packing::Piece& piece) {
  return piece.length * static_cast<std::int64_t>(at::elementSize(piece.type));
}

}  // namespace

Packing::Packing(std::vector<Piece> pieces, at::ScalarType own)
    : pieces_(std::move(pieces)),
      rounds_(std::ranges::any_of(pieces_, [&](const Piece& p) { return p.type != own; })) {
  const std::int64_t alignment = rounds_ ? kPieceAlignment : 1;
  for (const Piece& piece : pieces_) {
    offsets_.push_back(bytes_);
    bytes_ += (size_of(piece) + alignment - 1) / alignment * alignment;
  }
}

at::Tensor Packing::pack(const at::Tensor& rows) const {
  if (!rounds_) return rows.view(at::kByte);
  const at::Tensor message = at::empty({bytes_}, rows.options().dtype(at::kByte));
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const Piece& piece = pieces_[i];
    const at::Tensor from =
        rows.narrow(0, std::exchange(begin, begin + piece.length), piece.length);
    const at::Tensor to = message.narrow(0, offsets_[i], size_of(piece)).view(piece.type);
    to.copy_(piece.amax.defined() ? nn::part_to_fp8(from, piece.amax) : from);
  }
  return message;
}

void Packing::unpack(const at::Tensor& parts, std::size_t piece, const RowCut& cut,
                     const at::Tensor& whole) const {
  const Piece& what = pieces_[piece];
  if (what.length == 0) return;
  copy_from_parts(cut, parts.narrow(1, offsets_[piece], size_of(what)).view(what.type), whole);
  if (what.amax.defined()) nn::scale_part_from_fp8(whole, what.amax);
}

void own_memory(at::Tensor tensor) {
  const bool alone = tensor.is_contiguous() && tensor.storage_offset() == 0 &&
                     tensor.storage().nbytes() == tensor.nbytes();
  if (!alone || tensor.storage().use_count() > 1)
    tensor.set_data(tensor.detach().clone(at::MemoryFormat::Contiguous));
  tensor.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);
}

void require_same(World& world, const Check& check, const std::string& kind,
                  const std::string& where, const Fingerprints& fingerprints) {
  const auto difference = find_difference(world, check, fingerprints);
  if (!difference) return;
  throw CommError(
      check.component,
      fmt::format(
          "copies differ: {} '{}' on {}{} is not what it is on rank 0. Something changed it "
          "outside the optimizer's step, or ranks took different steps. Change it on every "
          "rank alike, and resume from a checkpoint.",
          kind, difference->name, show_ranks(difference->ranks), where),
      {.rank = world.rank(), .peer = difference->ranks[0], .operation = "verify"});
}

// On a GPU the host does not read the norm: where it is not finite every gradient becomes NaN, and
// the optimizers of the parts skip the step.
optim::StepResult step_divided(const void* optimizer, const optim::StepOptions& options,
                               const DividedStep& parts) {
  optim::GradScaler* const scaler =
      options.scaler != nullptr && options.scaler->enabled() ? options.scaler : nullptr;
  const bool may_skip = options.skip_non_finite || scaler != nullptr;
  const bool clips = options.max_grad_norm > 0;
  optim::StepResult result;
  bool skipped = false;
  bool device_decides = false;
  if (may_skip || clips || options.want_grad_norm) {
    const double unscale = scaler != nullptr ? 1 / scaler->get_scale() : 1;
    const at::Tensor all = parts.norm() * unscale;
    if (clips || options.want_grad_norm) result.grad_norm = all;
    if (may_skip) result.skipped = at::isfinite(all).logical_not().to(at::kFloat).reshape({1});
    device_decides = may_skip && scaler == nullptr && !all.is_cpu();
    skipped = may_skip && !device_decides && result.was_skipped();
    at::Tensor factor = at::full_like(all, unscale);
    if (clips) factor = factor * (options.max_grad_norm / (all + 1e-6)).clamp_max(1);
    if (device_decides)
      factor = at::where(at::isfinite(all), factor,
                         at::full_like(all, std::numeric_limits<double>::quiet_NaN()));
    if (!skipped && (!factor.is_cpu() || factor.item<double>() != 1)) parts.scale(factor);
  }
  if (!skipped) parts.step({.skip_non_finite = device_decides});
  if (scaler != nullptr) {
    scaler->record_step(optimizer, skipped);
    scaler->update();
  }
  return result;
}

}  // namespace lockstep::parallel
