// What a run says of itself: losses, speeds, evaluation, and which step was the best.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <cmath>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/train/run_checks.h"
#include "lockstep/train/trainer_impl.h"

namespace lockstep::train {
namespace {

bool greater_is_better(const TrainingArguments& a) {
  if (a.greater_is_better) return *a.greater_is_better;
  const std::string& name = a.metric_for_best_model;
  return !(name.size() >= 4 && name.compare(name.size() - 4, 4, "loss") == 0);
}

}  // namespace

// Everything stays on the device.
void TrainerImpl::count_window(const optim::StepResult& result) {
  const torch::NoGradGuard no_grad;
  const Window& window = accumulation_->last_window();
  at::Tensor loss = window.loss.to(at::kDouble);
  const at::Tensor count = window.count.to(at::kDouble);
  if (arguments_.logging_nan_inf_filter) {
    // A loss that is not a number is counted as the mean so far, so that the log stays readable.
    const at::Tensor mean = since_log_[0] / since_log_[1].clamp_min(1);
    loss = at::where(at::isfinite(loss), loss, mean);
  }
  const at::Tensor sums = at::stack({(loss * count).reshape({}), count.reshape({})});
  since_log_ += sums;
  since_start_ += sums;
  if (result.skipped.defined()) skipped_ += result.skipped.reshape({}).to(at::kDouble);
  if (result.grad_norm.defined()) grad_norm_ = result.grad_norm;
}

// A collective where ranks have counted for themselves.
double TrainerImpl::mean_loss(const at::Tensor& totals) {
  at::Tensor sums = totals;
  if (!arguments_.average_tokens_across_devices && world_.size() > 1) {
    sums = totals.clone();
    world_.all_reduce(sums).wait();
  }
  sums = sums.cpu();
  return sums[0].item<double>() / std::max(1.0, sums[1].item<double>());
}

// Of all ranks; collective likewise.
double TrainerImpl::tokens_since_log() {
  const double tokens = since_log_[1].item<double>();
  return arguments_.average_tokens_across_devices ? tokens : world_.sum(tokens);
}

// The only place where a training step reads the device.
void TrainerImpl::log() {
  const auto steps = static_cast<double>(state.global_step - last_log_step_);
  const double loss = mean_loss(since_log_);
  const double tokens = tokens_since_log();
  // After reading: a GPU has computed the steps now, the host had only asked for them before.
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - log_time_).count();
  state.num_input_tokens_seen += static_cast<std::int64_t>(tokens);
  Metrics values{{"loss", loss}};
  if (grad_norm_.defined()) values.emplace_back("grad_norm", grad_norm_.item<double>());
  // As Hugging Face: that of the step that was taken, not of the next one.
  values.emplace_back("learning_rate", learning_rate_);
  const double samples = static_cast<double>(std::exchange(samples_, 0)) * world_.size();
  values.emplace_back("samples_per_second", samples / seconds);
  if (tokens > samples * 1.5) values.emplace_back("tokens_per_second", tokens / seconds);
  const double skipped = skipped_.item<double>();
  if (skipped > 0) {
    values.emplace_back("skipped_steps", skipped);
    if (world_.is_leader() && !scaler_)
      log::warning("trainer",
                   "step {}: {} of the last {} steps had a gradient that is not finite and were "
                   "skipped on all ranks. Try a smaller learning rate.",
                   state.global_step, skipped, steps);
  }
  since_log_.zero_();
  skipped_.zero_();
  last_log_step_ = state.global_step;
  log_time_ = now;
  report(std::move(values));
}

void TrainerImpl::report(Metrics values) {
  LogEntry entry{.step = state.global_step, .epoch = state.epoch, .values = std::move(values)};
  state.log_history.push_back(entry);
  if (metrics_) metrics_->write(entry);
  if (progress_) progress_->log(entry);
  notify(&Observer::on_log, &entry);
}

// ---------------------------------------------------------------- evaluation

// Between two batches, on all ranks.
bool TrainerImpl::hears_a_stop() {
  const StepFlags heard = agreement_->exchange({.stop_signal = signals_->requested()});
  note_exchange();
  // On a GPU the first answer is that of the step before: its flags are made again.
  flags_.stop |= heard.stop;
  flags_.save |= heard.save;
  flags_.evaluate |= heard.evaluate;
  flags_.alert |= heard.alert;
  agreed_.stop_signal = heard.stop_signal;
  return heard.stop_signal != 0;
}

// Every sample once, whatever the number of ranks: ranks may differ by a batch, so all of them walk
// as many rounds as the longest has. A stop signal is heard in between.
Metrics TrainerImpl::evaluate_all() {
  const auto start = Clock::now();
  if (!eval_loader_) {
    eval_loader_.emplace(
        data::loader(task_.eval_data, world_,
                     {.batch_size = arguments_.per_device_eval_batch_size,
                      .evaluation = true,
                      .num_workers = static_cast<int>(arguments_.dataloader_num_workers),
                      .pin_memory = arguments_.dataloader_pin_memory}));
  }
  const torch::NoGradGuard no_grad;
  const bool was_training = task_.module->is_training();
  task_.module->eval();
  std::map<std::string, at::Tensor> sums;
  const auto zero = at::dtype(at::kDouble).device(world_.device());
  const auto add = [&](const std::string& name, const at::Tensor& value) {
    auto [found, fresh] = sums.try_emplace(name, at::zeros({}, zero));
    found->second += value.detach().to(zero).sum();
  };
  at::Tensor counts = at::zeros({2}, zero);  // tokens, samples
  add("loss", at::zeros({}, zero));
  auto batches = eval_loader_->epoch(0);
  for (std::int64_t i = 0; i < eval_loader_->batches_per_epoch(); ++i) {
    if (const auto batch = batches.next()) {
      const at::Tensor loss = forward(*batch);
      // The mean over nothing is not a number, and neither is zero times that.
      if (batch->tokens > 0) add("loss", loss.to(at::kDouble) * static_cast<double>(batch->tokens));
      if (task_.totals)
        for (const auto& [name, total] : task_.totals(*batch)) add(name, total);
      counts[0] += static_cast<double>(batch->tokens);
      counts[1] += static_cast<double>(batch->samples());
    }
    if (signals_ && hears_a_stop()) break;
  }
  task_.module->train(was_training);
  std::vector<at::Tensor> row{counts};
  // A rank without a batch does not know the names; the leader has at least as many as any.
  const auto names = [&] {
    std::string text;
    for (const auto& [name, sum] : sums) text += name + "\n";
    return world_.broadcast(text, 0);
  }();
  std::vector<std::string> order;
  for (std::size_t at = 0; at < names.size();) {
    const std::size_t end = names.find('\n', at);
    order.push_back(names.substr(at, end - at));
    at = end + 1;
    add(order.back(), at::zeros({}, zero));
    row.push_back(sums[order.back()].reshape({1}));
  }
  at::Tensor all = at::cat(row);
  if (world_.size() > 1) world_.all_reduce(all).wait();
  all = all.cpu();
  const double* value = all.const_data_ptr<double>();
  Metrics metrics;
  // Without a single target there is no mean; a loss of 0 would be the best there is.
  const double tokens = value[0] > 0 ? value[0] : NAN;
  for (std::size_t i = 0; i < order.size(); ++i)
    metrics.emplace_back("eval_" + order[i], value[i + 2] / tokens);
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  metrics.emplace_back("eval_runtime", seconds);
  metrics.emplace_back("eval_samples_per_second", value[1] / seconds);
  return metrics;
}

// True when a stop signal was heard on the way: what was summed up is not the whole.
bool TrainerImpl::evaluation_cut_off() {
  const int signal = std::exchange(agreed_, {}).stop_signal;
  if (signal != 0) obey(signal);
  return signal != 0;
}

// By how much a value is better than the best so far. What is not finite never is: after it nothing
// could be compared any more.
double TrainerImpl::gain_of(double value) const {
  if (!std::isfinite(value)) return -INFINITY;
  if (!state.best_metric || !std::isfinite(*state.best_metric)) return INFINITY;
  return (greater_is_better(arguments_) ? 1 : -1) * (value - *state.best_metric);
}

// Metrics are the same on every rank, so all judge identically without asking.
void TrainerImpl::evaluate_and_judge(Due& due) {
  const Metrics metrics = run_evaluation();
  if (evaluation_cut_off()) {
    evaluation_due_ = due.save = true;
    return;
  }
  report(metrics);
  const LogEntry& entry = state.log_history.back();
  notify(&Observer::on_evaluate, &entry);
  const std::string name = full_metric_name(arguments_.metric_for_best_model);
  const double* value = find_metric(metrics, name);
  if (value == nullptr) {
    std::vector<std::string> given;
    for (const auto& [metric, _] : metrics) given.push_back(metric);
    return check_metric(arguments_, given);
  }
  const double gain = gain_of(*value);
  if (gain > 0) {
    state.best_metric = *value;
    state.best_global_step = state.global_step;
    // A checkpoint of this step does not know yet that it is the best.
    if (saved_step_ == state.global_step) saved_step_ = -1;
    // To be loaded at the end it must be saved now, whenever else checkpoints are due.
    due.save |= arguments_.save_strategy == Interval::kBest || arguments_.load_best_model_at_end;
  }
  if (!arguments_.early_stopping_patience) return;
  const bool better = gain > arguments_.early_stopping_threshold;
  state.patience_used = better ? 0 : state.patience_used + 1;
  if (state.patience_used < *arguments_.early_stopping_patience) return;
  stop_ = true;
  if (world_.is_leader())
    log::info("trainer", "step {}: {} has not become better in {} evaluations: stopping early",
              state.global_step, name, state.patience_used);
}

// ---------------------------------------------------------------- the end

// Of a run that was complete before this call. Collective: the leader has the file.
Metrics TrainerImpl::recorded_summary() {
  std::string line;
  if (metrics_) {
    const auto recorded = newest_with(metrics_->path(), "train_loss");
    if (recorded && recorded->step == state.global_step) line = log_entry_json(*recorded);
  }
  line = world_.broadcast(line, 0);
  if (!line.empty()) return parse_log_entry(line, "metrics.jsonl").values;
  // Its last call was stopped, or the file is gone: the checkpoint has the losses that were logged.
  double sum = 0;
  std::int64_t before = 0;
  for (const LogEntry& entry : state.log_history) {
    const double* loss = find_metric(entry.values, "loss");
    if (loss == nullptr || !std::isfinite(*loss)) continue;
    sum += *loss * static_cast<double>(entry.step - before);
    before = entry.step;
  }
  if (before == 0) return {};
  return {{"train_loss", sum / static_cast<double>(before)}};
}

void TrainerImpl::summarize() {
  const double seconds = std::chrono::duration<double>(Clock::now() - start_time_).count();
  const auto steps = static_cast<double>(state.global_step - start_step_);
  if (steps > 0) {
    train_loss_ = mean_loss(since_start_);
    if (stop_signal_ != 0) return;
    summary_ = {{"train_runtime", seconds},
                {"train_steps_per_second", steps / seconds},
                {"train_loss", train_loss_}};
    report(summary_);
  } else if (stop_signal_ == 0) {
    summary_ = recorded_summary();
    const double* loss = find_metric(summary_, "train_loss");
    train_loss_ = loss != nullptr ? *loss : NAN;  // 0 would be the best there is
  }
}

// Collective. "SIGTERM", and which ranks have received it where not all have.
std::string TrainerImpl::stopped_by() {
  std::vector<int> ranks;
  const auto signals = world_.all_gather(std::to_string(signals_->requested()));
  for (std::size_t rank = 0; rank < signals.size(); ++rank)
    if (signals[rank] != "0") ranks.push_back(static_cast<int>(rank));
  std::string text = stop_signal_name(stop_signal_);
  if (ranks.empty() || ranks.size() == signals.size()) return text;
  return text + fmt::format(" (received by rank{} {})", ranks.size() > 1 ? "s" : "",
                            fmt::join(ranks, ", "));
}

// The run's last line, by the leader. Collective.
void TrainerImpl::say_end() {
  const std::string stop = stop_signal_ != 0 ? stopped_by() : std::string();
  if (!world_.is_leader()) return;
  const std::int64_t step = state.global_step;
  const std::string ended = stop.empty() ? fmt::format("trained until step {}", step)
                                         : fmt::format("stopped by {} at step {}", stop, step);
  if (lost_step_ >= 0) {
    const std::string newest = newest_.empty()
                                   ? "There is no checkpoint to continue from."
                                   : fmt::format("The newest whole checkpoint is {}.", newest_);
    log::error("trainer",
               "{}, but the last checkpoint (step {}) could not be written and is lost. {} Free "
               "some space, then run again with resume_from_checkpoint: auto (lockstep train "
               "--resume auto).",
               ended, lost_step_, newest);
  } else if (!stop.empty() && durable_step_ == step) {
    log::warning("trainer",
                 "stopped by {}, saved at step {}. To continue: resume_from_checkpoint: auto "
                 "(lockstep train --resume auto).",
                 stop, step);
  } else if (!stop.empty()) {
    log::error("trainer",
               "{}, of which {} has only the weights (save_only_model): no run can continue from "
               "there.",
               ended, newest_);
  } else if (step == start_step_) {
    const bool by_steps = arguments_.max_steps > 0;
    const std::string loss =
        std::isfinite(train_loss_) ? fmt::format(" (mean loss {:.4f})", train_loss_) : "";
    log::info("trainer",
              "nothing to do: the run in {} is complete at step {}{}. To train longer, raise {} "
              "(now {}); to start again, resume_from_checkpoint: never (lockstep train --resume "
              "never).",
              arguments_.output_dir, step, loss, by_steps ? "max_steps" : "num_train_epochs",
              by_steps ? fmt::format("{}", arguments_.max_steps)
                       : fmt::format("{}", arguments_.num_train_epochs));
  }
}

}  // namespace lockstep::train
