// In-place gradient allocation: lets autograd create large CPU gradients directly in the slots of
// the reducer's buckets, so that nothing has to copy them there. Off until enable().
//
//   InplaceGradients::offer(parameter, owner, [] { return slot; });  // called during backward
//   loss.backward();                     // parameter.grad() may lie in the slot's memory
//   InplaceGradients::withdraw(owner);
//
// Autograd makes a gradient with at::empty() and .grad takes it over, so the allocator that answers
// that one allocation decides where the gradient lies. The CPU allocator sees only a number of
// bytes; the node that the engine is evaluating gives the rest: if exactly one of its gradients has
// that size, and leads to a parameter with an offered slot, the allocation is that gradient's.
//
// Nothing depends on the answer: a gradient created elsewhere is copied as usual, and a temporary
// that got the slot is gone before the gradient arrives. Only nodes for which that is known are
// served, and never where somebody could hold on to a gradient (hooks, create_graph,
// autograd::grad). A writer to a slot asks in_use() first all the same.
//
// Any thread may call. enable() installs an allocator for the process, which stays.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace lockstep::memory {

class InplaceGradients {
 public:
  // Where the parameter's next gradient should lie, or an undefined tensor.
  using Slot = std::function<at::Tensor()>;

  // UsageError where LOCKSTEP_GRAD_INPLACE_MIN_BYTES is not a number; 0 there leaves it off.
  static void enable();
  static bool is_enabled();

  static void offer(const at::Tensor& parameter, const void* owner, Slot slot);
  static void withdraw(const void* owner);

  static bool in_use(const at::Tensor& slot);  // some tensor lies there now

  static std::size_t offered();   // parameters
  static std::uint64_t served();  // gradients placed since the process began
  // Gradients of at least this size are placed; for tests. Returns the old value.
  static std::size_t set_min_bytes(std::size_t bytes);
};

}  // namespace lockstep::memory
