// HookSet: the hooks by which autograd reports a model's gradients, and those that get lost.
//
//   HookSet hooks(model, /*in_place=*/true);
//   hooks.install(listener, forms);     // listener->on_gradient(i, ...) in every backward
//
// LibTorch drops a gradient accumulator, and the hooks on it, when a parameter moves to another
// dtype; a parameter that was frozen at installation has none. A second hook, on the tensor itself,
// survives both and stands in; then lost() is true until the next install(). Hooks call from
// backward's threads; everything else belongs to the thread that trains.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/parallel/backward_listener.h"
#include "lockstep/parallel/model_tensors.h"

namespace lockstep::parallel {

class HookSet {
 public:
  // In place: gradients may be allocated in free_slot().
  HookSet(const ModelTensors& model, bool in_place) : model_(model), in_place_(in_place) {}
  ~HookSet();
  HookSet(const HookSet&) = delete;

  // A hook on every parameter that is trained and has none; never during backward, which runs them.
  void install(const std::weak_ptr<BackwardListener>& listener,
               const std::vector<ParameterForm>& forms);
  bool lost() const { return lost_; }

  // In the backward in progress: whether the parameter gets one gradient and only the listener
  // sees it. One call at a time.
  bool alone(std::size_t parameter);
  // The parameters that the backward in progress will not reach. Empty where that is not known
  // before its end, because a checkpointed block is in no graph until it runs again.
  std::vector<std::size_t> unreached() const;

  // The listener learns of every backward of what it returns, also of one that reaches no
  // parameter.
  static at::Tensor watch(const at::Tensor& output, std::weak_ptr<BackwardListener> listener);

 private:
  struct Sentinel;  // the second hook
  struct Installed {
    std::shared_ptr<torch::autograd::Node> accumulator;  // keeps the hook alive
    std::uintptr_t key = 0;
  };
  void post_sentinels(const std::weak_ptr<BackwardListener>& listener);
  void on_sentinel(std::size_t parameter, BackwardListener& listener);

  const ModelTensors& model_;
  const bool in_place_;
  std::vector<Installed> installed_;  // by parameter
  std::atomic<bool> lost_{false};
  std::pair<int, bool> recomputes_{-1, false};  // a backward, and whether it has checkpoints
};

}  // namespace lockstep::parallel
