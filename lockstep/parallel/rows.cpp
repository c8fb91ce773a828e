#include "lockstep/parallel/rows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "lockstep/nn/fp8.h"

namespace lockstep::parallel {

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

namespace {

// Calls `copy` with equally large pieces of both: the ranks that have all their rows, and the one
// that has some of them.
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

}  // namespace lockstep::parallel
