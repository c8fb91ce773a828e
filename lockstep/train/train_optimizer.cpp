#include "lockstep/train/train_optimizer.h"

#include <algorithm>
#include <set>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/schedule.h"
#include "lockstep/optim/sgd.h"

namespace lockstep::train {
namespace {

template <typename Optimizer, typename Options>
std::shared_ptr<optim::FusedBase> with_groups(const optim::DecayGroups& groups, Options options) {
  const double decay = options.weight_decay;
  std::vector<torch::optim::OptimizerParamGroup> all;
  if (!groups.decayed.empty()) all.push_back(Optimizer::group(groups.decayed, options));
  options.weight_decay = 0;
  if (!groups.not_decayed.empty()) all.push_back(Optimizer::group(groups.not_decayed, options));
  options.weight_decay = decay;
  return std::make_shared<Optimizer>(all, options);
}

std::shared_ptr<optim::FusedBase> make_fused(const TrainingArguments& a,
                                             const torch::nn::Module& module) {
  const optim::DecayGroups groups = optim::decay_groups(module);
  const std::pair<double, double> betas{a.adam_beta1, a.adam_beta2};
  if (a.optim == "sgd") {
    return with_groups<optim::SGD>(
        groups, optim::SGDOptions{
                    .lr = a.learning_rate, .momentum = a.momentum, .weight_decay = a.weight_decay});
  }
  if (a.optim == "adam") {
    return with_groups<optim::Adam>(groups, optim::AdamOptions{.lr = a.learning_rate,
                                                               .betas = betas,
                                                               .eps = a.adam_epsilon,
                                                               .weight_decay = a.weight_decay});
  }
  return with_groups<optim::AdamW>(groups, optim::AdamWOptions{.lr = a.learning_rate,
                                                               .betas = betas,
                                                               .eps = a.adam_epsilon,
                                                               .weight_decay = a.weight_decay});
}

std::string scaler_json(const optim::GradScalerState& s) {
  return json_object({{"scale", real_node(s.scale)},
                      {"growth_factor", real_node(s.growth_factor)},
                      {"backoff_factor", real_node(s.backoff_factor)},
                      {"growth_interval", integer_node(s.growth_interval)},
                      {"growth_tracker", integer_node(s.growth_tracker)}});
}

optim::GradScalerState parse_scaler(const std::string& text, const std::string& name) {
  const Node root = parse_json(text, name);
  optim::GradScalerState s;
  for (const Entry& entry : as_map(root, "scaler").entries) {
    if (entry.key == "scale") s.scale = as_real(entry.value, entry.key);
    if (entry.key == "growth_factor") s.growth_factor = as_real(entry.value, entry.key);
    if (entry.key == "backoff_factor") s.backoff_factor = as_real(entry.value, entry.key);
    if (entry.key == "growth_interval") s.growth_interval = as_integer(entry.value, entry.key);
    if (entry.key == "growth_tracker") s.growth_tracker = as_integer(entry.value, entry.key);
  }
  return s;
}

}  // namespace

TrainOptimizer::TrainOptimizer(const RunContext& run) : run_(run) {
  optimizer_ =
      run.task.optimizer ? run.task.optimizer : make_fused(run.arguments, *run.task.module);
  stepper_ = optim::replicated(optimizer_, optim::named(*run.task.module), run.world);
  if (run.arguments.fp16) scaler_ = std::make_unique<optim::GradScaler>(run.world);
  for (std::size_t group = 0; group < stepper_->groups(); ++group)
    peaks_.push_back(stepper_->lr(group));
  if (std::ranges::all_of(peaks_, [](double lr) { return lr == 0; }))
    throw UsageError(
        "trainer",
        "every group of the task's optimizer has the learning rate 0, so nothing would "
        "be trained. Another run's schedule has probably left it there. Make a new "
        "optimizer for every run.");
}

void TrainOptimizer::set_schedule(const StepPlan& plan) {
  factor_ = run_.task.schedule;
  if (!factor_) {
    factor_ = [schedule = optim::make_schedule({.name = run_.arguments.lr_scheduler_type,
                                                .warmup_steps = plan.warmup_steps,
                                                .total_steps = plan.max_steps,
                                                .lr = peaks_.front(),
                                                .kwargs = run_.arguments.lr_scheduler_kwargs})](
                  std::int64_t steps) { return schedule.factor(steps); };
  }
  set_learning_rate();
}

void TrainOptimizer::set_learning_rate() {
  const double factor = factor_(run_.state.global_step);
  for (std::size_t group = 0; group < peaks_.size(); ++group)
    stepper_->set_lr(group, peaks_[group] * factor);
}

optim::StepResult TrainOptimizer::step(bool want_grad_norm) {
  learning_rate_ = stepper_->lr(0);
  const optim::StepResult result = stepper_->step({.max_grad_norm = run_.arguments.max_grad_norm,
                                                   .want_grad_norm = want_grad_norm,
                                                   .scaler = scaler_.get(),
                                                   .skip_non_finite = true});
  stepper_->zero_grad();
  return result;
}

void TrainOptimizer::load(const Checkpoint& checkpoint) {
  stepper_->load_state_dict(checkpoint.optimizer());
  const std::string text = scaler_ ? checkpoint.text("scaler.json") : std::string();
  if (!text.empty())
    scaler_->load_state_dict(parse_scaler(text, checkpoint.path() + "/scaler.json"));
}

void TrainOptimizer::save(CheckpointContents& contents) {
  contents.optimizer = live_state();
  const std::string type = run_.task.schedule ? "custom" : run_.arguments.lr_scheduler_type;
  contents.scheduler = json_object({{"type", text_node(type)},
                                    {"last_epoch", integer_node(run_.state.global_step)},
                                    {"base_lr", real_node(peaks_.front())},
                                    {"last_lr", real_node(stepper_->lr(0))}});
  if (scaler_) contents.scaler = scaler_json(scaler_->state_dict());
}

// The optimizer's own memory where there is much of it, so that the saver copies it while the next
// forward and backward run. state_dict() has the same names and values, as copies.
TensorDict TrainOptimizer::live_state() {
  TensorDict live;
  std::set<at::TensorImpl*> seen;  // a parameter of two names has its state under the first
  const auto& states = optimizer_->state();
  for (const auto& [name, parameter] : optim::named(*run_.task.module)) {
    if (!parameter.requires_grad() || !seen.insert(parameter.unsafeGetTensorImpl()).second)
      continue;
    const auto found = states.find(parameter.unsafeGetTensorImpl());
    const auto* adam = found == states.end()
                           ? nullptr
                           : dynamic_cast<const optim::AdamState*>(found->second.get());
    if (adam == nullptr || !adam->step.defined()) return stepper_->state_dict();
    live[name + ".exp_avg"] = adam->exp_avg;
    live[name + ".exp_avg_sq"] = adam->exp_avg_sq;
    live[name + ".step"] = adam->step.to(at::kDouble).reshape({});  // a copy
  }
  return live;
}

}  // namespace lockstep::train
