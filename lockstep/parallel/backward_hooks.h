// Hooks in autograd's backward. HookSet and PassEnd tell a BackwardListener, which is a reducer,
// about gradients and about the end of backward.
//
//   HookSet hooks(model, /*in_place=*/true);
//   hooks.install(listener, forms);     // listener->on_gradient(i, ...) in every backward
//
// Hooks are called on backward's threads; everything else belongs to the thread that trains.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/parallel/model_tensors.h"

namespace lockstep::parallel {

// Called on backward's threads, several at once.
class BackwardListener {
 public:
  virtual ~BackwardListener() = default;
  // .grad of this parameter holds its gradient. `arrived` is that tensor, or undefined if it is
  // unknown.
  virtual void on_gradient(std::size_t parameter, const at::Tensor& arrived) = 0;
  // Where a gradient of this parameter may be allocated; undefined: anywhere.
  virtual at::Tensor free_slot(std::size_t parameter) = 0;
  // Whether gradients stay this rank's own after backward. Called by the thread that trains.
  virtual bool gradients_are_local() const = 0;
  virtual void on_watched_backward() = 0;  // of an output of watch()
  virtual void on_backward_end() = 0;
  virtual void on_backward_abandoned() = 0;  // it threw
  virtual void on_outer_backward() = 0;      // see PassEnd::leave_to
};

// The hooks by which autograd reports a model's gradients.
//
// LibTorch drops a gradient accumulator, and the hooks on it, when a parameter moves to another
// dtype; a parameter that was frozen at installation has none. A second hook, on the tensor itself,
// survives both and stands in; then lost() is true until the next install().
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

// Declares a nested backward, one that runs inside another (checkpointing).
class NestedBackward {
 public:
  // Inside the outer backward, on the thread that is about to run the nested one.
  NestedBackward();
  ~NestedBackward();
  NestedBackward(const NestedBackward&) = delete;
  NestedBackward& operator=(const NestedBackward&) = delete;

  static bool active();
  // The outermost backward of this thread, by the engine's task id; -1 outside of any.
  static int outer_task();
  // Calls `call` when the outermost backward ends without an exception. Only inside a backward.
  static void at_end(std::function<void()> call);
};
bool is_checkpoint_node(const torch::autograd::Node& node);  // it will run such a backward

// Reports when the backward of a pass has ended, or has thrown.
//
// The engine runs callbacks at the end of every backward, nested ones too. A nested backward that
// announces itself (NestedBackward) leaves the end to the outermost one. After one that does not,
// leave_to() waits until the backward around it runs its next node, and asks for a callback there.
// A callback that is destroyed without having run means that the backward threw.
//
// One call at a time; misses_outer() may be called on any thread.
class PassEnd {
 public:
  // on_backward_end() follows when the outermost backward in progress ends, or
  // on_backward_abandoned().
  void queue(const std::weak_ptr<BackwardListener>& listener);
  // A nested backward has ended inside the node `outer`. on_outer_backward() follows when the outer
  // backward continues. False: no node follows that one.
  bool leave_to(const torch::autograd::Node& outer,
                const std::weak_ptr<BackwardListener>& listener);
  void saw_outer() { --unseen_; }  // on_outer_backward() was called
  bool misses_outer() const { return unseen_ > 0; }
  void forget();

 private:
  struct Token;
  struct OuterHook;
  struct OuterNode {
    std::weak_ptr<torch::autograd::Node> node;
    const OuterHook* hook = nullptr;  // on the node, unless somebody has removed it
    std::weak_ptr<Token> token;
  };
  // Nodes whose run shows that an outer backward continues, and how many of those are expected.
  std::vector<OuterNode> nodes_;
  std::atomic<int> unseen_{0};
};

}  // namespace lockstep::parallel
