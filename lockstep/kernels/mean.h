// A caller's Gradient as the loops take it; shared by step.cpp and norm.cpp.
//
//   loops<float>().mean_squares(mean_of(gradient), out, count, lanes);
//
// For this folder's sources only.
#pragma once

#include <cmath>

#include "lockstep/kernels/gradient.h"
#include "lockstep/kernels/machine.h"

namespace lockstep::kernels::detail {

// Dividing by a power of two and multiplying by its reciprocal round the same number, so the
// cheaper one serves; every other divisor divides.
template <typename T>
Mean<T> mean_of(const Gradient<T>& gradient) {
  Mean<T> mean{.sources = gradient.sources,
               .count = gradient.count,
               .divisor = gradient.divisor,
               .scale = gradient.scale};
  int exponent = 0;
  const T fraction = std::frexp(gradient.divisor, &exponent);
  const bool power_of_two = fraction == T(0.5) && exponent > -64 && exponent < 64;
  mean.divides = !power_of_two;
  if (power_of_two) mean.factor = T(1) / gradient.divisor;
  return mean;
}

}  // namespace lockstep::kernels::detail
