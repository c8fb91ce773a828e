// Sequence parallelism, as in Megatron-LM: each rank computes the operations between a
// TensorGroup's pairs of matrices (norms, residual sums, dropout) for its part of the sequence, not
// for all of it. An all-reduce becomes a reduce-scatter and an all-gather, which send as much; one
// more all-gather in backward restores what is not saved. The activations saved between the pairs
// take 1/n of the memory.
//
//   x = nn::leave_sequence(nn::own_embedding(...), group);     // [batch, part of time, width]
//   const nn::EnteredSequence in(norm(x), time, group);        // [batch, time, width]
//   const at::Tensor h = in.release({torch::linear(in.whole(), w1_slice)})[0];
//   x = x + nn::leave_sequence(torch::linear(h.relu(), w2_slice), group);
//
// Time is dimension 1, and a rank has group->range(time) of it, so no length has to divide by the
// number of ranks. A weight used on a part of the sequence (of a norm, a bias) goes through
// enter_weight(). Functions with a group are collectives of it, in backward too. One thread at a
// time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/nn/tensor_group.h"

namespace lockstep::nn {

// This rank's part of the sum over ranks of `x`, which covers the whole sequence: leave(), then
// slicing.
at::Tensor leave_sequence(const at::Tensor& x, const TensorGroupPtr& group);

// Joins the ranks' parts of a sequence of length `time`, then enter(). Layers would save the whole
// sequence for backward; release() frees it, and it is gathered again for their gradients. Under
// autocasting it has autocasting's type.
class EnteredSequence {
 public:
  // `time` 0: x is the whole sequence on every rank, and this is enter().
  EnteredSequence(const at::Tensor& x, std::int64_t time, const TensorGroupPtr& group);

  const at::Tensor& whole() const { return whole_; }
  // `outputs`: everything computed from whole(), which must not be read afterwards. Returns them;
  // use these. Backward through any other output reads freed memory. Does not support second
  // derivatives.
  std::vector<at::Tensor> release(std::vector<at::Tensor> outputs) const;

 private:
  at::Tensor part_, whole_;
  TensorGroupPtr group_;  // null: nothing is to be freed
  c10::intrusive_ptr<torch::CustomClassHolder> memory_;
};

// Dropout of this rank's slice of a tensor that is `whole` along `dimension`. Every rank draws the
// whole mask, so that generators stay equal and masks do not depend on the slices.
at::Tensor sliced_dropout(const at::Tensor& x, double p, std::int64_t dimension, std::int64_t whole,
                          const TensorGroupPtr& group);

}  // namespace lockstep::nn
