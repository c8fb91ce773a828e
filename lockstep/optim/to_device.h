// Copies a small tensor to another device, for a model that is spread over several.
//
// A non-blocking copy is safe towards a GPU, whose stream runs in order, but not towards the CPU:
// torch creates the result in pinned memory and returns before the bytes have arrived, so the next
// reader sees the old contents.
//
//   at::_foreach_mul_(grads, to_device(coefficient, grads[0].device()));
//
// Private to lockstep/optim.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::optim {

inline at::Tensor to_device(const at::Tensor& tensor, c10::Device device) {
  return tensor.to(device, /*non_blocking=*/!device.is_cpu());
}

}  // namespace lockstep::optim
