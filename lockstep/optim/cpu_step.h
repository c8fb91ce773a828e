// A step in the CPU's memory, by the kernels of lockstep/kernels: the one arithmetic of the
// optimizers in this folder and of ShardedOptimizer. Half types and devices are ATen's.
//
//   if (covered({param, grad, exp_avg, exp_avg_sq}))
//     step_on_cpu({{param, grad, exp_avg, exp_avg_sq, steps}}, options);
//
// All parameters of a batch are one run of elements, cut into equal parts for
// ATen's threads wherever the cuts fall. A slice says where in its tensor it lies, so the bits are
// those of one thread, and hundreds of small tensors cost one fork of threads instead of one each.
//
// For optimizers of this folder and for ShardedOptimizer. One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "lockstep/kernels/step.h"
#include "lockstep/optim/group.h"
#include "lockstep/optim/options.h"

namespace lockstep::optim::detail {

inline bool has_kernel(c10::ScalarType dtype, c10::Device device) {
  return device.is_cpu() && (dtype == at::kFloat || dtype == at::kDouble);
}

// Where a parameter and its state lie; what an optimizer does not have is null.
template <typename T>
struct Memory {
  T* param = nullptr;
  T* first = nullptr;   // exp_avg or momentum
  T* second = nullptr;  // exp_avg_sq

  Memory after(std::int64_t elements) const {
    const auto moved = [=](T* start) { return start == nullptr ? start : start + elements; };
    return {moved(param), moved(first), moved(second)};
  }
};

kernels::AdamStep adam_step(const auto& options, double steps) {
  return {.lr = options.lr,
          .beta1 = options.betas.first,
          .beta2 = options.betas.second,
          .eps = options.eps,
          .weight_decay = options.weight_decay,
          .step = steps};
}

// The update of a slice; `steps` counts from 1.
template <typename T>
void step_slice(const AdamWOptions& options, const kernels::Gradient<T>& gradient,
                const Memory<T>& memory, const kernels::Slice& slice, double steps) {
  kernels::adamw<T>(gradient, {memory.param, memory.first, memory.second}, slice,
                    adam_step(options, steps));
}

template <typename T>
void step_slice(const AdamOptions& options, const kernels::Gradient<T>& gradient,
                const Memory<T>& memory, const kernels::Slice& slice, double steps) {
  kernels::adam<T>(gradient, {memory.param, memory.first, memory.second}, slice,
                   adam_step(options, steps));
}

template <typename T>
void step_slice(const SGDOptions& options, const kernels::Gradient<T>& gradient,
                const Memory<T>& memory, const kernels::Slice& slice, double steps) {
  kernels::sgd<T>(gradient, {memory.param, memory.first}, slice,
                  {.lr = options.lr,
                   .momentum = options.momentum,
                   .dampening = options.dampening,
                   .weight_decay = options.weight_decay,
                   .nesterov = options.nesterov,
                   .first = steps == 1});
}

// Calls body(begin, end) for parts of [0, count) on ATen's threads, and waits for them. One of them
// stands for `unit` elements of a tensor; what is too little for a second thread has one.
using Part = c10::function_ref<void(std::int64_t begin, std::int64_t end)>;
void share_out(std::int64_t count, std::int64_t unit, Part body);

// A parameter, its gradient and its state, all of one dtype and laid out identically; the tensors
// of state that an optimizer does not have are undefined.
struct CpuItem {
  at::Tensor param, grad, first, second;
  double steps = 1;
};

// Whether the kernels can step these tensors, which belong to one parameter.
bool covered(std::initializer_list<at::Tensor> tensors);

// Changes the parameters and their state, all of one dtype.
template <typename Options>
void step_on_cpu(const std::vector<CpuItem>& items, const Options& options);
extern template void step_on_cpu(const std::vector<CpuItem>&, const AdamWOptions&);
extern template void step_on_cpu(const std::vector<CpuItem>&, const AdamOptions&);
extern template void step_on_cpu(const std::vector<CpuItem>&, const SGDOptions&);

// Increments the version counters, so that a graph retained across the step raises instead of using
// the new values. ATen's fused kernels do not do it either.
void count_versions(const Batch& batch);

// True when this batch's step is to be skipped and the host can see it: the flag is in its memory.
bool skipped(const Batch& batch);

}  // namespace lockstep::optim::detail
