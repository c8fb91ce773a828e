// Gradients that are still divided over ranks' buffers, for steps in CPU memory that average them
// in the same pass.
//
//   const SplitGradient gradient{.sources = {mine, theirs}, .divisor = 2};
//   const Sources<float> sources(gradient.sources);
//   kernel({.gradient = sources.gradient(gradient), ...});
//
// For optimizers of this folder and for lockstep/parallel. No state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "lockstep/kernels/step.h"

namespace lockstep::optim {

// The sum of `sources`, in their order, divided by `divisor` and multiplied by `scale`. The sources
// are contiguous, of one type and size.
struct SplitGradient {
  std::vector<at::Tensor> sources;
  double divisor = 1;
  double scale = 1;
};
struct SplitGradients {
  std::unordered_map<const at::TensorImpl*, SplitGradient> by_parameter;  // that is stepped
  const SplitGradient* find(const at::Tensor& parameter) const {
    const auto found = by_parameter.find(parameter.unsafeGetTensorImpl());
    return found != by_parameter.end() ? &found->second : nullptr;
  }
};

namespace detail {

// Pointers of one type to every source.
template <typename T>
struct Sources {
  explicit Sources(const std::vector<at::Tensor>& tensors) {
    for (const auto& tensor : tensors) pointers.push_back(tensor.template const_data_ptr<T>());
  }
  Sources after(std::int64_t elements) const {
    Sources rest = *this;
    for (const T*& pointer : rest.pointers) pointer += elements;
    return rest;
  }
  // Valid as long as this is.
  kernels::Gradient<T> gradient(const SplitGradient& how) const {
    return {.sources = pointers.data(),
            .count = static_cast<int>(pointers.size()),
            .divisor = static_cast<T>(how.divisor),
            .scale = static_cast<T>(how.scale)};
  }
  std::vector<const T*> pointers;
};

}  // namespace detail

}  // namespace lockstep::optim
