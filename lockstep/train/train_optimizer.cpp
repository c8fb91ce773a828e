#include "lockstep/train/train_optimizer.h"

#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
#include "lockstep/core/log.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/schedule.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/train/config_keys.h"
#include "lockstep/train/rule_options.h"

namespace lockstep::train {
namespace {

std::vector<optim::ParamGroup> groups_of(const RunContext& run) {
  if (!run.task.param_groups.empty()) return run.task.param_groups;
  const optim::Rule rule = std::visit([](const auto& options) { return optim::Rule(options); },
                                      rule_options(run.arguments));
  rule->check();
  if (!rule.is<optim::MuonOptions>()) return optim::decay_groups(*run.task.module, rule);
  return optim::muon_groups(*run.task.module, rule.as<optim::MuonOptions>(),
                            adamw_options(run.arguments));
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

ShardFacts shard_facts(const RunContext& run) {
  ShardFacts facts{.ranks = run.batch_ranks()};
  if (facts.ranks == 1) return facts;
  std::string unable;
  try {
    check_shardable(*run.task.module);
  } catch (const UsageError& e) {
    unable = e.what();
  }
  facts.share_memory = run.world.device().is_cpu() && run.mesh.batch().shares_memory();
  facts.lack_room =
      !facts.share_memory && any_rank(run.world, lacks_room(run.world, state_bytes(run)));
  facts.unable = any_rank(run.world, !unable.empty());
  if (run.world.is_leader() && !unable.empty() && (facts.share_memory || facts.lack_room))
    log::info("trainer", "shard_optimizer: auto cannot shard this model: {}", unable);
  return facts;
}

std::unique_ptr<optim::Optimizer> make_optimizer(RunContext& run) {
  if (run.task.make_optimizer) return run.task.make_optimizer(*run.parallelism);
  auto groups = groups_of(run);
  if (run.arguments.optim_args && !run.task.param_groups.empty() && run.world.is_leader())
    log::warning("trainer", "optim_args has no effect: the task has parameter groups of its own.");
  const std::string& reason = run.why_sharded;
  if (run.world.is_leader())
    log::info("trainer", "optimizer {}: {}",
              run.task.param_groups.empty() ? run.arguments.optim : "of the task",
              reason.empty()
                  ? run.parallelism->text()
                  : fmt::format("sharded over {} ranks ({})", run.batch_ranks(), reason));
  if (run.world.is_leader() && !reason.empty() && run.arguments.ddp_bucket_cap_mb)
    log::warning("trainer",
                 "ddp_bucket_cap_mb {} has no effect: the sharded optimizer averages gradients in "
                 "its step, without buckets. shard_optimizer: false has them.",
                 *run.arguments.ddp_bucket_cap_mb);
  return run.parallelism->make_optimizer(std::move(groups));
}

}  // namespace

std::vector<at::Tensor> state_of_a_run(const RunContext& run) {
  std::vector<at::Tensor> state;
  for (const optim::ParamGroup& group : groups_of(run)) {
    for (const at::Tensor& parameter : group.params) {
      if (!parameter.requires_grad()) continue;
      for (const optim::StateSpec& spec : group.options->state(parameter.sizes()))
        state.push_back(at::empty(
            spec.sizes, at::device(at::kMeta).dtype(dtype_of(spec, parameter.scalar_type()))));
    }
  }
  return state;
}

std::uint64_t state_bytes(const RunContext& run) {
  std::uint64_t bytes = 0;
  for (const at::Tensor& tensor : state_of_a_run(run)) bytes += tensor.nbytes();
  return bytes;
}

std::string reason_to_shard(const std::string& asked, const ShardFacts& facts) {
  if (asked != "auto") return asked == "true" ? "shard_optimizer: true" : "";
  if (facts.ranks == 1 || facts.unable) return "";
  if (facts.share_memory) return "ranks share memory: averaging and step are one pass";
  if (facts.lack_room)
    return "the state of every rank would need more than half of the free memory";
  return "";
}

// Ranks along "shard" divide the state already, and what the task makes is its own.
std::string reason_to_shard(const RunContext& run) {
  const auto is_shard = [](const MeshAxis& axis) { return axis.name == "shard"; };
  if (run.task.make_parallelism || run.task.make_optimizer || run.world.size() == 1 ||
      std::ranges::any_of(run.mesh.axes(), is_shard))
    return "";
  const std::string& asked = run.arguments.shard_optimizer;
  if (asked != "auto") return reason_to_shard(asked, {});
  // With ranks along other axes the model is divided, and its state with it.
  return run.batch_ranks() == run.world.size() ? reason_to_shard(asked, shard_facts(run)) : "";
}

TrainOptimizer::TrainOptimizer(RunContext& run) : run_(run), optimizer_(make_optimizer(run)) {
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
  if (!run_.why_sharded.empty()) run_.parallelism.reset();  // parameters get memory of their own
}

}  // namespace lockstep::train
