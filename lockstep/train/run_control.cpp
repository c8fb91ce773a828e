#include "lockstep/train/run_control.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/log.h"
#include "lockstep/core/thread_signals.h"

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

}  // namespace lockstep::train
