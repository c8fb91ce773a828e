// The arguments of a reduction: arrays to combine, where the result goes, and what to copy
// meanwhile.
#pragma once

#include <cstddef>

namespace lockstep::shm {

inline constexpr int kMaxMoves = 2;
struct Move {
  std::byte* to;
  const std::byte* from;
};

struct Arrays {
  const std::byte* const* inputs;
  int n;
  std::byte* const* outputs;
  int m;
  std::size_t count;
  // Copied in the same pass: as many bytes each as the sum has. They touch none of its arrays.
  const Move* moves = nullptr;
  int moved = 0;
  // The last output is for another processor: it need not stay in this one's cache.
  bool last_leaves = false;
};

}  // namespace lockstep::shm
