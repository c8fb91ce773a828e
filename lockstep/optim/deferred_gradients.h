// Which parameters belong to an optimizer that averages gradients in its own step.
//
// Until that step, .grad is this rank's own. What a user would do to averaged gradients (clip them,
// unscale them, step with another optimizer) would make ranks differ without a word, so the
// functions that do it ask here first.
//
//   mark_deferred(params);                              // ShardedOptimizer, when it is made
//   refuse_if_deferred(params, "clip_grad_norm_");      // throws UsageError saying what to do
//   unmark_deferred(params);
//
// The mark belongs to the tensor object that a module holds, not to its memory,
// so it stays when data is set again; and it ends with the tensor, so a later one cannot inherit
// it. Any thread may call these; asking costs one atomic read where nothing is marked.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

namespace lockstep::optim {

void mark_deferred(const std::vector<at::Tensor>& params);
void unmark_deferred(const std::vector<at::Tensor>& params);

// Throws UsageError in the name of `who` when one of the parameters is marked.
void refuse_if_deferred(const std::vector<at::Tensor>& params, std::string_view who);

}  // namespace lockstep::optim
