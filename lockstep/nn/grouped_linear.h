// Linear layers of groups of rows, as a mixture of experts has them: rows that are sorted by
// expert, and a weight for each of them.
//
//   const auto y = nn::grouped_linear(rows, {first, second}, ends);  // ends: int32 {3, 5}
//   // rows 0 to 2 times first^T, rows 3 and 4 times second^T
//
// Stateless; callable from any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace lockstep::nn {

struct GroupedLinearOptions {
  // Unset: on CUDA in bfloat16, with widths that are multiples of 8.
  std::optional<bool> one_product{};
};

// x [rows, in], weights [out, in] each. `ends` is int32 [groups] on x's device: the row after the
// last one of each group, in ascending order, up to the number of rows. A group may be empty; the
// gradient of its weight is then zero, and not undefined, so that every rank of a data-parallel run
// has the same gradients to reduce.
//
// Weights of another dtype than x are converted to it in each call. One product for all groups
// never waits for the device; it computes with a copy of the weights in one tensor, unless they lie
// so already (place_together), and its gradients are rounded to x's dtype. One product for each
// group waits for `ends`, and gradients of float weights are computed in float.
at::Tensor grouped_linear(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                          const at::Tensor& ends, const GroupedLinearOptions& options = {});

// Moves weights of one shape and dtype into one allocation, in order, where they are not in one.
// For weights that are not trained: what was made of their memory before is a copy afterwards.
void place_together(const std::vector<at::Tensor>& weights);

}  // namespace lockstep::nn
