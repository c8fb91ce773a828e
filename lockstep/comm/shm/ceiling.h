// What the machine's memory allows: the traffic of a symmetric all-reduce without the all-reduce.
//
//   auto arrays = world.symmetric({n}, at::kFloat);   // freshly written, each by its rank
//   world.barrier();
//   sum_own_slice({pointers, size, bytes}, world.rank());   // timed; the slowest rank's counts
#pragma once

#include <cstddef>

namespace lockstep::shm {

// `count` arrays of `bytes` bytes of floats, one of every rank.
struct Alike {
  std::byte* const* arrays = nullptr;
  int count = 0;
  std::size_t bytes = 0;
};

// One rank's part of an all-reduce of arrays that all ranks map: adds up its slice of all of them
// and writes the sum into all, as the engine does, but waits for nobody. When every rank calls it
// at once the arrays hold the sums afterwards: an engine's traffic without its waiting, which
// single medians of the engine may pass by noise.
void sum_own_slice(const Alike& alike, int rank);

}  // namespace lockstep::shm
