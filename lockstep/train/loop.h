// Loop: the training loop itself: windows of micro-batches, steps, epochs, and what is due after
// each.
//
//   Loop loop({run, control, metrics, checkpoints, evaluator});   // wraps model and data
//   if (checkpoint) loop.resume(*checkpoint);
//   loop.open();
//   loop.run();
//
// Makes run.parallelism, and owns the other parts of a step: loader, optimizer, and the position in
// the epochs. All functions are collectives, called on all ranks identically. One thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/data/loader.h"
#include "lockstep/monitor/run_record.h"
#include "lockstep/train/captured_step.h"
#include "lockstep/train/checkpoint_manager.h"
#include "lockstep/train/evaluator.h"
#include "lockstep/train/metrics_reporter.h"
#include "lockstep/train/step_plan.h"

namespace lockstep::train {

// auto_find_batch_size, before other memory is allocated. Halves per_device_train_batch_size until
// it fits every rank (or takes the next smaller one that divides the window), and raises the
// accumulation, so that the effective batch, on which learning depends, is the same.
void find_batch_size(RunContext& run, RunControl& control);

struct LoopParts {
  RunContext& run;
  RunControl& control;
  MetricsReporter& metrics;
  CheckpointManager& checkpoints;
  Evaluator& evaluator;
};

class Loop {
 public:
  explicit Loop(const LoopParts& parts);

  void resume(const Checkpoint& checkpoint);
  // Does the remaining preparation before the first step.
  void open();
  void run();
  // Facts for the record of the run (start_recording).
  monitor::RunFacts facts() const;
  // Called after loading the best weights.
  void sync_from_model() { optimizer_.sync_from_model(); }
  // Called at the end, after which the parameters are in this process's own memory.
  void release_optimizer() { optimizer_.release(); }

 private:
  void resume_data(const DataPosition& saved);
  void say_changes(const Checkpoint& checkpoint, const Node& then) const;
  void advise_learning_rate() const;
  bool saves_at_the_end_alone() const;
  DataPosition position() const;

  void run_epoch(std::int64_t epoch);
  void step(const data::Window& window);
  at::Tensor compute(const data::Window& window);
  at::Tensor run_stages(const data::Window& window);
  at::Tensor backward(const data::Batch& batch, const at::Tensor& weight, bool last);
  void capture_steps();
  at::Tensor captured_micro_batch(const data::MicroBatch& micro, bool first);
  void before_step();
  void after_step(Due due);
  void evaluate(Due& due);
  void save();
  void compare_replicas();

  RunContext& run_;
  RunControl& control_;
  MetricsReporter& metrics_;
  CheckpointManager& checkpoints_;
  Evaluator& evaluator_;
  std::int64_t accumulation_steps_;
  data::Loader loader_;
  StepPlan plan_;
  TrainOptimizer optimizer_;
  std::unique_ptr<CapturedStep> captured_;               // compile_model
  const data::Batch* captured_batch_ = nullptr;          // the one it computes
  std::int64_t batches_run_ = 0, batches_replayed_ = 0;  // only batches that may be captured
  optim::StepResult step_result_;
  std::optional<std::int64_t> resumed_batch_;  // the batch learning_rate was used with; on rank 0
  std::int64_t epoch_ = 0;
  bool epoch_ending_ = false;    // its last step is done, and what is due after it
  bool epoch_ended_ = false;     // everything that is due after the epoch has been done
  bool evaluation_due_ = false;  // a stop signal came before it, or in it
  bool compared_ = false;        // the replicas were compared, at the end
};

}  // namespace lockstep::train
