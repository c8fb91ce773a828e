// Pure functions that decide which rank owns which elements and where shared parameters live.
//
//   auto owned = cut_into_shares(sizes, world.size());     // owned[rank]: pieces of parameters
//
// A share is cut only at multiples of kBlock elements from a parameter's start, so that norms and
// results do not depend on the number of ranks. Shares differ by at most a block. Rules that need
// whole parameters (Muon's matrices) have them dealt out instead: deal_tensors().
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep::parallel {

// Elements [begin, begin + count) of a parameter.
struct Piece {
  std::size_t parameter = 0;
  std::int64_t begin = 0;
  std::int64_t count = 0;
  bool operator==(const Piece&) const = default;
};

inline constexpr std::int64_t kBlock = 4096;

// The parameters' elements, in order, in `shares` runs of about equal length.
std::vector<std::vector<Piece>> cut_into_shares(const std::vector<std::int64_t>& sizes, int shares);

// Whole parameters, so that every share costs about the same: the most expensive first, each to the
// share that has the least so far.
std::vector<std::vector<Piece>> deal_tensors(const std::vector<std::int64_t>& sizes,
                                             const std::vector<double>& costs, int shares);

// Where each of `sizes` lies: in which rank's part, and at which offset of it.
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

}  // namespace lockstep::parallel
