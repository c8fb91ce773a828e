// Divides a model's parameters over ranks: the owner of each element, the exchange of rows, and the
// coordination of one step. Internal.
//
//   const std::vector<int> owners = deal_tensors(sizes, costs, ranks);
//   const RowCut cut = cut_rows(parameter.sizes(), ranks);
//   return step_divided(this, options, {.norm = ..., .scale = ..., .step = ...});
//
// No state is shared between calls. A function that communicates says that it is collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/replicas.h"

namespace lockstep::parallel {

// The share that has each whole parameter, for rules that need them (Muon's matrices), so that all
// shares cost about the same: the most expensive first, each to the share with the least so far.
// -1: none, because it has no elements.
std::vector<int> deal_tensors(const std::vector<std::int64_t>& sizes,
                              const std::vector<double>& costs, int shares);

// The position of each of `sizes`: a rank's part and an offset in it.
struct PartOffset {
  int part = 0;
  std::int64_t offset = 0;
  bool operator==(const PartOffset&) const = default;
};
struct PartOffsets {
  std::vector<PartOffset> places;
  std::int64_t part_size = 0;  // of the fullest part; all are made that large
};
PartOffsets spread_over_parts(const std::vector<std::int64_t>& sizes, int parts);

// The division of rows over ranks: equally many each, fewer or none for the last ones.
struct RowCut {
  std::int64_t rows = 0;      // 1 for a parameter without dimensions
  std::int64_t row_size = 0;  // elements
  std::int64_t chunk = 0;     // rows of a rank, before the end is cut off
  std::int64_t padded() const { return chunk * row_size; }
  std::int64_t begin(int rank) const;
  std::int64_t count(int rank) const;
};
RowCut cut_rows(at::IntArrayRef sizes, int ranks);
// Of elements, at multiples of a norm's block (kernels::kNormBlock), so that norms and the bits of
// a step do not depend on the number of ranks. A smaller parameter is the first rank's.
RowCut cut_blocks(std::int64_t elements, int ranks);

// Copies between a whole parameter and `parts`, whose row r has the padded rows of rank r.
void copy_to_parts(const RowCut& cut, const at::Tensor& whole, const at::Tensor& parts);
void copy_from_parts(const RowCut& cut, const at::Tensor& parts, const at::Tensor& whole);

// Elements of a flat tensor, from `offset` on, as a tensor of its own, not a view.
at::Tensor alias_of(const at::Tensor& flat, std::int64_t offset, at::IntArrayRef sizes);

// Rows of several parameters as the bytes of one message.
//
//   const Packing packing({{cut.padded(), at::kBFloat16}}, at::kFloat);   // of one parameter
//   world.all_gather(parts, packing.pack(rows));   // parts: [ranks, packing.bytes()]
//   packing.unpack(parts, 0, cut, whole);
class Packing {
 public:
  struct Piece {
    std::int64_t length;  // elements of a rank, with its padding
    at::ScalarType type;  // in which they travel
    // With kFloat8_e4m3fn: the largest magnitude, over all ranks, of the values that share a scale.
    // The values that arrive have the same one, so that casting them again gives the same bytes.
    at::Tensor amax{};
  };
  Packing(std::vector<Piece> pieces, at::ScalarType own);

  std::int64_t bytes() const { return bytes_; }
  bool rounds() const { return rounds_; }  // whether a piece travels in another type than `own`
  // `rows` has the pieces in sequence. Values that need no rounding are not copied.
  at::Tensor pack(const at::Tensor& rows) const;
  void unpack(const at::Tensor& parts, std::size_t piece, const RowCut& cut,
              const at::Tensor& whole) const;

 private:
  std::vector<Piece> pieces_;
  std::vector<std::int64_t> offsets_;
  std::int64_t bytes_ = 0;
  bool rounds_;
};

// Moves a parameter to contiguous memory of its own, where it is not there already, and allows its
// storage to be replaced. No graph may hold the parameter yet.
void own_memory(at::Tensor tensor);

// Throws CommError where a tensor is not the same on all ranks of `world`, and UsageError on every
// rank where one refuses. `where` follows the ranks in the message: " along 'data'".
// Collective.
void require_same(World& world, const Check& check, const std::string& kind,
                  const std::string& where, const Fingerprints& fingerprints);

// The callbacks of a step whose gradients are divided over ranks.
struct DividedStep {
  std::function<at::Tensor()> norm;                     // of all gradients, the same on every rank
  std::function<void(const at::Tensor& factor)> scale;  // this rank's
  std::function<void(const optim::StepOptions&)> step;  // this rank's, without clipping or scaling
};
// Clips, unscales and skips on all ranks or none. Collective if the callbacks are.
optim::StepResult step_divided(const void* optimizer, const optim::StepOptions& options,
                               const DividedStep& parts);

}  // namespace lockstep::parallel
