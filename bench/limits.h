// Limits of the machine itself, for comparison. Nothing here uses the library: plain loops and
// memcpy over the caller's arrays, compiled separately. A limit measured with the library's own
// kernels would drop when they get slower.
//
//   sum_slices({arrays, 2, begin, end});      // timed beside an all-reduce of those arrays
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::bench {

// Elements [begin, end) of `count` arrays.
struct Slices {
  float* const* arrays = nullptr;
  int count = 0;
  std::int64_t begin = 0, end = 0;
};

// The traffic of one rank's share of an all-reduce in shared memory: reads the slice of every array
// and writes one of the same size to every array. sum_slices leaves the sum in all of them;
// copy_slices leaves the next array's values in each, and the second one's in the last.
void sum_slices(const Slices& slices);
void copy_slices(const Slices& slices);

// The arrays that one AdamW step reads and, except for the gradients, writes.
struct StepArrays {
  const float* const* gradients = nullptr;
  int ranks = 0;
  float* param = nullptr;
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
};

// The traffic of one rank's share of a fused reduce and step, with next to no arithmetic.
void move_step_bytes(const StepArrays& arrays, std::int64_t begin, std::int64_t end);

// The arithmetic of AdamW for `count` elements with all data in the first cache. The result is
// returned so that the compiler cannot drop it.
float adamw_arithmetic(std::int64_t count);

}  // namespace lockstep::bench
