// TensorGroup: ranks that compute a layer together, each with a slice of its weights. Tensor
// parallelism as in Megatron-LM: a pair of matrices, the first cut by its outputs ("column
// parallel"), the second by its inputs ("row parallel"), needs one sum over ranks in forward and
// one in backward.
//
//   const at::Tensor h = torch::linear(nn::enter(x, group), w1_slice, b1_slice).relu();
//   const at::Tensor y = nn::leave(torch::linear(h, w2_slice), group) + b2;
//
// Between a leave() and the next enter() activations and gradients are equal on every rank, and so
// are the gradients of weights used there (norms, b2): these need no communication. Without a group
// (null) the functions are those of one process.
//
// A model that supports this is nn::Sliced, and TensorParallel
// (lockstep/parallel/tensor_parallel.h) cuts its weights and sets the group. Functions with a group
// are collectives of it, in backward too. One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <unordered_set>
#include <utility>
#include <vector>

namespace lockstep::nn {

// A run of indices: [begin, begin + length).
struct Range {
  std::int64_t begin = 0;
  std::int64_t length = 0;
  bool operator==(const Range&) const = default;
};
// The part of `whole` indices that rank `rank` of `ranks` has; sizes differ by at most one.
constexpr Range slice_range(std::int64_t whole, int rank, int ranks) {
  const std::int64_t begin = whole * rank / ranks;
  return {begin, whole * (rank + 1) / ranks - begin};
}

class TensorGroup : public torch::CustomClassHolder {
 public:
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Sums the tensors of all ranks in place. Collective.
  virtual void sum(const at::Tensor& tensor) = 0;
  virtual void max(const at::Tensor& tensor) = 0;
  // `all` is [size, elements] and `mine` [elements]: row rank() of `all`, or of its sum over ranks.
  virtual void all_gather(const at::Tensor& all, const at::Tensor& mine) = 0;
  virtual void reduce_scatter(const at::Tensor& mine, const at::Tensor& all) = 0;

  Range range(std::int64_t whole) const { return slice_range(whole, rank(), size()); }

  // Parameters whose gradients ranks have yet to average: enter_weight() notes them in backward.
  using Parameters = std::unordered_set<at::TensorImpl*>;
  void note_partial(const at::Tensor& weight) { partial_.insert(weight.unsafeGetTensorImpl()); }
  Parameters take_partial() { return std::exchange(partial_, {}); }

 private:
  Parameters partial_;
};
using TensorGroupPtr = c10::intrusive_ptr<TensorGroup>;

// How many of `whole` this rank has.
inline std::int64_t local_size(std::int64_t whole, const TensorGroupPtr& group) {
  return group ? group->range(whole).length : whole;
}

// `x` is the same on every rank, and is used with slices: its gradient is the sum over ranks.
at::Tensor enter(const at::Tensor& x, const TensorGroupPtr& group);
// The same for a parameter that every rank has and uses with its slices of an activation. Its
// backward does not communicate: it gives the parameter size() times this rank's part of the
// gradient, and whoever cut the model averages the gradients of all such parameters over ranks at
// the end of the last backward before a step. Averaging does not change a gradient that is equal on
// every rank, so passes with and without enter_weight() can be accumulated.
at::Tensor enter_weight(const at::Tensor& weight, const TensorGroupPtr& group);
// The sum over ranks of each rank's result for its slices.
at::Tensor leave(const at::Tensor& x, const TensorGroupPtr& group);
// Joins the ranks' slices of a dimension of size `whole`; the result is equal on every rank.
at::Tensor join(const at::Tensor& x, std::int64_t dimension, std::int64_t whole,
                const TensorGroupPtr& group);

// Rows of an embedding of `vocabulary` rows, of which this rank has those in `weight`: zeros for
// the tokens of other ranks, until leave(). `padding_index`: a token without a gradient; -1: none.
at::Tensor own_embedding(const at::Tensor& ids, const at::Tensor& weight, std::int64_t vocabulary,
                         std::int64_t padding_index, const TensorGroupPtr& group);
// The mean cross entropy over the targets that are not `ignore_index`, from this rank's columns of
// the logits [..., slice of the vocabulary]; the others' are not gathered. Sums are in float. nan
// where all targets are ignored, as in PyTorch.
at::Tensor sliced_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                                std::int64_t vocabulary, const TensorGroupPtr& group,
                                std::int64_t ignore_index = -100);

// A model that computes with slices of its weights. A block of it (nn::Block) that is Sliced too is
// cut while the model is made (ShardedConstruction): it names its cuts, and needs no group.
class Sliced {
 public:
  // A parameter of which every rank has a slice; unlisted parameters are whole on every rank.
  struct Cut {
    at::Tensor parameter;
    std::int64_t dimension = 0;
    // Widths along it, each of which is cut: queries, keys and values of one matrix.
    std::vector<std::int64_t> parts{};
  };

  virtual ~Sliced() = default;

  // UsageError where the module cannot be divided over this number of ranks.
  virtual std::vector<Cut> cuts(int ranks) const = 0;

  // Null: parameters are whole.
  const TensorGroupPtr& tensor_group() const { return tensor_group_; }
  void set_tensor_group(TensorGroupPtr group) {
    tensor_group_ = std::move(group);
    was_cut_ = was_cut_ || tensor_group_;
  }

  // Whether ranks divide the sequence between layers (below), as with
  // Megatron-LM's sequence_parallel. Set it before the model is cut, which compares it over ranks;
  // UsageError for a change after that.
  bool sequence_parallel() const { return sequence_parallel_; }
  void use_sequence_parallel(bool on);

 private:
  TensorGroupPtr tensor_group_;
  bool sequence_parallel_ = false;
  bool was_cut_ = false;  // stays true while parameters are whole again
};

// ---------------------------------------------------------------- parts of a sequence
//
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
//
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
