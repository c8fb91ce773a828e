// An optimizer step in CPU memory with the kernels of lockstep/kernels, shared by the optimizers of
// this folder and of FullyShard so that all round alike. Half types, devices and rules without
// kernels use ATen.
//
//   if (covered(kernels, param, grad, {exp_avg, exp_avg_sq}))
//     step_on_cpu({{param, grad, {exp_avg, exp_avg_sq}, steps}}, kernels);
//
// All parameters of a batch form one run of elements, divided equally over ATen's threads. A slice
// carries its position in its tensor, so the bits are those of one thread, and hundreds of small
// tensors cost one fork of threads instead of one each.
//
// One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <cstdint>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "lockstep/kernels/step.h"
#include "lockstep/optim/rule.h"

namespace lockstep::optim {

// A gradient that is still divided over buffers of ranks, for steps that average it in the same
// pass: the sum of `sources`, in their order, divided by `divisor` and multiplied by `scale`. The
// sources are contiguous, of one type and size.
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

inline bool has_kernel(c10::ScalarType dtype, c10::Device device) {
  return device.is_cpu() && (dtype == at::kFloat || dtype == at::kDouble);
}

inline constexpr std::size_t kMaxStates = 4;  // for a rule with kernels

template <typename T>
kernels::SpanKernel<T> kernel_of(const SpanKernels& kernels) {
  if constexpr (std::is_same_v<T, float>) return kernels.float32;
  if constexpr (std::is_same_v<T, double>) return kernels.float64;
}

// The memory of a parameter and its state.
template <typename T>
struct Memory {
  Memory(const at::Tensor& tensor, const StateTensors& states)
      : param(tensor.mutable_data_ptr<T>()) {
    for (std::size_t i = 0; i < states.size(); ++i) state[i] = states[i].mutable_data_ptr<T>();
  }
  Memory after(std::int64_t elements) const {
    Memory moved = *this;
    moved.param += elements;
    for (T*& each : moved.state)
      if (each != nullptr) each += elements;
    return moved;
  }

  T* param = nullptr;
  std::array<T*, kMaxStates> state{};
};

// Calls body(begin, end) for parts of [0, count) on ATen's threads, and waits for them. Each index
// stands for `unit` elements of a tensor; too little work for a second thread runs on one.
using Part = c10::function_ref<void(std::int64_t begin, std::int64_t end)>;
void share_out(std::int64_t count, std::int64_t unit, Part body);

// A parameter, its gradient and its state, all of one dtype and laid out identically.
struct CpuItem {
  at::Tensor param, grad;
  StateTensors state;
  double steps = 1;
  const SplitGradient* split = nullptr;  // what `grad` stands for, where it is divided
};

// Whether kernels can step these tensors, which belong to one parameter.
bool covered(const SpanKernels& kernels, const at::Tensor& param, const at::Tensor& grad,
             const StateTensors& state);

// Changes the parameters and their state, all of one dtype.
void step_on_cpu(const std::vector<CpuItem>& items, const SpanKernels& kernels);

}  // namespace detail
}  // namespace lockstep::optim
