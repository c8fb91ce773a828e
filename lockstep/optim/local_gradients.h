// Detects gradients that still belong to this rank alone and are not yet the average over ranks;
// and copies a small tensor to another device.
//
// With Shard::kState a FullyShard averages gradients in its optimizer's step. Clipping or unscaling
// them before, or stepping them with another optimizer, would make ranks differ without an error,
// so the functions that do this ask first:
//
//   refuse_local_gradients(params, "clip_grad_norm_");   // throws UsageError saying what to do
//
// The tensor itself gives the answer: the hook that a Reducer puts on a parameter's gradient
// accumulator is a GradientHook, which asks its Reducer. There is no separate registry.
//
// LibTorch's own functions do not check. GradientWatch detects their writes afterwards.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <cstdint>
#include <functional>
#include <string>
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

// Marks gradients that lack passes of their step: a wrapper calls it at the end of its
// backward(loss, last), and one with `last` removes the marks. So does everything else that writes
// a gradient or replaces it, such as a plain loss.backward(); no_sync() marks nothing. A gradient
// that is marked is therefore surely incomplete. For any thread.
void mark_pass(const std::vector<at::Tensor>& params, bool last);
// Throws UsageError in the name of `who` when a parameter's gradient is marked.
void refuse_incomplete(const std::vector<at::Tensor>& params, std::string_view who);

// Detects writes to gradients since backward that bypass their version counters, as
// torch::nn::utils::clip_grad_norm_ makes when it writes grad.data():
//
//   watch.see(name, parameter);       // at the end of backward
//   watch.refuse_written("fully_shard");
//   watch.reset();                    // the step reads .grad
//
// A watched gradient lies in a copy-on-write storage of LibTorch that nobody shares. The first
// write access makes it an ordinary one, in the same memory and without a copy; reading leaves it
// as it is. In-place operations on .grad itself count in its version and are allowed. For the
// training thread.
class GradientWatch {
 public:
  GradientWatch() = default;
  ~GradientWatch() { forget(); }
  GradientWatch(const GradientWatch&) = delete;
  GradientWatch& operator=(const GradientWatch&) = delete;

  // Watches the parameter's .grad, if there is one. The name must outlive this object.
  void see(std::string_view name, const at::Tensor& parameter);
  // Throws UsageError where one was written since reset().
  void refuse_written(std::string_view who) const;
  // Call it before gradients are written again: gives them ordinary storages again.
  void forget();
  void reset();

 private:
  struct Gradient {
    std::string_view name;
    at::Tensor tensor;
    c10::Storage own, watched;
    std::int64_t version = 0;
    bool written() const;
  };
  std::string find_written() const;

  std::vector<Gradient> gradients_;
  std::string written_;  // one of those that were forgotten
};

// Copies a small tensor to another device, for a model that is spread over several.
//
// A non-blocking copy is safe towards a GPU, whose stream runs in order, but not towards the CPU:
// torch creates the result in pinned memory and returns before the bytes have arrived, so the next
// reader sees the old contents.
//
//   at::_foreach_mul_(grads, to_device(coefficient, grads[0].device()));
//
// Private to lockstep/optim.
inline at::Tensor to_device(const at::Tensor& tensor, c10::Device device) {
  return tensor.to(device, /*non_blocking=*/!device.is_cpu());
}

}  // namespace lockstep::optim
