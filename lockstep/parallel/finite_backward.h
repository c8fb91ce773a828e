// FiniteBackward: while it lives, a backward from a loss passes on what is finite alone.
//
//   const FiniteBackward finite(loss);      // a mean over nothing, times zero
//   loss.backward();
//
// A mean over nothing is 0 / 0, and zero times its derivative is not a number either; somewhere
// behind it the derivative of nothing is zero again. The graph still has to be walked to its end:
// what synchronises in it waits for every rank, and a SyncBatchNorm brings gradients of the other
// ranks' losses, which are not zero. Internal. One thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace lockstep::parallel {

class FiniteBackward {
 public:
  explicit FiniteBackward(const at::Tensor& loss);
  ~FiniteBackward();
  FiniteBackward(const FiniteBackward&) = delete;
  FiniteBackward& operator=(const FiniteBackward&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<torch::autograd::Node>, std::uintptr_t>> hooks_;
};

}  // namespace lockstep::parallel
