#include "lockstep/train/evaluator.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <sstream>
#include <vector>

#include "lockstep/comm/device.h"
#include "lockstep/comm/numbers.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/log.h"
#include "lockstep/nn/block.h"
#include "lockstep/train/checks.h"

namespace lockstep::train {
namespace {

bool greater_is_better(const TrainingArguments& a) {
  return a.greater_is_better.value_or(!a.metric_for_best_model.ends_with("loss"));
}

}  // namespace

// Sums over this rank's batches; float64 on the device.
struct Evaluator::Sums {
  at::Tensor counts;  // tokens, samples
  std::map<std::string, at::Tensor> totals;
};

// A forward of a divided model runs on all ranks: one that has no batch takes the first sample.
data::Batch Evaluator::stand_in() const {
  auto one = data::loader(
      run_.task.eval_data, World{},
      {.batch_size = 1, .evaluation = true, .device = run_.world.device(), .check_ranks = false});
  auto batches = one.epoch(0);
  return batches.next().value();
}

// Ranks may differ by a batch, so each of them runs as many rounds as the longest has.
Evaluator::Sums Evaluator::sum_up() {
  const auto zero = at::dtype(at::kDouble).device(run_.world.device());
  Sums sums{.counts = at::zeros({2}, zero), .totals = {{"loss", at::zeros({}, zero)}}};
  if (in_windows()) {
    sum_up_windows(sums);
    return sums;
  }
  auto batches = loader_->epoch(0);
  for (std::int64_t i = 0; i < loader_->batches_per_epoch(); ++i) {
    if (const auto batch = batches.next()) {
      add(sums, *batch, run_.forward(*batch));
    } else if (divided()) {
      run_.forward(stand_in());
    }
    if (control_.stop_heard()) break;
  }
  return sums;
}

void Evaluator::add(Sums& sums, const data::Batch& batch, const LossOutput& result) const {
  const at::TensorOptions type = sums.counts.options();
  const auto add_to = [&](const std::string& name, const at::Tensor& value) {
    sums.totals.try_emplace(name, at::zeros({}, type)).first->second +=
        value.detach().to(type).sum();
  };
  const auto tokens = static_cast<double>(batch.tokens);
  // The mean over nothing is not a number, and neither is zero times that.
  if (tokens > 0) add_to("loss", result.loss.to(at::kDouble) * tokens);
  if (run_.task.totals)
    for (const auto& [name, total] : run_.task.totals(batch, result.output)) add_to(name, total);
  sums.counts[0] += tokens;
  sums.counts[1] += static_cast<double>(batch.samples());
}

// The stages of a pipeline process several batches at a time. The last stage's rank sums up its
// results, in the order of the batches.
void Evaluator::sum_up_windows(Sums& sums) {
  const auto* const staged = dynamic_cast<const nn::Staged*>(run_.task.module.get());
  const std::int64_t most = 4 * run_.mesh.size("pipeline");  // they wait 20 % of the time at most
  auto batches = loader_->epoch(0);
  for (std::int64_t left = loader_->batches_per_epoch(); left > 0; left -= most) {
    std::vector<Parallelism::Pass> passes;
    for (std::int64_t i = 0; i < std::min(left, most); ++i) {
      const std::optional<data::Batch> own = batches.next();
      const data::Batch batch = own ? *own : stand_in();
      const bool counts = own.has_value();
      passes.push_back({.forward =
                            [this, &sums, staged, batch, counts] {
                              const LossOutput result = run_.forward(batch);
                              if (counts && (staged == nullptr || staged->stage().last))
                                add(sums, batch, result);
                              return result.loss;
                            },
                        .weigh = {},
                        .sizes = batch.data.sizes().vec()});
    }
    run_.parallelism->run_window(passes);
    if (control_.stop_heard()) break;
  }
}

Metrics Evaluator::evaluate() {
  const ledger::PhaseScope evaluation(ledger::Phase::kEvaluation);
  mark_device_phase(ledger::Phase::kEvaluation, run_.world.device());
  ledger::add(ledger::Counter::kEvaluations);
  const auto start = std::chrono::steady_clock::now();
  World& world = run_.world;
  const TrainingArguments& a = run_.arguments;
  if (!loader_) {
    loader_.emplace(data::loader(run_.task.eval_data, run_.mesh.batch(),
                                 {.batch_size = a.per_device_eval_batch_size,
                                  .evaluation = true,
                                  .num_workers = static_cast<int>(a.dataloader_num_workers),
                                  .pin_memory = a.dataloader_pin_memory}));
  }
  const torch::NoGradGuard no_grad;
  torch::nn::Module& module = *run_.task.module;
  const bool was_training = module.is_training();
  module.eval();
  std::shared_ptr<void> whole;
  if (!divided()) whole = run_.gathered();  // ranks may differ by a batch
  Sums sums = run_.with_memory_advice([&] { return sum_up(); }, Phase::kEvaluation);
  module.train(was_training);
  // A rank without a batch does not know the names; the first has at least as many as any. Of a
  // pipeline the ranks of the last stage know them.
  World& line = run_.mesh["pipeline"];
  const int last = in_windows() ? line.size() - 1 : 0;
  std::string lines;
  for (const auto& [name, total] : sums.totals) lines += name + "\n";
  std::istringstream names(broadcast_bytes(line, broadcast_bytes(run_.mesh.batch(), lines), last));
  std::vector<std::string> order;
  std::vector<at::Tensor> row{sums.counts};
  for (std::string name; std::getline(names, name); order.push_back(name)) {
    const at::Tensor& total = sums.totals[name];
    row.push_back(total.defined() ? total.reshape({1}) : at::zeros({1}, sums.counts.options()));
  }
  at::Tensor all = at::cat(row);
  if (run_.batch_ranks() > 1) run_.mesh.batch().all_reduce(all).wait();
  if (line.size() > 1) line.broadcast(all, last).wait();
  // What follows from it (the best step, an early stop) is decided on every rank.
  if (run_.batch_ranks() < world.size()) world.broadcast(all, 0).wait();
  all = all.cpu();
  mark_device_phase(ledger::Phase::kNone, world.device());
  const double* value = all.const_data_ptr<double>();
  Metrics metrics;
  // Without a single target there is no mean; a loss of 0 would be the best there is.
  const double tokens = value[0] > 0 ? value[0] : NAN;
  for (std::size_t i = 0; i < order.size(); ++i)
    metrics.emplace_back("eval_" + order[i], value[i + 2] / tokens);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  metrics.emplace_back("eval_runtime", seconds.count());
  metrics.emplace_back("eval_samples_per_second", value[1] / seconds.count());
  return metrics;
}

// How much better a value is than the best so far. A value that is not finite never is: nothing
// could be compared with it afterwards.
double Evaluator::gain_of(double value) const {
  const auto& best = run_.state.best_metric;
  if (!std::isfinite(value)) return -INFINITY;
  if (!best || !std::isfinite(*best)) return INFINITY;
  return (greater_is_better(run_.arguments) ? 1 : -1) * (value - *best);
}

bool Evaluator::judge(const Metrics& metrics) {
  const TrainingArguments& a = run_.arguments;
  TrainerState& state = run_.state;
  const std::string name = full_metric_name(a.metric_for_best_model);
  const double* value = find_metric(metrics, name);
  if (value == nullptr) {
    std::vector<std::string> given;
    for (const auto& [metric, _] : metrics) given.push_back(metric);
    check_metric(a, given);
    return false;
  }
  if (!direction_said_ && !a.greater_is_better && greater_is_better(a) && run_.world.is_leader())
    log::info("trainer",
              "the best model has the greatest {} (metric_for_best_model). For the smallest set "
              "greater_is_better: false.",
              name);
  direction_said_ = true;
  const double gain = gain_of(*value);
  if (!std::isfinite(*value) && run_.world.is_leader())
    log::warning("trainer",
                 "step {}: {} is not finite, so this evaluation chooses no best model. Look at the "
                 "losses that were logged before.",
                 state.global_step, name);
  if (gain > 0) {
    state.best_metric = *value;
    state.best_global_step = state.global_step;
  }
  if (a.early_stopping_patience) {
    state.patience_used = gain > a.early_stopping_threshold ? 0 : state.patience_used + 1;
    if (state.patience_used >= *a.early_stopping_patience) {
      control_.stop();
      if (run_.world.is_leader())
        log::info("trainer", "step {}: {} has not become better in {} evaluations: stopping early",
                  state.global_step, name, state.patience_used);
    }
  }
  return gain > 0;
}

}  // namespace lockstep::train
