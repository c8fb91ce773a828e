// What the machine's memory allows: the traffic of a symmetric all-reduce without the all-reduce.
//
//   const double limit = reduce_ceiling_bytes_per_s(2, 100'000'000);
//   print("{:.0f} % of the memory's limit", 100 * bytes / seconds / limit);
#pragma once

#include <cstddef>

namespace lockstep::shm {

// `ranks` threads, each on its own slice, add up that many arrays of `bytes` bytes (float) and
// write the sum into all of them, as the engine does, but without waiting for each other. The
// result is what an all-reduce of one array of that size would reach: `bytes` divided by the best
// time of several runs. Takes a few tenths of a second and ranks * bytes of memory. Throws
// UsageError when there is not that much.
double reduce_ceiling_bytes_per_s(int ranks, std::size_t bytes);

}  // namespace lockstep::shm
