// The loop: micro-batches, steps, epochs, and what is due after each.
#include "lockstep/train/trainer.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <new>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/optim/autocast.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/effective_batch.h"
#include "lockstep/train/run_checks.h"
#include "lockstep/train/trainer_impl.h"

namespace lockstep {
namespace train {
namespace {

void check_task(const TrainerTask& task) {
  const char* missing = !task.module ? "module" : !task.loss ? "loss" : nullptr;
  if (missing == nullptr && !task.train_data && !task.eval_data) missing = "train_data";
  if (missing != nullptr)
    throw UsageError("trainer", "the task has no {}. Set it: {{.module = net, .loss = ...}}.",
                     missing);
}

c10::ScalarType precision(const TrainingArguments& arguments) {
  return arguments.bf16 ? at::kBFloat16 : arguments.fp16 ? at::kHalf : at::kFloat;
}

}  // namespace

bool says_out_of_memory(const char* text) {
  for (const char* words : {"out of memory", "can't allocate memory", "not enough memory",
                            "CUBLAS_STATUS_ALLOC_FAILED"})
    if (std::strstr(text, words) != nullptr) return true;
  return false;
}

TrainerImpl::TrainerImpl(World world, TrainerTask task, TrainingArguments arguments)
    : world_(std::move(world)), task_(std::move(task)), arguments_(std::move(arguments)) {
  check_arguments(arguments_);
  expand_paths(arguments_);
  check_task(task_);
}

void TrainerImpl::notify(Call call, const LogEntry* entry, const std::string* path,
                         const std::string* text) {
  for (const auto& observer : observers) {
    Event event{.state = state,
                .rank = world_.rank(),
                .optimizer = optimizer_.get(),
                .entry = entry,
                .path = path,
                .text = text};
    ((*observer).*call)(event);
    flags_.stop |= event.stop;
    flags_.save |= event.save;
    flags_.evaluate |= event.evaluate;
  }
}

void TrainerImpl::out_of_memory(const std::string& what, bool evaluating) const {
  const std::string first_line = what.substr(0, what.find('\n'));
  if (evaluating)
    throw Error(
        "trainer",
        fmt::format("rank {}: out of memory in the evaluation at step {} ({}). {}", world_.rank(),
                    state.global_step, first_line, evaluation_memory_advice(arguments_)));
  throw Error("trainer", fmt::format("rank {}: out of memory in step {} ({}). {}", world_.rank(),
                                     state.global_step + 1, first_line,
                                     out_of_memory_advice(arguments_, world_.size())));
}

template <typename Body>
auto TrainerImpl::with_memory_advice(Body&& body, bool evaluating) {
  try {
    return body();
  } catch (const std::bad_alloc& e) {
    out_of_memory(e.what(), evaluating);
  } catch (const c10::Error& e) {
    if (!says_out_of_memory(e.what_without_backtrace())) throw;
    out_of_memory(e.what_without_backtrace(), evaluating);
  }
}

Metrics TrainerImpl::run_evaluation() {
  return with_memory_advice([&] { return evaluate_all(); }, /*evaluating=*/true);
}

// ---------------------------------------------------------------- a step

at::Tensor TrainerImpl::forward(const data::Batch& batch) {
  const optim::Autocast autocast(world_.device(), precision(arguments_));
  return task_.loss(batch);
}

// True when it ended the window: the gradients are averaged, the step may be taken.
bool TrainerImpl::micro_batch(const data::Batch& batch) {
  samples_ += batch.samples();
  return with_memory_advice([&] {
    const at::Tensor loss = model_->reducer().watch(forward(batch));
    return accumulation_->backward(loss, {.count = batch.tokens, .scaler = scaler_.get()});
  });
}

void TrainerImpl::optimizer_step() {
  if (saver_) saver_->wait_copied();  // before the exchange: with it every rank has waited
  flags_.stop_signal = signals_->requested();
  agreed_ = agreement_->exchange(std::exchange(flags_, {}));
  note_exchange();
  notify(&Observer::on_optimizer_step);
  const bool will_log = due_after_step(arguments_, plan_, state.global_step + 1).log;
  learning_rate_ = optimizer_->lr();
  const optim::StepResult result = with_memory_advice([&] {  // the first one makes Adam's state
    return optimizer_->step({.max_grad_norm = arguments_.max_grad_norm,
                             .want_grad_norm = will_log,
                             .scaler = scaler_.get(),
                             .skip_non_finite = true});
  });
  optimizer_->zero_grad();
  ++state.global_step;
  set_learning_rate();
  count_window(result);
}

// Between two exchanges no rank hears of a stop. The first step's costs are its own.
void TrainerImpl::note_exchange() {
  const auto now = Clock::now();
  const auto since = now - std::exchange(exchange_time_, now);
  if (state.global_step > start_step_)
    signals_->set_step_time(std::chrono::duration_cast<std::chrono::milliseconds>(since));
}

// As Hugging Face: the schedule counts the steps taken.
void TrainerImpl::set_learning_rate() {
  optimizer_->set_lr(arguments_.learning_rate * schedule_->factor(state.global_step));
}

void TrainerImpl::update_epoch(std::int64_t batches_left) {
  const auto total = static_cast<double>(loader_->batches_per_epoch());
  state.epoch = static_cast<double>(epoch_) + 1 - static_cast<double>(batches_left) / total;
}

bool TrainerImpl::over() const {
  return stop_ || stop_signal_ != 0 || state.global_step >= plan_.max_steps;
}

void TrainerImpl::obey(int signal) {
  stop_signal_ = signal;
  signals_->agreed();
  if (world_.is_leader())
    log::warning("trainer", "step {}: stop requested by {}: saving, then leaving",
                 state.global_step, stop_signal_name(signal));
}

// What is due, in Hugging Face's order: log, evaluate, save. All ranks come here identically.
void TrainerImpl::after_step(Due due) {
  due.save |= agreed_.save;
  due.evaluate |= agreed_.evaluate;
  stop_ |= agreed_.stop;
  if (agreed_.alert) report_alerts();
  const int signal = std::exchange(agreed_, {}).stop_signal;
  if (signal != 0) {
    obey(signal);
    // A run that continues from here comes to the epoch's end, unless there is no step left to
    // take.
    const bool last = state.global_step >= plan_.max_steps;
    evaluation_due_ = due.evaluate || (last && due_after_epoch(arguments_, state.epoch).evaluate);
    due = {.log = due.log, .evaluate = false, .save = true};
  }
  collect_save();
  if (due.log && state.global_step > last_log_step_) log();
  if (due.evaluate && task_.eval_data) evaluate_and_judge(due);
  if (due.save && saved_step_ != state.global_step) save();
}

void TrainerImpl::run_epoch(std::int64_t epoch) {
  epoch_ = epoch;
  epoch_ending_ = epoch_ended_ = false;
  notify(&Observer::on_epoch_begin);
  auto batches = loader_->epoch(epoch);
  std::int64_t left = loader_->batches_left(epoch);
  accumulation_->begin_epoch(left);
  bool begun = false;
  while (left > 0 && !over()) {
    auto batch = with_memory_advice([&] { return batches.next(); });
    LOCKSTEP_ASSERT(batch.has_value());  // as many as the loader has said, on every rank
    --left;
    if (!begun) notify(&Observer::on_step_begin);
    begun = !micro_batch(*batch);
    if (begun) {
      notify(&Observer::on_substep_end);
      continue;
    }
    optimizer_step();
    update_epoch(left);
    notify(&Observer::on_step_end);
    if (progress_) progress_->step(state.global_step);
    after_step(due_after_step(arguments_, plan_, state.global_step));
  }
  if (stop_signal_ != 0) return;
  // As Hugging Face: an epoch that max_steps or a flag cut short has an end, too.
  epoch_ending_ = true;
  epoch_ended_ = left == 0;
  notify(&Observer::on_epoch_end);
  after_step(due_after_epoch(arguments_, state.epoch));
}

void TrainerImpl::run_epochs() {
  if (arguments_.eval_on_start && state.global_step == 0 && task_.eval_data) {
    const Metrics metrics = run_evaluation();
    if (evaluation_cut_off()) return save();  // a run that continues from step 0 evaluates again
    report(metrics);
    notify(&Observer::on_evaluate, &state.log_history.back());
  }
  if (std::exchange(evaluation_due_, false) && task_.eval_data) {
    Due due{.save = true};
    evaluate_and_judge(due);
    if (due.save && saved_step_ != state.global_step) save();  // it was the best
  }
  for (std::int64_t epoch = epoch_; !over(); ++epoch) run_epoch(epoch);
}

// ---------------------------------------------------------------- a run

TrainResult TrainerImpl::train() {
  if (!task_.train_data)
    throw UsageError("trainer", "the task has no train_data. Set it, or call evaluate().");
  if (model_)
    throw UsageError("trainer",
                     "train() was called a second time, and a Trainer trains once. Make another "
                     "one; the module keeps its weights.");
  check_evaluation(arguments_, task_.eval_data != nullptr);
  const io::FolderLock alone = take_output_dir();  // to the end of the run, however it ends
  try {
    prepare();
    notify(&Observer::on_train_begin);
    start_time_ = log_time_ = exchange_time_ = Clock::now();
    start_step_ = last_log_step_ = state.global_step;
    task_.module->train();
    run_epochs();
    finish();
  } catch (...) {
    saver_.reset();  // which may still be writing into that folder
    throw;
  }
  TrainResult result;
  result.global_step = state.global_step;
  result.first_step = start_step_;
  result.train_loss = train_loss_;
  result.metrics = summary_;
  result.stop_signal = stop_signal_;
  result.durable_step = durable_step_;
  result.lost_step = lost_step_;
  result.checkpoint = committed_;
  return result;
}

void TrainerImpl::finish() {
  signals_->agreed();  // the run ends by itself: a signal that comes now has nothing to ask for
  // Nobody leaves before the last checkpoint is durable: a rank that ends ends the others.
  wait_for_saves(/*last=*/true);
  if (agreement_->exchange_now({.alert = !alerts_.empty()}).alert) report_alerts();
  durable_step_ =
      static_cast<std::int64_t>(world_.min(saver_ ? static_cast<double>(durable_step_) : INFINITY));
  lost_step_ = static_cast<std::int64_t>(world_.max(static_cast<double>(lost_step_)));
  if (stop_signal_ != 0 && signals_->requested() != 0)
    report_stop(fmt::format("stopped by {}, {}saved at step {}",
                            stop_signal_name(signals_->requested()),
                            durable_step_ == state.global_step ? "" : "not ", state.global_step));
  if (stop_signal_ == 0 && arguments_.load_best_model_at_end && state.best_model_checkpoint)
    load_best();
  summarize();
  notify(&Observer::on_train_end);
  optimizer_.reset();  // a sharded one shares the parameters' memory between ranks until then
  progress_.reset();
  metrics_.reset();
  say_end();
  signals_.reset();
}

Metrics TrainerImpl::evaluate() {
  if (!task_.eval_data)
    throw UsageError("trainer", "the task has no eval_data to evaluate on. Set it.");
  if (!agreement_) {
    task_.module->to(world_.device());
    agreement_.emplace(world_);
  }
  return run_evaluation();
}

}  // namespace train

Trainer::Trainer(World world, TrainerTask task, TrainingArguments arguments)
    : impl_(std::make_unique<train::TrainerImpl>(std::move(world), std::move(task),
                                                 std::move(arguments))) {}
Trainer::~Trainer() = default;

void Trainer::add(std::shared_ptr<Observer> observer) {
  impl_->observers.push_back(std::move(observer));
}
TrainResult Trainer::train() {
  return impl_->train();
}
train::Metrics Trainer::evaluate() {
  return impl_->evaluate();
}
const train::TrainerState& Trainer::state() const {
  return impl_->state;
}

}  // namespace lockstep
