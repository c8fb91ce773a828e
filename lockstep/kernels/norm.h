// The sum of squares of a gradient, with the same bits however it is divided.
//
// Floating-point addition depends on its order, so the order is fixed by the data alone. A tensor
// is cut into blocks of kNormBlock elements; each block has one sum, taken in one fixed order in
// double; the blocks are added in block order. The owner of a block fills in its sum, the sums are
// exchanged, and every rank adds all of them: the result does not depend on the number of ranks.
// Slices are therefore cut at multiples of kNormBlock from the tensor's start.
//
//   std::vector<double> sums(norm_blocks(n));
//   const bool finite = reduce_with_norms(gradient, out, n, sums.data());
//   const double norm = std::sqrt(add_blocks(sums.data(), norm_blocks(n)));
//
// Pure functions on the caller's memory, as in step.h.
#pragma once

#include <cstdint>

#include "lockstep/kernels/step.h"

namespace lockstep::kernels {

inline constexpr std::int64_t kNormBlock = 4096;

constexpr std::int64_t norm_blocks(std::int64_t count) {
  return (count + kNormBlock - 1) / kNormBlock;
}

// sums[b] = the square sum of block b of values, which begin at a block's start; norm_blocks(count)
// of them. Returns whether every value is finite; squares of doubles may still overflow to infinity
// when they are.
template <typename T>
bool block_norms(const T* values, std::int64_t count, double* sums);

// The first of two passes when the norm must be known before the step: out[i] = the gradient of
// element i, and its block norms. `out` may be one of the sources, or null where only the norms are
// wanted.
template <typename T>
bool reduce_with_norms(const Gradient<T>& gradient, T* out, std::int64_t count, double* sums);

// The sums one after the other, in block order.
double add_blocks(const double* sums, std::int64_t blocks);

extern template bool block_norms(const float*, std::int64_t, double*);
extern template bool block_norms(const double*, std::int64_t, double*);
extern template bool reduce_with_norms(const Gradient<float>&, float*, std::int64_t, double*);
extern template bool reduce_with_norms(const Gradient<double>&, double*, std::int64_t, double*);

}  // namespace lockstep::kernels
