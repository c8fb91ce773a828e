// Learning-rate schedules: Hugging Face's, and PyTorch's StepLR, MultiStepLR and ExponentialLR.
//
//   const Schedule schedule = make_schedule({.name = "cosine", .warmup_steps = 100,
//                                            .total_steps = 5000, .lr = 3e-4});
//   for (int step = 0; step < 5000; ++step) optimizer.set_lr(base_lr * schedule.factor(step));
//
// A schedule is a function of the number of optimizer steps taken, and nothing else. There is no
// state to save, so a resumed run, or one with skipped steps that were not counted, cannot drift.
// factor(0) is the first step's, as with transformers' get_scheduler.
//
// Names: constant, constant_with_warmup, linear, cosine, cosine_with_restarts, polynomial,
// inverse_sqrt, warmup_stable_decay, cosine_with_min_lr; step, multi_step, exponential. The options
// of each (num_cycles, power, lr_end, timescale, min_lr, min_lr_rate, num_stable_steps,
// num_decay_steps, warmup_type, decay_type, min_lr_ratio; step_size, milestones, gamma) have the
// meanings and defaults of Hugging Face and PyTorch; docs/optimisation.md lists them.
//
// A value: copy it, read it from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace lockstep {
struct Node;
}

namespace lockstep::optim {

// Hugging Face's lr_scheduler_kwargs: {{"num_cycles", 2.0}, {"decay_type", "linear"}}. A list is
// {"milestones", std::vector<double>{30, 80}}.
using ScheduleKwargs =
    std::map<std::string, std::variant<double, std::string, std::vector<double>>>;

struct ScheduleOptions {
  std::string name = "linear";
  std::int64_t warmup_steps = 0;
  std::int64_t total_steps = 0;  // not needed by those that have no end (schedule_has_end)
  double lr = 1e-3;              // the optimizer's own; polynomial's lr_end and min_lr relate to it
  ScheduleKwargs kwargs{};
};

class Schedule {
 public:
  // The factor of every group's base learning rate after `step` steps.
  double factor(std::int64_t step) const { return factor_(step); }
  const std::string& name() const { return name_; }

 private:
  friend Schedule make_schedule(const ScheduleOptions& options);
  std::string name_;
  std::function<double(std::int64_t)> factor_;
};

// Throws UsageError for an unknown name or option (with the nearest one) and for values that leave
// nothing to compute.
Schedule make_schedule(const ScheduleOptions& options);

const std::vector<std::string>& schedule_names();
// Whether it depends on total_steps; also false for an unknown name.
bool schedule_has_end(std::string_view name);

// Reads options from a file: a map, or null for none. A key without a value means its default.
ScheduleKwargs schedule_kwargs(const Node& node);

}  // namespace lockstep::optim
