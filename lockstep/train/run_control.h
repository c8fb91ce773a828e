// RunControl: agreement over ranks on what changes a run's course: stop signals, observers' flags,
// alerts. It also calls the observers. RunContext: the data that all parts of a Trainer share.
//
//   RunControl control(run);
//   control.connect();
//   control.notify(&Observer::on_step_begin);     // what they ask for is remembered,
//   control.exchange(metrics.waits());            // agreed on with the step's own exchange
//   const StepFlags agreed = control.take_agreed();   // and done by all ranks after the step
//
// Functions named collective are called on all ranks identically. One thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/mesh.h"
#include "lockstep/comm/world.h"
#include "lockstep/train/arguments.h"
#include "lockstep/train/stop_signals.h"
#include "lockstep/train/task.h"

namespace lockstep::train {

// Whether an error's text means that memory is full rather than misused.
bool says_out_of_memory(const char* text);

inline std::uint64_t data_seed(const TrainingArguments& a) {
  return static_cast<std::uint64_t>(a.data_seed.value_or(a.seed));
}

enum class Phase { kTraining, kEvaluation };

// Owned by TrainerImpl; each part holds a reference. In `state` and `result`, Loop writes steps
// and epoch, MetricsReporter the measurements, Evaluator the best step and CheckpointManager the
// saves.
struct RunContext {
  Mesh mesh;
  TrainerTask task;
  TrainingArguments arguments;
  World& world = mesh.world();
  TrainerState state{};
  std::shared_ptr<Parallelism> parallelism{};  // from Loop's constructor on
  std::string why_sharded{};                   // by shard_optimizer; empty: it is not
  optim::Optimizer* optimizer = nullptr;       // while there is one
  TrainResult result{};                        // of this call of train(); complete at its end

  // Whether this rank writes checkpoints.
  bool writes() const {
    return arguments.save_on_each_node ? world.local_rank() == 0 : world.is_leader();
  }
  // Ranks over which samples are divided. The others see the same ones as one of these.
  int batch_ranks() const { return mesh.batch().size(); }
  bool at_last_step() const { return state.global_step >= state.max_steps; }

  // The model's parameters are whole while it is held. Collective.
  std::shared_ptr<void> gathered() const { return parallelism ? parallelism->gathered() : nullptr; }
  // The task's loss under autocast. Collective, unless gathered() is held.
  LossOutput forward(const data::Batch& batch) const;

  // Runs `body`; memory that runs out becomes an error that says what to try.
  template <typename Body>
  auto with_memory_advice(Body&& body, Phase phase = Phase::kTraining) const {
    try {
      return body();
    } catch (const std::bad_alloc& e) {
      out_of_memory(e.what(), phase);
    } catch (const c10::Error& e) {
      if (!says_out_of_memory(e.what_without_backtrace())) throw;
      out_of_memory(e.what_without_backtrace(), phase);
    }
  }
  [[noreturn]] void out_of_memory(const std::string& what, Phase phase = Phase::kTraining) const;
};

struct StepFlags {
  int stop_signal = 0;  // the signal's number; the largest of all ranks wins
  bool stop = false;
  bool save = false;
  bool evaluate = false;
  bool out_of_memory = false;
  bool alert = false;   // there is one to report to all
  bool saving = false;  // a save is being written
  // Shares of a rank's time since the last log, in 1/100 %; the largest of all ranks. -1: unknown.
  int data_wait = -1;
  int communication = -1;
};

// Agreement of all ranks on one rank's flags, at the same step. The flags are part of a tiny
// reduction that every step makes before its update: it costs microseconds, and no rank acts on a
// flag that another has not seen. Reading the result on a GPU would make the host wait for the
// device, so there a step's result is read one step later, on every rank identically. Collective.
class Agreement {
 public:
  explicit Agreement(World world);
  ~Agreement();
  Agreement(const Agreement&) = delete;
  Agreement& operator=(const Agreement&) = delete;

  // All ranks' flags: of this call on a CPU, of the previous call on a GPU.
  StepFlags exchange(const StepFlags& mine);
  // The answer to this very call, even on a GPU: waits for the device.
  StepFlags exchange_now(const StepFlags& mine);

 private:
  struct Pending;
  World world_;
  std::unique_ptr<Pending> pending_;
};

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
  // The waits of the rank that waits most, from the last completed exchange.
  const Waits& waits() const { return waits_; }
  // The flags agreed on in the last exchange, returned once. A stop among them takes effect.
  StepFlags take_agreed();
  // Collective, between two batches of an evaluation: whether to end it early.
  bool stop_heard();
  // Collective: whether any rank is saving. Also exchanges stop signals unless `last`.
  bool any_saving(bool mine, bool last);
  // Collective.
  bool any_out_of_memory(bool mine);

  // Logs it now; observers of all ranks get it after the next exchange, or in report_alerts().
  void alert(std::string text);

  void stop() { stop_ = true; }
  // The signal that was agreed on, or 0.
  int stop_signal() const { return stop_signal_; }
  bool over() const { return stop_ || stop_signal_ != 0 || run_.at_last_step(); }

  // A signal that comes from here on is ignored.
  void ignore_signals() { signals_->agreed(); }
  // Collective: reports the remaining alerts.
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
