#include "lockstep/train/step_plan.h"

#include <algorithm>
#include <cmath>

#include "lockstep/core/error.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/config_keys.h"

namespace lockstep::train {
namespace {

void fill_intervals(const TrainingArguments& arguments, StepPlan& plan) {
  plan.logging_steps = in_steps(arguments.logging_steps, plan.max_steps);
  plan.eval_steps =
      in_steps(arguments.eval_steps.value_or(arguments.logging_steps), plan.max_steps);
  plan.save_steps = in_steps(arguments.save_steps, plan.max_steps);
  plan.warmup_steps = in_steps(arguments.warmup_steps, plan.max_steps);
}

// The steps of a run's epochs, which a checkpoint or a very large dataset can make any number.
std::int64_t whole_steps(double steps, const char* what) {
  const double whole = std::ceil(steps);
  if (whole >= 0 && whole <= kStepLimit) return static_cast<std::int64_t>(whole);
  throw UsageError("trainer", "{} is {}, which is not from 0 to {}. Lower num_train_epochs.", what,
                   steps, static_cast<std::int64_t>(kStepLimit));
}

bool every(std::int64_t steps, std::int64_t step) {
  return steps > 0 && step % steps == 0;
}

}  // namespace

StepPlan plan_steps(const TrainingArguments& arguments, std::int64_t batches_per_epoch,
                    std::int64_t accumulation) {
  LOCKSTEP_ASSERT(batches_per_epoch > 0);  // a loader has one
  StepPlan plan;
  plan.steps_per_epoch = (batches_per_epoch + accumulation - 1) / accumulation;
  if (arguments.max_steps > 0) {
    plan.max_steps = arguments.max_steps;
    plan.num_train_epochs = (plan.max_steps + plan.steps_per_epoch - 1) / plan.steps_per_epoch;
  } else {
    plan.max_steps =
        whole_steps(arguments.num_train_epochs * static_cast<double>(plan.steps_per_epoch),
                    "the number of steps");
    plan.num_train_epochs = whole_steps(arguments.num_train_epochs, "the number of epochs");
  }
  fill_intervals(arguments, plan);
  return plan;
}

StepPlan replan_steps(const TrainingArguments& arguments, const StepPlan& plan,
                      const RunProgress& progress) {
  StepPlan changed = plan;
  if (arguments.max_steps <= 0) {
    const double left = std::max(0.0, arguments.num_train_epochs - progress.epoch);
    changed.max_steps =
        progress.step +
        // An epoch is a fraction of samples; a hair above a whole number of steps is rounding.
        whole_steps(std::max(0.0, left * static_cast<double>(plan.steps_per_epoch) - 1e-6),
                    "the number of steps left");
  } else {
    const double left =
        static_cast<double>(std::max<std::int64_t>(0, plan.max_steps - progress.step)) /
        static_cast<double>(plan.steps_per_epoch);
    changed.num_train_epochs =
        whole_steps(std::max(0.0, progress.epoch + left - 1e-6), "the number of epochs");
  }
  fill_intervals(arguments, changed);
  return changed;
}

Due due_after_step(const TrainingArguments& arguments, const StepPlan& plan, std::int64_t step) {
  Due due;
  const bool last = step >= plan.max_steps;
  due.log = (step == 1 && arguments.logging_first_step) ||
            (arguments.logging_strategy == Interval::kSteps && every(plan.logging_steps, step));
  due.evaluate = arguments.eval_strategy == Interval::kSteps &&
                 (every(plan.eval_steps, step) || last) &&
                 arguments.eval_delay <= static_cast<double>(step);
  due.save = arguments.save_strategy == Interval::kSteps && (every(plan.save_steps, step) || last);
  return due;
}

Due due_after_epoch(const TrainingArguments& arguments, double epoch) {
  return {.log = arguments.logging_strategy == Interval::kEpoch,
          .evaluate = arguments.eval_strategy == Interval::kEpoch && arguments.eval_delay <= epoch,
          .save = arguments.save_strategy == Interval::kEpoch};
}

}  // namespace lockstep::train
