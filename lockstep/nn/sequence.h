// Sequence parallelism, as in Megatron-LM: what lies between the pairs of matrices of a TensorGroup
// (norms, residual sums, dropout) is computed by each rank for its part of the sequence, not by
// every rank for all of it. An all-reduce becomes a reduce-scatter and an all-gather, which send as
// much; one more all-gather in backward brings back what is not saved. Activations that are saved
// between the pairs take 1/n of the memory.
//
//   x = nn::leave_sequence(nn::own_embedding(...), group);     // [batch, part of time, width]
//   const nn::EnteredSequence in(norm(x), time, group);        // [batch, time, width]
//   const at::Tensor h = in.release({torch::linear(in.whole(), w1_slice)})[0];
//   x = x + nn::leave_sequence(torch::linear(h.relu(), w2_slice), group);
//
// Time is dimension 1, and ranks have group->range(time) of it, so no length has to divide by their
// number. A weight that is used on a part of the sequence (of a norm, a bias) goes through
// enter_weight(). What is called with a group is a collective of it, in backward too. One thread at
// a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/nn/tensor_group.h"

namespace lockstep::nn {

// This rank's part of the sum over ranks of `x`, which has the whole sequence. leave(), then a part
// of it.
at::Tensor leave_sequence(const at::Tensor& x, const TensorGroupPtr& group);

// The whole sequence, of whose `time` each rank has a part: the parts side by side, then enter().
// Layers would save it for backward; release() frees it, and it is gathered again when their
// gradients come. Under autocasting it is in autocasting's type.
class EnteredSequence {
 public:
  // `time` 0: x is the whole sequence on every rank, and this is enter().
  EnteredSequence(const at::Tensor& x, std::int64_t time, const TensorGroupPtr& group);

  const at::Tensor& whole() const { return whole_; }
  // `outputs`: all that was computed from whole(), which nobody reads from here on. Returns them;
  // use these. Backward through an output that is not among them reads memory that was freed. No
  // second derivatives.
  std::vector<at::Tensor> release(std::vector<at::Tensor> outputs) const;

 private:
  at::Tensor part_, whole_;
  TensorGroupPtr group_;  // null: nothing is to be freed
  c10::intrusive_ptr<torch::CustomClassHolder> memory_;
};

// Dropout of this rank's slice of a tensor that is `whole` along `dimension`. Every rank draws the
// mask of the whole, so that their generators stay equal and masks do not depend on the slices.
at::Tensor sliced_dropout(const at::Tensor& x, double p, std::int64_t dimension, std::int64_t whole,
                          const TensorGroupPtr& group);

}  // namespace lockstep::nn
