// Parameters that are divided over ranks by rows, and how these rows travel.
//
//   const RowCut cut = cut_rows(parameter.sizes(), ranks);
//   const Packing packing({{cut.padded(), at::kBFloat16}}, at::kFloat);   // of one parameter
//   world.all_gather(parts, packing.pack(rows));   // parts: [ranks, packing.bytes()]
//   packing.unpack(parts, 0, cut, whole);
//
// Functions on tensors without state of their own; one thread at a time for each tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep::parallel {

// How rows are divided over ranks: equally many each, fewer or none for the last ones.
struct RowCut {
  std::int64_t rows = 0;      // 1 for a parameter without dimensions
  std::int64_t row_size = 0;  // elements
  std::int64_t chunk = 0;     // rows of a rank, before the end is cut off
  std::int64_t padded() const { return chunk * row_size; }
  std::int64_t begin(int rank) const;
  std::int64_t count(int rank) const;
};
RowCut cut_rows(at::IntArrayRef sizes, int ranks);

// Copies between a whole parameter and `parts`, whose row r has the padded rows of rank r.
void copy_to_parts(const RowCut& cut, const at::Tensor& whole, const at::Tensor& parts);
void copy_from_parts(const RowCut& cut, const at::Tensor& parts, const at::Tensor& whole);

// Elements of a flat tensor, from `offset` on, as a tensor of its own, not a view.
at::Tensor alias_of(const at::Tensor& flat, std::int64_t offset, at::IntArrayRef sizes);

// Rows of several parameters as the bytes of one message.
class Packing {
 public:
  struct Piece {
    std::int64_t length;  // elements of a rank, with its padding
    at::ScalarType type;  // in which they travel
    // With kFloat8_e4m3fn: the largest magnitude of what has one scale, on all ranks. The values
    // that arrive have the same one, so that a further cast to fp8 gives the same bytes and scale.
    at::Tensor amax{};
  };
  Packing(std::vector<Piece> pieces, at::ScalarType own);

  std::int64_t bytes() const { return bytes_; }
  bool rounds() const { return rounds_; }  // whether a piece travels in another type than `own`
  // `rows` has the pieces one after another. What is not rounded is not copied.
  at::Tensor pack(const at::Tensor& rows) const;
  void unpack(const at::Tensor& parts, std::size_t piece, const RowCut& cut,
              const at::Tensor& whole) const;

 private:
  std::vector<Piece> pieces_;
  std::vector<std::int64_t> offsets_;
  std::int64_t bytes_ = 0;
  bool rounds_;
};

}  // namespace lockstep::parallel
