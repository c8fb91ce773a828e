#include "lockstep/train/run_control.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cstring>
#include <utility>

#include "lockstep/comm/device.h"
#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/core/thread_signals.h"
#include "lockstep/nn/fp8.h"
#include "lockstep/optim/amp.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/effective_batch.h"

namespace lockstep::train {

void RunControl::notify(void (Observer::*call)(Event&), const EventDetails& about) {
  for (const auto& observer : observers_) {
    Event event{.state = run_.state,
                .rank = run_.world.rank(),
                .optimizer = run_.optimizer,
                .entry = about.entry,
                .path = about.path,
                .text = about.text};
    ((*observer).*call)(event);
    flags_.stop |= event.stop;
    flags_.save |= event.save;
    flags_.evaluate |= event.evaluate;
  }
}

void RunControl::connect() {
  if (!agreement_) agreement_.emplace(run_.world);
}

void RunControl::listen() {
  StopSignalOptions stop{
      .install = run_.arguments.enable_jit_checkpoint,
      .give_up = [world = run_.world](const std::string& why) mutable { world.abort(why); }};
  // A single rank has nobody to agree with: the step's end is waited for, however long it takes.
  if (run_.world.size() == 1) stop.deadline = std::chrono::hours(24 * 365);
  signals_ = std::make_unique<StopSignals>(std::move(stop));
}

void RunControl::exchange(const Waits& mine) {
  flags_.stop_signal = signals_->requested();
  flags_.data_wait = mine.data;
  flags_.communication = mine.communication;
  agreed_ = agreement_->exchange(std::exchange(flags_, {}));
  if (agreed_.data_wait >= 0) waits_ = {agreed_.data_wait, agreed_.communication};
  note_exchange();
}

// Between two exchanges no rank hears of a stop. The first step includes one-time costs.
void RunControl::note_exchange() {
  const auto now = std::chrono::steady_clock::now();
  const auto since = now - std::exchange(exchange_time_, now);
  if (run_.state.global_step > run_.result.first_step)
    signals_->set_step_time(std::chrono::duration_cast<std::chrono::milliseconds>(since));
}

StepFlags RunControl::take_agreed() {
  const StepFlags agreed = std::exchange(agreed_, {});
  stop_ |= agreed.stop;
  if (agreed.alert) report_alerts();
  if (agreed.stop_signal != 0) obey(agreed.stop_signal);
  return agreed;
}

void RunControl::obey(int signal) {
  stop_signal_ = signal;
  signals_->agreed();
  if (run_.world.is_leader())
    log::warning("trainer", "step {}: stop requested by {}: saving, then leaving",
                 run_.state.global_step, signal_name(signal));
}

bool RunControl::stop_heard() {
  if (!signals_) return false;  // an evaluation outside of train()
  const StepFlags heard = agreement_->exchange({.stop_signal = signals_->requested()});
  note_exchange();
  // On a GPU the first answer is that of the previous step: its flags are set again.
  flags_.stop |= heard.stop;
  flags_.save |= heard.save;
  flags_.evaluate |= heard.evaluate;
  flags_.alert |= heard.alert;
  agreed_.stop_signal = heard.stop_signal;
  return heard.stop_signal != 0;
}

bool RunControl::any_saving(bool mine, bool last) {
  const StepFlags all =
      agreement_->exchange_now({.stop_signal = last ? 0 : signals_->requested(), .saving = mine});
  note_exchange();
  if (all.stop_signal != 0 && stop_signal_ == 0) obey(all.stop_signal);
  return all.saving;
}

bool RunControl::any_out_of_memory(bool mine) {
  return agreement_->exchange_now({.out_of_memory = mine}).out_of_memory;
}

void RunControl::alert(std::string text) {
  log::error("checkpoint", "{}", text);
  alerts_.push_back(std::move(text));
  flags_.alert = true;
}

void RunControl::report_alerts() {
  std::string mine;
  for (const std::string& text : std::exchange(alerts_, {})) mine += text + '\0';
  for (const std::string& texts : all_gather_bytes(run_.world, mine)) {
    for (std::size_t at = 0; at < texts.size();) {
      const std::string text = texts.substr(at, texts.find('\0', at) - at);
      at += text.size() + 1;
      notify(&Observer::on_alert, {.text = &text});
    }
  }
}

void RunControl::report_last_alerts() {
  if (agreement_->exchange_now({.alert = !alerts_.empty()}).alert) report_alerts();
}

std::string RunControl::stopped_by() {
  std::vector<int> ranks;
  const auto signals = all_gather_bytes(run_.world, std::to_string(signals_->requested()));
  for (std::size_t rank = 0; rank < signals.size(); ++rank)
    if (signals[rank] != "0") ranks.push_back(static_cast<int>(rank));
  std::string text = signal_name(stop_signal_);
  if (ranks.empty() || ranks.size() == signals.size()) return text;
  return text + fmt::format(" (received by rank{} {})", ranks.size() > 1 ? "s" : "",
                            fmt::join(ranks, ", "));
}

namespace {

constexpr std::size_t kStepFlags = 9;
using Numbers = std::array<std::int32_t, kStepFlags>;

Numbers numbers_of(const StepFlags& flags) {
  return {flags.stop_signal, flags.stop,   flags.save,      flags.evaluate,     flags.out_of_memory,
          flags.alert,       flags.saving, flags.data_wait, flags.communication};
}

StepFlags flags_of(const at::Tensor& numbers) {
  const auto* n = numbers.const_data_ptr<std::int32_t>();
  return {.stop_signal = n[0],
          .stop = n[1] != 0,
          .save = n[2] != 0,
          .evaluate = n[3] != 0,
          .out_of_memory = n[4] != 0,
          .alert = n[5] != 0,
          .saving = n[6] != 0,
          .data_wait = n[7],
          .communication = n[8]};
}

at::Tensor tensor_of(const StepFlags& flags) {
  Numbers numbers = numbers_of(flags);
  return at::from_blob(numbers.data(), {static_cast<std::int64_t>(kStepFlags)}, at::kInt).clone();
}

}  // namespace

// An answer on its way to the host.
struct Agreement::Pending {
  at::Tensor host;
  std::unique_ptr<c10::Event> arrived;
};

Agreement::Agreement(World world) : world_(std::move(world)) {}
Agreement::~Agreement() = default;

StepFlags Agreement::exchange_now(const StepFlags& mine) {
  if (world_.size() == 1) return mine;
  at::Tensor numbers = tensor_of(mine).to(world_.device());
  world_.all_reduce(numbers, ReduceOp::kMax).wait();
  const DeviceWait wait(world_.device());
  return flags_of(numbers.cpu());
}

StepFlags Agreement::exchange(const StepFlags& mine) {
  if (world_.size() == 1 || world_.device().is_cpu()) return exchange_now(mine);
  const c10::Device device = world_.device();
  at::Tensor numbers = tensor_of(mine).pin_memory().to(device, /*non_blocking=*/true);
  world_.all_reduce(numbers, ReduceOp::kMax).wait();
  auto next = std::make_unique<Pending>();
  next->host = at::empty({static_cast<std::int64_t>(kStepFlags)},
                         at::TensorOptions().dtype(at::kInt).pinned_memory(true));
  next->host.copy_(numbers, /*non_blocking=*/true);
  next->arrived = std::make_unique<c10::Event>(device.type());
  next->arrived->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  StepFlags agreed;
  if (pending_) {
    const DeviceWait wait(device);
    pending_->arrived->synchronize();  // enqueued a step ago, so it has long arrived
    agreed = flags_of(pending_->host);
  }
  pending_ = std::move(next);
  return agreed;
}

bool says_out_of_memory(const char* text) {
  for (const char* phrase : {"out of memory", "can't allocate memory", "not enough memory",
                             "CUBLAS_STATUS_ALLOC_FAILED"})
    if (std::strstr(text, phrase) != nullptr) return true;
  return false;
}

LossOutput RunContext::forward(const data::Batch& batch) const {
  const optim::Autocast autocast(world.device(), arguments.bf16   ? at::kBFloat16
                                                 : arguments.fp16 ? at::kHalf
                                                                  : at::kFloat);
  const std::string recipe = fp8_recipe_name(arguments);
  const nn::Fp8Autocast fp8(recipe.empty() ? std::nullopt
                                           : std::optional(nn::fp8_recipe_of(recipe)));
  if (parallelism) parallelism->before_forward();
  return task.loss(batch);
}

void RunContext::out_of_memory(const std::string& what, Phase phase) const {
  const std::string first_line = what.substr(0, what.find('\n'));
  if (phase == Phase::kEvaluation)
    throw Error(
        "trainer",
        fmt::format("rank {}: out of memory in the evaluation at step {} ({}). {}", world.rank(),
                    state.global_step, first_line, evaluation_memory_advice(arguments)));
  throw Error("trainer", fmt::format("rank {}: out of memory in step {} ({}). {}", world.rank(),
                                     state.global_step + 1, first_line,
                                     out_of_memory_advice(arguments, batch_ranks())));
}

}  // namespace lockstep::train
