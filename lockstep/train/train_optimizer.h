// TrainOptimizer: a run's optimizer with its loss scaler and its schedule; the Trainer makes,
// steps, saves and loads it here.
//
//   TrainOptimizer optimizer(run);   // replicated or sharded, as shard_optimizer says
//   optimizer.set_schedule(plan);
//   const optim::StepResult result = optimizer.step(/*want_grad_norm=*/false);
//
// step(), state() and load() may communicate: call them on all ranks identically. One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/optim/amp.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/train/checkpoint.h"
#include "lockstep/train/run_control.h"
#include "lockstep/train/step_plan.h"

namespace lockstep::train {

// The facts on which `shard_optimizer: auto` decides, the same on every rank.
struct ShardFacts {
  int ranks = 1;
  bool share_memory = false;
  bool lack_room = false;  // for the whole state on every rank
  bool unable = false;     // the model cannot be sharded
};
// Why the optimizer is sharded; empty: it is replicated.
std::string reason_to_shard(const std::string& asked, const ShardFacts& facts);
// The same from the run's settings, before its parallelism is made. Collective.
std::string reason_to_shard(const RunContext& run);

// The state that the optimizer will have on a rank that holds it whole, on the meta device, and its
// size in bytes. For a task that makes its own optimizer: the state of the rule in `optim`.
std::vector<at::Tensor> state_of_a_run(const RunContext& run);
std::uint64_t state_bytes(const RunContext& run);

class TrainOptimizer {
 public:
  // Made by run.parallelism. Sets run.optimizer, for observers.
  explicit TrainOptimizer(RunContext& run);

  void set_schedule(const StepPlan& plan);
  // Sets it for the next step. As in Hugging Face, the schedule counts the steps taken.
  void set_learning_rate();

  // Call it before every step: records the step's learning rate.
  void begin_step() { learning_rate_ = optimizer_->lr(); }
  // Clips, steps (unless a gradient is not finite) and clears the gradients.
  optim::StepResult step(bool want_grad_norm);
  optim::StepOptions step_options(bool want_grad_norm) const;
  optim::Optimizer& optimizer() { return *optimizer_; }
  // The first group's learning rate in the last step.
  double learning_rate() const { return learning_rate_; }
  optim::GradScaler* scaler() const { return scaler_.get(); }

  void load(const Checkpoint& checkpoint);
  // The optimizer's state for a checkpoint, on ranks that request it. If it is not sharded this is
  // its own memory, valid until the next step: the saver copies it during the next forward and
  // backward.
  TensorDict state(bool wanted, bool divided = false) {
    return optimizer_->state_dict({.wanted = wanted, .copy = false, .divided = divided});
  }
  // Adds scheduler and scaler to `contents`.
  void save(CheckpointContents& contents) const;

  // Called when the module's weights were loaded, equally on every rank.
  void sync_from_model() { optimizer_->sync_from_model(); }
  // Until this call ranks of one host share the parameters' memory where they divide the state.
  // There is no parallelism then.
  void release();

 private:
  RunContext& run_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::unique_ptr<optim::GradScaler> scaler_;
  std::function<double(std::int64_t)> factor_;  // scales the peaks, after so many steps
  std::vector<double> peaks_;                   // learning rates of the groups
  double learning_rate_ = 0;
};

}  // namespace lockstep::train
