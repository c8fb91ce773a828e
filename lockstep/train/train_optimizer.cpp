#include "lockstep/train/train_optimizer.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/core/memory_limits.h"
#include "lockstep/optim/schedule.h"
#include "lockstep/parallel/deferred.h"
#include "lockstep/parallel/sharded_optimizer.h"

namespace lockstep::train {
namespace {

optim::OptimizerOptions optimizer_options(const TrainingArguments& a) {
  if (a.optim == "sgd")
    return optim::SGDOptions{
        .lr = a.learning_rate, .momentum = a.momentum, .weight_decay = a.weight_decay};
  const auto adam = [&](auto options) {
    options.lr = a.learning_rate;
    options.betas = {a.adam_beta1, a.adam_beta2};
    options.eps = a.adam_epsilon;
    options.weight_decay = a.weight_decay;
    return options;
  };
  if (a.optim == "adam") return adam(optim::AdamOptions{});
  return adam(optim::AdamWOptions{});
}

// Bytes of state of a replicated optimizer.
std::uint64_t state_bytes(const TrainingArguments& a, const torch::nn::Module& module) {
  std::uint64_t bytes = 0;
  for (const at::Tensor& parameter : module.parameters())
    if (parameter.requires_grad() && a.optim != "sgd") bytes += 2 * parameter.nbytes();
  return bytes;
}

// Whether the state, and as much again for activations and gradients, exceeds what is free.
bool lacks_room(const World& world, std::uint64_t bytes) {
  const c10::Device device = world.device();
  if (!device.is_cpu())
    return bytes > c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index()).first / 2;
  const auto ranks = static_cast<std::size_t>(world.local_size());
  return !lacking_memory({.own_bytes = 2 * bytes,
                          .host_bytes = 2 * bytes * ranks,
                          .map_bytes = 2 * bytes,
                          .groups = std::vector(ranks, memory_groups())})
              .empty();
}

ShardFacts shard_facts(RunContext& run, WrappedModel& model) {
  if (run.arguments.shard_optimizer != "auto") return {};
  ShardFacts facts{.ranks = run.world.size()};
  if (facts.ranks == 1) return facts;
  facts.tune = run.world.any(run.arguments.tune.has_value());
  std::string unable;
  try {
    parallel::Deferral(model.reducer()).check_deferrable();
  } catch (const UsageError& e) {
    unable = e.what();
  }
  facts.share_memory = run.world.device().is_cpu() && run.world.shares_memory();
  facts.lack_room =
      !facts.share_memory &&
      run.world.any(lacks_room(run.world, state_bytes(run.arguments, *run.task.module)));
  facts.unable = run.world.any(!unable.empty());
  if (run.world.is_leader() && !unable.empty() && (facts.share_memory || facts.lack_room))
    log::info("trainer", "shard_optimizer: auto cannot shard this model: {}", unable);
  return facts;
}

std::unique_ptr<optim::Optimizer> make_optimizer(RunContext& run, WrappedModel& model) {
  if (run.task.make_optimizer) return run.task.make_optimizer(model);
  auto groups = run.task.param_groups;
  if (groups.empty())
    groups = optim::decay_groups(*run.task.module, optimizer_options(run.arguments));
  const std::string reason =
      reason_to_shard(run.arguments.shard_optimizer, shard_facts(run, model));
  if (run.world.is_leader())
    log::info("trainer", "optimizer {}: {}",
              run.task.param_groups.empty() ? run.arguments.optim : "of the task",
              reason.empty() ? "replicated"
                             : fmt::format("sharded over {} rank{} ({})", run.world.size(),
                                           run.world.size() == 1 ? "" : "s", reason));
  if (run.world.is_leader() && !reason.empty() && run.arguments.ddp_bucket_cap_mb)
    log::warning("trainer",
                 "ddp_bucket_cap_mb {} has no effect: the sharded optimizer averages gradients in "
                 "its step, without buckets. shard_optimizer: false has them.",
                 *run.arguments.ddp_bucket_cap_mb);
  if (reason.empty()) return std::make_unique<optim::ReplicatedOptimizer>(model, std::move(groups));
  return std::make_unique<ShardedOptimizer>(model, std::move(groups));
}

}  // namespace

std::string reason_to_shard(const std::string& asked, const ShardFacts& facts) {
  if (asked != "auto") return asked == "true" ? "shard_optimizer: true" : "";
  if (facts.ranks == 1 || facts.unable) return "";
  if (facts.share_memory) return "ranks share memory: averaging and step are one pass";
  if (facts.lack_room && !facts.tune)
    return "the state of every rank would need more than half of the free memory";
  return "";
}

TrainOptimizer::TrainOptimizer(RunContext& run, WrappedModel& model)
    : run_(run), optimizer_(make_optimizer(run, model)) {
  if (run.arguments.fp16) scaler_ = std::make_unique<optim::GradScaler>(run.world);
  for (std::size_t group = 0; group < optimizer_->groups(); ++group)
    peaks_.push_back(optimizer_->lr(group));
  if (std::ranges::all_of(peaks_, [](double lr) { return lr == 0; }))
    throw UsageError("trainer",
                     "every group of the task's optimizer has the learning rate 0, so nothing "
                     "would be trained. Give the groups their peak learning rates.");
  run.optimizer = optimizer_.get();
}

void TrainOptimizer::set_schedule(const StepPlan& plan) {
  factor_ = run_.task.schedule;
  if (!factor_) {
    const auto& kwargs = run_.arguments.lr_scheduler_kwargs;
    factor_ = [schedule = optim::make_schedule(
                   {.name = run_.arguments.lr_scheduler_type,
                    .warmup_steps = plan.warmup_steps,
                    .total_steps = plan.max_steps,
                    .lr = peaks_.front(),
                    .kwargs = optim::schedule_kwargs(kwargs ? *kwargs : Node{})})](
                  std::int64_t steps) { return schedule.factor(steps); };
  }
  set_learning_rate();
}

void TrainOptimizer::set_learning_rate() {
  const double factor = factor_(run_.state.global_step);
  for (std::size_t group = 0; group < peaks_.size(); ++group)
    optimizer_->set_lr(group, peaks_[group] * factor);
}

optim::StepOptions TrainOptimizer::step_options(bool want_grad_norm) const {
  return {.max_grad_norm = run_.arguments.max_grad_norm,
          .want_grad_norm = want_grad_norm,
          .scaler = scaler_.get(),
          .skip_non_finite = true};
}

optim::StepResult TrainOptimizer::step(bool want_grad_norm) {
  const optim::StepResult result = optimizer_->step(step_options(want_grad_norm));
  optimizer_->zero_grad();
  return result;
}

void TrainOptimizer::load(const Checkpoint& checkpoint) {
  optimizer_->load_state_dict(checkpoint.optimizer());
  const std::string text = scaler_ ? checkpoint.text("scaler.json") : std::string();
  if (!text.empty())
    scaler_->load_state_dict(parse_scaler_text(text, checkpoint.path() + "/scaler.json"));
}

void TrainOptimizer::save(CheckpointContents& contents) const {
  const std::string type = run_.task.schedule ? "custom" : run_.arguments.lr_scheduler_type;
  std::vector<double> rates;
  for (std::size_t group = 0; group < optimizer_->groups(); ++group)
    rates.push_back(optimizer_->lr(group));
  const std::int64_t step = run_.state.global_step;
  contents.scheduler = scheduler_text(type, factor_(step), step, rates);
  if (scaler_) contents.scaler = scaler_text(scaler_->state_dict());
}

void TrainOptimizer::release() {
  run_.optimizer = nullptr;
  optimizer_.reset();
}

}  // namespace lockstep::train
