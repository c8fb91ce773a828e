// The number of optimizer steps of a run, and the steps at which it logs, evaluates and saves, by
// Hugging Face's rules.
//
// Everything is counted in optimizer steps. Batches become steps by the accumulation (a short last
// window is a step too), epochs become steps, and intervals below 1 are a share of all steps,
// rounded up.
//
//   const StepPlan plan = plan_steps(arguments, loader.batches_per_epoch(), accumulation);
//   if (due_after_step(arguments, plan, step).save) ...
//
// Pure functions; call from any thread.
#pragma once

#include <cstdint>

#include "lockstep/train/arguments.h"

namespace lockstep::train {

struct StepPlan {
  std::int64_t steps_per_epoch = 0;
  std::int64_t max_steps = 0;         // the run ends after this one
  std::int64_t num_train_epochs = 0;  // whole ones that are begun
  std::int64_t logging_steps = 0;     // 0: never by steps
  std::int64_t eval_steps = 0;
  std::int64_t save_steps = 0;
  std::int64_t warmup_steps = 0;
};

StepPlan plan_steps(const TrainingArguments& arguments, std::int64_t batches_per_epoch,
                    std::int64_t accumulation);

// Progress of a run that was saved with a different number of ranks, batch size or accumulation.
struct RunProgress {
  std::int64_t step = 0;
  double epoch = 0;  // epochs consumed, including the fraction of the current one
};
// The plan for the remaining steps: steps taken still count, and the rest of the epochs uses the
// new numbers. A given max_steps is not changed.
StepPlan replan_steps(const TrainingArguments& arguments, const StepPlan& plan,
                      const RunProgress& progress);

struct Due {
  bool log = false;
  bool evaluate = false;
  bool save = false;
};
Due due_after_step(const TrainingArguments& arguments, const StepPlan& plan, std::int64_t step);
Due due_after_epoch(const TrainingArguments& arguments, double epoch);

}  // namespace lockstep::train
