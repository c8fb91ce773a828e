// BackwardListener: what autograd reports to a reducer during backward, through HookSet and
// PassEnd. Called on backward's threads, several at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace lockstep::parallel {

class BackwardListener {
 public:
  virtual ~BackwardListener() = default;
  // .grad holds the gradient of this parameter; `arrived` is it, or undefined where unknown.
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

}  // namespace lockstep::parallel
