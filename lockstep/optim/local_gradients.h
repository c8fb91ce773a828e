// Which gradients are still this rank's own, not the average over ranks.
//
// ShardedOptimizer averages gradients in its step. Clipping or unscaling them before, or stepping
// them with another optimizer, would make ranks differ without an error, so the functions that do
// this ask first:
//
//   refuse_local_gradients(params, "clip_grad_norm_");   // throws UsageError saying what to do
//
// The answer is found from the tensor itself: the hook that a Reducer puts on a parameter's
// gradient accumulator is a GradientHook, which asks its Reducer. Nothing is registered elsewhere.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <functional>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::optim {

// Runs `on_gradient` after a gradient was accumulated. `is_local` is called by the training thread.
class GradientHook final : public torch::autograd::utils::LambdaPostHook {
 public:
  using Function = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& outputs,
                                                         const std::vector<at::Tensor>& gradients)>;
  GradientHook(Function on_gradient, std::function<bool()> is_local)
      : LambdaPostHook(std::move(on_gradient)), is_local_(std::move(is_local)) {}

  bool is_local() const { return is_local_(); }

 private:
  std::function<bool()> is_local_;
};

// Whether a Reducer watches the parameter's gradient, averaged by it or not.
bool is_watched(const at::Tensor& param);

// Throws UsageError in the name of `who` when a parameter's gradient is local.
void refuse_local_gradients(const std::vector<at::Tensor>& params, std::string_view who);

}  // namespace lockstep::optim
