// CapturedStep: a whole training step (forward, backward, gradient synchronisation, clipping,
// optimizer) as one CUDA graph. Small steps are then bound by the GPU and not by the host, which
// launches one graph instead of a thousand kernels.
//
//   const lockstep::optim::StepOptions how{.max_grad_norm = 1.0};
//   lockstep::CapturedStep step{optimizer, {how, model.parameters()}, [&](const auto& in, int) {
//     const at::Tensor loss = net->loss(in[0], in[1]);
//     loss.backward();
//     optimizer.step(how);
//     optimizer.zero_grad();
//     return std::vector<at::Tensor>{loss.detach()};
//   }};
//   for (auto& batch : loader.epoch(epoch)) losses += step.run({batch.data, batch.target})[0];
//
// The first calls run the function; then it is recorded, and later calls replay it: inputs are
// copied to where the graph reads them, learning rates and the clipping bound are on the device,
// and every replay rewrites the tensors that the function returned (clone what must stay). The
// results have the bits of the function itself. Inputs of other shapes, such as an epoch's last
// batch, get a graph of their own when they are frequent enough, and until then run the
// function.
// The function must do the same whenever it is called with the same shapes and variant, and the
// tensors that it reads must stay where they are; its host code runs only while there is no graph.
// If it cannot be captured (it waits for the device, or the optimizer cannot be captured), a log
// line names the operation, and it runs without a graph.
//
// Several ranks: with options.parallelism they agree in every call, and all run, record or replay.
// The collectives of the backward are in the graph with the rest; what ranks exchange on the host,
// in a communication hook for example, cannot be. A graph has the world's deadline.
//
//   lockstep::CapturedStepOptions options{.step = how, .parameters = model.parameters(),
//                                         .parallelism = model.parallelism()};
//
// Shares optimizer, parameters and parallelism. One thread; with several ranks the constructor and
// run() communicate, on all of them identically.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/optim/optimizer.h"

namespace lockstep {

class Parallelism;

struct CapturedStepOptions {
  optim::StepOptions step{};             // what the function passes to optimizer.step()
  std::vector<at::Tensor> parameters{};  // the model's
  int warmup_steps = 3;  // calls with the same shapes before one is recorded, at least 1
  // The parallelism of the wrapped model that the function trains. Without it, a model that is
  // wrapped, now or later, is refused: its graph would have no collectives, or stale ones.
  std::shared_ptr<Parallelism> parallelism{};
  bool asked = true;  // false: a log line about missing graphs is not a warning
};

class CapturedStep {
 public:
  using Tensors = std::vector<at::Tensor>;
  // `variant`: the function may do different things for the same shapes. The micro-batches that
  // begin an accumulation window, continue it, and end it with a step are different variants.
  using Work = std::function<Tensors(const Tensors& inputs, int variant)>;

  CapturedStep(optim::Optimizer& optimizer, CapturedStepOptions options, Work work);
  ~CapturedStep();
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  Tensors run(const Tensors& inputs, int variant = 0);

  // Whether the last run() replayed a graph, so that no host code of the function ran.
  bool replayed() const;
  // Why there are no graphs; empty: there are, or will be.
  const std::string& unavailable_reason() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
