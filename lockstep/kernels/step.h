// One optimizer step over a slice of a tensor, in one pass over memory: the mean gradient is taken
// from the buffers of all ranks, the state and the parameter are read and written once.
//
// The results are bit-equal to ATen's fused CPU kernels (Python's fused=True), and ATen does not
// have one arithmetic. Its compiler joined some multiplies and adds into fused ones and left
// others, differently per instruction set, and differently again for the last few elements of a
// tensor, which ATen's vector loop leaves over. So a slice says where in which tensor it lies; with
// that, cutting a tensor anywhere gives the bits of the uncut one (machine.h has the rules).
//
//   const float* sources[] = {mine + begin, theirs + begin};
//   adamw<float>({.sources = sources, .count = 2, .divisor = 2}, {param, exp_avg, exp_avg_sq},
//                {.tensor_size = n, .begin = begin, .count = count}, {.lr = 3e-4, .step = 1});
//
// Pure functions on the caller's memory: any thread may call them, even several at once on slices
// that do not overlap. float and double; nothing is allocated and nothing is thrown.
#pragma once

#include <cstdint>

#include "lockstep/kernels/gradient.h"  // IWYU pragma: export

namespace lockstep::kernels {

// Elements [begin, begin + count) of a tensor of tensor_size elements. Every pointer that comes
// with a slice points at its first element, not at the tensor's.
struct Slice {
  std::int64_t tensor_size = 0;
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

// A slice with everything that a rule's update of it reads and writes; state in the rule's order.
template <typename T>
struct Span {
  Gradient<T> gradient;
  T* param = nullptr;
  T* const* state = nullptr;
  Slice slice;
  double step = 1;  // counts from 1
};
// A rule's update as a plain function, for callers that drive rules without knowing them.
template <typename T>
using SpanKernel = void (*)(const Span<T>& span, const void* options);

// The memory a step changes. None of it may overlap another part or a gradient source.
template <typename T>
struct AdamTensors {
  T* param = nullptr;
  T* exp_avg = nullptr;
  T* exp_avg_sq = nullptr;
};

template <typename T>
struct SgdTensors {
  T* param = nullptr;
  T* momentum = nullptr;  // unused without momentum
};

struct AdamStep {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  double step = 1;  // counts from 1
};

struct SgdStep {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool first = false;  // the momentum buffer holds nothing yet
};

// Weight decay shrinks the parameter (AdamW) or is added to the gradient (Adam).
template <typename T>
void adamw(const Gradient<T>& gradient, const AdamTensors<T>& tensors, const Slice& slice,
           const AdamStep& step);
template <typename T>
void adam(const Gradient<T>& gradient, const AdamTensors<T>& tensors, const Slice& slice,
          const AdamStep& step);
template <typename T>
void sgd(const Gradient<T>& gradient, const SgdTensors<T>& tensors, const Slice& slice,
         const SgdStep& step);

extern template void adamw(const Gradient<float>&, const AdamTensors<float>&, const Slice&,
                           const AdamStep&);
extern template void adamw(const Gradient<double>&, const AdamTensors<double>&, const Slice&,
                           const AdamStep&);
extern template void adam(const Gradient<float>&, const AdamTensors<float>&, const Slice&,
                          const AdamStep&);
extern template void adam(const Gradient<double>&, const AdamTensors<double>&, const Slice&,
                          const AdamStep&);
extern template void sgd(const Gradient<float>&, const SgdTensors<float>&, const Slice&,
                         const SgdStep&);
extern template void sgd(const Gradient<double>&, const SgdTensors<double>&, const Slice&,
                         const SgdStep&);

}  // namespace lockstep::kernels
