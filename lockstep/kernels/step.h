// The CPU's part of an optimizer step over a slice of a tensor: averages the gradient from all
// ranks' buffers and updates state and parameter in one pass over memory; also the gradient's norm,
// if a step needs it first, and the copy into a buffer.
//
// The results are bit-equal to ATen's fused CPU kernels (Python's fused=True), which round a
// tensor's last elements differently (machine.h has the rules). So a slice carries its position in
// its tensor, and cutting a tensor anywhere gives the bits of the uncut one.
//
//   const float* sources[] = {mine + begin, theirs + begin};
//   adam<float>({.sources = sources, .count = 2, .divisor = 2}, {param, exp_avg, exp_avg_sq},
//                {.tensor_size = n, .begin = begin, .count = count}, {.lr = 3e-4, .step = 1});
//
// Pure functions on the caller's memory: any thread may call them, even several at once on slices
// that do not overlap. float and double; nothing is allocated and nothing is thrown.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::kernels::cuda {
struct AdamTensor;  // arguments.h
struct AdamGroup;
struct AdamFactors;
}  // namespace lockstep::kernels::cuda

namespace lockstep::kernels {

// A gradient that is still divided over ranks' buffers. The gradient of element i is sources[0][i]
// + sources[1][i] + ..., added in this order and rounded each time, then divided by `divisor`, then
// multiplied by `scale`: the bits of a sum over ranks, div_(divisor) and mul_(scale). One source
// with the defaults is a plain gradient.
template <typename T>
struct Gradient {
  const T* const* sources = nullptr;  // one per rank, in rank order; at least one
  int count = 1;
  T divisor = 1;  // the number of ranks for a mean
  T scale = 1;    // the factor of clipping or unscaling
};

// Elements [begin, begin + count) of a tensor of tensor_size elements. Every pointer that comes
// with a slice points at its first element, not at the tensor's.
struct Slice {
  std::int64_t tensor_size = 0;
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

// A slice of all tensors that a rule's update reads and writes; state in the rule's order.
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
  double step = 1;        // counts from 1
  bool decoupled = true;  // AdamW: decay shrinks the parameter; Adam: it is added to the gradient
};

struct SgdStep {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool first = false;  // the momentum buffer holds nothing yet
};

template <typename T>
void adam(const Gradient<T>& gradient, const AdamTensors<T>& tensors, const Slice& slice,
          const AdamStep& step);
template <typename T>
void sgd(const Gradient<T>& gradient, const SgdTensors<T>& tensors, const Slice& slice,
         const SgdStep& step);

extern template void adam(const Gradient<float>&, const AdamTensors<float>&, const Slice&,
                          const AdamStep&);
extern template void adam(const Gradient<double>&, const AdamTensors<double>&, const Slice&,
                          const AdamStep&);
extern template void sgd(const Gradient<float>&, const SgdTensors<float>&, const Slice&,
                         const SgdStep&);
extern template void sgd(const Gradient<double>&, const SgdTensors<double>&, const Slice&,
                         const SgdStep&);

// ---------------------------------------------------------------- AdamW as on a GPU

// What the elements of a step share; steps count from 1.
cuda::AdamFactors adamw_factors(const cuda::AdamGroup& group, float step, std::uint32_t parameter);
// Elements [from, to) of a step by the CUDA kernel's rule (adamw_element.h), on a CPU's memory.
// `*tensor.step` counts this step already.
void adamw(const cuda::AdamTensor& tensor, const cuda::AdamGroup& group, float clip,
           std::int64_t from, std::int64_t to);

// ---------------------------------------------------------------- norms

// The sum of squares of a gradient has the same bits however the gradient is divided over ranks: a
// tensor is cut into blocks of kNormBlock elements from its start. The rank that owns a block sums
// it in a fixed order, in double. Every rank then adds the sums of all blocks in their order.
//
//   std::vector<double> sums(norm_blocks(n));
//   const bool finite = reduce_with_norms(gradient, out, n, sums.data());
//   const double norm = std::sqrt(add_blocks(sums.data(), norm_blocks(n)));
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

// ---------------------------------------------------------------- copies

// memcpy with stores that bypass the cache where the processor has them, for memory that is not
// read again soon: the destination is not read first, and nothing is evicted. About a third faster
// than at::copy_ for 30 MB (docs/benchmarks.md), and slower for data that would have stayed in the
// cache. The ranges must not overlap.
void stream_copy(void* to, const void* from, std::size_t bytes);

}  // namespace lockstep::kernels
