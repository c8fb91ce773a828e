// A gradient that is still in pieces, one per rank.
#pragma once

namespace lockstep::kernels {

// The gradient of element i is sources[0][i] + sources[1][i] + ..., added in this order and rounded
// each time, then divided by `divisor`, then multiplied by `scale`: the bits of a sum over ranks,
// div_(divisor) and mul_(scale). One source with the defaults is a plain gradient.
template <typename T>
struct Gradient {
  const T* const* sources = nullptr;  // one per rank, in rank order; at least one
  int count = 1;
  T divisor = 1;  // the number of ranks for a mean
  T scale = 1;    // what clipping or unscaling asks for
};

}  // namespace lockstep::kernels
