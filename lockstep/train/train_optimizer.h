// TrainOptimizer: the optimizer of a run with its loss scaler and its schedule; everything in the
// Trainer that makes, steps, saves and loads it.
//
//   TrainOptimizer optimizer(run);          // shares the module's parameters
//   optimizer.set_schedule(plan);
//   const optim::StepResult result = optimizer.step(/*want_grad_norm=*/false);
//
// The optimizer is replicated: every rank has the whole state. step() and load() may communicate,
// on all ranks identically. One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "lockstep/optim/grad_scaler.h"
#include "lockstep/optim/stepper.h"
#include "lockstep/train/checkpoint.h"
#include "lockstep/train/run_context.h"
#include "lockstep/train/step_plan.h"

namespace lockstep::train {

class TrainOptimizer {
 public:
  explicit TrainOptimizer(const RunContext& run);

  void set_schedule(const StepPlan& plan);
  // For the next step. As Hugging Face: the schedule counts the steps taken.
  void set_learning_rate();

  // Clips, steps (unless a gradient is not finite) and clears the gradients.
  optim::StepResult step(bool want_grad_norm);
  // Of the first group, in the step that was taken last.
  double learning_rate() const { return learning_rate_; }
  optim::GradScaler* scaler() const { return scaler_.get(); }

  void load(const Checkpoint& checkpoint);
  // optimizer, scheduler and scaler of `contents`. The tensors are the optimizer's own memory.
  void save(CheckpointContents& contents);

 private:
  TensorDict live_state();

  const RunContext& run_;
  std::shared_ptr<optim::FusedBase> optimizer_;
  std::unique_ptr<optim::Stepper> stepper_;
  std::unique_ptr<optim::GradScaler> scaler_;
  std::function<double(std::int64_t)> factor_;  // of the peaks, after so many steps
  std::vector<double> peaks_;                   // learning rates of the groups
  double learning_rate_ = 0;
};

}  // namespace lockstep::train
