// The reference: one blocking all-reduce per parameter after backward, nothing else. Tests compare
// DistributedDataParallel with it.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep::testing {

inline void average_gradients(World& world, const std::vector<at::Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    if (!parameter.requires_grad()) continue;
    at::Tensor grad = parameter.grad().defined() ? parameter.grad() : at::zeros_like(parameter);
    world.all_reduce(grad, ReduceOp::kAvg).wait();
    parameter.mutable_grad() = grad;
  }
}

}  // namespace lockstep::testing
