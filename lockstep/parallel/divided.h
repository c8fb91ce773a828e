// What ways to divide a model over ranks have in common (FullyShard, Pipeline). Internal.
//
//   own_memory(parameter);
//   return step_divided(this, options, {.norm = ..., .scale = ..., .step = ...});
//
// Functions without state; which communicate is said.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/replicas.h"

namespace lockstep::parallel {

// Gives a parameter memory that nothing else lies in, in the order of its rows, and lets its
// storage be replaced. No graph holds the parameter yet.
void own_memory(at::Tensor tensor);

// Throws CommError where a tensor is not the same on all ranks of `world`, which are along `where`.
// Collective.
void require_same(World& world, const std::string& component, const std::string& kind,
                  const std::string& where, const Fingerprints& fingerprints);

// A step whose gradients are divided over ranks.
struct DividedStep {
  std::function<at::Tensor()> norm;                     // of all of them, the same on every rank
  std::function<void(const at::Tensor& factor)> scale;  // this rank's
  std::function<void(const optim::StepOptions&)> step;  // this rank's, without clipping or scaling
};
// Clips, unscales and skips on all ranks or none. Collective where the parts are.
optim::StepResult step_divided(const void* optimizer, const optim::StepOptions& options,
                               const DividedStep& parts);

}  // namespace lockstep::parallel
