// Lets large CPU gradients come into being where they belong, so that nobody has to copy them
// there.
//
//   Birthplace::expect(parameter, owner, [] { return slot; });  // asked in the middle of backward
//   loss.backward();                     // parameter.grad() may lie in the slot's memory
//   Birthplace::forget(owner);
//
// The one hard idea: autograd makes a gradient with at::empty() and lets .grad take it over, so
// whoever answers that one allocation decides where the gradient lies. The allocator of CPU tensors
// sees a number of bytes only; the node that the engine is evaluating says the rest: if exactly one
// of its gradients has that size, and leads to a parameter that is expected, it is that one's.
//
// Nothing depends on the answer: a gradient that came into being elsewhere is copied as ever, and
// a temporary that got the place instead is gone before the gradient arrives. Only nodes of which
// that is known are served, and never where somebody could hold on to a gradient (hooks,
// create_graph, autograd::grad). Who writes to a place asks is_taken() first all the same.
//
// Any thread may call. The first expect() puts the allocator in, for the process and for good.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace lockstep::parallel {

class Birthplace {
 public:
  // Where the parameter's next gradient should lie, or an undefined tensor.
  using Place = std::function<at::Tensor()>;

  static void check_environment();  // UsageError where the variable below is no number

  static void expect(const at::Tensor& parameter, const void* owner, Place place);
  static void forget(const void* owner);

  static bool is_taken(const at::Tensor& place);  // some tensor lies there now

  static std::size_t expecting();  // parameters
  static std::uint64_t served();   // places given away since the process began
  // From which size on: LOCKSTEP_BIRTHPLACE_BYTES, and this for tests. Gives the old one.
  static std::size_t set_least_bytes(std::size_t bytes);
};

}  // namespace lockstep::parallel
