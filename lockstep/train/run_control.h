// RunControl: what may change a run's course, agreed over the ranks: stop signals, the flags of
// observers, alerts. It also calls the observers.
//
//   RunControl control(run);
//   control.connect();
//   control.notify(&Observer::on_step_begin);     // what they ask for is remembered,
//   control.exchange(metrics.waits());            // agreed on with the step's own exchange
//   const StepFlags agreed = control.take_agreed();   // and done by all ranks after the step
//
// Functions named collective are called on all ranks identically. One thread.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/train/agreement.h"
#include "lockstep/train/observer.h"
#include "lockstep/train/run_context.h"
#include "lockstep/train/stop_signals.h"

namespace lockstep::train {

struct EventDetails {
  const LogEntry* entry = nullptr;
  const std::string* path = nullptr;
  const std::string* text = nullptr;
};

// Shares of the time since the last log, in 1/100 %, as StepFlags has them.
struct Waits {
  int data = -1;
  int communication = -1;
};

class RunControl {
 public:
  explicit RunControl(RunContext& run) : run_(run) {}

  void add(std::shared_ptr<Observer> observer) { observers_.push_back(std::move(observer)); }
  void notify(void (Observer::*call)(Event&), const EventDetails& about = {});

  // Collective. Needed by everything below; later calls do nothing.
  void connect();
  // Handles stop signals from here on, until finish().
  void listen();

  // Collective, once per step, before its update.
  void exchange(const Waits& mine);
  // Those of the rank that waits most, from the last exchange that has answered.
  const Waits& waits() const { return waits_; }
  // What the last exchange agreed on, once. A stop in it is obeyed.
  StepFlags take_agreed();
  // Collective, between two batches of an evaluation: whether to cut it short.
  bool stop_heard();
  // Collective: whether any rank is saving. Hears a stop unless `last`.
  bool any_saving(bool mine, bool last);
  // Collective.
  bool any_out_of_memory(bool mine);

  // Logged now; observers of all ranks hear it after the next exchange, or in report_alerts().
  void alert(std::string text);

  void stop() { stop_ = true; }
  // The signal that was agreed on, or 0.
  int stop_signal() const { return stop_signal_; }
  bool over() const { return stop_ || stop_signal_ != 0 || run_.at_last_step(); }

  // A signal that comes from here on is ignored.
  void ignore_signals() { signals_->agreed(); }
  // Collective: the alerts that are left.
  void report_last_alerts();
  // The signal that this rank received, or 0.
  int received_signal() const { return signals_->requested(); }
  // Collective. "SIGTERM", and which ranks received it if not all did.
  std::string stopped_by();
  // Restores the earlier handlers.
  void finish() { signals_.reset(); }

 private:
  void note_exchange();
  void obey(int signal);
  void report_alerts();

  RunContext& run_;
  std::vector<std::shared_ptr<Observer>> observers_;
  std::optional<Agreement> agreement_;
  std::unique_ptr<StopSignals> signals_;
  StepFlags flags_;   // this rank's, for the next exchange
  StepFlags agreed_;  // everybody's
  Waits waits_;       // everybody's
  int stop_signal_ = 0;
  bool stop_ = false;
  std::vector<std::string> alerts_;  // this rank's, not yet reported to all
  std::chrono::steady_clock::time_point exchange_time_;
};

}  // namespace lockstep::train
