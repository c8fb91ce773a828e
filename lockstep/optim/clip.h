// Gradient clipping without a host sync, operation by operation what torch.nn.utils does.
//
//   loss.backward();
//   scaler.unscale_(optimizer);                              // with loss scaling: unscale first
//   const at::Tensor norm = clip_grad_norm_(model.parameters(), 1.0);
//   optimizer.step();
//
// The norm and the coefficient stay tensors on the gradients' device, so nothing waits for the GPU;
// read the returned norm when it is logged, not in every step.
//
// Parameters without a gradient are skipped, and one listed twice (tied weights) counts once.
// Averaged gradients are the same on all ranks, so every rank clips identically without
// communication; a model whose gradients are still this rank's own (Shard::kState) is refused with
// UsageError.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::optim {

struct ClipOptions {
  double norm_type = 2;             // any p > 0, or infinity
  bool error_if_nonfinite = false;  // reads the norm on the host: a sync per call
  // The norm of order 2 with the order of summation of a divided state (Shard::kState): in double,
  // over blocks of 4096 elements, parameter by parameter. Replicated clipping then has that
  // optimizer's bits instead of torch's. For float and double gradients on the CPU; the norm is a
  // double.
  bool by_blocks = false;
};

// Scales the gradients so that their norm, taken over all of them as one vector, is at most
// max_norm. Returns the norm before.
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& params, double max_norm,
                           const ClipOptions& options = {});

// Only the norm.
at::Tensor grad_norm(const std::vector<at::Tensor>& params, const ClipOptions& options = {});

// Bounds every element of every gradient to [-clip_value, clip_value].
void clip_grad_value_(const std::vector<at::Tensor>& params, double clip_value);

}  // namespace lockstep::optim
