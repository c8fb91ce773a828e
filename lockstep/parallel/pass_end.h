// PassEnd: reports when the backward that a pass belongs to has ended, or thrown.
//
// The engine runs callbacks at the end of every backward, nested ones too. A nested backward that
// is announced (NestedBackward) leaves the end to the outermost one; after one that is not,
// leave_to() waits until the backward around it runs its next node, and asks for a callback there.
// A callback that is destroyed without having run means that the backward threw.
//
// One call at a time, but misses_outer() on any thread.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "lockstep/parallel/backward_listener.h"

namespace lockstep::parallel {

// A backward that runs inside another one (checkpointing) announces itself with this guard.
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
  // Calls it when the outermost backward ends without an exception. Only inside a backward.
  static void at_end(std::function<void()> call);
};
bool is_checkpoint_node(const torch::autograd::Node& node);  // it will run such a backward

class PassEnd {
 public:
  // on_backward_end() follows when the outermost backward in progress ends, or
  // on_backward_abandoned().
  void queue(const std::weak_ptr<BackwardListener>& listener);
  // A nested backward has ended inside the node `outer`. on_outer_backward() follows when the
  // backward around it continues. False: nothing follows that node.
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
